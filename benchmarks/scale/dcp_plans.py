"""The plans of torch's distributed checkpoint for W ranks x T tensors, with its cache and without.

1. Each rank's plan has the items that DCP makes of row shards. They go to the coordinator and back
   as DCP's collectives carry them, pickled; how long the others take to make theirs is left out.
2. Whether the coordinator's own plan is the one that its cache has stands for all ranks: they say
   what it says.
"""

from __future__ import annotations

import contextlib
import pickle  # as DCP's collectives carry plans
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

RANKS, TENSORS, ROWS, WIDTH = 1024, 500, 4, 1024


@dataclass(frozen=True)
class Plans:
    """What one save's plans take."""

    ranks: int
    tensors: int
    cache: bool
    again: bool
    """Whether the same was saved before."""
    plan: float
    """Processor seconds of the coordinator: it unpickles, merges and pickles."""
    up: float
    """Bytes from each rank to the coordinator."""
    down: float
    manifest: int
    """Bytes of the metadata file."""


def measure(ranks: int = RANKS, tensors: int = TENSORS) -> list[dict[str, Any]]:
    """A first and a second save, without and with the cache, as JSON values."""
    return [asdict(each) for cache in (False, True) for each in _saves(ranks, tensors, cache)]


def _saves(ranks: int, tensors: int, cache: bool) -> list[Plans]:
    from torch.distributed.checkpoint import default_planner, planner

    plans = [_plan(rank, ranks, tensors) for rank in range(ranks)]
    with contextlib.ExitStack() as stack:
        for name in [name for name in vars(planner.SavePlanner) if name.startswith("_cached_")]:
            stack.enter_context(mock.patch.object(planner.SavePlanner, name, {}))
        # What DCP makes of the coordinator's state.
        made = mock.patch.object(
            default_planner, "create_default_local_save_plan", return_value=plans[0]
        )
        stack.enter_context(made)
        return [_save(plans, cache, again) for again in (False, True)]


def _save(plans: Sequence[Any], cache: bool, again: bool) -> Plans:
    from torch.distributed.checkpoint import default_planner

    coordinator = default_planner.DefaultSavePlanner(
        enable_plan_caching=cache, flatten_state_dict=False
    )
    coordinator.set_up_planner({}, is_coordinator=True)
    mine = coordinator.create_local_plan()
    sent = [pickle.dumps(plan if mine.usable else mine) for plan in plans]
    began = time.process_time()
    shares, metadata = coordinator.create_global_plan([pickle.loads(each) for each in sent])
    given = [pickle.dumps(share) for share in shares]
    spent = time.process_time() - began
    coordinator.finish_plan(shares[0])
    up, down = (sum(map(len, way[1:])) / (len(plans) - 1) for way in (sent, given))
    ranks, tensors, manifest = len(plans), len(plans[0].items), len(pickle.dumps(metadata))
    return Plans(ranks, tensors, cache, again, spent, up, down, manifest)


def _plan(rank: int, ranks: int, tensors: int) -> Any:
    import torch
    from torch.distributed.checkpoint import metadata, planner

    box = metadata.ChunkStorageMetadata(torch.Size((rank * ROWS, 0)), torch.Size((ROWS, WIDTH)))
    properties = metadata.TensorProperties(dtype=torch.float32)
    data = planner.TensorWriteData(box, properties, torch.Size((ranks * ROWS, WIDTH)))
    indices = [
        metadata.MetadataIndex(f"model.layers.{number}.weight", box.offsets)
        for number in range(tensors)
    ]
    items = [planner.WriteItem(index, planner.WriteItemType.SHARD, None, data) for index in indices]
    return planner.SavePlan(items)
