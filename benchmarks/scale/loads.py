"""Loads of W ranks x T tensors by the real engine, planner and wire encoding.

1. What is loaded is the manifest of a simulated save; no chunk is read.
2. Each rank's planner is the default one, except that its targets come from the placement
   (`PlacedLoadPlanner`).
3. Ranks 0 and 1 plan. The others say what rank 1 says: all want the same leaves, so that ``moe``
   cannot be simulated.
4. No rank reads for others: `benchmarks.scale.hosts` has what that takes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from tempfile import TemporaryFile

from benchmarks.scale.placements import Placement
from benchmarks.scale.ranks import Aside, Coordinator, Rank
from benchmarks.scale.saves import Placed, save
from xckpt.core.geometry.box import Boxes
from xckpt.core.metadata import Metadata
from xckpt.core.plan.items import LoadPlan
from xckpt.core.plan.load import DefaultLoadPlanner, LoadPlanner
from xckpt.core.plan.wanted import WantedLeaf
from xckpt.engine.load import load_state
from xckpt.engine.ranks.group import KeptPlans
from xckpt.options import LoadOptions
from xckpt.storage.read_checkpoint import ZarrStorageReader


@dataclass(frozen=True, slots=True)
class Load:
    """What one load costs; see `benchmarks.scale.saves.Save`."""

    plan: float
    """Processor seconds of the coordinator, from its call until it has handed out the shares."""
    rank: float
    """Processor seconds of another rank, all steps, without its reading."""
    up: list[int]
    """Bytes to the coordinator, of each collective."""
    down: list[int]
    """Bytes from the coordinator, of each collective."""


@dataclass(frozen=True, slots=True)
class _Target:
    """A tensor without memory."""

    shape: tuple[int, ...]
    boxes: Boxes
    dtype: str = "float32"
    annotation: str = ""

    def buffer(self, index: int) -> object:
        raise NotImplementedError

    def commit(self, index: int) -> None:
        raise NotImplementedError

    def result(self) -> object:
        return None


class PlacedLoadPlanner(DefaultLoadPlanner):
    """The default planner over a placement in place of a target tree."""

    def __init__(self, placement: Placement, rank: int) -> None:
        super().__init__()
        self._placed = placement, rank

    def set_up_planner(
        self,
        state_dict: Mapping[str, object] | None,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """There is no tree."""
        super().set_up_planner({}, metadata, is_coordinator)
        placement, rank = self._placed
        boxes, shapes = placement.boxes(rank), placement.shapes
        for name, kind in placement.leaves(rank):
            self._wanted[name] = WantedLeaf(name, _Target(shapes[kind], boxes[kind]))

    def result(self) -> object:
        """Nothing was read."""
        return None


class _Reader(ZarrStorageReader):
    """Has a manifest, and reads nothing."""

    def __init__(self, where: str, manifest: bytes) -> None:
        super().__init__(where, options=LoadOptions(share_reads=False))
        self._manifest = manifest

    def read_metadata(self) -> bytes:
        """The manifest."""
        return self._manifest

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Nothing."""


def simulate_load(placement: Placement) -> Load:
    """Save a placement and load it as it was saved."""
    placed = Placed(placement)
    save(placed)

    def run(rank: Rank | Coordinator) -> float:
        began = time.process_time()
        reader = _Reader(placed.where, placed.manifest)
        load_state({}, reader, group=rank, planner=PlacedLoadPlanner(placement, rank.rank))
        return time.process_time() - began

    with TemporaryFile() as file:
        other = Rank(1, placement.ranks, Aside(file.fileno()))
        group = Coordinator([other], run, KeptPlans())
        group.size = placement.ranks
        began = group.seconds()
        run(group)
        planned, traffic = group.planned - began, group.traffic
        other.again()
        return Load(planned, run(other), traffic.up, traffic.down)
