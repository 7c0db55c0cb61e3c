"""What a rank raises, or meets, that no rank should: the others name it in time, nothing hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import xckpt
from tests.support.ranks import Ranks
from tests.support.signs import act_before
from tests.support.stored import step_at
from tests.support.time_limit import ALLOWANCE
from xckpt.engine.ranks.star import Star
from xckpt.planner import DefaultSavePlanner
from xckpt.storage import ZarrStorageWriter

TIMEOUT = 3.0
BAR = TIMEOUT + 2 * ALLOWANCE
"""Seconds within which every rank has to end."""


def state(step: int) -> dict[str, Any]:
    return {**{f"w{n}": np.full((64, 64), step, np.int32) for n in range(4)}, "step": step}


class Mute(Exception):
    """It cannot say what it is about."""

    def __str__(self) -> str:
        raise ValueError("no words")


def with_notes(notes: Any) -> Exception:
    error = ValueError("noted")
    error.__notes__ = notes
    return error


def with_a_lock() -> Exception:
    return type("Inner", (Exception,), {"lock": threading.Lock()})("locked")


def without_end(*_: object) -> Any:
    return without_end()


ERRORS: dict[str, tuple[Callable[[], BaseException], str]] = {
    "mute": (Mute, "rank {}: Mute: (what it says raises ValueError)"),
    "a note that is none": (lambda: with_notes([5, b"x"]), "rank {}: ValueError: noted"),
    "no list of notes": (lambda: with_notes(7), "rank {}: ValueError: (what it says raises Type"),
    "100 MB of text": (lambda: ValueError("x" * (100 << 20)), "rank {}: ValueError: xxxx"),
    "half a character": (lambda: ValueError("\ud800\x1b[31m"), r"rank {}: ValueError: \ud800\x1b["),
    "no pickle": (with_a_lock, "rank {}: Inner: locked"),
    "many": (lambda: ExceptionGroup("many", [OSError("a")]), "rank {}: ExceptionGroup: many"),
    "a timeout of its own": (lambda: TimeoutError("mine"), "rank {}: TimeoutError: mine"),
}


class Planner(DefaultSavePlanner):
    """Does something before its rank's local plan."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self._act = act

    def create_local_plan(self) -> Any:
        self._act()
        return super().create_local_plan()


def outcome(call: Callable[[], object]) -> tuple[str, str, list[int], float]:
    """The class and the text of what a call raises, the ranks named, and the seconds."""
    began, kind, text, named = time.monotonic(), "done", "", list[int]()
    try:
        call()
    except BaseException as error:
        kind, text = type(error).__name__, str(error)[:2000]
        failures = getattr(error, "failures", ()) or getattr(error.__cause__, "failures", ())
        named = [each.rank for each in failures]
    return kind, text, named, time.monotonic() - began


def on_rank_that_raises(rank: int, what: str, victim: int, path: Path) -> Any:
    group: Any = dist.new_group()

    def act() -> None:
        if what == "recursion":
            without_end()
        raise ERRORS[what][0]()

    planner = Planner(act) if rank == victim else None
    dist.barrier()
    said = outcome(
        lambda: xckpt.save(path, state(2), planner=planner, group=group, timeout=TIMEOUT)
    )
    xckpt.save(path, state(3), group=group, timeout=60)
    return said


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


@pytest.mark.parametrize(
    "what, victim",
    [
        ("mute", 1),
        *(
            pytest.param(what, victim, marks=pytest.mark.thorough)
            for what in [*ERRORS, "recursion"]
            for victim in (0, 1)
        ),
    ],
)
def test_an_error_that_can_hardly_be_said(
    three_ranks: Ranks, tmp_path: Path, what: str, victim: int
) -> None:
    """It has one class on all ranks, which save together afterwards."""
    answers = three_ranks.run(on_rank_that_raises, what, victim, tmp_path / "ckpt")
    text = ERRORS[what][1] if what in ERRORS else "rank {}: RecursionError: maximum recursion"
    assert len({kind for kind, *_ in answers}) == 1, answers
    for _, said, named, seconds in answers:
        assert text.format(victim) in said and named == [victim], answers
        assert seconds < BAR
    assert step_at(str(tmp_path / "ckpt")) == 3


def on_rank_that_does(rank: int, what: str, victim: int, path: Path) -> Any:
    group: Any = dist.new_group()
    struck: list[int] = []

    def progress(*_: object) -> None:
        if rank != victim or struck:
            return
        struck.append(1)
        if what == "a pause":
            subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        elif what == "a fork" and not os.fork():
            try:
                xckpt.save(path / "child", state(9), group=group, timeout=1)
            finally:
                os._exit(0)

    with pytest.MonkeyPatch.context() as patch:
        if what == "a clock that runs backwards" and rank == victim:
            now, ticks = time.time(), iter(range(1 << 30))
            patch.setattr(time, "time", lambda: now - 1000 * next(ticks))
        options = xckpt.SaveOptions(chunk_bytes=1 << 12, progress=progress)
        dist.barrier()
        saving = xckpt.save_async(
            path / "new", state(2), group=group, timeout=TIMEOUT, options=options
        )
        if what == "its group is destroyed" and rank == victim:
            dist.destroy_process_group(group)
        return outcome(lambda: saving.result(60))


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    "what", ["a pause", "a fork", "a clock that runs backwards", "its group is destroyed"]
)
def test_what_a_save_survives(three_ranks: Ranks, tmp_path: Path, what: str, victim: int) -> None:
    answers = three_ranks.run(on_rank_that_does, what, victim, tmp_path)
    assert [kind for kind, *_ in answers] == ["done"] * 3, answers
    assert step_at(str(tmp_path / "new")) == 2 and os.listdir(tmp_path) == ["new"]


def on_rank_without_threads(rank: int, number: int, victim: int, path: Path) -> Any:
    group: Any = dist.new_group()
    start, count = threading.Thread.start, iter(range(1 << 20))

    def refused(thread: threading.Thread) -> None:
        if next(count) >= number:
            raise RuntimeError("can't start new thread")
        start(thread)

    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if rank == victim:
            patch.setattr(threading.Thread, "start", refused)
        return outcome(lambda: xckpt.save(path / "new", state(2), group=group, timeout=TIMEOUT))


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("number", range(4))
def test_a_rank_that_can_start_no_more_threads(
    three_ranks: Ranks, tmp_path: Path, number: int, victim: int
) -> None:
    for kind, text, named, seconds in three_ranks.run(
        on_rank_without_threads, number, victim, tmp_path
    ):
        assert kind == "RanksFailedError" and named == [victim], (kind, text)
        assert seconds < BAR
    assert os.listdir(tmp_path) == []


def on_rank_interrupted(rank: int, number: int, victim: int, path: Path) -> Any:
    group: Any = dist.new_group()
    dist.barrier()
    interrupt = lambda: signal.raise_signal(signal.SIGINT)  # noqa: E731
    patch = act_before(Star, number, interrupt) if rank == victim else pytest.MonkeyPatch()
    said = outcome(lambda: xckpt.save(path, state(2), group=group, timeout=TIMEOUT))
    patch.undo()
    xckpt.save(path, state(3), group=group, timeout=60, overwrite=True)
    return said


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, 1])
def test_an_interrupt_before_any_collective(
    three_ranks: Ranks, tmp_path: Path, victim: int
) -> None:
    for number in range(6):
        path = tmp_path / str(number)
        answers = three_ranks.run(on_rank_interrupted, number, victim, path)
        for rank, (kind, text, named, seconds) in enumerate(answers):
            if rank == victim:
                assert kind == "KeyboardInterrupt", number
            elif kind != "done":  # before a rank's last collective, the save is committed
                assert named == [victim] and f"rank {victim}: KeyboardInterrupt" in text
            else:
                assert number == 5 and victim != 0, answers
            assert seconds < BAR
        assert step_at(str(path)) == 3


def on_rank_that_fails_once_committed(rank: int, what: type[BaseException], path: Path) -> Any:
    """The coordinator is interrupted, or fails, between the commit and the answer to all ranks."""
    group: Any = dist.new_group()
    xckpt.save(path, state(1), group=group)
    dist.barrier()
    finish = ZarrStorageWriter.finish

    def interrupted(writer: ZarrStorageWriter, *arguments: Any) -> bytes:
        finish(writer, *arguments)
        raise what

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ZarrStorageWriter, "finish", interrupted)
            xckpt.save(path, state(2), group=group, overwrite=True, timeout=TIMEOUT)
    except (KeyboardInterrupt, ValueError, xckpt.XckptError) as error:
        said = [str(error), *getattr(error, "__notes__", ())]
        xckpt.save(path, state(3), group=group, overwrite=True)
        return type(error).__name__, "\n".join(said), step_at(str(path))
    return "done", "", 0


@pytest.mark.parametrize(
    "what, others", [(KeyboardInterrupt, "RanksFailedError"), (ValueError, "ValueError")]
)
def test_all_ranks_hear_that_an_interrupted_save_is_committed(
    three_ranks: Ranks, tmp_path: Path, what: type[BaseException], others: str
) -> None:
    answers = three_ranks.run(on_rank_that_fails_once_committed, what, tmp_path / "new")
    assert [kind for kind, *_ in answers] == [what.__name__, others, others]
    for _, said, step in answers:
        assert "after the commit: the checkpoint is there, whole" in said
        assert "nothing was committed" not in said and step == 3
