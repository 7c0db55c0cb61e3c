"""A JAX process stops, or dies, before any of its collectives: all others name it in time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import xckpt
from tests.support.jax_jobs import run
from tests.support.signs import act_before, await_sign, continue_after, seconds_since, stop_here
from tests.support.stored import step_at
from tests.support.time_limit import ALLOWANCE
from xckpt.errors import XckptError
from xckpt.jax.group import JaxGroup

TIMEOUT = min(2.5, ALLOWANCE)
BAR = TIMEOUT + 2 * ALLOWANCE
"""Seconds within which every process that lives has to end."""
MOST = 40
"""More collectives than a call has."""


def state(step: int) -> dict[str, object]:
    return {"w": np.full(64, step, np.float32), "step": step}


def _save(path: Path, group: JaxGroup) -> None:
    xckpt.save(path / "new", state(2), group=group, timeout=TIMEOUT)


def _overwrite(path: Path, group: JaxGroup) -> None:
    xckpt.save(path / "old", state(2), group=group, timeout=TIMEOUT, overwrite=True)


def _save_async(path: Path, group: JaxGroup) -> None:
    xckpt.save_async(path / "new", state(2), group=group, timeout=TIMEOUT).result(60)


def _load(path: Path, group: JaxGroup) -> None:
    xckpt.load(path / "old", state(0), group=group, timeout=TIMEOUT)


def _restore(path: Path, group: JaxGroup) -> None:
    run = xckpt.CheckpointManager(path / "run", group=group, timeout=TIMEOUT)
    run.restore(state(0))


def _manager_save(path: Path, group: JaxGroup) -> None:
    with xckpt.CheckpointManager(path / "run", group=group, timeout=TIMEOUT) as run:
        run.save(7, state(2), force=True)
        run.wait()


CALLS: dict[str, tuple[Callable[[Path, JaxGroup], object], str]] = {
    "save": (_save, "new"),
    "overwrite": (_overwrite, "old"),
    "save_async": (_save_async, "new"),
    "load": (_load, ""),
    "restore": (_restore, ""),
    "save of a manager": (_manager_save, "run/step-00000007"),
}
"""What is called, and where it saves."""


def prepare(path: Path) -> None:
    """Save what a call finds: step 1."""
    path.mkdir()
    xckpt.save(path / "old", state(1))
    xckpt.save(path / "run" / "1", state(1))


def outcome(what: str, path: Path, group: JaxGroup) -> tuple[str, list[int]]:
    """What a call raises, and the ranks that this names."""
    try:
        CALLS[what][0](path, group)
    except XckptError as error:
        return str(error), [failure.rank for failure in error.failures]
    return "", []


def found_at(place: Path) -> object:
    """The step that is saved there."""
    return step_at(str(place)) if (place / "xckpt.json").exists() else None


def stopped_before_each(what: str, victim: int, folder: str, first: int, last: int) -> list[object]:
    """One process stops before its first collective, in the next call before its second, etc."""
    group, outcomes = JaxGroup(timeout=60), list[object]()
    # The first calls import much, which can take longer than `TIMEOUT`.
    xckpt.save(Path(folder) / "before", state(1), group=group, timeout=60)
    xckpt.load(Path(folder) / "before", state(0), group=group, timeout=60)
    for number in range(first, last):
        path = Path(folder) / str(number)
        note, ranks = path / "stopped", range(group.size)
        stop = number if group.rank == victim else MOST
        patch = act_before(JaxGroup, stop, lambda note=note: stop_here(note))
        text, named = outcome(what, path, group)
        patch.undo()
        if note.exists():
            seconds = seconds_since(note)
            outcomes.append([text, named, seconds, found_at(path / CALLS[what][1])])
            if group.rank != victim:
                continue_after(note, group.rank, set(ranks) - {victim})
        (path / f"called {group.rank}").touch()
        for rank in ranks:
            await_sign(path / f"called {rank}")
        if not note.exists():
            break
    saves_to = CALLS[what][1]
    for number in range(first, first + len(outcomes) if saves_to else first):
        place = Path(folder) / str(number) / saves_to
        xckpt.save(place, state(4), group=group, timeout=60, overwrite=True)
    xckpt.save(Path(folder) / "after", state(4), group=group, timeout=60)
    return outcomes


@pytest.mark.parametrize(
    "what, victim, first, last",
    [
        ("load", 2, 2, 3),
        *(
            pytest.param(what, victim, 0, MOST, marks=pytest.mark.thorough)
            for what in CALLS
            for victim in range(3)
        ),
    ],
)
def test_a_process_that_stops_before_any_collective_is_named(
    tmp_path: Path, what: str, victim: int, first: int, last: int
) -> None:
    """Process 0 is that of the coordination service too."""
    for number in range(first, last):
        prepare(tmp_path / str(number))
    answers = cast(list[Any], run(stopped_before_each, 3, what, victim, str(tmp_path), first, last))
    others = answers[:victim] + answers[victim + 1 :]
    count = len(others[0])
    assert count == 1 if last < MOST else 6 <= count < MOST
    for number in range(count):
        for text, named, seconds, found in (other[number] for other in others):
            assert named == [victim], (number, text)
            assert seconds < BAR, (number, seconds)
            if what == "save":
                # The last collective of a save tells that it is committed.
                assert found == (2 if number == count - 1 else None), number
            elif CALLS[what][1]:
                assert found in (None, 1, 2), number
        path = tmp_path / str(first + number)
        if CALLS[what][1]:
            assert step_at(str(path / CALLS[what][1])) == 4, number
        beside = {each.name.split()[0] for each in path.iterdir()}
        assert beside - {"new"} == {"old", "run", "stopped", "ended", "called"}, number
        assert {each.name for each in (path / "run").iterdir()} <= {"1", "step-00000007"}, number
    assert step_at(str(tmp_path / "after")) == 4


def killed_before(what: str, number: int, folder: str) -> None:
    """Process 0 is killed before a collective; JAX ends those that lack its service."""
    group, path = JaxGroup(timeout=60), Path(folder)
    if group.rank == 0:
        act_before(JaxGroup, number, lambda: os.kill(os.getpid(), signal.SIGKILL))
    outcome(what, path, group)
    await_sign(path / "never")


@pytest.mark.parametrize(
    "what, number",
    [
        ("overwrite", 3),
        *(
            pytest.param(what, number, marks=pytest.mark.thorough)
            for what in ("save", "overwrite", "save_async", "load")
            for number in range(6)
        ),
    ],
)
def test_a_coordination_service_that_is_killed(tmp_path: Path, what: str, number: int) -> None:
    """JAX ends the other processes itself, by SIGABRT; what was there stays whole."""
    path = tmp_path / "job"
    prepare(path)
    began = time.monotonic()
    run(killed_before, 3, what, number, str(path), killed=(0,), aborted=(1, 2))
    assert time.monotonic() - began < 10 * ALLOWANCE
    place = path / (CALLS[what][1] or "old")
    before = {"save": None, "save_async": None}.get(what, 1)
    found = found_at(place)
    # Before its last collective, a save is committed.
    assert found == (2 if number == 5 and what != "load" else before)
    xckpt.save(place, state(3), overwrite=True)
    assert step_at(str(place)) == 3
    assert {each.name for each in path.iterdir()} <= {"old", "new", "run"}
