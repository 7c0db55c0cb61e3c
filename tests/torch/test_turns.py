"""Threads of a process that save in one process group take turns."""

from __future__ import annotations

import datetime
from pathlib import Path

import torch.distributed as dist

from tests.support.ranks import Ranks
from tests.support.time_limit import ALLOWANCE
from tests.support.turns import check_saved, save_in_threads


def on_rank_saves_in_threads(rank: int, folder: Path) -> list[str]:
    group = dist.new_group(timeout=datetime.timedelta(seconds=5 * ALLOWANCE))
    assert isinstance(group, dist.ProcessGroup)
    return save_in_threads(folder, group)


def test_threads_of_one_group(four_ranks: Ranks, tmp_path: Path) -> None:
    """Ranks on which they come in another order refuse that call; the group goes on."""
    assert four_ranks.run(on_rank_saves_in_threads, tmp_path) == [[]] * 4
    check_saved(tmp_path)
