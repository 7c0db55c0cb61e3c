"""Describing a state of DTensors by torch's adapter: a rank's part of a save before any collective.

1. The mesh has as many ranks as asked for, and 8 columns; the process group is torch's fake one, so
   that one process is any rank of it.
2. Each save flattens the state, describes each leaf, makes the local plan, and finds what the rank
   knows of all others' plans (`xckpt.core.plan.alone`): the real planner and adapter do that.
3. The first is timed once, and those after it are the median of `ROUNDS`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.scale.placements import COLUMNS, SHAPES, WIDTH
from xckpt.core.geometry.spread import Processes
from xckpt.core.plan.save import DefaultSavePlanner
from xckpt.engine.adapters import loaded_adapters

RANK = 1
ROUNDS = 30
CASES = ((8, 1000), (1024, 1000), (10240, 1000))
"""Ranks and tensors."""


@dataclass(frozen=True, slots=True)
class Described:
    """What a rank takes to describe its state; processor seconds."""

    ranks: int
    tensors: int
    first: float
    again: float
    """The median of later saves."""
    least: float
    """The least of them: where other work shares the processor, the nearest to what it takes."""


def describe(ranks: int, tensors: int, rounds: int = ROUNDS) -> Described:
    """Describe so many DTensors, in a process that has no process group yet."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=ranks)
    try:
        state = _state(ranks, tensors)
        processes = Processes("torch", np.arange(ranks))
        first, *later = [_describe(state, processes) for _ in range(1 + rounds)]
    finally:
        dist.destroy_process_group()
    return Described(ranks, tensors, first, median(later), min(later))


def _state(ranks: int, tensors: int) -> dict[str, object]:
    """Rows over ranks / 8, columns over 8."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (ranks // COLUMNS, COLUMNS), mesh_dim_names=("dp", "tp"))
    layers: dict[str, object] = {}
    for number in range(tensors):
        rows = 4 + number % SHAPES
        local = torch.zeros(rows, WIDTH // COLUMNS)
        shape = torch.Size((rows * ranks // COLUMNS, WIDTH))
        about = {"run_check": False, "shape": shape, "stride": (WIDTH, 1)}
        made = DTensor.from_local(local, mesh, (Shard(0), Shard(1)), **about)
        layers[f"layers.{number}.weight"] = made
    return {"model": layers}


def _describe(state: dict[str, object], processes: Processes) -> float:
    """Processor seconds of one rank."""
    began = time.process_time()
    planner = DefaultSavePlanner()
    planner.use_adapters(loaded_adapters(RANK))
    planner.set_up_planner(state)
    known = planner.known_plans(planner.create_local_plan(), RANK, processes)
    spent = time.process_time() - began
    assert known is not None
    return spent
