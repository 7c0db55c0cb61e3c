"""Seconds and memory to plan a save on the coordinator: many ranks, 500 tensors, one process.

1. Each tensor is sharded by rows over all ranks, so every rank has a box of each.
2. A fresh process makes every rank's local plan as the coordinator holds it, makes the global plan
   from them, and encodes what is stored of it.  xckpt also decodes the local plans from the bytes
   in which they came and encodes each rank's share, the way its engine does; DCP's plans are not
   pickled here, only its metadata is.
3. Memory is what the process allocated at its peak over what it held after the imports: the local
   plans and all that follows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.probe import serve, watch

TENSORS = 500
WIDTH = 1024
LIKE_A_MODEL = 12
"""Different shapes among the tensors: layers repeat."""

ALIKE = "xckpt, 12 shapes"
UNLIKE = "xckpt, 500 shapes"
DCP = "DCP, 12 shapes"


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


def _rows_per_rank(shapes: int) -> list[int]:
    """Rows of each tensor that a rank holds; ``shapes`` different numbers, as layers repeat."""
    return [4 + number % shapes for number in range(TENSORS)]


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

    def item(name: str, rows: int, rank: int) -> WriteItem:
        offsets = torch.Size((rank * rows, 0))
        chunk = ChunkStorageMetadata(offsets, torch.Size((rows, WIDTH)))
        shape = torch.Size((ranks * rows, WIDTH))
        data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), shape)
        return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)

    def local(rank: int) -> SavePlan:
        rows = zip(_names(), _rows_per_rank(LIKE_A_MODEL), strict=True)
        return SavePlan([item(name, count, rank) for name, count in rows], planner_data={})

    plans = [local(rank) for rank in range(ranks)]
    planner = DefaultSavePlanner()
    start = time.perf_counter()
    _, metadata = planner.create_global_plan(plans)
    planned = time.perf_counter()
    encoded = pickle.dumps(metadata)
    ended = time.perf_counter()
    return {"plan": planned - start, "carry": ended - planned, "encoded": len(encoded)}


def _xckpt(shapes: int, ranks: int) -> dict[str, Any]:
    import msgspec
    import numpy as np

    from xckpt.core.geometry.box import Block, Boxes
    from xckpt.core.manifest.codec import complete, draft, encode
    from xckpt.core.plan.items import LeafRow, SavePlan, WriteItems
    from xckpt.core.plan.merge import global_plan
    from xckpt.engine.ranks.wire import SavePlanCodec
    from xckpt.storage.array import digest_bytes

    rows = np.array(_rows_per_rank(shapes), np.int64)
    table = tuple(
        LeafRow(name, dtype="float32", shape=(ranks * count, WIDTH), sharded=True)
        for name, count in zip(_names(), rows.tolist(), strict=True)
    )
    sizes = np.stack([rows, np.full(TENSORS, WIDTH)], axis=1).astype(np.int64)
    leaf = np.arange(TENSORS, dtype=np.int32)

    def local(rank: int) -> SavePlan:
        boxes = Boxes(sizes * np.array([rank, 0], np.int64), sizes)
        return SavePlan(WriteItems(table, [Block(leaf, boxes)]))

    sender, receiver, answerer = SavePlanCodec(), SavePlanCodec(), SavePlanCodec()
    received = [sender.encode(local(rank)) for rank in range(ranks)]
    receiver.learn(sender.table_of(local(0)))
    start = time.perf_counter()
    plans = [receiver.decode(data) for data in received]
    decoded = time.perf_counter()
    shares, metadata = global_plan(plans)
    planned = time.perf_counter()
    for share in shares:
        answerer.encode(share)
    # A digest of the digests is as long as any other: what is stored has this size.
    digests = digest_bytes(b"").hex()
    whole = msgspec.structs.replace(complete(draft(metadata), metadata, {}), digests=digests)
    manifest = encode(whole, digest_bytes)
    ended = time.perf_counter()
    return {
        "plan": planned - decoded,
        "carry": (decoded - start) + (ended - planned),
        "encoded": len(manifest),
    }


PLANNERS: dict[str, Callable[[int], dict[str, Any]]] = {
    ALIKE: partial(_xckpt, LIKE_A_MODEL),
    UNLIKE: partial(_xckpt, TENSORS),
    DCP: _dcp,
}

if __name__ == "__main__":
    _plan, _ranks = PLANNERS[sys.argv[1]], int(sys.argv[2])
    _plan(2)  # the imports
    serve(lambda: _plan(_ranks))
