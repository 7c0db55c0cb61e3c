"""A DTensor that is described again: quicker than before, and never by what was true once."""

from __future__ import annotations

import gc

import torch
from torch.distributed.tensor import DTensor, Shard

from tests.support.ranks import Ranks
from tests.support.steps import steps
from tests.support.torch_meshes import on_rank_mesh
from xckpt.errors import UnsupportedLeafError
from xckpt.torch.adapter import ADAPTER
from xckpt.torch.sharded import dtensor

MOST_STEPS = 50
"""Of a DTensor's description in a repeated save: functions that are called."""


def on_rank_made(rows: int = 3) -> DTensor:
    return DTensor.from_local(torch.zeros(rows, 8), on_rank_mesh("4"), [Shard(0)], run_check=False)


def on_rank_steps(rank: int) -> tuple[int, int]:
    """Of a tensor that lies like one before, and of the same again."""
    first, tensor = on_rank_made(), on_rank_made()
    ADAPTER.describe(first, "w")
    alike = steps(lambda: ADAPTER.describe(tensor, "w"))
    return alike, steps(lambda: ADAPTER.describe(tensor, "w"))


def test_a_tensor_that_was_described_takes_fewer_steps_the_next_time(four_ranks: Ranks) -> None:
    for alike, again in four_ranks.run(on_rank_steps):
        assert again <= min(MOST_STEPS, alike - 20)


def on_rank_changed(rank: int) -> list[object]:
    tensor = on_rank_made()
    before = ADAPTER.describe(tensor, "w")
    tensor._local_tensor = torch.zeros(2, 8)
    try:
        ADAPTER.describe(tensor, "w")
        refused = ""
    except UnsupportedLeafError as error:
        refused = str(error)
    tensor._local_tensor = torch.zeros(12, 2)
    tensor._spec.shard_order = None  # type: ignore[assignment]
    tensor._spec.placements = (Shard(1),)
    after = ADAPTER.describe(tensor, "w")
    return [before.boxes[0].sizes, refused, after.boxes[0].offsets, after.boxes[0].sizes]


def test_a_tensor_that_has_changed_is_looked_at_anew(four_ranks: Ranks) -> None:
    for rank, (before, refused, *after) in enumerate(four_ranks.run(on_rank_changed)):
        assert before == (3, 8)
        assert "its local tensor has shape (2, 8)" in str(refused)
        assert after == [(0, 2 * rank), (12, 2)]


def on_rank_kept(rank: int) -> list[int]:
    gc.collect()
    counts = [len(dtensor._seen)]
    tensors = [on_rank_made() for _ in range(5)]
    assert all(ADAPTER.describe(tensor, "w").sharded for tensor in tensors)
    counts.append(len(dtensor._seen))
    del tensors
    gc.collect()
    return [*counts, len(dtensor._seen)]


def test_what_was_seen_of_a_tensor_goes_with_it(four_ranks: Ranks) -> None:
    for before, held, after in four_ranks.run(on_rank_kept):
        assert (held, after) == (before + 5, before)
