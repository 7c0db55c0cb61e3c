"""Orders for pieces, of all ranks together, in columns.

1. `orders_in_columns` collects the boxes that ranks write of leaves in pieces: once for all leaves
   of a rank that are cut alike and of which it writes the same boxes.
2. One search for each cut finds the pieces that they lie in (`intersect`).
3. A rank's orders have its pieces once for such leaves (`SomePieces`), and what all ranks share is
   encoded once (`RankOrders`). The rank makes arrays of them (`expanded`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Boxes, Int64s
from xckpt.core.geometry.box_lookup import intersect
from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.manifest.pieces import Pieces
from xckpt.core.plan.items import LeafTable, SavePlan, WriteItems
from xckpt.core.struct_types import prepare_structs
from xckpt.storage.chunks.orders import WriteOrders

if TYPE_CHECKING:
    from xckpt.storage.chunks.columns import Parted


class SomePieces(msgspec.Struct, array_like=True, frozen=True):
    """Some pieces of leaves of a rank's table that are cut alike."""

    leaves: bytes
    """Numbers of the leaves in the table, int32."""
    firsts: bytes
    """The number of each leaf's first digest, int64."""
    numbers: bytes
    """Numbers of the pieces in their leaf, int64."""
    within: bytes
    """How many digests of the leaf come before those of each piece, int64."""
    pieces: Pieces


prepare_structs(SomePieces)


@dataclass(eq=False)
class _Briefs:
    """Orders of several ranks for each leaf table, encoded."""

    orders: WriteOrders
    known: dict[int, tuple[LeafTable, msgspec.Raw]] = field(
        default_factory=dict[int, tuple[LeafTable, msgspec.Raw]]
    )

    @cached_property
    def _arrays(self) -> Parted:
        from xckpt.storage.chunks.columns import parted

        return parted(self.orders.arrays)

    def of(self, table: LeafTable) -> msgspec.Raw:
        """The orders for the ranks that have a table."""
        from xckpt.storage.chunks.columns import brief

        if id(table) not in self.known:
            orders = msgspec.msgpack.encode(brief(self.orders, self._arrays, table))
            self.known[id(table)] = table, msgspec.Raw(orders)
        return self.known[id(table)][1]


@dataclass(slots=True, eq=False)
class RankOrders:
    """Orders of one of several ranks, leaves in pieces included."""

    common: WriteOrders
    """The orders of all ranks, with the arrays that are not pieces."""
    pieces: tuple[SomePieces, ...]
    briefs: _Briefs = field(repr=False)
    """The common part for each leaf table; the same for all ranks."""

    def brief(self, table: LeafTable) -> object:
        """The orders for a rank that knows its leaves."""
        return self.briefs.of(table), self.pieces

    def place(self) -> dict[str, object]:
        """Where the save is staged; see `WriteOrders`."""
        return self.common.place()

    def as_arrays(self, table: LeafTable) -> WriteOrders:
        """The orders with each piece as an array, for a rank that gets no columns."""
        if not self.pieces:
            return self.common
        arrays = (*self.common.arrays, *expanded(self.pieces, table))
        return msgspec.structs.replace(self.common, arrays=arrays)


Cuts = Mapping[str, tuple[Pieces, int]]
"""Leaf name -> its pieces, and the number of its first digest."""


@dataclass(slots=True, eq=False)
class _Wanted:
    """What ranks write of leaves of one cut."""

    pieces: Pieces
    ranks: list[int] = field(default_factory=list[int])
    leaves: list[tuple[bytes, bytes]] = field(default_factory=list[tuple[bytes, bytes]])
    boxes: list[Boxes] = field(default_factory=list[Boxes])

    def found(self) -> Iterator[tuple[int, SomePieces]]:
        """The pieces that each rank needs to know, by rank."""
        count = len(self.pieces)
        owner, number, _ = intersect(Boxes.concatenated(self.boxes), self.pieces.grid.arrays)
        owner = np.repeat(np.arange(len(self.boxes)), list(map(len, self.boxes)))[owner]
        pairs = np.unique(owner * count + number)
        ends = np.searchsorted(pairs, np.arange(1, len(self.boxes) + 1) * count).tolist()
        start = 0
        for rank, (leaves, firsts), end in zip(self.ranks, self.leaves, ends, strict=True):
            numbers = pairs[start:end] % count
            within = self.pieces.firsts[numbers]
            taken = self.pieces.take(numbers)
            yield rank, SomePieces(leaves, firsts, numbers.tobytes(), within.tobytes(), taken)
            start = end


def orders_in_columns(
    plans: Sequence[SavePlan], common: WriteOrders, cuts: Cuts
) -> list[RankOrders]:
    """The orders of several ranks.

    Args:
        plans: the ranks' shares.
        common: what all of them have.
        cuts: of every leaf in pieces.
    """
    wanted: dict[int, _Wanted] = {}
    known: dict[tuple[int, int], tuple[WriteItems, _LeavesOfKinds]] = {}
    for rank, plan in enumerate(plans):
        items = WriteItems.of(plan.items)
        key = id(items.table), id(items.kinds)
        if key not in known:
            known[key] = items, _leaves_of_kinds(items, cuts)
        of_kinds = known[key][1]
        for kind, boxes in _boxes_by_kind(items):
            for pieces, leaves in of_kinds.get(kind, ()):
                want = wanted.setdefault(id(pieces), _Wanted(pieces))
                want.ranks.append(rank)
                want.leaves.append(leaves)
                want.boxes.append(boxes)
    given: list[list[SomePieces]] = [[] for _ in plans]
    for want in wanted.values():
        for rank, some in want.found():
            given[rank].append(some)
    briefs = _Briefs(common)
    return [RankOrders(common, tuple(pieces), briefs) for pieces in given]


_LeavesOfKinds = dict[int, list[tuple[Pieces, tuple[bytes, bytes]]]]
"""Kind -> for each cut that its leaves have: these leaves' numbers, and their first digests'."""


def _leaves_of_kinds(items: WriteItems, cuts: Cuts) -> _LeavesOfKinds:
    grouped: dict[tuple[int, int], tuple[Pieces, list[int], list[int]]] = {}
    kinds: list[int] = items.kinds.tolist()
    for number, (row, kind) in enumerate(zip(items.table, kinds, strict=True)):
        if row.name in cuts:
            pieces, first = cuts[row.name]
            _, leaves, firsts = grouped.setdefault((kind, id(pieces)), (pieces, [], []))
            leaves.append(number)
            firsts.append(first)
    found: _LeavesOfKinds = {}
    for (kind, _), (pieces, leaves, firsts) in grouped.items():
        columns = np.array(leaves, np.int32).tobytes(), np.array(firsts, np.int64).tobytes()
        found.setdefault(kind, []).append((pieces, columns))
    return found


def _boxes_by_kind(items: WriteItems) -> Iterator[tuple[int, Boxes]]:
    for block in items.of_kinds:
        order = np.argsort(block.leaf, kind="stable")
        kinds, starts = np.unique(block.leaf[order], return_index=True)
        ends = [*starts[1:].tolist(), len(order)]
        for kind, start, end in zip(kinds.tolist(), starts.tolist(), ends, strict=True):
            yield kind, block.boxes.take(order[start:end])


def expanded(pieces: Sequence[SomePieces], table: LeafTable) -> Iterator[ZarrArray]:
    """The arrays that some pieces of the leaves of a table are."""
    for some in pieces:
        numbers, within = (_column(column) for column in (some.numbers, some.within))
        rows = list(zip(numbers.tolist(), within.tolist(), some.pieces.rows(), strict=True))
        leaves: list[int] = np.frombuffer(some.leaves, np.int32).tolist()
        for leaf, first in zip(leaves, _column(some.firsts).tolist(), strict=True):
            row = table[leaf]
            for number, before, shapes in rows:
                at = first + before
                yield ZarrArray(row.name, number, row.dtype, *shapes, at, row.shape)


def _column(content: bytes) -> Int64s:
    numbers: NDArray[np.int64] = np.frombuffer(content, np.int64)
    return numbers


def with_pieces(plan: SavePlan, orders: WriteOrders, cuts: Cuts) -> WriteOrders:
    """Orders with the pieces that a plan's items lie in, as arrays."""
    (own,) = orders_in_columns([plan], orders, cuts)
    return own.as_arrays(WriteItems.of(plan.items).table)
