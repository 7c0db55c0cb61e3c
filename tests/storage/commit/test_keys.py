"""Lock files of dead writers are emptied, those of living ones and what they became are not."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
