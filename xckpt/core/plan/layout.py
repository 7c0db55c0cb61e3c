"""How a leaf is laid out in a save, as pure functions: its grid, and what each rank writes of it.

For each leaf, from the boxes that all ranks reported (`LeafShards`):

1. **Deduplicate** (`lay_out`): equal boxes are replicas of one; its holders are the ranks that
   reported it.
2. **Check the cover**: every element is in exactly one distinct box, or a message says where that
   fails.
3. **Choose the grid** so that each chunk lies inside one box (`xckpt.core.geometry.grid`). Where
   every box has R holders, chunks are small enough for R writers to share it.
4. **Cut** each box into at most R parts along chunk boundaries.
5. **Share** (`share`): the parts go to the holders with the fewest bytes so far, larger parts to
   those with fewer; largest leaves first. With R equal parts, each holder writes one.

Steps 1 to 4 depend only on shape, item size, boxes and holders, and models repeat those, so a
`Layout` is computed once for all leaves that are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Boxes, Int64s
from xckpt.core.geometry.cover import CoverFault, cover_fault, neighbours, unique
from xckpt.core.geometry.grid import Grid, GridOptions, choose_grid
from xckpt.core.geometry.kept_grid import still_fits
from xckpt.core.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from xckpt.core.plan.items import LeafTable
from xckpt.errors import ranks_in_words

MOST_BESIDE = 4
"""Boxes beside a gap that a message names."""

SMALLEST_SHARE = 1 << 20
"""Chunks are not made smaller than this (bytes) for the sake of sharing replicas."""


@dataclass(frozen=True, slots=True, eq=False)
class LeafShards:
    """All ranks' boxes of one leaf: rank ``ranks[i]`` holds ``boxes[i]``."""

    shape: tuple[int, ...]
    item_bytes: int
    boxes: Boxes
    ranks: Int64s

    def key(self) -> tuple[object, ...]:
        """Equal for leaves that get equal layouts."""
        columns = (self.boxes.offsets, self.boxes.sizes, self.ranks)
        return (self.shape, self.item_bytes, *(column.tobytes() for column in columns))


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Boxes of one size that R ranks each hold, cut alike into p parts each (m boxes)."""

    holders: Int64s
    """The ranks that hold each box, (m, R)."""
    offsets: Int64s
    """Offset of each part, (m, p, rank)."""
    sizes: Int64s
    """Size of each part, (m, p, rank)."""
    bytes: Int64s
    """Bytes of each part, (m, p)."""
    disjoint: bool
    """Whether no rank holds two of the boxes."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What `lay_out` decided for leaves that are alike."""

    boxes: Boxes
    """The distinct non-empty boxes."""
    grid: Grid
    parts: tuple[Parts, ...]
    """All boxes' parts, grouped by size and number of holders."""

    contested: bool
    """Whether there is a choice: more holders than parts, or parts of unequal size."""


def lay_out(shards: LeafShards, options: GridOptions, kept: Grid | None = None) -> Layout | str:
    """Deduplicate, check, choose the grid and cut; or say what is wrong with the cover.

    A grid of an earlier checkpoint is ``kept`` where it still fits.

    Example:
        >>> shards = LeafShards((4, 8), 4, Boxes.of([((0, 0), (4, 8))] * 2), np.array([0, 1]))
        >>> layout = lay_out(shards, GridOptions())
        >>> layout.parts[0].holders.tolist(), layout.grid.chunks.tolist()
        ([[0, 1]], [[4, 8]])
        >>> half = LeafShards((4, 8), 4, Boxes.of([((0, 0), (3, 8))]), np.array([0]))
        >>> lay_out(half, GridOptions())
        '[3, 4) x [0, 8) is held by no rank; beside it: [0, 3) x [0, 8) on rank 0'
    """
    filled = np.flatnonzero(shards.boxes.elements > 0)
    boxes, inverse = unique(shards.boxes.take(filled))
    ranks = shards.ranks[filled]
    fault = cover_fault(shards.shape, boxes)
    if fault is not None:
        return _in_words(fault, shards.shape, boxes, lambda n: _held_by(ranks[inverse == n]))
    if len(boxes) == 0:
        grid = choose_grid(shards.shape, shards.item_bytes, boxes, options)
        return Layout(boxes, grid, (), contested=False)
    groups = _by_holder_count(inverse, ranks, len(boxes))
    grid = kept
    if grid is None or not still_fits(grid, shards.shape, boxes):
        shared = _shared_options(shards, boxes, groups, options)
        grid = choose_grid(shards.shape, shards.item_bytes, boxes, shared)
    parts = tuple(
        part
        for chosen, holders in groups
        for part in _cut(boxes, grid, chosen, holders, shards.item_bytes)
    )
    return Layout(boxes, grid, parts, not all(_is_settled(part) for part in parts))


def _in_words(
    fault: CoverFault, shape: tuple[int, ...], boxes: Boxes, ranks_of: Callable[[int], str]
) -> str:
    """What is wrong with the cover, with the ranks of each box that is concerned."""
    where = str(fault.box)
    if fault.kind == "outside":
        return f"{where} on {ranks_of(fault.holders[0])} lies outside the shape {shape}"
    concerned = fault.holders or neighbours(boxes, fault.box)[:MOST_BESIDE]
    those = [f"{boxes[number]} on {ranks_of(number)}" for number in concerned]
    if fault.kind == "overlap":
        return f"{where} is held twice: {those[0]} overlaps {those[1]}"
    beside = f"; beside it: {', '.join(those)}" if those else ""
    return f"{where} is held by no rank{beside}"


def metadata_of(
    table: LeafTable, kinds: NDArray[np.int32], layouts: Sequence[Layout]
) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
    """What a checkpoint says of each leaf, by the layout of its kind."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    alike: list[TensorStorageMetadata | None] = [None] * len(layouts)
    of_leaves: list[int] = kinds.tolist()
    for row, kind in zip(table, of_leaves, strict=True):
        if row.kind:
            described[row.name] = BytesStorageMetadata(row.kind)
            continue
        known, about = alike[kind], (row.dtype, row.shape, row.sharding, row.annotation)
        if known is None or (known.dtype, known.size, known.sharding, known.annotation) != about:
            boxes, grid = layouts[kind].boxes, layouts[kind].grid
            properties = TensorProperties(row.dtype)
            known = TensorStorageMetadata(properties, row.shape, boxes, grid, *about[2:])
        described[row.name] = alike[kind] = known
    return described


def with_grids(metadata: Metadata, options: GridOptions) -> Metadata:
    """The metadata, with grids where a planner has chosen none."""
    described = dict(metadata.state_dict_metadata)
    for name, tensor in described.items():
        if isinstance(tensor, TensorStorageMetadata) and tensor.grid is None:
            pairs = ((box.offsets, box.sizes) for box in tensor.chunks)
            boxes = Boxes.of(pairs, rank=len(tensor.size))
            grid = choose_grid(tensor.size, item_size(tensor.properties.dtype), boxes, options)
            described[name] = replace(tensor, grid=grid)
    return replace(metadata, state_dict_metadata=described)


def share(layout: Layout, loads: Int64s) -> tuple[Int64s, Boxes]:
    """Give each part to one of its holders and add its bytes to ``loads`` (in place, per rank).

    Returns:
        The rank of each part, (n,), and the parts' boxes.
    """
    ranks, boxes = [np.zeros(0, np.int64)], [layout.boxes[:0]]
    if layout.parts:
        ranks, boxes = [], []
    for part in layout.parts:
        ranks.append(_choose(part, loads).ravel())
        shape = (part.bytes.size, layout.boxes.rank)
        boxes.append(Boxes(part.offsets.reshape(shape), part.sizes.reshape(shape)))
    return np.concatenate(ranks), Boxes.concatenated(boxes)


def _choose(part: Parts, loads: Int64s) -> Int64s:
    """A rank for each part, (m, p); all of one box's parts go to different holders."""
    if _is_settled(part):
        np.add.at(loads, part.holders.ravel(), part.bytes.ravel())
        return part.holders
    # The boxes are of one size and cut alike, so the first one's order of parts serves all.
    heaviest_first = np.argsort(-part.bytes[0], kind="stable")
    count = len(heaviest_first)
    chosen = np.empty(part.bytes.shape, np.int64)
    if part.disjoint:
        # Each box has holders of its own, so all choices are made at once.
        before = loads[part.holders]
        if count == 1:
            order = before.argmin(axis=1)[:, None]
        else:
            order = np.argsort(before, axis=1, kind="stable")[:, :count]
        chosen[:, heaviest_first] = np.take_along_axis(part.holders, order, axis=1)
        loads[chosen] += part.bytes
        return chosen
    for row, holders in enumerate(part.holders):  # one by one, as each adds to the others' loads
        order = np.argsort(loads[holders], kind="stable")[:count]
        chosen[row, heaviest_first] = holders[order]
        loads[chosen[row]] += part.bytes[row]
    return chosen


def _is_settled(part: Parts) -> bool:
    """Whether each holder of a box writes one part and all parts are equal."""
    return part.holders.shape == part.bytes.shape and bool((part.bytes == part.bytes[:, :1]).all())


def _by_holder_count(inverse: Int64s, ranks: Int64s, count: int) -> list[tuple[Int64s, Int64s]]:
    """For each number R of holders: the boxes that have R (m,), and their holders (m, R)."""
    order = np.lexsort((ranks, inverse))
    box, rank = inverse[order], ranks[order]
    # A rank may report one box from several local devices.
    fresh = np.ones(len(box), bool)
    fresh[1:] = (box[1:] != box[:-1]) | (rank[1:] != rank[:-1])
    box, rank = box[fresh], rank[fresh]
    holders = np.bincount(box, minlength=count)
    starts = np.cumsum(holders) - holders
    groups: list[tuple[Int64s, Int64s]] = []
    for number in np.unique(holders).tolist():
        chosen = np.flatnonzero(holders == number)
        groups.append((chosen, rank[starts[chosen][:, None] + np.arange(number)]))
    return groups


def _shared_options(
    shards: LeafShards,
    boxes: Boxes,
    groups: Sequence[tuple[Int64s, Int64s]],
    options: GridOptions,
) -> GridOptions:
    """Chunks small enough that the holders of the largest boxes can share them."""
    fewest = min(holders.shape[1] for _, holders in groups)
    largest = int(boxes.elements.max()) * shards.item_bytes
    wanted = max(SMALLEST_SHARE, -(-largest // fewest))
    if fewest == 1 or wanted >= max(options.chunk_bytes, options.shard_bytes):
        return options
    return replace(
        options,
        chunk_bytes=min(options.chunk_bytes, wanted),
        shard_bytes=min(options.shard_bytes, wanted),
    )


def _cut(boxes: Boxes, grid: Grid, chosen: Int64s, holders: Int64s, item_bytes: int) -> list[Parts]:
    """Cut each chosen box along unit boundaries into at most as many parts as it has holders."""
    units = grid.units[chosen] if len(grid.arrays) == len(boxes) > 1 else grid.units[:1]
    shapes = np.concatenate(  # (boxes, 2 * rank): sizes of the box, sizes of a unit
        [boxes.sizes[chosen], np.broadcast_to(units, (len(chosen), boxes.rank))], axis=1
    )
    distinct, inverse = _distinct_rows(shapes)
    cut: list[Parts] = []
    for number, row in enumerate(distinct):
        members = np.flatnonzero(inverse == number)
        low, high = _bounds(row[: boxes.rank], row[boxes.rank :], holders.shape[1])
        offsets = boxes.offsets[chosen[members]][:, None, :] + low[None]
        sizes = np.broadcast_to((high - low)[None], offsets.shape)
        part_bytes = np.prod(sizes, axis=2, dtype=np.int64) * item_bytes
        held = holders[members]
        disjoint = len(np.unique(held)) == held.size
        cut.append(Parts(held, offsets, sizes, part_bytes, disjoint))
    return cut


def _distinct_rows(rows: Int64s) -> tuple[Int64s, Int64s]:
    """The distinct rows, and for each row which it is; quick where all are alike, as most are."""
    if (rows == rows[0]).all():
        return rows[:1], np.zeros(len(rows), np.int64)
    distinct, inverse = np.unique(rows, axis=0, return_inverse=True)
    return distinct, inverse.reshape(-1)


def _bounds(sizes: Int64s, unit: Int64s, most: int) -> tuple[Int64s, Int64s]:
    """Starts and ends, (p, rank), of at most ``most`` nearly equal parts of a box, whole units."""
    rank = len(sizes)
    if rank == 0 or most == 1:
        return np.zeros((1, rank), np.int64), sizes[None]
    units = -(-sizes // unit)
    enough = np.flatnonzero(units >= most)
    axis = int(enough[0]) if len(enough) else int(np.argmax(units))
    count = min(most, int(units[axis]))
    edges = np.minimum(np.arange(count + 1) * units[axis] // count * unit[axis], sizes[axis])
    low, high = np.zeros((count, rank), np.int64), np.tile(sizes, (count, 1))
    low[:, axis], high[:, axis] = edges[:-1], edges[1:]
    return low, high


def _held_by(ranks: Int64s) -> str:
    """The ranks that hold a box in words, each once."""
    return ranks_in_words(np.unique(ranks).tolist())
