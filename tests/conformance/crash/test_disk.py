"""The model of a file system against the kernel, and what its power cuts leave."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given

from conformance.crash.disk import Disk, Image, apply, power_cuts, starting
from conformance.crash.operations import (
    Create,
    Exchange,
    Link,
    MakeFolder,
    Operation,
    Remove,
    Rename,
    Resize,
    Sync,
    SyncAll,
    Write,
)
from conformance.crash.recording import image_of, memory, replay
from tests.conformance.crash.operations import perform_all, some_operations
from tests.support.examples import examples


def after(operations: Sequence[Operation], disk: Disk | None = None) -> Disk:
    disk = disk or Disk()
    for operation in operations:
        disk = apply(disk, operation)
    return disk


def cuts(disk: Disk) -> list[dict[str, bytes | None]]:
    return [dict(image) for image in power_cuts(disk)]


@given(some_operations)
def test_the_kernel_agrees(operations: list[Operation]) -> None:
    with tempfile.TemporaryDirectory(dir=memory()) as name:
        done = perform_all(operations, Path(name))
        assert dict(after(done).image()) == image_of(Path(name))


@given(some_operations)
def test_what_is_synced_is_certain_and_the_rest_may_be_there(operations: list[Operation]) -> None:
    with tempfile.TemporaryDirectory(dir=memory()) as name:
        disk = after(perform_all(operations, Path(name)))
    assert dict(disk.image()) in cuts(disk)
    assert cuts(apply(disk, SyncAll())) == [dict(disk.image())]


@given(some_operations)
@examples(30)
def test_an_image_comes_back_from_a_folder(operations: list[Operation]) -> None:
    with tempfile.TemporaryDirectory(dir=memory()) as name:
        one, other = Path(name) / "one", Path(name) / "other"
        one.mkdir()
        perform_all(operations, one)
        image = image_of(one)
        replay(image, other)
        assert image_of(other) == image == dict(starting(image).image())


OLD: Image = {"f": b"old"}
NEW = [Create("t"), Write("t", 0, b"new!")]


def test_a_synced_file_renamed_is_old_or_new() -> None:
    disk = after([*NEW, Sync("t"), Rename("t", "f")], starting(OLD))
    assert {image["f"] for image in cuts(disk)} == {b"old", b"new!"}
    assert {image["f"] for image in cuts(apply(disk, Sync("")))} == {b"new!"}


def test_a_file_renamed_before_its_sync_may_be_damaged() -> None:
    disk = after([*NEW, Rename("t", "f"), Sync("")], starting(OLD))
    assert {image["f"] for image in cuts(disk)} == {b"new!", b"", b"ne", b"\0\0\0\0"}


def test_syncing_a_file_does_not_keep_its_name() -> None:
    assert cuts(after([*NEW, Sync("t")])) == [{}, {"t": b"new!"}]


def test_syncing_a_folder_does_not_keep_its_own_name() -> None:
    disk = after([MakeFolder("d"), Create("d/x"), Sync("d/x"), Sync("d")])
    assert cuts(disk) == [{}, {"d": None, "d/x": b""}]


def test_names_may_be_kept_in_another_order() -> None:
    disk = after([Create("a"), Create("b")])
    assert cuts(disk) == [{}, {"a": b""}, {"b": b""}, {"a": b"", "b": b""}]


def test_a_rename_between_folders_is_whole() -> None:
    disk = after([Rename("d/x", "e/x")], starting({"d": None, "d/x": b"1", "e": None}))
    without = {"d": None, "e": None}
    assert cuts(disk) == [{**without, "d/x": b"1"}, {**without, "e/x": b"1"}]
    assert cuts(apply(disk, Sync("d"))) == cuts(apply(disk, Sync("e"))) == cuts(disk)[1:]


def test_an_exchange_is_whole() -> None:
    disk = after([Exchange("a", "b")], starting({"a": b"1", "b": None, "b/x": b"2"}))
    assert cuts(disk) == [
        {"a": b"1", "b": None, "b/x": b"2"},
        {"a": None, "a/x": b"2", "b": b"1"},
    ]


def test_a_removal_may_be_undone() -> None:
    assert cuts(after([Remove("f")], starting(OLD))) == [dict(OLD), {}]


def test_both_names_of_a_file_show_its_content() -> None:
    disk = after([Link("f", "g"), Write("g", 1, b"XY"), Resize("f", 2)], starting(OLD))
    assert dict(disk.image()) == {"f": b"oX", "g": b"oX"}


def test_many_uncertain_names() -> None:
    disk = after([Create(f"f{n}") for n in range(12)])
    found = {frozenset(image) for image in cuts(disk)}
    names = frozenset(f"f{n}" for n in range(12))
    assert {frozenset(), names, *(names - {n} for n in names)} <= found
    assert len(list(power_cuts(disk, more=50, seed=1))) > len(found) + 40


def test_what_is_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        apply(Disk(), Remove("a"))
    with pytest.raises(FileExistsError):
        after([Create("a"), MakeFolder("a")])
