"""Do boxes cover a shape exactly once? If not, `cover_fault` gives one witness.

A witness is a box of elements that no given box holds, or that two hold.

1. The distinct boundaries of each dimension cut the tensor into cells; a box holds each of them
   wholly or not at all.
2. How many boxes hold each cell is a difference array in d dimensions: add +-1 at the 2^d corners
   of each box, then sum along every axis.
3. Where there would be too many cells (boxes with unrelated boundaries in several dimensions) or
   too many corners, halve the tensor along the dimension with the most boundaries and check each
   half.

`unique` finds replicas of one box once: they must not count twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Box, Boxes, Int64s

MAX_CELLS = 1 << 22
"""Most cells that one difference array may have (an int32 each)."""

MAX_CUT_DIMENSIONS = 6
"""Most dimensions with several cells at once: n of them give a box 2^n corners."""


@dataclass(frozen=True, slots=True)
class CoverFault:
    """Why boxes do not cover a shape exactly once."""

    kind: str
    """``"outside"``, ``"overlap"`` or ``"gap"``."""
    box: Box
    """The witness: elements outside the shape, held twice, or held by no box."""
    holders: tuple[int, ...]
    """The indices of (up to two) boxes that hold the witness; none for a gap."""


def cover_fault(shape: Sequence[int], boxes: Boxes) -> CoverFault | None:
    """None if the boxes cover ``shape`` exactly once, else one witness of where they do not.

    Empty boxes hold nothing and are welcome anywhere.

    Example:
        >>> cover_fault((4, 2), Boxes.of([((0, 0), (2, 2)), ((2, 0), (2, 2))])) is None
        True
        >>> fault = cover_fault((4, 2), Boxes.of([((0, 0), (3, 2)), ((2, 0), (2, 2))]))
        >>> fault.kind, str(fault.box), fault.holders
        ('overlap', '[2, 3) x [0, 2)', (0, 1))
    """
    extent = np.array(shape, dtype=np.int64)
    held = np.flatnonzero((boxes.sizes > 0).all(axis=1))
    outside = held[((boxes.offsets[held] < 0) | (boxes.ends[held] > extent[None, :])).any(axis=1)]
    if len(outside):
        index = int(outside[0])
        return CoverFault("outside", boxes[index], (index,))
    filled = boxes if len(held) == len(boxes) else boxes.take(held)
    if _is_product(shape, filled):
        return None
    fault = _cover_fault_in(np.zeros_like(extent), extent, filled)
    if fault is None:
        return None
    return CoverFault(fault.kind, fault.box, tuple(int(held[i]) for i in fault.holders))


def _is_product(shape: Sequence[int], boxes: Boxes) -> bool:
    """Whether boxes in lexicographic order are a product of cuts, one list for each dimension.

    Most sets of boxes are. This is found without cells; False says nothing about the cover.
    """
    counts: list[int] = []
    together = len(
        boxes
    )  # the boxes, from the first on, that begin where it does in dimensions so far
    for d in range(boxes.rank):
        starts = boxes.offsets[:together, d]
        same = int(np.count_nonzero(starts == starts[0])) if together else 0
        if same == 0 or together % same:
            return False
        counts.append(together // same)
        together = same
    if together != 1 or prod(counts) != len(boxes):
        return False
    for d, size in enumerate(shape):
        low, length = (
            np.moveaxis(column[:, d].reshape(counts), d, -1)
            for column in (boxes.offsets, boxes.sizes)
        )
        line, sizes = low.reshape(-1, counts[d])[0], length.reshape(-1, counts[d])[0]
        ends = np.cumsum(sizes)
        if ends[-1] != size or line[0] != 0 or not np.array_equal(line[1:], ends[:-1]):
            return False
        if not (low == line).all() or not (length == sizes).all():
            return False
    return True


def _cover_fault_in(low: Int64s, high: Int64s, boxes: Boxes) -> CoverFault | None:
    """`cover_fault` within ``[low, high)``, for non-empty boxes that lie inside it."""
    if (low >= high).any():
        return None
    if len(boxes) == 1 and np.array_equal(boxes.sizes[0], high - low):
        return None
    cuts = [
        np.unique(
            np.concatenate([boxes.offsets[:, d], boxes.ends[:, d], low[d : d + 1], high[d : d + 1]])
        )
        for d in range(len(low))
    ]
    cells = [len(cut) - 1 for cut in cuts]
    several = [n for n in cells if n > 1]
    if prod(n + 1 for n in several) > MAX_CELLS or len(several) > MAX_CUT_DIMENSIONS:
        return _cover_fault_by_halves(low, high, boxes, cuts)
    wrong = np.argwhere(_counts(boxes, cuts, cells) != 1)
    if len(wrong) == 0:
        return None
    cell = wrong[0]
    cell_low = np.array([cut[i] for cut, i in zip(cuts, cell, strict=True)], np.int64)
    cell_high = np.array([cut[i + 1] for cut, i in zip(cuts, cell, strict=True)], np.int64)
    holding = (boxes.offsets <= cell_low).all(axis=1) & (boxes.ends >= cell_high).all(axis=1)
    holders = tuple(np.flatnonzero(holding)[:2].tolist())
    witness = Boxes(cell_low[None], (cell_high - cell_low)[None])[0]
    return CoverFault("overlap" if holders else "gap", witness, holders)


def _counts(boxes: Boxes, cuts: Sequence[Int64s], cells: Sequence[int]) -> NDArray[np.int32]:
    """How many boxes hold each cell: a difference array, summed along every axis.

    A dimension that is one cell takes no part: every box spans it.
    """
    axes = [d for d, n in enumerate(cells) if n > 1]
    if len(boxes) == 0 or not axes:
        return np.full(cells, len(boxes), np.int32)
    starts = [np.searchsorted(cuts[d], boxes.offsets[:, d]) for d in axes]
    stops = [np.searchsorted(cuts[d], boxes.ends[:, d]) for d in axes]
    counts = np.zeros([cells[d] + 1 for d in axes], np.int32)
    for corner in product((0, 1), repeat=len(axes)):
        where = tuple(stops[k] if side else starts[k] for k, side in enumerate(corner))
        np.add.at(counts, where, -1 if sum(corner) % 2 else 1)
    for axis in range(counts.ndim):
        np.cumsum(counts, axis=axis, out=counts)
    return counts[tuple(slice(0, cells[d]) for d in axes)].reshape(cells)


def _cover_fault_by_halves(
    low: Int64s, high: Int64s, boxes: Boxes, cuts: Sequence[Int64s]
) -> CoverFault | None:
    """`_cover_fault_in`, on each side of the middle cut of the dimension with the most cuts."""
    axis = int(np.argmax([len(cut) for cut in cuts]))
    middle = cuts[axis][len(cuts[axis]) // 2]
    for start, stop in ((low[axis], middle), (middle, high[axis])):
        meets = np.flatnonzero((boxes.offsets[:, axis] < stop) & (boxes.ends[:, axis] > start))
        part = boxes.take(meets)
        ends = np.minimum(part.ends[:, axis], stop)
        part.offsets[:, axis] = np.maximum(part.offsets[:, axis], start)
        part.sizes[:, axis] = ends - part.offsets[:, axis]
        part_low, part_high = low.copy(), high.copy()
        part_low[axis], part_high[axis] = start, stop
        fault = _cover_fault_in(part_low, part_high, part)
        if fault is not None:
            holders = tuple(int(meets[i]) for i in fault.holders)
            return CoverFault(fault.kind, fault.box, holders)
    return None


def unique(boxes: Boxes) -> tuple[Boxes, Int64s]:
    """The distinct boxes in lexicographic order, and for each given box which one it is.

    Example:
        >>> distinct, inverse = unique(Boxes.of([((2,), (2,)), ((0,), (2,)), ((2,), (2,))]))
        >>> distinct, inverse.tolist()
        (Boxes([0, 2), [2, 4)), [1, 0, 1])
    """
    rows = np.concatenate([boxes.offsets, boxes.sizes], axis=1)
    if len(rows) == 0 or rows.shape[1] == 0:
        return boxes[: min(len(boxes), 1)], np.zeros(len(boxes), np.int64)
    if _ascend(rows):
        return boxes, np.arange(len(boxes))
    order = np.lexsort(rows.T[::-1])
    ordered = rows[order]
    first = np.ones(len(rows), bool)
    first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    inverse = np.empty(len(rows), np.int64)
    inverse[order] = np.cumsum(first) - 1
    return boxes.take(order[first]), inverse


def _ascend(rows: Int64s) -> bool:
    """Whether the rows ascend in lexicographic order, as those of ranks do."""
    less = np.zeros(len(rows) - 1, bool)
    for column in rows.T[::-1]:
        less = (column[:-1] < column[1:]) | ((column[:-1] == column[1:]) & less)
    return bool(less.all())


def neighbours(boxes: Boxes, box: Box) -> list[int]:
    """The numbers of the boxes that share a face with a box which none of them meets.

    Example:
        >>> around = Boxes.of([((0, 0), (2, 4)), ((3, 0), (1, 4)), ((0, 4), (2, 4))])
        >>> neighbours(around, Box((2, 0), (1, 4)))
        [0, 1]
    """
    low, high = np.array(box.offsets, np.int64), np.array(box.ends, np.int64)
    touch = (boxes.offsets <= high) & (boxes.ends >= low)
    meet = (boxes.offsets < high) & (boxes.ends > low)
    beside = touch.all(axis=1) & (np.count_nonzero(meet, axis=1) == boxes.rank - 1)
    return np.flatnonzero(beside & (boxes.sizes > 0).all(axis=1)).tolist()
