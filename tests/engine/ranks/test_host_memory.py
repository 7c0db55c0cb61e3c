"""The ranks of one host share its budget of memory."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import xckpt
from conformance.implementations.threads import ThreadGroup, results
from xckpt.convert.run import convert
from xckpt.engine.ranks.compare import compare_ranks
from xckpt.storage import write_checkpoint
from xckpt.storage.budget import Pool
from xckpt.storage.chunks import window

MEMORY = 1 << 20
RANKS = 4


@pytest.fixture
def budgets(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The budgets of the pools that saves and loads make."""
    made: list[int] = []
    lock = threading.Lock()

    class Noted(Pool):
        def __init__(self, *, threads: int | None, budget: int) -> None:
            with lock:
                made.append(budget)
            super().__init__(threads=threads, budget=budget)

    monkeypatch.setattr(write_checkpoint, "Pool", Noted)
    monkeypatch.setattr(window, "Pool", Noted)
    return made


def state(rank: int) -> dict[str, object]:
    """What a rank has: a part of its own, and a replica."""
    own = xckpt.PerRank(np.full(50_000, rank))
    return {"own": own, "all": np.arange(200_000)}


def test_a_save_and_a_load_divide_their_memory(tmp_path: Path, budgets: list[int]) -> None:
    path = tmp_path / "c"
    results(
        RANKS,
        lambda group: xckpt.save(
            path, state(group.rank), group=group, options=xckpt.SaveOptions(memory_bytes=MEMORY)
        ),
    )
    assert len(budgets) == RANKS and 0 < sum(budgets) <= MEMORY
    assert max(budgets) > MEMORY // RANKS - (8 << 10)  # but for 1 KiB an item
    budgets.clear()
    options = xckpt.LoadOptions(memory_bytes=MEMORY)
    loaded = results(RANKS, lambda group: xckpt.load(path, group=group, options=options))
    assert all(isinstance(tree, dict) for tree in loaded)
    assert len(budgets) == RANKS and 0 < sum(budgets) <= MEMORY


@pytest.mark.parametrize(("hosts", "most"), [("aaaa", 4), ("aabb", 2), ("abcd", 1), ("abbb", 3)])
def test_how_many_ranks_share_a_host(hosts: str, most: int) -> None:
    def compared(group: ThreadGroup) -> int:
        return compare_ranks(group, {"path": "'a'"}, host=hosts[group.rank])

    assert results(RANKS, compared) == [most] * RANKS


def test_ranks_of_two_hosts_have_half_of_the_memory_each(
    tmp_path: Path, budgets: list[int]
) -> None:
    xckpt.save(tmp_path / "c", {"w": np.arange(200_000)})
    budgets.clear()

    def load(group: ThreadGroup) -> object:
        host = f"host{group.rank // 2}"
        options = xckpt.LoadOptions(memory_bytes=MEMORY, host=host, share_reads=False)
        return xckpt.load(tmp_path / "c", group=group, options=options)

    results(RANKS, load)
    assert len(budgets) == RANKS and MEMORY // 4 < max(budgets) <= MEMORY // 2


def test_chunks_that_are_handed_over_count(tmp_path: Path, budgets: list[int]) -> None:
    """What a rank publishes lies in shared memory, beside what it reads."""
    xckpt.save(tmp_path / "c", {"w": np.arange(200_000)})
    budgets.clear()
    options = xckpt.LoadOptions(memory_bytes=MEMORY)
    results(2, lambda group: xckpt.load(tmp_path / "c", group=group, options=options))
    assert min(budgets) <= MEMORY // 4 < max(budgets) <= MEMORY // 2


def test_a_conversion_divides_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xckpt.convert.units import run

    xckpt.save(tmp_path / "a", {"w": np.arange(200_000)})
    made: list[int] = []
    original = run.Pool

    def noted(*, threads: int | None, budget: int) -> Pool:
        made.append(budget)
        return original(threads=threads, budget=budget)

    monkeypatch.setattr(run, "Pool", noted)
    options = xckpt.SaveOptions(memory_bytes=MEMORY)
    results(2, lambda group: convert(tmp_path / "a", tmp_path / "b", group=group, options=options))
    assert made == [MEMORY // 2] * 2
