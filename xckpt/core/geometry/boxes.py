"""The algebra of boxes: hyper-rectangles ``[offset, offset + size)`` of a tensor, many at a time.

A `Boxes` holds n boxes of one rank as two (n, rank) int64 arrays; every function here is vectorised
over them and touches no data. What a planner asks:

1. `intersect`: which boxes of one set meet which of another, and where (a load).
2. `unique`: replicas of one box, found once (a save).
3. `cover_fault`: do boxes cover a shape exactly once? If not, one witness: a box of elements that
   nobody holds, or that two boxes hold.

`cover_fault` compresses coordinates: the distinct boundaries of each dimension cut the tensor into
cells that a box holds wholly or not at all. Counting how many boxes hold each cell is a
d-dimensional difference array: add +-1 at the 2^d corners of each box, then sum along every axis.
Where the cells would be too many (boxes with unrelated boundaries in several dimensions), or the
corners, the tensor is halved along the dimension with the most boundaries and each half is checked
on its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import overload

import numpy as np
from numpy.typing import NDArray

from xckpt.core.metadata import ChunkStorageMetadata

__all__ = ["Boxes", "CoverFault", "cover_fault", "intersect", "interval", "unique"]

Int64s = NDArray[np.int64]

MAX_CELLS = 1 << 22
"""Most cells that one difference array may have (an int32 each)."""

MAX_CUT_DIMENSIONS = 6
"""Most dimensions with several cells at once: n of them give a box 2^n corners."""


@dataclass(frozen=True, slots=True, eq=False)
class Boxes(Sequence[ChunkStorageMetadata]):
    """n boxes of one rank, in the order given.

    Example:
        >>> boxes = Boxes.of([((0, 0), (2, 4)), ((2, 0), (1, 4))])
        >>> len(boxes), boxes.rank
        (2, 2)
        >>> boxes[1]
        ChunkStorageMetadata(offsets=(2, 0), sizes=(1, 4))
        >>> boxes.elements
        array([8, 4])
    """

    offsets: Int64s
    """First element of each box, (n, rank)."""
    sizes: Int64s
    """Elements of each box per dimension, (n, rank); 0 is allowed."""

    def __post_init__(self) -> None:
        if self.offsets.ndim != 2 or self.offsets.shape != self.sizes.shape:
            raise ValueError(
                f"offsets and sizes must both be (n, rank) arrays, "
                f"got {self.offsets.shape} and {self.sizes.shape}"
            )

    @classmethod
    def of(
        cls, boxes: Iterable[tuple[Sequence[int], Sequence[int]]], *, rank: int | None = None
    ) -> Boxes:
        """Boxes from (offsets, sizes) pairs; ``rank`` is needed only where there may be none."""
        pairs = list(boxes)
        shape = (len(pairs), len(pairs[0][0]) if pairs else rank or 0)
        offsets = np.array([offset for offset, _ in pairs], dtype=np.int64).reshape(shape)
        sizes = np.array([size for _, size in pairs], dtype=np.int64).reshape(shape)
        return cls(offsets, sizes)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Boxes:
        """The one box that is all of a shape.

        Example:
            >>> list(Boxes.whole((3, 5)))
            [ChunkStorageMetadata(offsets=(0, 0), sizes=(3, 5))]
        """
        return _whole(tuple(shape))

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return self.offsets.shape[1]

    @property
    def ends(self) -> Int64s:
        """One past the last element of each box, (n, rank)."""
        return self.offsets + self.sizes

    @property
    def elements(self) -> Int64s:
        """Number of elements of each box, (n,)."""
        return np.prod(self.sizes, axis=1, dtype=np.int64)

    def take(self, indices: Int64s | NDArray[np.bool_]) -> Boxes:
        """The boxes at ``indices`` (or where a mask is true), in that order."""
        return Boxes(self.offsets[indices], self.sizes[indices])

    def __len__(self) -> int:
        return self.offsets.shape[0]

    @overload
    def __getitem__(self, index: int) -> ChunkStorageMetadata: ...
    @overload
    def __getitem__(self, index: slice) -> Boxes: ...
    def __getitem__(self, index: int | slice) -> ChunkStorageMetadata | Boxes:
        if isinstance(index, slice):
            return Boxes(self.offsets[index], self.sizes[index])
        return ChunkStorageMetadata(
            tuple(self.offsets[index].tolist()), tuple(self.sizes[index].tolist())
        )

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        for offsets, sizes in zip(self.offsets.tolist(), self.sizes.tolist(), strict=True):
            yield ChunkStorageMetadata(tuple(offsets), tuple(sizes))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Boxes):
            return np.array_equal(self.offsets, other.offsets) and np.array_equal(
                self.sizes, other.sizes
            )
        if isinstance(other, Sequence):
            return list(self) == list(other)
        return NotImplemented

    def __repr__(self) -> str:
        shown = [interval(o, s) for o, s in zip(self.offsets[:4], self.sizes[:4], strict=True)]
        more = f", ... {len(self) - 4} more" if len(self) > 4 else ""
        return f"Boxes({', '.join(shown)}{more})"


@functools.lru_cache(maxsize=1024)
def _whole(shape: tuple[int, ...]) -> Boxes:
    """The box of a shape, made once: most tensors of a state have the shape of another."""
    boxes = Boxes.of([((0,) * len(shape), shape)])
    boxes.offsets.flags.writeable = boxes.sizes.flags.writeable = False
    return boxes


def interval(offsets: Iterable[int], sizes: Iterable[int]) -> str:
    """A box as people read it.

    Example:
        >>> interval((0, 8), (3, 8))
        '[0, 3) x [8, 16)'
        >>> interval((), ())
        'the scalar'
    """
    parts = [f"[{int(o)}, {int(o) + int(s)})" for o, s in zip(offsets, sizes, strict=True)]
    return " x ".join(parts) or "the scalar"


def intersect(a: Boxes, b: Boxes) -> tuple[Int64s, Int64s, Boxes]:
    """All non-empty intersections between two sets of boxes.

    Returns:
        ``(i, j, boxes)``: ``boxes[k]`` is what ``a[i[k]]`` and ``b[j[k]]`` share, ordered by
        i, then j. A 0-d box is one element, so two of them do meet.

    Example:
        >>> i, j, shared = intersect(Boxes.whole((4,)), Boxes.of([((0,), (3,)), ((3,), (3,))]))
        >>> i.tolist(), j.tolist(), shared
        ([0, 0], [0, 1], Boxes([0, 3), [3, 4)))
    """
    low = np.maximum(a.offsets[:, None, :], b.offsets[None, :, :])
    high = np.minimum(a.ends[:, None, :], b.ends[None, :, :])
    i, j = np.nonzero((low < high).all(axis=2))
    return i, j, Boxes(low[i, j], (high - low)[i, j])


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
    order = np.lexsort(rows.T[::-1])
    ordered = rows[order]
    first = np.ones(len(rows), bool)
    first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    inverse = np.empty(len(rows), np.int64)
    inverse[order] = np.cumsum(first) - 1
    return boxes.take(order[first]), inverse


@dataclass(frozen=True, slots=True)
class CoverFault:
    """Why boxes do not cover a shape exactly once."""

    kind: str
    """``"outside"``, ``"overlap"`` or ``"gap"``."""
    box: ChunkStorageMetadata
    """The witness: elements outside the shape, held twice, or held by nobody."""
    holders: tuple[int, ...]
    """The indices of (up to two) boxes that hold the witness; none for a gap."""


def cover_fault(shape: Sequence[int], boxes: Boxes) -> CoverFault | None:
    """None if the boxes cover ``shape`` exactly once, else one witness of where they do not.

    Empty boxes hold nothing and are welcome anywhere.

    Example:
        >>> cover_fault((4, 2), Boxes.of([((0, 0), (2, 2)), ((2, 0), (2, 2))])) is None
        True
        >>> fault = cover_fault((4, 2), Boxes.of([((0, 0), (3, 2)), ((2, 0), (2, 2))]))
        >>> fault.kind, interval(fault.box.offsets, fault.box.sizes), fault.holders
        ('overlap', '[2, 3) x [0, 2)', (0, 1))
    """
    extent = np.array(shape, dtype=np.int64)
    held = np.flatnonzero((boxes.sizes > 0).all(axis=1))
    outside = held[((boxes.offsets[held] < 0) | (boxes.ends[held] > extent[None, :])).any(axis=1)]
    if len(outside):
        index = int(outside[0])
        return CoverFault("outside", boxes[index], (index,))
    fault = _cover_fault_in(np.zeros_like(extent), extent, boxes.take(held))
    if fault is None:
        return None
    return CoverFault(fault.kind, fault.box, tuple(int(held[i]) for i in fault.holders))


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
