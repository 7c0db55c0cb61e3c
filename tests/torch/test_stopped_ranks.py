"""Ranks that stop, die, come late or call again: all others end in time, and nothing stays.

A rank stops itself by SIGSTOP, where the default of a signal handler cannot help. It is continued
once the others have ended, and must learn what has happened.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import xckpt
from tests.support.ranks import Ranks
from tests.support.signs import await_sign, continue_after, seconds_since, stop_here
from tests.support.slow_disk import slow_disk
from tests.support.time_limit import ALLOWANCE
from xckpt.errors import RanksFailedError, XckptError

TIMEOUT = 1.5
BAR = TIMEOUT + 2 * ALLOWANCE
"""Seconds within which every rank that lives has to end, from when the other has stopped."""
PATIENT = 4.0
"""The timeout of a call that has to succeed, seconds."""
STATE = {"w": np.arange(1 << 18, dtype=np.float32), "step": 3}
SAVING = xckpt.SaveOptions(chunk_bytes=1 << 16, threads=2)


SHARING: Any = {"shared load": "host", "load between hosts": "job"}


def open_files() -> set[str]:
    """Sockets and shared memory that this process has open."""
    found: set[str] = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if link.startswith(("socket:", "/memfd:xckpt")):
            found.add(link)
    return found


def leftovers(before: set[str]) -> list[str]:
    """What a call has left in this process: files, and threads after a moment."""
    threads: list[str] = []
    files: list[str] = []
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        gc.collect()  # errors and the frames of their tracebacks hold each other
        threads = [t.name for t in threading.enumerate() if t.name.startswith("xckpt-")]
        files = sorted(open_files() - before)
        if not threads and not files:
            return []
        time.sleep(0.05)
    return [*threads, *files]


class Stopping:
    """A progress function that stops the process once."""

    def __init__(self, note: Path) -> None:
        self.note: Path | None = note

    def __call__(self, *_: Any) -> None:
        if self.note is not None:
            note, self.note = self.note, None
            stop_here(note)


def call(what: str, path: Path, group: Any, progress: Any, timeout: float = TIMEOUT) -> None:
    """The save or load under attack."""
    if what == "save":
        options = xckpt.SaveOptions(chunk_bytes=1 << 16, threads=2, progress=progress)
        xckpt.save(path / "new", STATE, group=group, timeout=timeout, options=options)
    elif what == "async":
        options = xckpt.SaveOptions(chunk_bytes=1 << 16, threads=2, progress=progress)
        saving = xckpt.save_async(
            path / "new", STATE, group=group, timeout=timeout, options=options
        )
        saving.result(60)
    else:
        like = {"w": np.zeros_like(STATE["w"]), "step": 0}
        # Each rank a host of its own, or all on one.
        host = f"host {dist.get_rank()}" if what == "load between hosts" else None
        share = SHARING.get(what, False)
        options = xckpt.LoadOptions(threads=2, progress=progress, share_reads=share, host=host)
        xckpt.load_into(path / "old", like, group=group, timeout=timeout, options=options)


def on_rank(rank: int, what: str, victim: int, when: str, path: Path) -> Any:
    group: Any = dist.new_group()
    note = path / "stopped"
    dist.barrier()
    before = open_files()
    progress = Stopping(note) if rank == victim and when == "in the middle" else None
    if rank == victim and when == "before":
        stop_here(note)
    text, ranks = "", []
    try:
        call(what, path, group, progress)
    except XckptError as error:
        text, ranks = str(error), [failure.rank for failure in error.failures]
    seconds, left = seconds_since(note), leftovers(before)
    if rank != victim:
        continue_after(note, rank, {0, 1, 2} - {victim})
    return text, ranks, seconds, left


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["before", "in the middle"])
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("what", ["save", "async", "shared load", "load", "load between hosts"])
def test_a_stopped_rank_is_named_in_time(
    three_ranks: Ranks, tmp_path: Path, what: str, victim: int, when: str
) -> None:
    xckpt.save(tmp_path / "old", STATE, options=SAVING)
    answers = three_ranks.run(on_rank, what, victim, when, tmp_path)
    for rank, (text, ranks, seconds, left) in enumerate(answers):
        assert left == [], (rank, left)
        assert text, rank
        if rank != victim:
            assert ranks == [victim], (rank, text)
            assert f"rank {victim}: sent nothing for {TIMEOUT:g} s" in text
            assert seconds < BAR, (rank, seconds)
    assert not (tmp_path / "new").exists()
    # A rank that was stopped while it wrote goes on a little; `xckpt gc` removes that.
    left = {name for name in os.listdir(tmp_path) if not name.startswith(".new.saving-")}
    assert left == {"old", "stopped", *(f"ended {rank}" for rank in range(3) if rank != victim)}


def on_rank_interrupted(rank: int, victim: int, path: Path) -> Any:
    """One rank is interrupted, catches that, and calls again; the others call again too."""
    group: Any = dist.new_group()
    xckpt.save(path / "first", STATE, group=group, timeout=20)
    started = time.monotonic()

    interrupts = iter([True] if rank == victim else [])

    def progress(*_: Any) -> None:
        if next(interrupts, False):
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.01)

    options = xckpt.SaveOptions(chunk_bytes=1 << 16, threads=2, progress=progress)
    text = ""
    try:
        xckpt.save(path / "second", STATE, group=group, timeout=20, options=options)
    except KeyboardInterrupt:
        text = "interrupted"
    except RanksFailedError as error:
        text = str(error)
    seconds = time.monotonic() - started
    xckpt.save(path / "third", STATE, group=group, timeout=20)
    return text, seconds


@pytest.mark.parametrize("victim", [0, 1])
def test_an_interrupted_rank_is_named_and_all_can_call_again(
    three_ranks: Ranks, tmp_path: Path, victim: int
) -> None:
    """What it sends of the next save is not taken for the save that it has left."""
    answers = three_ranks.run(on_rank_interrupted, victim, tmp_path)
    for rank, (text, seconds) in enumerate(answers):
        assert seconds < 5 * ALLOWANCE
        if rank == victim:
            assert text == "interrupted"
        else:
            assert "1 rank left it before the end; this save or load cannot go on" in text
            assert f"rank {victim}: KeyboardInterrupt" in text
    assert sorted(os.listdir(tmp_path)) == ["first", "third"]


def on_rank_calls_twice(rank: int, victim: int, path: Path) -> Any:
    """A rank that does not say that it leaves: as if a second interrupt had cut that short."""
    group: Any = dist.new_group()
    text: list[str] = []
    for attempt in range(2):
        if rank == victim and attempt == 0:
            from xckpt.torch.group import TorchGroup

            quiet = TorchGroup(group, timeout=PATIENT)
            quiet.begin()
            text.append("left")
            continue
        try:
            xckpt.save(path / str(attempt), STATE, group=group, timeout=PATIENT)
            text.append("")
        except RanksFailedError as error:
            text.append(str(error))
    return text


def test_a_rank_in_the_next_save_is_not_taken_for_one_in_this(
    three_ranks: Ranks, tmp_path: Path
) -> None:
    answers = three_ranks.run(on_rank_calls_twice, 1, tmp_path)
    for rank, (first, second) in enumerate(answers):
        assert second == "", (rank, second)
        assert first == "left" or "rank 1: RuntimeError: it began another save or load" in first
    assert os.listdir(tmp_path) == ["1"]


class StoppingSavePlanner(xckpt.planner.DefaultSavePlanner):
    """Stops its process where the others begin to write."""

    note: Path

    def finish_plan(self, new_plan: Any) -> Any:
        stop_here(self.note)
        return super().finish_plan(new_plan)


class StoppingLoadPlanner(xckpt.planner.DefaultLoadPlanner):
    """Stops its process where the others begin to read."""

    note: Path

    def finish_plan(self, central_plan: Any) -> Any:
        stop_here(self.note)
        return super().finish_plan(central_plan)


def on_rank_beside_one_at_work(rank: int, what: str, slow: int, path: Path) -> Any:
    """The last rank stops while a slow disk keeps another one busy for many seconds."""
    group: Any = dist.new_group()
    note, text, ranks = path / "stopped", "", []
    large = np.zeros(24 << 18, np.uint8)
    planner: Any = None
    if rank == 2:
        planner = StoppingLoadPlanner() if what == "load" else StoppingSavePlanner()
        planner.note = note
    call: dict[str, Any] = {"group": group, "timeout": TIMEOUT}
    call |= {} if planner is None else {"planner": planner}
    dist.barrier()
    with slow_disk(0.5) if rank == slow else contextlib.nullcontext():
        try:
            if what == "load":
                reading = xckpt.LoadOptions(threads=1, share_reads=False)
                like = {"step": 0} | ({"w": large} if rank == slow else {})
                xckpt.load_into(path / "old", like, options=reading, strict=False, **call)
            else:
                options = xckpt.SaveOptions(chunk_bytes=1 << 18, threads=1)
                state = {"step": 3} | ({"w": large} if rank == slow else {})
                begin = xckpt.save if what == "save" else xckpt.save_async
                saved: Any = begin(path / "new", state, options=options, **call)
                saved.result(60) if what == "async" else None
        except XckptError as error:
            text, ranks = str(error), [failure.rank for failure in error.failures]
    seconds = seconds_since(note)
    if rank != 2:
        continue_after(note, rank, {0, 1})
    return text, ranks, seconds


@pytest.mark.parametrize(
    "what, slow",
    [
        ("save", 0),
        *(
            pytest.param(what, slow, marks=pytest.mark.thorough)
            for what, slow in [("save", 1), ("async", 0), ("async", 1), ("load", 0), ("load", 1)]
        ),
    ],
)
def test_ranks_at_work_hear_of_a_stopped_one(
    three_ranks: Ranks, tmp_path: Path, what: str, slow: int
) -> None:
    """The coordinator names it while it works itself; then all end, also those that work."""
    state = {"w": np.zeros(24 << 18, np.uint8), "step": 3}
    xckpt.save(tmp_path / "old", state, options=xckpt.SaveOptions(chunk_bytes=1 << 18))
    answers = three_ranks.run(on_rank_beside_one_at_work, what, slow, tmp_path)
    for text, ranks, seconds in answers[:2]:
        assert ranks == [2], text
        assert f"rank 2: sent nothing for {TIMEOUT:g} s" in text
        assert seconds < BAR, seconds
    assert not (tmp_path / "new").exists()


def on_rank_suspended(rank: int, what: str, path: Path) -> str:
    """All ranks are stopped where one is in the middle, as a scheduler suspends a job."""
    group: Any = dist.new_group()
    dist.barrier()

    def progress(*_: Any) -> None:
        if rank == 0 and not (path / "middle").exists():
            (path / "middle").touch()
            time.sleep(0.5)

    try:
        call(what, path, group, progress, PATIENT)
    except XckptError as error:
        return str(error)
    return ""


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["save", "async", "load", "shared load", "load between hosts"])
def test_a_job_that_was_suspended_goes_on(three_ranks: Ranks, tmp_path: Path, what: str) -> None:
    """The time in which no rank ran is no silence."""
    xckpt.save(tmp_path / "old", STATE, options=SAVING)

    def suspend() -> None:
        await_sign(tmp_path / "middle")
        for signal_, seconds in ((signal.SIGSTOP, PATIENT + 1.5), (signal.SIGCONT, 0)):
            for process in three_ranks.processes:
                os.kill(process.pid, signal_)
            time.sleep(seconds)

    scheduler = threading.Thread(target=suspend)
    scheduler.start()
    answers = three_ranks.run(on_rank_suspended, what, tmp_path)
    scheduler.join()
    assert answers == ["", "", ""]
