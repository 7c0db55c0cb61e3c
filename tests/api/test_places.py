"""`exists`, `delete` and `copy`, in local folders, memory and buckets."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import xckpt
from tests.support.servers import environment, gcs, new_place, s3
from tests.support.states import LAYOUTS, everything, expected, same
from xckpt.storage import copy_checkpoint
from xckpt.storage.commit.remove import Hidden
from xckpt.storage.location import Location, open_store

__all__ = ["environment", "gcs", "s3"]

STATE = {"model": {"w": np.arange(20.0).reshape(4, 5)}, "step": 2}
SMALL = xckpt.SaveOptions(chunk_bytes=40)
_numbers = itertools.count()


@pytest.fixture(params=["folder", "memory", "s3", "gcs"])
def home(request: pytest.FixtureRequest) -> str:
    """A place of its own, to which names can be appended."""
    return new_place(request)


def keys(path: str) -> list[str]:
    return sorted(key.decode() for key in open_store(Location.parse(path)).list().result())


def check_progress(shown: list[xckpt.Progress], objects: list[str]) -> None:
    """It grows by each object, but for those by which a save begins and ends."""
    done = [each.done for each in shown]
    assert done == sorted(done) and shown[-1].done == shown[-1].total
    assert len(shown) == len(set(objects) - {"xckpt.json", "xckpt.saving"})


def test_a_checkpoint_comes_goes_and_is_copied(home: str) -> None:
    one, two = f"{home}/one", f"{home}/two"
    assert not xckpt.exists(one)
    xckpt.save(one, STATE, options=SMALL, metadata={"run": 1})
    assert xckpt.exists(one) and not xckpt.exists(two) and not xckpt.exists(home)
    shown: list[xckpt.Progress] = []
    xckpt.copy(one, two, options=xckpt.LoadOptions(progress=shown.append))
    check_progress(shown, keys(one))
    xckpt.delete(one)
    assert not xckpt.exists(one) and keys(one) == []
    with xckpt.open(two) as checkpoint:
        assert checkpoint.verify() == [] and checkpoint.user_metadata == {"run": 1}
    assert same(xckpt.load(two), STATE)
    xckpt.save(one, {"step": 5})
    assert xckpt.load(one) == {"step": 5}


def test_a_copy_replaces_only_where_it_may(home: str) -> None:
    one, two = f"{home}/one", f"{home}/two"
    xckpt.save(one, STATE)
    xckpt.save(two, {"step": 9})
    with pytest.raises(xckpt.CheckpointExistsError, match="overwrite=True"):
        xckpt.copy(one, two)
    assert xckpt.load(two) == {"step": 9}
    xckpt.copy(one, two, overwrite=True)
    assert same(xckpt.load(two), STATE)
    # What is replaced lies in a generation where folders cannot be exchanged.
    xckpt.copy(two, f"{home}/three")
    assert same(xckpt.load(f"{home}/three"), STATE)


def test_nothing_is_copied_by_halves(home: str) -> None:
    one, two = f"{home}/one", f"{home}/two"
    xckpt.save(one, STATE, options=SMALL)
    store = open_store(Location.parse(one))
    store.write("model/w/c/2/0", None).result()
    with pytest.raises(xckpt.CorruptCheckpointError, match="model/w/c/2/0: it is missing"):
        xckpt.copy(one, two)
    assert not xckpt.exists(two) and keys(two) == []


def test_a_source_that_is_replaced_meanwhile(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = f"{home}/one", f"{home}/two"
    xckpt.save(one, STATE)
    copied = copy_checkpoint._copy_objects

    def replacing(*arguments: object) -> None:
        copied(*arguments)  # type: ignore[arg-type]
        xckpt.save(one, {"step": 3}, overwrite=True)

    monkeypatch.setattr(copy_checkpoint, "_copy_objects", replacing)
    with pytest.raises(xckpt.StorageError, match="was replaced while it was copied"):
        xckpt.copy(one, two)
    assert not xckpt.exists(two) and keys(two) == []


def test_a_manifest_that_cannot_be_trusted_is_named(home: str) -> None:
    one = f"{home}/one"
    xckpt.save(one, STATE)
    open_store(Location.parse(one)).write("xckpt.json", b"{}").result()
    with pytest.raises(xckpt.ManifestError, match=f"^{re.escape(one)}: the manifest is truncated"):
        xckpt.copy(one, f"{home}/two")
    assert keys(f"{home}/two") == []


@pytest.mark.parametrize("below", ["ckpt", "a/b"])
def test_a_path_below_a_file_is_refused_with_advice(tmp_path: Path, below: str) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(xckpt.StorageError, match=r"file.*: choose another path$"):
        xckpt.save(tmp_path / "notes" / below, STATE)
    assert (tmp_path / "notes").read_text() == "mine"


def test_the_users_files_stay(home: str) -> None:
    one = f"{home}/one"
    xckpt.save(one, STATE, options=SMALL)
    store = open_store(Location.parse(one))
    for key in ("config.json", "model/notes.txt"):
        store.write(key, b"mine").result()
    xckpt.copy(one, f"{home}/two")
    assert "config.json" not in keys(f"{home}/two")
    xckpt.delete(one)
    assert keys(one) == ["config.json", "model/notes.txt"] and not xckpt.exists(one)


def test_what_is_deleted_by_halves_is_no_checkpoint(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = f"{home}/one"
    xckpt.save(one, STATE, options=SMALL)

    class Killed(BaseException):
        pass

    def die(*arguments: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Hidden, "sweep", die)
        with pytest.raises(Killed):
            xckpt.delete(one)
    assert not xckpt.exists(one) and "model/w/c/0/0" in keys(one)
    with pytest.raises(xckpt.NotACheckpointError):
        xckpt.load(one)
    xckpt.save(one, {"step": 1}, overwrite=True)
    assert xckpt.load(one) == {"step": 1} and "model/w/c/0/0" not in keys(one)


def test_where_nothing_is(home: str) -> None:
    with pytest.raises(xckpt.NotACheckpointError, match="nothing was deleted"):
        xckpt.delete(f"{home}/one")
    with pytest.raises(xckpt.NotACheckpointError):
        xckpt.copy(f"{home}/one", f"{home}/two")
    assert not xckpt.exists(f"{home}/two")
    xckpt.save(f"{home}/one", STATE)
    with pytest.raises(ValueError, match="are one place"):
        xckpt.copy(f"{home}/one", f"{home}/one")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_is_copied(tmp_path: Path, layout: str) -> None:
    state = everything()
    xckpt.save(tmp_path / "one", state, options=LAYOUTS[layout])
    xckpt.copy(tmp_path / "one", tmp_path / "two")
    url = f"memory://places-{next(_numbers)}"
    xckpt.copy(tmp_path / "two", url)
    xckpt.copy(url, tmp_path / "three")
    for path in (tmp_path / "two", url, tmp_path / "three"):
        assert xckpt.open(path).verify() == []
        assert same(xckpt.load(path), expected(state))


def test_a_local_copy_takes_no_bytes(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    xckpt.save(one, STATE, options=SMALL)
    xckpt.copy(one, two)
    chunks = [path for path in two.rglob("c/*/*") if path.is_file()]
    assert len(chunks) == 4 and all(path.stat().st_nlink == 2 for path in chunks)
    xckpt.save(one, {"model": {"w": np.zeros((4, 5))}, "step": 0}, overwrite=True, options=SMALL)
    assert same(xckpt.load(two), STATE) and xckpt.open(two).verify() == []
    shutil.rmtree(one)
    assert same(xckpt.load(two), STATE)


def test_files_that_cannot_be_linked_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    xckpt.save(tmp_path / "one", STATE)
    with monkeypatch.context() as patch:
        patch.setattr("os.link", refuse)
        xckpt.copy(tmp_path / "one", tmp_path / "two")
    assert same(xckpt.load(tmp_path / "two"), STATE)
    assert (tmp_path / "two/zarr.json").stat().st_nlink == 1


def test_arguments_without_sense() -> None:
    for call in (xckpt.exists, xckpt.delete):
        with pytest.raises(TypeError, match=r"call \w+\(path\)"):
            call({})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"call copy\(source, target\)"):
        xckpt.copy("a", {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"copy takes options=xckpt.LoadOptions\(...\), not a dict"):
        xckpt.copy("a", "b", options={})  # type: ignore[arg-type]


def test_a_save_that_comes_second_to_an_equal_one_is_not_called_committed(tmp_path: Path) -> None:
    path, state = tmp_path / "c", {"w": np.arange(4.0)}

    def save_first(progress: xckpt.Progress) -> None:
        if not path.exists():
            xckpt.save(path, state)

    options = xckpt.SaveOptions(progress=save_first, threads=1)
    with pytest.raises(xckpt.CheckpointExistsError, match="this save is not committed") as caught:
        xckpt.save(path, state, options=options)
    assert not getattr(caught.value, "__notes__", [])


def test_a_pipe_in_the_manifests_place_is_not_waited_for(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "ckpt", {"w": np.ones(3)})
    (tmp_path / "ckpt" / "xckpt.json").unlink()
    os.mkfifo(tmp_path / "ckpt" / "xckpt.json")
    with pytest.raises(xckpt.StorageError, match=r"xckpt\.json is not a plain file, so nothing"):
        xckpt.delete(tmp_path / "ckpt")
    assert (tmp_path / "ckpt" / "w" / "zarr.json").is_file()
