"""Saves of W ranks x T tensors by the real engine, planner, wire encoding and commit.

1. Each rank's planner is the default one, except that it takes its columns from the placement, not
   from tensors (`PlacedPlanner`). Rank 1 has tensors: its seconds are those of any rank.
2. The writer is the real one over memory, except that nothing is written or digested: each rank
   reports a digest for each chunk of its share (`_Writer`).
3. The state is saved twice, as a training run does, and the second save is timed too.
4. Where ranks plan alone, ranks 0 and 1 do. The others say what rank 0 says, and their shares are
   taken from a plan that was made before (`_Shared`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
from numpy.typing import NDArray

from benchmarks.probe import memory_of
from benchmarks.scale.placements import Placement
from benchmarks.scale.ranks import Aside, Coordinator, Rank
from xckpt.core.geometry.box import Block
from xckpt.core.geometry.grid import GridOptions, cells
from xckpt.core.geometry.spread import Processes, Spread
from xckpt.core.leaf import HostSource
from xckpt.core.manifest.own_keys import DIGESTS
from xckpt.core.metadata import Metadata
from xckpt.core.plan.alone.known import KnownPlans, known_plans
from xckpt.core.plan.items import LeafRow, LeafTable, SavePlan, WriteItems
from xckpt.core.plan.merge import global_plan
from xckpt.core.plan.save import DefaultSavePlanner, SavePlanner
from xckpt.core.storage import BriefData
from xckpt.engine.ranks.group import KeptPlans, OwnPlan
from xckpt.engine.ranks.wire import widened
from xckpt.engine.save import save_state
from xckpt.options import SaveOptions
from xckpt.storage.array import DIGEST_BYTES
from xckpt.storage.chunks.columns import BriefOrders, parts, received
from xckpt.storage.chunks.orders import Written
from xckpt.storage.chunks.piece_orders import SomePieces
from xckpt.storage.location import open_store
from xckpt.storage.write_checkpoint import ZarrStorageWriter

WHERE = "memory://benchmarks-scale"
"""And a number: nothing is there before the first save."""
MANY = SaveOptions(many_objects=True)
"""Nothing is written, however many objects there would be."""
_simulated = count(1000)


@dataclass(frozen=True, slots=True)
class Save:
    """What one save costs."""

    plan: float
    """Processor seconds of the coordinator, from its call until it has handed out the shares."""
    commit: float
    """Processor seconds of the coordinator, from the last report to the end."""
    rank: float
    """Processor seconds of another rank, all steps, without its writing."""
    up: list[int]
    """Bytes to the coordinator, of each collective."""
    down: list[int]
    """Bytes from the coordinator, of each collective."""
    memory: int
    """Peak of resident memory over what there was before the first save, bytes."""
    manifest: int
    """Bytes."""


class PlacedPlanner(DefaultSavePlanner):
    """The default planner over a placement in place of a state."""

    def __init__(self, placed: Placed, rank: int) -> None:
        super().__init__()
        self._plan = placed, rank

    def known_plans(self, plan: SavePlan, rank: int, processes: Processes) -> KnownPlans | None:
        """What the placement says of all ranks."""
        placed, _ = self._plan
        return placed.known(plan, rank, processes, self.grid or self._storage_grid)

    def set_up_planner(
        self,
        state_dict: Mapping[str, object],
        storage_meta: object = None,
        is_coordinator: bool = False,
    ) -> None:
        """There is no state."""
        super().set_up_planner({}, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """The columns that the placement gives."""
        placed, rank = self._plan
        return placed.plan(rank)


class Placed:
    """The plans of a placement's ranks."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.where = f"{WHERE}-{next(_simulated)}"
        self._table = cache(self._table_of)
        self._spreads = placement.spreads()
        self._first: KnownPlans | None = None
        self._shared: tuple[list[SavePlan], Metadata] | None = None
        self.manifest = b""
        """Of the last save."""

    def share_out(self) -> None:
        """Plan for all ranks: those after the second take their shares from it."""
        if self.placement.mesh:
            plans = [self.plan(rank) for rank in range(self.placement.ranks)]
            self._shared = global_plan(plans, ZarrStorageWriter(WHERE).storage_meta())

    def known(
        self, plan: SavePlan, rank: int, processes: Processes, options: GridOptions | None
    ) -> KnownPlans | None:
        """What a rank knows of all plans: the first finds it, the others take it from there."""
        if rank == 0:
            leaves = self.state(0)["model"]
            assert isinstance(leaves, dict)
            named = {f"model/{name}": leaf for name, leaf in leaves.items()}
            self._first = known_plans(plan, named, rank, processes, options)
            return self._first
        if self._first is None or self._shared is None:
            return None
        first = self._first
        given = plan, rank, processes, first.kinds, first.spreads, first.options
        return _Shared(*given, self._shared[0][rank], self._shared[1])

    def _table_of(self, group: int) -> tuple[LeafTable, NDArray[np.int32], frozenset[int]]:
        placement = self.placement
        leaves = placement.leaves(group * placement.ranks // placement.groups)
        rows = [
            LeafRow(name, dtype="float32", shape=placement.shapes[kind], sharded=True)
            for name, kind in leaves
        ]
        kinds = [kind for _, kind in leaves]
        return tuple(rows), np.array(kinds, np.int32), frozenset(kinds)

    def plan(self, rank: int) -> SavePlan:
        """The plan that `DefaultSavePlanner` makes of `state`."""
        table, kinds, present = self._table(rank * self.placement.groups // self.placement.ranks)
        boxes = enumerate(self.placement.boxes(rank))
        held = [(kind, each) for kind, each in boxes if kind in present]
        return SavePlan(WriteItems(table, [Block.of(held)], kinds))

    def state(self, rank: int) -> dict[str, object]:
        """The state of a rank, flat; no tensor takes memory."""
        boxes = self.placement.boxes(rank)
        nothing = np.zeros((), np.float32)
        layers: dict[str, object] = {}
        spreads = [None if each is None else partial(_same, each) for each in self._spreads]
        for name, kind in self.placement.leaves(rank):
            data = np.broadcast_to(nothing, boxes[kind][0].sizes)
            shape, spread = self.placement.shapes[kind], spreads[kind]
            source = HostSource(shape, "float32", boxes[kind], (data,), True, spread=spread)
            layers[name.removeprefix("model/")] = source
        return {"model": layers}


def _same(spread: Spread) -> Spread:
    return spread


@dataclass(frozen=True, slots=True, eq=False)
class _Shared(KnownPlans):
    """What a rank knows whose share is there already."""

    own: SavePlan
    metadata: Metadata

    def share(self) -> tuple[SavePlan, Metadata]:
        """The share that is there."""
        return self.own, self.metadata


_orders: dict[int, tuple[Metadata, BriefData, Metadata]] = {}
"""The orders of all ranks that take their shares from one plan."""


class _Writer(ZarrStorageWriter):
    """Reports what it has not written."""

    def prepare_own_plan(self, plan: SavePlan, metadata: Metadata) -> tuple[SavePlan, Metadata]:
        """The plan with orders, which are the same for all ranks: there are no pieces."""
        if id(metadata) not in _orders:
            made, committed = super().prepare_own_plan(plan, metadata)
            assert isinstance(made.storage_data, BriefData)
            _orders[id(metadata)] = metadata, made.storage_data, committed
        _, orders, committed = _orders[id(metadata)]
        return replace(plan, storage_data=orders), committed

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Written:
        """A digest of nothing for each chunk of the share."""
        if self._files is not None and self._draft is not None:
            self._files.begin(self._draft.leaves)
        assert isinstance(plan.storage_data, BriefData)
        brief, pieces = parts(plan.storage_data.content)
        items = WriteItems.of(plan.items)
        grid_of: list[int] = widened(brief.grid_of).tolist()
        firsts = _firsts(brief, items.table)
        numbers = [np.zeros(0, np.int64), *map(_chunks_of, pieces)]
        for block in items.of_kinds:
            for kind, box in zip(block.leaf.tolist(), block.boxes, strict=True):
                leaves = _leaves_of(items.kinds.tobytes(), kind)
                if grid_of[leaves[0]] >= 0:
                    shape, chunk = items.table[leaves[0]].shape, brief.grids[grid_of[leaves[0]]][0]
                    within, _ = cells(box.offsets, box.ends, shape, chunk)
                    numbers.append((firsts[leaves][:, None] + within).ravel())
        chunks = np.concatenate(numbers).tobytes()
        return Written([], {}, 0, "", brief.draft, chunks, bytes(DIGEST_BYTES * len(chunks) // 8))


def _chunks_of(some: SomePieces) -> NDArray[np.int64]:
    """The numbers of all chunks of some pieces, each of which a rank writes alone."""
    starts, counts = np.frombuffer(some.within, np.int64), np.diff(some.pieces.firsts)
    within = np.repeat(starts - some.pieces.firsts[:-1], counts) + np.arange(some.pieces.chunks)
    return (np.frombuffer(some.firsts, np.int64)[:, None] + within).ravel()


@cache
def _leaves_of(kinds: bytes, kind: int) -> NDArray[np.int64]:
    return np.flatnonzero(np.frombuffer(kinds, np.int32) == kind)


_known: dict[object, NDArray[np.int64]] = {}


def _firsts(brief: BriefOrders, table: LeafTable) -> NDArray[np.int64]:
    """The number of the first chunk of each leaf that is one array."""
    key = table[0], len(table), brief.grids, brief.grid_of, brief.firsts
    if key not in _known:
        known = {array.leaf: array.first for array in received(BriefData(brief, table)).arrays}
        _known[key] = np.array([known.get(row.name, -1) for row in table], np.int64)
    return _known[key]


@dataclass(slots=True)
class _Kept:
    """What a rank that is not the coordinator keeps for the next save."""

    shares: tuple[int, int] | None = None
    """Where its shares are."""
    own: dict[bytes, OwnPlan] = field(default_factory=dict[bytes, OwnPlan])


def simulate(placement: Placement, saves: int = 2, *, gathered: bool = False) -> list[Save]:
    """Save a placement that often, over itself; plans are ``gathered``, or each rank plans alone.

    Where the ranks do not know each other's plans, they are gathered in any case.
    """
    return save(Placed(replace(placement, mesh=()) if gathered else placement), saves)


def save(placed: Placed, saves: int = 1) -> list[Save]:
    """Save what is placed, so often."""
    placed.share_out()
    plans, kept = KeptPlans(), [_Kept() for _ in range(placed.placement.ranks)]
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_of()["VmRSS"]
    with TemporaryFile() as file:
        aside = Aside(file.fileno())
        return [_save(placed, plans, kept, aside, before) for _ in range(saves)]


def _save(
    placed: Placed, plans: KeptPlans, after: Sequence[_Kept], aside: Aside, before: int
) -> Save:
    placement = placed.placement
    kept = [replace(each) for each in after]
    processes = Processes("torch", np.arange(placement.ranks))

    def run(rank: Rank) -> float:
        had = kept[rank.rank]
        rank.processes = processes
        shares = {} if had.shares is None else aside.get(had.shares)
        rank.kept_plans = KeptPlans(shares, own=dict(had.own))
        whole = rank.rank == 1
        planner = DefaultSavePlanner() if whole else PlacedPlanner(placed, rank.rank)
        state = placed.state(1) if whole else {}
        writer = _Writer(placed.where, overwrite=True, options=MANY)
        began = time.process_time()
        try:
            save_state(state, writer, group=rank, planner=planner)
            spent = time.process_time() - began
            after[rank.rank].shares = aside.put(rank.kept_plans.shares)
        finally:
            rank.kept_plans.shares = {}
        return spent

    others = [Rank(number, placement.ranks, aside) for number in range(1, placement.ranks)]
    group = Coordinator(others, run, plans)
    group.processes = processes
    alone = bool(placement.mesh)
    group.alike = 2 if alone else 0  # what is saved, and what is known of all plans
    writer = _Writer(placed.where, overwrite=True, options=MANY)
    began = group.seconds()
    save_state({}, writer, group=group, planner=PlacedPlanner(placed, 0))
    ended = group.seconds()
    memory = memory_of()["VmHWM"] - before
    spent: list[float] = []
    for other in others[:1] if alone else others:
        other.again()
        spent.append(run(other))
    for other in others:
        after[other.rank].own = other.kept_plans.own
    assert writer._committed is not None
    placed.manifest = writer._committed[0]
    _drop_digests(writer)
    return Save(
        group.planned - began,
        ended - group.gathered,
        spent[0],
        group.traffic.up,
        group.traffic.down,
        memory,
        len(placed.manifest),
    )


def _drop_digests(writer: _Writer) -> None:
    """Delete the digests: in a bucket they would take no memory of this process."""
    store = open_store(writer.target)
    for key in store.list().result():
        if key.endswith(DIGESTS.encode()):
            store.write(key, None).result()
