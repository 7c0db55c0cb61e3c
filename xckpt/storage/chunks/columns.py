"""Orders and reports in columns, for groups of many ranks: what a rank knows already is not sent.

1. Orders name the arrays of a rank's leaves. The rank has the leaf table of its share, so for an
   array that is all of a leaf, the number of its grid is enough (`brief`, `received`).
2. A report names the draft of the manifest that numbers its chunks, by `draft_name`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Shape
from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.manifest.codec import to_metadata
from xckpt.core.manifest.decode import encode_body
from xckpt.core.manifest.entries import Entry, Manifest, ValueEntry
from xckpt.core.metadata import BytesStorageMetadata, Metadata
from xckpt.core.plan.items import LeafTable, SavePlan, WriteItems
from xckpt.core.storage import BriefData
from xckpt.core.struct_types import prepare_structs
from xckpt.engine.ranks.wire import narrow, widened
from xckpt.storage.array import digest_bytes
from xckpt.storage.chunks.orders import BaseOrders, WriteOrders
from xckpt.storage.chunks.piece_orders import SomePieces, expanded
from xckpt.storage.chunks.units import orders_for
from xckpt.storage.location import Location

_Grid = tuple[Shape, Shape | None, tuple[str, ...] | None]
"""Chunk, zarr shard, and the names of the dimensions."""


class BriefOrders(msgspec.Struct, array_like=True, frozen=True):
    """`WriteOrders` for a rank that knows its leaves."""

    location: Location
    codecs: tuple[str, ...]
    grids: tuple[_Grid, ...]
    grid_of: bytes
    """For each leaf the number of its grid, `narrow`; -1: it is not one array, or not a tensor."""
    firsts: bytes
    """The number of the first digest of each such array, int64; empty if they follow each other."""
    others: tuple[ZarrArray, ...]
    """The arrays that are not a whole leaf."""
    draft: bytes
    base: BaseOrders | None
    pack_bytes: int


prepare_structs(BriefOrders)


Parted = tuple[dict[str, ZarrArray], list[ZarrArray]]
"""Arrays that are all of a leaf, by its name, and the others."""


def parted(arrays: Iterable[ZarrArray]) -> Parted:
    """The arrays of orders, parted once for all leaf tables that these are made brief for."""
    whole: dict[str, ZarrArray] = {}
    others: list[ZarrArray] = []
    for array in arrays:
        if array.piece_of is None:
            whole[array.leaf] = array
        else:
            others.append(array)
    return whole, others


def brief(orders: WriteOrders, arrays: Parted, table: LeafTable) -> BriefOrders:
    """Orders for a rank that knows the table of its leaves; other leaves are left out.

    Args:
        orders: for several ranks.
        arrays: their arrays, `parted`.
        table: of the rank's leaves.
    """
    whole, others = arrays[0], [*arrays[1]]
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
        narrow(grid_of),
        firsts.tobytes(),
        tuple(others),
        orders.draft,
        _base_of(orders, [*listed, *others]),
        orders.pack_bytes,
    )


def own_orders(
    plan: SavePlan, planned: Manifest, target: Location, codecs: tuple[str, ...]
) -> BriefData:
    """The orders for the share of a rank that knows the whole plan, without the place."""
    name = draft_name(planned)
    orders = WriteOrders(target, codecs, (), draft=name, pack_bytes=planned.pack_bytes)
    (own,) = orders_for([plan], orders, planned, None)
    table = WriteItems.of(plan.items).table
    return BriefData(msgspec.convert(own, WriteOrders).brief(table), table)


def expected_metadata(planned: Manifest, metadata: Metadata) -> Metadata:
    """The metadata that the manifest will have, without values and the caller's own metadata.

    Args:
        planned: the manifest without the values.
        metadata: the plan's.
    """
    tensors = {leaf.name: leaf for leaf in planned.leaves}
    entries: dict[str, Entry] = {}
    for name, leaf in metadata.state_dict_metadata.items():
        is_value = isinstance(leaf, BytesStorageMetadata)
        entries[name] = ValueEntry(name, leaf.kind, "") if is_value else tensors[name]
    said = to_metadata(planned, entries)
    return replace(said, containers=dict(metadata.containers))


def _base_of(orders: WriteOrders, received: Sequence[ZarrArray]) -> BaseOrders | None:
    """What orders say about a base, array by array as they are received."""
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
    """The parts of brief orders, with pieces (`RankOrders`) or without."""
    if isinstance(content, list) and len(pair := cast("list[object]", content)) == 2:
        return msgspec.convert(pair[0], BriefOrders), msgspec.convert(pair[1], list[SomePieces])
    return msgspec.convert(content, BriefOrders), []


def received(data: BriefData) -> WriteOrders:
    """The full orders again; the inverse of `brief`."""
    brief, some = parts(data.content)
    table = data.table
    if data.place is not None:
        brief = msgspec.structs.replace(brief, location=msgspec.convert(data.place, Location))
    arrays: list[ZarrArray] = []
    given: list[int] = np.frombuffer(brief.firsts, np.int64).tolist()
    first = 0
    numbers: list[int] = widened(brief.grid_of).tolist()
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
    """The number of each array's first chunk, if there are no other arrays."""
    counts = _column(array.count for array in arrays)
    return np.cumsum(counts) - counts


def draft_name(draft: Manifest) -> bytes:
    """A name of a draft, different for each plan."""
    plan = msgspec.structs.replace(draft, user=None, planner=None)
    return digest_bytes(encode_body(plan))
