"""Recorded operations are those that were done, in their order; killed processes did the first."""

from __future__ import annotations

import itertools
import mmap
import multiprocessing
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from conformance.crash import savers
from conformance.crash.disk import apply, starting
from conformance.crash.operations import Create, MakeFolder, Operation, Write
from conformance.crash.recording import (
    ActionError,
    CannotRecordError,
    Recorder,
    Recording,
    image_of,
    memory,
    replay,
)
from conformance.implementation import Held, Implementation, Refused
from conformance.implementations.xckpt import IMPLEMENTATION, Xckpt
from tests.conformance.crash.operations import perform_all, perform_in_saver, some_operations
from tests.support.examples import examples
from xckpt.core.manifest.own_keys import CLAIM


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    with Recorder(IMPLEMENTATION) as found:
        yield found


def image_after(found: Recording) -> dict[str, bytes | None]:
    disk = starting(found.before)
    for operation in found.operations:
        disk = apply(disk, operation)
    return dict(disk.image())


@given(some_operations)
@examples(20, 400)
def test_operations_are_recorded(recorder: Recorder, operations: list[Operation]) -> None:
    with tempfile.TemporaryDirectory(dir=memory()) as one, tempfile.TemporaryDirectory() as other:
        found = recorder.record(Path(one), perform_in_saver, operations, Path(one))
        assert list(found.operations) == perform_all(operations, Path(other))
        assert image_after(found) == image_of(Path(one))


@given(some_operations, st.integers(0, 10))
@examples(40)
def test_a_process_is_killed_before_an_operation(
    recorder: Recorder, operations: list[Operation], most: int
) -> None:
    with tempfile.TemporaryDirectory(dir=memory()) as one, tempfile.TemporaryDirectory() as other:
        found = recorder.record(Path(one), perform_in_saver, operations, Path(one), most=most)
        possible = perform_all(operations, Path(other))
        # It may also be killed before one that would have failed.
        assert found.killed or len(possible) <= most
        assert list(found.operations) == possible[:most]
        assert image_after(found) == image_of(Path(one))


def write_in_many_ways(_: Implementation, root: Path) -> None:
    """With relative paths, appending, vectors, copies in the kernel, growing."""
    os.chdir(root)
    os.makedirs("d/e")
    with open("d/a", "wb") as file:
        file.write(b"first")
    with open("d/a", "ab", buffering=0) as file:
        file.write(b"second")
        os.writev(file.fileno(), [b"third", b"fourth"])
    with open("d/a", "r+b", buffering=0) as file:
        os.pwritev(file.fileno(), [b"x", b"yz"], 3)
        os.posix_fallocate(file.fileno(), 0, 40)
        os.ftruncate(file.fileno(), 33)
    shutil.copyfile("d/a", "d/e/b")
    with open("d/a", "rb") as source, open("c", "wb") as target:
        os.copy_file_range(source.fileno(), target.fileno(), 20)
        os.sendfile(target.fileno(), source.fileno(), 0, 10)
    folder = os.open("d", os.O_RDONLY)
    os.rename("e/b", "moved", src_dir_fd=folder, dst_dir_fd=folder)
    os.rmdir("e", dir_fd=folder)
    with open(root / "c", "wb"):
        pass
    os.close(folder)


def test_many_ways_to_write(recorder: Recorder, tmp_path: Path) -> None:
    found = recorder.record(tmp_path, write_in_many_ways, tmp_path)
    image = image_of(tmp_path)
    assert image_after(found) == image
    assert image["d/a"] == b"firxyzecondthirdfourth".ljust(33, b"\0") == image["d/moved"]


def write_from_threads_and_processes(_: Implementation, root: Path) -> None:
    def fill(name: str) -> None:
        os.mkdir(root / name)
        for n in range(20):
            (root / name / str(n)).write_bytes(name.encode())

    threads = [threading.Thread(target=fill, args=(f"thread{n}",)) for n in range(3)]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=fill, args=(f"process{n}",)) for n in range(2)]
    for process in processes:
        process.start()
    for thread in threads:
        thread.start()
    for each in (*threads, *processes):
        each.join()


def test_threads_and_processes(recorder: Recorder, tmp_path: Path) -> None:
    found = recorder.record(tmp_path, write_from_threads_and_processes, tmp_path)
    assert len(found.operations) == 5 * (1 + 2 * 20)
    assert image_after(found) == image_of(tmp_path)


def test_all_processes_are_killed(recorder: Recorder, tmp_path: Path) -> None:
    found = recorder.record(tmp_path, write_from_threads_and_processes, tmp_path, most=70)
    assert found.killed and len(found.operations) == 70
    assert image_after(found) == image_of(tmp_path)


def write_elsewhere(_: Implementation, root: Path, other: Path) -> None:
    (other / "x").write_bytes(b"1")
    with tempfile.TemporaryFile(dir=other) as file:
        file.write(b"not to be seen")
    (root / "y").write_bytes(b"2")
    with pytest.raises(FileNotFoundError):
        os.mkdir(root / "no" / "such")


def test_what_fails_or_is_elsewhere_is_left_out(recorder: Recorder, tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "root-not"
    root.mkdir()
    other.mkdir()
    found = recorder.record(root, write_elsewhere, root, other)
    assert found.operations == (Create("y"), Write("y", 0, b"2"))


def map_to_write(_: Implementation, root: Path) -> None:
    with open(root / "x", "w+b") as file:
        file.truncate(10)
        mmap.mmap(file.fileno(), 10)[:2] = b"ab"


def make_symbolic_link(_: Implementation, root: Path) -> None:
    os.symlink("x", root / "y")


def move_out(_: Implementation, root: Path) -> None:
    os.mkdir(root / "x")
    os.rename(root / "x", root.parent / "x")


@pytest.mark.parametrize("action", [map_to_write, make_symbolic_link, move_out])
def test_what_cannot_be_recorded(recorder: Recorder, tmp_path: Path, action) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with pytest.raises(CannotRecordError):
        recorder.record(root, action, root)


def fail(_: Implementation, kind: str) -> None:
    if kind == "refuse":
        raise Refused("not this")
    if kind == "raise":
        raise KeyError("this one")
    if kind == "abort":
        os.abort()
    if kind == "wait":
        threading.Event().wait()


def test_failures_are_recorded(recorder: Recorder, tmp_path: Path) -> None:
    with pytest.raises(ActionError, match="this one"):
        recorder.do(fail, "raise")
    with pytest.raises(ActionError, match="this one"):
        recorder.record(tmp_path, fail, "raise")
    with pytest.raises(ActionError, match="ended with status"):
        recorder.do(fail, "abort")
    with pytest.raises(Refused, match="not this"):
        recorder.do(fail, "refuse")
    recorder.do(fail, "nothing")


def test_a_process_is_killed_in_time(recorder: Recorder) -> None:
    assert recorder.kill(0.05, fail, "wait")
    assert not recorder.kill(60, fail, "nothing")


class Hanging(Xckpt):
    """A library that does not survive a fork."""

    def save(
        self, path: Path, ranks: Sequence[Mapping[str, Held]], *, overwrite: bool = False
    ) -> None:
        threading.Event().wait()


def give_up_on_a_hanging_library() -> None:
    savers.SECONDS_TO_SAVE = 1
    assert not savers._can_fork(Hanging())


def test_who_hangs_when_forked_is_not_forked() -> None:
    # In a process of its own: it forks, which one that other tests have used may not survive.
    process = multiprocessing.get_context("spawn").Process(target=give_up_on_a_hanging_library)
    process.start()
    process.join()
    assert process.exitcode == 0


def make_two(_: Implementation, root: Path) -> None:
    (root / "d").mkdir()
    (root / "d" / "x").mkdir()


def test_through_a_symbolic_link(recorder: Recorder, tmp_path: Path) -> None:
    root, link = tmp_path / "root", tmp_path / "link"
    root.mkdir()
    link.symlink_to(root)
    found = recorder.record(link, make_two, link)
    assert found.operations == (MakeFolder("d"), MakeFolder("d/x"))


def delete_step(_: Implementation, step: Path) -> None:
    xckpt.delete(step)


def test_wherever_a_deletion_is_killed_gc_removes_what_is_left(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the step too, once nobody can be about to fill it."""
    step = tmp_path / "recorded" / "step-00000005"
    xckpt.save(step, {"w": np.ones(3)}, options=xckpt.SaveOptions(pack_bytes=0))
    found = recorder.record(step.parent, delete_step, step)
    disk, stays = starting(found.before), list[str]()
    for number, operation in enumerate(found.operations):
        disk = apply(disk, operation)
        root = tmp_path / str(number)
        replay(disk.image(), root)
        if (root / step.name / CLAIM).exists():  # an image has no times; the claim is the oldest
            os.utime(root / step.name / CLAIM, (0, 0))
        young = [each.owner for each in xckpt.gc(root) if not each.removed]
        with monkeypatch.context() as patch:
            patch.setattr("xckpt.storage.commit.leftovers.SETTLED", 0.0)
            assert [each.removed for each in xckpt.gc(root)] == [True] * len(young)
        whole = [each.name for each in root.iterdir() if xckpt.exists(each)]
        assert [each.name for each in root.iterdir()] == whole
        stays.append("whole" if whole else ", ".join(young))
    assert [state for state, _ in itertools.groupby(stays)] == ["whole", "", "alive", ""]
