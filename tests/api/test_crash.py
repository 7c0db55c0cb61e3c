"""Savers that are killed, or race: a path holds the old checkpoint, the new one, or none."""

from __future__ import annotations

import itertools
import os
import random
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread

import pytest

import xckpt
from tests.support.savers import PLACES, Command, Savers, number_of, state

MORE_TRIALS = 20
"""Of a busy machine, each as long or longer, until enough is committed."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An empty folder, in memory where possible: hundreds of saves would wait for the disk."""
    memory = Path("/dev/shm")
    where = memory if os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(prefix="crash-", dir=where) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def savers() -> Iterator[Savers]:
    with Savers() as process:
        yield process


def committed_at(path: Path) -> int | None:
    """The number of the whole and verified state at a path; None if there is none."""
    try:
        checkpoint = xckpt.open(path)
    except xckpt.NotACheckpointError:
        return None
    assert checkpoint.verify() == []
    return number_of(xckpt.load(path))


def check_next_save(path: Path) -> None:
    """After a crash the next save works, and leaves nothing of what was killed."""
    xckpt.save(path, state(999_999), overwrite=True)
    assert committed_at(path) == 999_999
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    root = xckpt.open(path).manifest.root
    files = [str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()]
    assert [file for file in files if not file.startswith(root) and file != "xckpt.json"] == []


@pytest.mark.parametrize("trials", [3, pytest.param(15, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("old", [False, True])
def test_killed_at_any_moment(
    savers: Savers, folder: Path, place: str, old: bool, trials: int
) -> None:
    """Moments from a save's begin to twice its length, when the first is committed for certain."""
    pick = random.Random(f"{place} {old}")
    ends: list[str] = []
    began = time.monotonic()
    assert savers.run(Command(str(folder / "first"), place, first=101, most=1)) == 101
    span = max(0.1, 2 * (time.monotonic() - began))  # a busy machine saves nothing in less
    for trial in itertools.count():
        # A busy machine may save nothing in the time that the first took: then it gets more.
        if trial >= trials and ("new" in ends or trial >= trials + MORE_TRIALS):
            break
        path = folder / str(trial) / "ckpt"
        if old:
            xckpt.save(path, state(100))
        seconds = span * (trial + pick.random()) / trials
        reported = savers.run(Command(str(path), place, first=101, seconds=seconds))
        found = committed_at(path)
        before = reported if reported > 0 else 100 if old else None
        after = 101 if before is None else before + 1
        assert found in (before, after)
        ends.append("nothing" if found is None else "old" if found == 100 else "new")
        check_next_save(path)
    assert "new" in ends


@pytest.mark.thorough  # conformance judges the same by tracing every place
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("old", [False, True])
def test_killed_before_each_operation(savers: Savers, folder: Path, place: str, old: bool) -> None:
    """One save, killed before its first operation on files, its second, and so on to its end."""
    ends: list[int | None] = []
    for operation in range(1, 1000):
        path = folder / str(operation) / "ckpt"
        if old:
            xckpt.save(path, state(100))
        reported = savers.run(Command(str(path), place, 101, most=1, operation=operation))
        found = committed_at(path)
        if reported == 101:
            assert found == 101
            break
        ends.append(found)
        check_next_save(path)
    before = 100 if old else None
    assert ends == [before] * ends.count(before) + [101] * ends.count(101)
    assert ends.count(before) > 3


@pytest.mark.parametrize("place", PLACES)
def test_savers_that_race(savers: Savers, folder: Path, place: str) -> None:
    """Two processes save to one path while this one reads: each load succeeds, and is whole."""
    path = folder / "ckpt"
    xckpt.save(path, state(0))
    done = Event()
    seen: list[int] = []
    wrong: list[BaseException] = []

    def read() -> None:
        while not done.is_set():
            try:
                seen.append(number_of(xckpt.load(path)))
            except BaseException as error:
                wrong.append(error)

    reader = Thread(target=read)
    reader.start()
    try:
        reported = savers.run(Command(str(path), place, most=15, savers=2, seconds=60))
    finally:
        done.set()
        reader.join()
    assert wrong == [] and reported > 0
    last = committed_at(path)
    assert last is not None and last >= 2 and len(set(seen)) > 1
    check_next_save(path)


@pytest.mark.thorough
@pytest.mark.parametrize("place", PLACES)
def test_many_writers_and_a_reader(savers: Savers, folder: Path, place: str) -> None:
    """Three processes overwrite a path for ten seconds: no load fails, no save but by the rules.

    A busy machine gets as many seconds again, until enough is saved and loaded to judge by.
    """
    path = folder / "ckpt"
    xckpt.save(path, state(0))
    done = Event()
    seen: list[int] = []
    reported = 0

    def read() -> None:
        while not done.is_set():
            seen.append(number_of(xckpt.load(path)))

    reader = ThreadPoolExecutor(1)
    reading = reader.submit(read)
    try:
        for _ in range(MORE_TRIALS):
            last = savers.run(Command(str(path), place, reported + 1, 100_000, savers=3))
            assert last != -2, "a saver failed"
            reported = max(reported, last)
            if reading.done() or (reported > 10 and len(seen) > 10):
                break
    finally:
        done.set()
        reader.shutdown()
    reading.result()
    assert reported > 10 and len(seen) > 10
    check_next_save(path)
