"""All ranks' plans, as each rank may know them from its own leaves.

1. `known_plans`: a rank knows all plans if each leaf is whole on every rank, or says where all
   ranks' boxes are (`xckpt.core.geometry.spread`) and is right about this rank's.
2. If `KnownPlans.facts` and leaf tables are equal on all ranks, what they know is true: each rank
   has compared its own plan.
3. `KnownPlans.share` is then what the coordinator would give this rank if it had gathered the plans
   (`xckpt.core.plan.merge.global_plan`): the same functions make it, from the same boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.cover import unique
from xckpt.core.geometry.grid import GridOptions
from xckpt.core.geometry.spread import Processes, Spread, Whole
from xckpt.core.metadata import Metadata
from xckpt.core.plan.items import LeafTable, SavePlan, WriteItems
from xckpt.core.plan.layout import LeafShards, metadata_of
from xckpt.core.plan.merge import Kinds, blocks_of, item_bytes, lay_out_all, shares_of

MOST_BOXES: Final = 1 << 18
"""Boxes of leaves that are not alike, of all ranks: where there are more, plans are gathered,
because each rank of a host would take the time and the memory of the coordinator."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownPlans:
    """The plans of all ranks, as one of them knows them."""

    plan: SavePlan
    """This rank's."""
    rank: int
    processes: Processes
    kinds: NDArray[np.int32]
    """The kind of each leaf, (leaves,)."""
    spreads: tuple[Spread, ...]
    """Where the leaves of each kind are."""
    options: GridOptions
    """Target sizes of chunks."""

    def facts(self) -> list[bytes]:
        """What all ranks must know alike, besides the table of the leaves."""
        processes = self.processes.framework.encode() + self.processes.numbers.tobytes()
        containers = repr(sorted(self.plan.containers.items())).encode("utf-8", "surrogatepass")
        said = [processes, containers, self.kinds.tobytes(), *(s.says() for s in self.spreads)]
        return [part for each in said for part in (len(each).to_bytes(8, "little"), each)]

    def share(self) -> tuple[SavePlan, Metadata] | None:
        """This rank's share of the global plan, and the metadata of the whole.

        None where the boxes do not make up whole tensors: the coordinator is to say so, from the
        plans of all ranks.
        """
        table, size = WriteItems.of(self.plan.items).table, len(self.processes.numbers)
        shards = self._shards(table)
        if shards is None:
            return None
        kinds = Kinds(self.kinds, np.unique(self.kinds, return_index=True)[1], ())
        kept = [None] * len(table)
        layouts, problems = lay_out_all(table, kinds, shards, kept, self.options)
        if problems:
            return None
        numbers, shares = shares_of(self.kinds, shards, layouts, size)
        own = ((number, boxes.take(ranks == self.rank)) for number, ranks, boxes in shares)
        blocks = blocks_of((number, boxes) for number, boxes in own if len(boxes))
        containers = dict(self.plan.containers)
        metadata = Metadata(metadata_of(table, self.kinds, layouts), containers)
        return SavePlan(WriteItems(table, blocks, numbers)), metadata

    def _shards(self, table: LeafTable) -> list[LeafShards] | None:
        """All ranks' boxes, kind by kind."""
        shards: list[LeafShards] = []
        first: list[int] = np.unique(self.kinds, return_index=True)[1].tolist()
        for leaf, spread in zip(first, self.spreads, strict=True):
            held = spread.held(self.processes)
            if held is None:
                return None
            row = table[leaf]
            shards.append(LeafShards(row.shape, item_bytes(row), held[1], held[0]))
        return shards


def known_plans(
    plan: SavePlan,
    leaves: Mapping[str, object],
    rank: int,
    processes: Processes,
    options: GridOptions | None = None,
) -> KnownPlans | None:
    """What a rank knows of all ranks' plans; None if it does not know them.

    Args:
        plan: this rank's.
        leaves: leaf name -> the source that it was described as.
        rank: this one's.
        processes: those that save together.
        options: target sizes of chunks.
    """
    if plan.planner_data is not None:
        return None
    items = WriteItems.of(plan.items)
    found: dict[tuple[int, Spread], int] = {}
    kinds: list[int] = []
    own_kinds: list[int] = items.kinds.tolist()
    for row, own in zip(items.table, own_kinds, strict=True):
        spread = Whole(row.shape) if not row.sharded else _spread_of(leaves[row.name])
        if spread is None or (row.is_tensor and not row.dtype):
            return None
        key = own, spread  # leaves of one kind have one dtype
        number = found.get(key)
        if number is None:
            held = spread.held_by(rank, processes)
            if held is None or not _same(held, _boxes_of(leaves[row.name])):
                return None
            number = found[key] = len(found)
            if len(found) * len(processes.numbers) > MOST_BOXES:
                return None
        kinds.append(number)
    spreads = tuple(spread for _, spread in found)
    numbers = np.array(kinds, np.int32)
    return KnownPlans(plan, rank, processes, numbers, spreads, options or GridOptions())


def _spread_of(leaf: object) -> Spread | None:
    """What a source says of all processes, if it does."""
    ask = cast("Callable[[], Spread | None] | None", getattr(leaf, "spread", None))
    return None if ask is None else ask()


def _boxes_of(leaf: object) -> Boxes:
    """What this rank holds of a leaf; a value is a scalar."""
    boxes = getattr(leaf, "boxes", None)
    return boxes if isinstance(boxes, Boxes) else Boxes.whole(())


def _same(one: Boxes, other: Boxes) -> bool:
    """Whether they are the same boxes, without those that have no elements."""
    a, b = (unique(boxes.take(np.flatnonzero(boxes.elements > 0)))[0] for boxes in (one, other))
    return a == b
