"""Lock files of dead writers are emptied, those of living ones and what they became are not."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import xckpt
from xckpt.storage.commit import keys
from xckpt.storage.commit.keys import empty_stale_lock
from xckpt.storage.location import Location, open_store


def test_a_dead_writers_lock_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "k.__lock").write_bytes(b"x" * 100)
    empty_stale_lock(tmp_path, "k")
    open_store(Location("file", str(tmp_path))).write("k", b"new").result()
    assert (tmp_path / "k").read_bytes() == b"new"


def test_where_there_is_none(tmp_path: Path) -> None:
    empty_stale_lock(tmp_path, "k")
    assert list(tmp_path.iterdir()) == []


def test_a_living_writers_lock_is_left(tmp_path: Path) -> None:
    path = tmp_path / "k.__lock"
    path.write_bytes(b"half of it")
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'r+b'); fcntl.lockf(file, fcntl.LOCK_EX);"
        "print('locked', flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=pipe, stdout=pipe) as held:
        assert held.stdout is not None and held.stdout.readline() == b"locked\n"
        empty_stale_lock(tmp_path, "k")
        assert path.read_bytes() == b"half of it"
        held.communicate(b"")
    empty_stale_lock(tmp_path, "k")
    assert path.read_bytes() == b""


def test_what_was_renamed_meanwhile_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer finishes after the lock was opened: it is the key now."""
    path = tmp_path / "k.__lock"
    path.write_bytes(b"the manifest")

    def lock_after_it_finished(file, how: int) -> None:
        os.rename(path, tmp_path / "k")
        path.write_bytes(b"of another")
        fcntl.flock(file, how)

    monkeypatch.setattr(keys.fcntl, "lockf", lock_after_it_finished)
    empty_stale_lock(tmp_path, "k")
    assert (tmp_path / "k").read_bytes() == b"the manifest"
    assert path.read_bytes() == b"of another"


def test_files_of_the_user_survive_a_kill_amid_the_deletion_beside_a_claim() -> None:
    """The copy of the old manifest says what is to go; the claim alone would mean any zarr.json."""
    place = Location.parse("memory://keys-killed-amid-the-deletion")
    store = open_store(place)
    xckpt.save(place, {"w": np.arange(3)})
    old = {key: store.read(key).result().value for key in store.list().result()}
    xckpt.save(place, {"w": np.arange(4)}, overwrite=True)
    root = next(k.decode() for k in store.list().result() if b".generations/" in k).split("/")[1]
    left = {"w/c/0": old[b"w/c/0"], "xckpt.saving": b"{}", "mine/zarr.json": b"{}"}
    left[f".generations/{root}/{keys.REPLACED}"] = old[b"xckpt.json"]
    for key, content in left.items():
        store.write(key, content).result()
    xckpt.save(place, {"w": np.arange(5)}, overwrite=True)
    there = [key.decode() for key in store.list().result()]
    outside = [key for key in there if not key.startswith(".generations/")]
    assert sorted(outside) == ["mine/zarr.json", "xckpt.json"]
    assert xckpt.open(place).verify() == []
