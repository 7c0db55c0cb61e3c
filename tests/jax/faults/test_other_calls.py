"""JAX processes make different calls, or the same one elsewhere: all say so in time.

Nothing is committed, and the next call of all is answered. `tests/torch/test_other_calls.py` holds
the same of torch's ranks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest

import xckpt
from tests.support.jax_jobs import run
from tests.support.stored import step_at
from tests.support.time_limit import ALLOWANCE
from xckpt.errors import XckptError
from xckpt.jax.group import JaxGroup

TIMEOUT = 1.5
BAR = TIMEOUT + 2 * ALLOWANCE
"""Seconds within which each process has to end."""

Manager = xckpt.CheckpointManager


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(64, step, np.float32), "step": step}


def _save_async(path: Path, run: Manager) -> None:
    xckpt.save_async(path / "new", state(2), timeout=TIMEOUT).result(60)


def _manager_save(path: Path, run: Manager) -> None:
    run.save(7, state(2), force=True)
    run.wait()


CALLS: dict[str, Callable[[Path, Manager], object]] = {
    "save": lambda path, run: xckpt.save(path / "new", state(2), timeout=TIMEOUT),
    "save_async": _save_async,
    "load": lambda path, run: xckpt.load(path / "old", state(0), timeout=TIMEOUT),
    "load_into": lambda path, run: xckpt.load_into(path / "old", state(0), timeout=TIMEOUT),
    "save of a manager": _manager_save,
    "restore of a manager": lambda path, run: run.restore(state(0)),
    "delete of a manager": lambda path, run: run.delete(1),
}
ELSEWHERE: dict[str, Callable[[Path, Manager], object]] = {
    "nothing": lambda path, run: None,
    "save elsewhere": lambda path, run: xckpt.save(path / "newer", state(2), timeout=TIMEOUT),
    "save over": lambda path, run: xckpt.save(
        path / "new", state(2), timeout=TIMEOUT, overwrite=True
    ),
    "load elsewhere": lambda path, run: xckpt.load(path / "older", state(0), timeout=TIMEOUT),
}
WORDS = {
    "save of a manager": ("save or should_save of its CheckpointManager", "save a step"),
    "restore of a manager": ("restore of its CheckpointManager", "restore a step"),
    "delete of a manager": ("delete of its CheckpointManager", "delete a step"),
}
"""How errors name the calls of a manager."""

Outcome = tuple[str, float, str, str]
"""What a call raises, in how many seconds, and what the next save and the next restore raise."""


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except XckptError as error:
        return str(error)
    return ""


def in_turn(rounds: Sequence[Sequence[str]], folder: str) -> list[Outcome]:
    """In each round each process makes its own call, and then all save and restore together."""
    together = JaxGroup(timeout=60).in_background()

    def meet() -> None:
        together.broadcast(b"" if together.rank == 0 else None)

    outcomes: list[Outcome] = []
    for number, calls in enumerate(rounds):
        path, what = Path(folder) / str(number), calls[jax.process_index()]
        run = Manager(path / "run", timeout=TIMEOUT)
        xckpt.save_async(path / "warm", state(1), overwrite=True).result(60)
        xckpt.load(path / "warm", state(0))
        meet()
        began = time.monotonic()
        said = error_of(lambda: ({**CALLS, **ELSEWHERE})[what](path, run))  # noqa: B023
        seconds = time.monotonic() - began
        meet()
        again = error_of(lambda: xckpt.save(path / "again", state(3), timeout=TIMEOUT))  # noqa: B023
        restored = error_of(lambda: run.restore(state(0)))  # noqa: B023
        outcomes.append((said, seconds, again, restored))
    return outcomes


def attack(folder: Path, rounds: Sequence[Sequence[str]]) -> list[list[Outcome]]:
    """For each round the processes' outcomes; nothing else was committed or deleted."""
    for number in range(len(rounds)):
        path = folder / str(number)
        path.mkdir()
        xckpt.save(path / "old", state(1))
        xckpt.save(path / "older", state(0))
        for step in (1, 2):
            with Manager(path / "run") as run_:
                run_.save(step, state(step), force=True)
    answers = cast(list[list[Any]], run(in_turn, len(rounds[0]), rounds, str(folder)))
    for number, calls in enumerate(rounds):
        path = folder / str(number)
        for said, seconds, again, restored in (each[number] for each in answers):
            assert seconds < BAR, (calls, said, seconds)
            assert (again, restored) == ("", ""), calls
        assert [each.number for each in Manager(path / "run").steps()] == [1, 2], calls
        assert (step_at(str(path / "again")), step_at(str(path / "old"))) == (3, 1)
        assert {e.name for e in path.iterdir()} == {"old", "older", "run", "warm", "again"}, calls
    return [[answer[number] for answer in answers] for number in range(len(rounds))]


def names(said: str, rank: int, call: str) -> bool:
    """Whether an error says that a rank makes a call."""
    words = (call, *WORDS.get(call, ()))
    ways = "{1} on rank {0}", "rank {0} {1}", "rank {0} to {1}", "is to {1}"
    ways = (*ways, "rank {0}: RuntimeError: it calls {1}")
    return any(way.format(rank, word) in said for way in ways for word in words)


PAIRS = [*itertools.permutations(CALLS, 2)]
FEW = [
    *[("save", "load"), ("save_async", "save"), ("save", "restore of a manager")],
    *[("save of a manager", "save_async"), ("load_into", "delete of a manager")],
]


@pytest.mark.parametrize(
    "pairs",
    [
        *[pytest.param(PAIRS[n::6], marks=pytest.mark.thorough) for n in range(6)],
        FEW[:2],
        pytest.param(FEW[2:], marks=pytest.mark.thorough),
    ],
)
def test_each_process_names_the_calls(tmp_path: Path, pairs: list[tuple[str, str]]) -> None:
    for calls, outcomes in zip(pairs, attack(tmp_path, pairs), strict=True):
        for (said, *_), (rank, call) in itertools.product(outcomes, enumerate(calls)):
            assert names(said, rank, call), (calls, said)


@pytest.mark.thorough
def test_one_of_three_makes_another_call(tmp_path: Path) -> None:
    rounds = [
        ("save", "save", "load"),
        ("save_async", "load_into", "load_into"),
        ("restore of a manager", "save", "save"),
        ("save", "save", "restore of a manager"),
    ]
    for calls, outcomes in zip(rounds, attack(tmp_path, rounds), strict=True):
        odd = next(rank for rank, call in enumerate(calls) if calls.count(call) == 1)
        for said, *_ in outcomes:
            assert names(said, odd, calls[odd]), (calls, said)


@pytest.mark.thorough
def test_a_process_that_calls_nothing_is_named(tmp_path: Path) -> None:
    """Afterwards it is one call behind, whichever process it is, and all save together again."""
    pairs = [pair for call in CALLS for pair in (("nothing", call), (call, "nothing"))]
    for calls, outcomes in zip(pairs, attack(tmp_path, pairs), strict=True):
        away = calls.index("nothing")
        assert outcomes[away][0] == ""
        assert f"rank {away}" in outcomes[1 - away][0], (calls, outcomes)


@pytest.mark.thorough
def test_the_same_call_elsewhere(tmp_path: Path) -> None:
    pairs = [("save", "save elsewhere"), ("load elsewhere", "load"), ("save", "save over")]
    told = ["the argument path is", "the argument path is", "the argument overwrite is"]
    for calls, outcomes, text in zip(pairs, attack(tmp_path, pairs), told, strict=True):
        for said, *_ in outcomes:
            assert text in said and "rank 0, but" in said, (calls, said)
