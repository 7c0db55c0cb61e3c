"""Seconds and memory to plan a save on the coordinator: many ranks, 500 tensors, one process.

1. Each tensor is sharded by rows over all ranks, so every rank has a box of each.
2. A fresh process makes every rank's local plan as the coordinator holds it, makes the global plan
   from them, and encodes what is stored of it.  xckpt also decodes the local plans from the bytes
   in which they came and encodes each rank's share, the way its engine does.
3. Memory is what the process allocated at its peak over what it held after the imports: the local
   plans and all that follows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.probe import serve, watch

TENSORS = 500
WIDTH = 1024
ROWS_PER_RANK = 4


@dataclass(frozen=True, slots=True)
class Planning:
    """What planning costs one planner at one size."""

    planner: str
    ranks: int
    plan: float
    """Seconds from the local plans to the global plan and the checkpoint's metadata."""
    carry: float
    """Seconds to decode, encode or pickle what goes between ranks or to storage."""
    memory: int
    """Peak of allocated memory over the imports, in bytes, the local plans included."""
    encoded: int
    """Bytes of the metadata that is stored."""


def run(planner: str, ranks: Sequence[int], tell: Callable[[str], None]) -> list[Planning]:
    """Plan for each number of ranks in a fresh process."""
    return [_run(planner, count, tell) for count in ranks]


def _run(planner: str, ranks: int, tell: Callable[[str], None]) -> Planning:
    tell(f"planning for {ranks} ranks: {planner}")
    peak = watch(("benchmarks.planning", planner, str(ranks)))
    return Planning(planner, ranks, memory=peak.anonymous, **peak.answer)


def _names() -> list[str]:
    return [f"model/layers.{number}.weight" for number in range(TENSORS)]


def _dcp(ranks: int) -> dict[str, Any]:
    import pickle  # the format of torch's metadata file

    import torch
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    shape = torch.Size((ranks * ROWS_PER_RANK, WIDTH))

    def item(name: str, rank: int) -> WriteItem:
        offsets = torch.Size((rank * ROWS_PER_RANK, 0))
        chunk = ChunkStorageMetadata(offsets, torch.Size((ROWS_PER_RANK, WIDTH)))
        data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), shape)
        return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)

    plans = [
        SavePlan([item(name, rank) for name in _names()], planner_data={}) for rank in range(ranks)
    ]
    planner = DefaultSavePlanner()
    start = time.perf_counter()
    _, metadata = planner.create_global_plan(plans)
    planned = time.perf_counter()
    encoded = pickle.dumps(metadata)
    ended = time.perf_counter()
    return {"plan": planned - start, "carry": ended - planned, "encoded": len(encoded)}


PLANNERS: dict[str, Callable[[int], dict[str, Any]]] = {"DCP": _dcp}

if __name__ == "__main__":
    _plan, _ranks = PLANNERS[sys.argv[1]], int(sys.argv[2])
    _plan(2)  # the imports
    serve(lambda: _plan(_ranks))
