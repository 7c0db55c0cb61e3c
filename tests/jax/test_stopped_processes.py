"""A stopped JAX process, that of the coordination service too: all others end in time."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import xckpt
from tests.support.jax_jobs import run
from tests.support.signs import continue_after, seconds_since, stop_here
from tests.support.slow_disk import slow_disk
from tests.support.time_limit import ALLOWANCE
from xckpt.errors import XckptError
from xckpt.jax.group import JaxGroup

TIMEOUT = 2.0
BAR = TIMEOUT + 2 * ALLOWANCE


def stopped(what: str, victim: int, folder: str, timeout: float = TIMEOUT) -> list[object]:
    """One process stops itself in the middle of a save or load; what the others get, and when.

    The others let it go on once all of them have their answer.
    """
    path, group = Path(folder), JaxGroup(timeout=60)
    state = {"w": np.arange(1 << 16, dtype=np.float32)}
    note = path / "stopped"
    xckpt.save(path / "old", state, group=group, options=xckpt.SaveOptions(chunk_bytes=1 << 14))

    def progress(*_: object) -> None:
        if group.rank == victim and not note.exists():
            stop_here(note)

    text, ranks = "", []
    try:
        if what == "save":
            options = xckpt.SaveOptions(chunk_bytes=1 << 14, progress=progress)
            xckpt.save(path / "new", state, group=group, timeout=timeout, options=options)
        else:
            reading = xckpt.LoadOptions(progress=progress)
            xckpt.load_into(path / "old", state, group=group, timeout=timeout, options=reading)
    except XckptError as error:
        text, ranks = str(error), [failure.rank for failure in error.failures]
    seconds = seconds_since(note)
    if group.rank != victim:
        continue_after(note, group.rank, set(range(group.size)) - {victim})
    return [text, ranks, seconds]


def test_a_stopped_process_is_named_in_a_moment(tmp_path: Path) -> None:
    (text, ranks, seconds), _ = cast(list[Any], run(stopped, 2, "save", 1, str(tmp_path), 0.5))
    assert ranks == [1], text
    assert seconds < 0.5 + 2 * ALLOWANCE


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("what", ["save", "load"])
def test_a_stopped_process_is_named_in_time(tmp_path: Path, what: str, victim: int) -> None:
    answers = run(stopped, 3, what, victim, str(tmp_path))
    for rank, answer in enumerate(answers):
        assert isinstance(answer, list)
        text, ranks, seconds = answer
        if rank != victim:
            assert ranks == [victim], (rank, text)
            assert seconds < BAR, (rank, seconds)


def interrupted(victim: int, folder: str) -> str:
    """One process leaves a save by an interrupt; all call again."""
    group = JaxGroup(timeout=30)
    once = iter([True] if group.rank == victim else [])

    def progress(*_: object) -> None:
        if next(once, False):
            signal.raise_signal(signal.SIGINT)

    state = {"w": np.arange(1 << 14, dtype=np.float32)}
    options = xckpt.SaveOptions(chunk_bytes=1 << 12, progress=progress)
    text = ""
    try:
        xckpt.save(Path(folder) / "first", state, group=group, options=options)
    except KeyboardInterrupt:
        text = "interrupted"
    except XckptError as error:
        text = str(error)
    xckpt.save(Path(folder) / "second", state, group=group)
    return text


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, 1])
def test_an_interrupted_process_is_named_and_all_can_call_again(
    tmp_path: Path, victim: int
) -> None:
    answers = run(interrupted, 2, victim, str(tmp_path))
    assert answers[victim] == "interrupted"
    assert f"rank {victim}: KeyboardInterrupt" in str(answers[1 - victim])
    assert os.listdir(tmp_path) == ["second"]


def stopped_beside_a_slow_one(slow: int, folder: str) -> list[object]:
    """The last process stops while a slow disk keeps another one busy for many seconds."""
    path, group = Path(folder), JaxGroup(timeout=60)
    note = path / "stopped"
    state: dict[str, Any] = {"step": 3}
    if group.rank == slow:
        state["w"] = np.zeros(24 << 18, np.uint8)
    planner = StoppingPlanner(note) if group.rank == 2 else None
    options = xckpt.SaveOptions(chunk_bytes=1 << 18, threads=1)
    text, ranks = "", []
    with slow_disk(0.5) if group.rank == slow else contextlib.nullcontext():
        try:
            xckpt.save(
                path / "new", state, planner=planner, group=group, timeout=TIMEOUT, options=options
            )
        except XckptError as error:
            text, ranks = str(error), [failure.rank for failure in error.failures]
    seconds = seconds_since(note)
    if group.rank != 2:
        continue_after(note, group.rank, {0, 1})
    return [text, ranks, seconds]


PATIENT = 4.0
"""The timeout of a call that has to succeed, seconds."""


def suspended(what: str, folder: str) -> str:
    """All processes are stopped where one is in the middle, as a scheduler suspends a job."""
    path, group = Path(folder), JaxGroup(timeout=60)
    state = {"w": np.arange(1 << 16, dtype=np.float32)}
    xckpt.save(path / "old", state, group=group, options=xckpt.SaveOptions(chunk_bytes=1 << 14))
    (path / f"process {os.getpid()}").touch()

    def progress(*_: object) -> None:
        if group.rank == 0 and not (path / "middle").exists():
            (path / "middle").touch()
            time.sleep(0.5)

    try:
        if what == "load":
            reading = xckpt.LoadOptions(progress=progress)
            xckpt.load_into(path / "old", state, group=group, timeout=PATIENT, options=reading)
        else:
            options = xckpt.SaveOptions(chunk_bytes=1 << 14, progress=progress)
            xckpt.save(path / "new", state, group=group, timeout=PATIENT, options=options)
    except XckptError as error:
        return str(error)
    return ""


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["save", "load"])
def test_a_job_that_was_suspended_goes_on(tmp_path: Path, what: str) -> None:
    """The time in which no process ran is no silence."""

    def suspend() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not (tmp_path / "middle").exists():
            time.sleep(0.02)
        processes = [int(note.name.split()[1]) for note in tmp_path.glob("process *")]
        for signal_, seconds in ((signal.SIGSTOP, PATIENT + 1.5), (signal.SIGCONT, 0)):
            for process in processes:
                os.kill(process, signal_)
            time.sleep(seconds)

    scheduler = threading.Thread(target=suspend)
    scheduler.start()
    answers = run(suspended, 3, what, str(tmp_path))
    scheduler.join()
    assert answers == ["", "", ""]


class StoppingPlanner(xckpt.planner.DefaultSavePlanner):
    """Stops its process where the others begin to write."""

    def __init__(self, note: Path) -> None:
        super().__init__()
        self._note = note

    def finish_plan(self, new_plan: Any) -> Any:
        stop_here(self._note)
        return super().finish_plan(new_plan)


@pytest.mark.thorough
def test_a_coordinator_at_work_names_a_stopped_process(tmp_path: Path) -> None:
    answers = cast(list[Any], run(stopped_beside_a_slow_one, 3, 0, str(tmp_path)))
    for text, ranks, seconds in answers[:2]:
        assert ranks == [2], text
        assert seconds < BAR, seconds
    assert not (tmp_path / "new").exists()
