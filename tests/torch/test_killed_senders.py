"""A host that dies while it sends chunks to others: every other rank raises, and names it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

import xckpt
from tests.support.ranks import Ranks, die
from xckpt.errors import XckptError
from xckpt.storage.host.far import FarRanks, Parcel

TIMEOUT = 30.0
"""Seconds that a silent rank is waited for; a dead one is noticed at once."""
VICTIM = 1


def dying(self: FarRanks, rank: int, parcel: Parcel) -> None:
    die()


def on_rank(rank: int, path: Path) -> tuple[str, list[int], float]:
    """A load of which each rank, on a host of its own, reads a third; the victim's first chunk
    kills it."""
    group: Any = dist.new_group()
    if rank == VICTIM:
        FarRanks.send = dying
    like = {"w": np.zeros(1 << 18, np.float32)}
    options = xckpt.LoadOptions(share_reads="job", host=f"host {rank}", threads=1)
    dist.barrier()
    began, text, ranks = time.monotonic(), "", []
    try:
        xckpt.load_into(path, like, group=group, timeout=TIMEOUT, options=options)
    except XckptError as error:
        text, ranks = str(error), [failure.rank for failure in error.failures]
    return text, ranks, time.monotonic() - began


def test_a_rank_that_is_killed_while_it_sends_is_named(tmp_path: Path) -> None:
    state = {"w": np.arange(1 << 18, dtype=np.float32)}
    xckpt.save(tmp_path / "old", state, options=xckpt.SaveOptions(chunk_bytes=1 << 16))
    with Ranks(3) as ranks:
        answers = ranks.attempt(on_rank, tmp_path / "old")
        for process in ranks.processes:
            process.kill()  # torch would wait for the dead one at its end
    assert answers[VICTIM] == (False, "ended with code -9")
    for rank in (0, 2):
        ended, (text, named, seconds) = answers[rank]
        assert ended and named == [VICTIM], (rank, text)
        assert "probably killed" in text
        assert seconds < TIMEOUT, rank
