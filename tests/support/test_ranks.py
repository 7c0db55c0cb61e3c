"""Ranks that live long stay cheap while they wait."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Ranks


def on_rank_loops(rank: int) -> int:
    """How many threads look after sockets of gloo, once there are three groups."""
    import torch
    import torch.distributed as dist

    for _ in range(2):
        group: Any = dist.new_group()
        dist.all_reduce(torch.ones(1), group=group)
    names = [each.read_text() for each in Path("/proc/self/task").glob("*/comm")]
    return names.count("gloo_tcp_loop\n")


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_all_groups_of_a_rank_share_one_device() -> None:
    with Ranks(2) as ranks:
        assert ranks.run(on_rank_loops) == [1, 1]
