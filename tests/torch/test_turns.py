"""Threads of a process that save in one process group take turns."""

from __future__ import annotations

import datetime
import threading
from pathlib import Path

import torch
import torch.distributed as dist

import xckpt
from tests.support.ranks import Ranks
from tests.support.time_limit import ALLOWANCE

THREADS = ("a", "b", "c")


def on_rank_saves_in_threads(rank: int, folder: Path) -> list[str]:
    """What went wrong in the threads, and afterwards."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=5 * ALLOWANCE))
    assert isinstance(group, dist.ProcessGroup)
    wrong: list[str] = []

    def save_some(name: str) -> None:
        for step in range(4):
            try:
                xckpt.save(folder / name, {"w": torch.full((64,), step)}, group=group)
            except xckpt.PlanError:
                pass  # another rank saves what another thread has
            except Exception as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=save_some, args=(name,)) for name in THREADS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    xckpt.save(folder / "after", {"w": torch.zeros(3)}, group=group)
    return wrong


def test_threads_of_one_group(four_ranks: Ranks, tmp_path: Path) -> None:
    """Ranks on which they come in another order refuse that call; the group goes on."""
    assert four_ranks.run(on_rank_saves_in_threads, tmp_path) == [[]] * 4
    for path in tmp_path.iterdir():
        assert xckpt.open(path).verify() == []
