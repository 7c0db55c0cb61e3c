"""Ranks of a group are killed at random moments: a path holds the last state, or the next one."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import xckpt
from conformance.crash.recording import memory
from tests.conformance.crash.killed_ranks import KilledRanks, Trial, number_at

VICTIMS = ((0,), (1,), (0, 1))


@pytest.fixture(scope="module")
def ranks() -> Iterator[KilledRanks]:
    with KilledRanks() as found:
        yield found


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="killed-", dir=memory()) as name:
        yield Path(name)


def check_next_save(path: Path) -> None:
    """The next save works, and leaves nothing of those that were killed."""
    state = {"rows": np.full(3, 7), "both": np.full(2, 7), "step": 7}
    xckpt.save(path, state, overwrite=True)
    assert number_at(path) == 7
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def check(ranks: KilledRanks, folder: Path, trials: int, seed: int) -> None:
    pick = random.Random(seed)
    found_new = 0
    for trial in range(trials):
        path = folder / str(trial) / "ckpt"
        first, before = 101, None
        if trial % 4:
            before = 100
            state = {"rows": np.full(3, 100), "both": np.full(2, 100), "step": 100}
            xckpt.save(path, state)
        victims = VICTIMS[trial % 3]
        saves = 0 if trial % 2 else pick.randint(1, 3)
        outcome = ranks.run(Trial(str(path), first, saves, pick.uniform(0, 0.1), victims))
        # The ranks that are left get an error, and do not wait for ever.
        assert outcome.survivors == ("RanksFailedError",) * (2 - len(victims))
        last = before if outcome.last < 0 else outcome.last
        following = first if outcome.last < 0 else outcome.last + 1
        found = number_at(path)
        assert found in (last, following), f"{victims} killed: {found}, not {last} or {following}"
        found_new += found is not None and found >= first
        check_next_save(path)
    assert found_new


def test_some_moments(ranks: KilledRanks, folder: Path) -> None:
    """Each rank once; `tests/api/test_crash.py` kills all that save."""
    check(ranks, folder, 2, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_many_moments(ranks: KilledRanks, folder: Path, seed: int) -> None:
    check(ranks, folder, 60, seed)
