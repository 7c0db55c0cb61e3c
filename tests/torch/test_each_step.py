"""A rank stops, or dies, before any of its collectives: all others name it in time, or succeed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import xckpt
from tests.support.ranks import Ranks, die
from tests.support.signs import act_before, continue_after, seconds_since, stop_here
from tests.support.time_limit import ALLOWANCE
from xckpt.engine.ranks.star import Star
from xckpt.errors import XckptError

TIMEOUT = 1.5
BAR = TIMEOUT + 2 * ALLOWANCE
"""Seconds within which every rank that lives has to end."""
STATE = {"w": np.arange(64, dtype=np.float32), "step": 3}
MOST = 20
"""More collectives than a call has."""


def call(what: str, path: Path, group: Any) -> tuple[str, list[int]]:
    """The call under attack: what it raises, and the ranks that this names."""
    try:
        if what == "save":
            xckpt.save(path / "new", STATE, group=group, timeout=TIMEOUT, overwrite=True)
        else:
            xckpt.load(path / "old", STATE, group=group, timeout=TIMEOUT)
    except XckptError as error:
        return str(error), [failure.rank for failure in error.failures]
    return "", []


def on_rank_that_stops(rank: int, what: str, victim: int, number: int, path: Path) -> Any:
    group: Any = dist.new_group()
    note = path / "stopped"
    dist.barrier()
    patch = act_before(Star, number, lambda: stop_here(note)) if rank == victim else None
    text, named = call(what, path, group)
    if patch is not None:
        patch.undo()
    if not note.exists():
        return None
    seconds = seconds_since(note)
    if rank != victim:
        continue_after(note, rank, {0, 1, 2} - {victim})
    return text, named, seconds


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("what, least", [("save", 6), ("load", 7)])
def test_a_rank_that_stops_before_any_collective_is_named(
    three_ranks: Ranks, tmp_path: Path, what: str, least: int, victim: int
) -> None:
    xckpt.save(tmp_path / "old", STATE)
    outcomes: list[list[Any]] = []
    for number in range(MOST):
        (tmp_path / "stopped").unlink(missing_ok=True)
        for ended in tmp_path.glob("ended *"):
            ended.unlink()
        answers = three_ranks.run(on_rank_that_stops, what, victim, number, tmp_path)
        others = answers[:victim] + answers[victim + 1 :]
        if None in others:
            break
        outcomes.append(others)
    assert least <= len(outcomes) < MOST
    # A rank's last collective only tells it the end: none of the others waits for it there.
    for others in outcomes if victim == 0 else outcomes[:-1]:
        for text, named, seconds in others:
            assert named == [victim], others
            assert f"rank {victim}: sent nothing for {TIMEOUT:g} s" in text
            assert seconds < BAR, others


def on_rank_that_dies(rank: int, what: str, number: int, path: Path) -> Any:
    if rank == 0:
        act_before(Star, number, die)
    return call(what, path, None)


@pytest.mark.thorough
@pytest.mark.parametrize("what, collectives", [("save", 6), ("load", 7)])
def test_a_coordinator_that_dies_before_any_collective_is_named(
    tmp_path: Path, what: str, collectives: int
) -> None:
    xckpt.save(tmp_path / "old", STATE)
    for number in range(collectives):
        with Ranks(3) as ranks:
            dead, *others = ranks.attempt(on_rank_that_dies, what, number, tmp_path)
        assert dead == (False, "ended with code -9")
        for _, (text, named) in others:
            assert named == [0] and "rank 0: the process was probably killed" in text, number
