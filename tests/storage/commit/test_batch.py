"""Many files that are forced to disk together: all of them, in parts that count as progress."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from xckpt.engine.ranks.alive import WORK, Work
from xckpt.storage.commit import batch


@pytest.fixture
def work() -> Iterator[Work]:
    """What this thread works at; its last progress was long ago."""
    work = Work(moved=0.0, is_heard=True)
    token = WORK.set(work)
    yield work
    WORK.reset(token)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files in folders, and one that is still being written."""
    for name in ("a/0", "a/b/1", "a/b/2", "c/3", "a/b/4.__lock"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(300))
    return tmp_path


@pytest.mark.parametrize("size, counts", [(99, False), (100, True), (1000, True)])
def test_a_large_file_counts_as_progress(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, counts: bool
) -> None:
    monkeypatch.setattr(batch, "LARGE_BYTES", 100)
    monkeypatch.setattr(batch, "FLUSH_BYTES", 64)
    (tmp_path / "large").write_bytes(bytes(size))
    with (tmp_path / "large").open("rb") as file:
        batch.flush(file.fileno())
    assert (work.moved > 0) is counts


def test_what_cannot_be_forced_in_parts_is_synced_as_a_whole(work: Work) -> None:
    """A pipe has no parts."""
    reading, writing = os.pipe()
    try:
        batch.flush(writing)
    finally:
        os.close(reading)
        os.close(writing)
    assert work.moved == 0


@pytest.mark.parametrize("at_once", [True, False])
def test_every_file_and_folder_is_forced_to_disk(
    work: Work, folder: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    forced: list[str] = []
    monkeypatch.setattr(batch, "LARGE_BYTES", 100)
    monkeypatch.setattr(batch, "syncs_at_once", lambda _: at_once)
    name, real = ("flush", batch.flush) if at_once else ("fsync", os.fsync)

    def noted(descriptor: int) -> None:
        forced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), folder))
        real(descriptor)

    monkeypatch.setattr(batch if at_once else os, name, noted)
    descriptor = os.open(folder, os.O_RDONLY)
    batch.sync_all(descriptor, [folder / "a", folder / "c", folder / "none"])
    os.close(descriptor)
    files, folders = ["a/0", "a/b/1", "a/b/2", "c/3"], ["a", "a/b", "c"]
    assert sorted(forced) == sorted(files if at_once else [*files, *folders])
    assert work.moved > 0


def test_a_failure_ends_the_rest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "syncs_at_once", lambda _: False)
    monkeypatch.setattr(batch, "THREADS", 1)
    asked: list[int] = []

    def full(descriptor: int) -> None:
        asked.append(descriptor)
        time.sleep(0.05)  # a disk, for which the others wait
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    descriptor = os.open(folder, os.O_RDONLY)
    with pytest.raises(OSError, match="No space left"):
        batch.sync_all(descriptor, [folder])
    os.close(descriptor)
    assert len(asked) < 8
