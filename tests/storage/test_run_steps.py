"""Deletions in the background that several threads ask for, and look at."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.schedules import at_once, fuzzed
from xckpt.storage.location import Location
from xckpt.storage.run_steps import Remover

TASKS = 12


@pytest.mark.parametrize("seed", range(4))
def test_a_remover_serves_several_threads(tmp_path: Path, seed: int) -> None:
    """What one asks for is waited for, while others look which steps still go."""
    remover = Remover(Location.parse(tmp_path), None)
    done: list[str] = []

    def ask(name: str) -> None:
        for _ in range(TASKS):
            remover.run(lambda: (time.sleep(1e-3), done.append(name)), name)

    def look() -> None:
        for _ in range(4 * TASKS):
            assert remover.names <= {"a", "b"}

    with fuzzed(seed, "storage/run_steps.py"):
        at_once(lambda: ask("a"), lambda: ask("b"), look, look)
    remover.wait()
    assert sorted(done) == [*"a" * TASKS, *"b" * TASKS]
    assert remover.names == set()
