"""Orders and reports in columns, for groups of many ranks: what a rank knows is not said again.

1. Orders name the arrays of a rank's leaves. The rank has the leaf table of its share, so for an
   array that is all of a leaf it is enough to say which of few grids it has (`brief`, `received`).
2. A report names no arrays: chunks are numbered as in the draft of the manifest that the orders are
   of (`numbered`), and the coordinator puts the digests there (`Placing`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Shape
from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.manifest.decode import encode_body
from xckpt.core.manifest.entries import Manifest
from xckpt.core.manifest.rules import chunks_of, count_chunks
from xckpt.core.plan.items import BriefData, LeafTable, SavePlan, WriteItems
from xckpt.core.struct_types import prepare_structs
from xckpt.errors import PlanError
from xckpt.storage.array import DIGEST_BYTES, digest_bytes
from xckpt.storage.chunks.orders import BaseOrders, WriteOrders, Written
from xckpt.storage.chunks.piece_orders import SomePieces, expanded
from xckpt.storage.chunks.units import leaf_firsts, orders_for
from xckpt.storage.location import Location

_Grid = tuple[Shape, Shape | None, tuple[str, ...] | None]
"""Chunk, zarr shard, and the names of the dimensions."""


class BriefOrders(msgspec.Struct, array_like=True, frozen=True):
    """`WriteOrders` for a rank that knows its leaves."""

    location: Location
    codecs: tuple[str, ...]
    grids: tuple[_Grid, ...]
    grid_of: bytes
    """For each leaf the number of its grid, int32; -1: it is not one array, or not a tensor."""
    firsts: bytes
    """The number of the first digest of each such array, int64; empty if they follow each other."""
    others: tuple[ZarrArray, ...]
    """The arrays that are no whole leaves."""
    draft: bytes
    base: BaseOrders | None
    pack_bytes: int


prepare_structs(BriefOrders)


def brief(orders: WriteOrders, table: LeafTable) -> BriefOrders:
    """Orders for a rank that knows the table of its leaves: of other leaves they say nothing."""
    whole: dict[str, ZarrArray] = {}
    others: list[ZarrArray] = []
    for array in orders.arrays:
        if array.piece_of is None:
            whole[array.leaf] = array
        else:
            others.append(array)
    grids: dict[_Grid, int] = {}
    grid_of = np.full(len(table), -1, np.int32)
    listed: list[ZarrArray] = []
    for number, row in enumerate(table):
        array = whole.get(row.name)
        if array is not None:
            if (row.dtype, row.shape) != (array.dtype, array.shape):
                others.append(array)
                continue
            grid = array.chunk, array.shard, array.dimension_names
            grid_of[number] = grids.setdefault(grid, len(grids))
            listed.append(array)
    firsts = _column(array.first for array in listed)
    if np.array_equal(firsts, _following(listed)):
        firsts = firsts[:0]
    return BriefOrders(
        orders.location,
        orders.codecs,
        tuple(grids),
        grid_of.tobytes(),
        firsts.tobytes(),
        tuple(others),
        orders.draft,
        _base_of(orders, [*listed, *others]),
        orders.pack_bytes,
    )


def own_orders(
    plan: SavePlan, planned: Manifest, target: Location, codecs: tuple[str, ...]
) -> BriefData:
    """The orders for the share of a rank that knows the whole plan, but for the place."""
    name = draft_name(planned)
    orders = WriteOrders(target, codecs, (), draft=name, pack_bytes=planned.pack_bytes)
    (own,) = orders_for([plan], orders, planned, None)
    table = WriteItems.of(plan.items).table
    return BriefData(brief(msgspec.convert(own, WriteOrders), table), table)


def _base_of(orders: WriteOrders, received: Sequence[ZarrArray]) -> BaseOrders | None:
    """What orders say of a base, array by array as they are received."""
    base = orders.base
    if base is None:
        return None
    given = {(array.leaf, array.number): at for at, array in enumerate(orders.arrays)}
    order = [given[array.leaf, array.number] for array in received]
    firsts = tuple(base.firsts[at] for at in order)
    return msgspec.structs.replace(
        base, firsts=firsts, places=tuple(base.places[at] for at in order)
    )


def parts(content: object) -> tuple[BriefOrders, list[SomePieces]]:
    """What orders consist of that were made brief, with pieces (`RankOrders`) or without."""
    if isinstance(content, list) and len(pair := cast("list[object]", content)) == 2:
        return msgspec.convert(pair[0], BriefOrders), msgspec.convert(pair[1], list[SomePieces])
    return msgspec.convert(content, BriefOrders), []


def received(data: BriefData) -> WriteOrders:
    """The orders that were made `brief`."""
    brief, some = parts(data.content)
    table = data.table
    if data.place is not None:
        brief = msgspec.structs.replace(brief, location=msgspec.convert(data.place, Location))
    arrays: list[ZarrArray] = []
    given: list[int] = np.frombuffer(brief.firsts, np.int64).tolist()
    first = 0
    numbers: list[int] = np.frombuffer(brief.grid_of, np.int32).tolist()
    for row, number in zip(table, numbers, strict=True):
        if number < 0:
            continue
        chunk, shard, names = brief.grids[number]
        origin = (0,) * len(row.shape)
        number = given[len(arrays)] if given else first
        grid = row.dtype, origin, row.shape, chunk, shard
        arrays.append(ZarrArray(row.name, 0, *grid, number, None, names))
        first += arrays[-1].count
    about = brief.base, brief.draft, brief.pack_bytes
    pieces = expanded(some, table)
    return WriteOrders(brief.location, brief.codecs, (*arrays, *brief.others, *pieces), *about)


def _column(numbers: Iterable[int]) -> NDArray[np.int64]:
    return np.array([*numbers], np.int64)


def _following(arrays: Sequence[ZarrArray]) -> NDArray[np.int64]:
    """The number of the first chunk of each array, if these are all arrays that there are."""
    counts = _column(array.count for array in arrays)
    return np.cumsum(counts) - counts


def numbered(written: Written, orders: WriteOrders) -> Written:
    """A report without names of the arrays of the orders; long values keep theirs."""
    firsts = {(array.leaf, array.number): array.first for array in orders.arrays}
    named = [array for array in written.arrays if (array.leaf, array.number) not in firsts]
    mine = [array for array in written.arrays if (array.leaf, array.number) in firsts]
    starts = [firsts[array.leaf, array.number] for array in mine]
    cells = np.frombuffer(b"".join(array.cells for array in mine), np.int64)
    counts = [len(array.digests) // DIGEST_BYTES for array in mine]
    return msgspec.structs.replace(
        written,
        arrays=named,
        draft=orders.draft,
        chunks=(np.repeat(_column(starts), counts) + cells).tobytes(),
        digests=b"".join(array.digests for array in mine),
        places=b"".join(array.places for array in mine),
    )


def draft_name(draft: Manifest) -> bytes:
    """What tells a draft from that of another plan."""
    plan = msgspec.structs.replace(draft, user=None, planner=None)
    return digest_bytes(encode_body(plan))


class Placing:
    """Where the chunks of a draft are in the manifest.

    Args:
        draft: with the arrays of the plan.
        placed: the number of each leaf's first digest in the manifest.

    Raises:
        PlanError: a leaf of the draft is not in the manifest.
    """

    def __init__(self, draft: Manifest, placed: Mapping[str, int]) -> None:
        self._name = draft_name(draft)
        full = [(leaf.name, first) for leaf, first in leaf_firsts(draft) if chunks_of(leaf)]
        self._firsts = _column(first for _, first in full)
        self._shift = _column(placed[name] - first for name, first in full)
        self._count = count_chunks(draft)

    def numbers(self, written: Written, rank: int) -> NDArray[np.int64]:
        """The number of each chunk of a report in the manifest.

        Raises:
            PlanError: the report is of other orders.
        """
        chunks = np.frombuffer(written.chunks, np.int64)
        if len(chunks) == 0:
            return chunks
        if written.draft != self._name or not (0 <= chunks.min() <= chunks.max() < self._count):
            raise PlanError(
                f"rank {rank} wrote by the orders of another plan; nothing is committed"
            )
        if not self._shift.any():
            return chunks
        return chunks + self._shift[np.searchsorted(self._firsts, chunks, side="right") - 1]
