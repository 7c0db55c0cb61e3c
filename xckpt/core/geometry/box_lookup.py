"""Which boxes meet, and which holds another one, found without looking at all pairs.

1. `intersect`: which boxes of one set meet which of another, and where (a load, and pieces).
2. `BoxLookup`: which of some boxes holds a box (a save).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from xckpt.core.geometry.box import Box, Boxes, Int64s, tuples


class BoxLookup:
    """Finds which of some boxes that do not overlap holds another box.

    1. An equal box is found by its offsets.
    2. Else the boxes are sorted by their offset in the dimension where most of them differ. The
       holder does not begin behind the box, nor further before its end than the longest box is
       long.

    Example:
        >>> lookup = BoxLookup(Boxes.of([((0, 0), (2, 4)), ((2, 0), (3, 4))]))
        >>> lookup.holder(Box((2, 0), (3, 4))), lookup.holder(Box((3, 1), (1, 2)))
        (1, 1)
        >>> lookup.holder(Box((1, 0), (2, 4))) is None
        True
    """

    def __init__(self, boxes: Boxes) -> None:
        self._boxes, self._ends = boxes, boxes.ends
        self._numbers = {each: number for number, each in enumerate(tuples(boxes.offsets))}
        self._sizes = tuples(boxes.sizes)
        self._dimension = self._longest = 0
        self._order = np.zeros(0, np.int64)
        self._sorted = np.zeros(0, np.int64)
        if len(boxes) > 1 and boxes.rank:
            distinct = [len(np.unique(column)) for column in boxes.offsets.T]
            self._dimension = int(np.argmax(distinct))
            self._order = np.argsort(boxes.offsets[:, self._dimension], kind="stable")
            self._sorted = boxes.offsets[self._order, self._dimension]
            self._longest = int(boxes.sizes[:, self._dimension].max())

    def holder(self, box: Box) -> int | None:
        """The number of the box that holds all of ``box``; None if there is none."""
        number = self._numbers.get(box.offsets)
        if number is not None and self._sizes[number] == box.sizes:
            return number
        boxes, low, end = self._boxes, np.array(box.offsets), np.array(box.ends)
        near = self._near(box)
        holds = (boxes.offsets[near] <= low).all(axis=1) & (end <= self._ends[near]).all(axis=1)
        holders = near[holds]
        return int(holders[0]) if len(holders) else None

    def _near(self, box: Box) -> Int64s:
        """The numbers of the boxes that may hold a box, as far as one dimension says."""
        if len(self._order) == 0:
            return np.arange(len(self._boxes))
        d = self._dimension
        start = np.searchsorted(self._sorted, box.ends[d] - self._longest)
        stop = np.searchsorted(self._sorted, box.offsets[d], side="right")
        return self._order[start:stop]


FEW_PAIRS = 1 << 12
"""With up to this many pairs, `intersect` looks at each."""
MANY_PAIRS = 1 << 20
"""About this many pairs are looked at together."""


def intersect(a: Boxes, b: Boxes) -> tuple[Int64s, Int64s, Boxes]:
    """All non-empty intersections between two sets of boxes.

    1. The boxes of ``b`` are sorted by their offset in the dimension where most of them differ.
    2. Those that may meet a box stand together: behind all that end before it, and before all that
       begin behind it. Only these are looked at.

    Returns:
        ``(i, j, boxes)``: ``boxes[k]`` is what ``a[i[k]]`` and ``b[j[k]]`` share, ordered by
        i, then j. A 0-d box is one element, so two of them do meet.

    Example:
        >>> i, j, shared = intersect(Boxes.whole((4,)), Boxes.of([((0,), (3,)), ((3,), (3,))]))
        >>> i.tolist(), j.tolist(), shared
        ([0, 0], [0, 1], Boxes([0, 3), [3, 4)))
    """
    if len(a) * len(b) <= FEW_PAIRS or a.rank == 0:
        every = np.indices((len(a), len(b))).reshape(2, -1)
        return _shared(a, b, every[0], every[1])
    parts = [_shared(a, b, i, j) for i, j in near_pairs(a, b)]
    i, j, boxes = zip(*parts, strict=True)
    return np.concatenate(i), np.concatenate(j), Boxes.concatenated(boxes)


def near_pairs(a: Boxes, b: Boxes) -> Iterator[tuple[Int64s, Int64s]]:
    """The pairs that may meet, as far as one dimension says: some boxes of ``a`` at a time."""
    d = int(np.argmax([len(np.unique(column)) for column in b.offsets.T]))
    order = np.argsort(b.offsets[:, d], kind="stable")
    reach = np.maximum.accumulate(b.ends[order, d])
    starts = np.searchsorted(reach, a.offsets[:, d], side="right")
    counts = np.maximum(np.searchsorted(b.offsets[order, d], a.ends[:, d]) - starts, 0)
    stops = np.cumsum(counts)
    low = 0
    while low < len(a):
        before = int(stops[low] - counts[low])
        high = max(low + 1, int(np.searchsorted(stops, before + MANY_PAIRS, side="right")))
        i = np.repeat(np.arange(low, high), counts[low:high])
        within = np.arange(before, before + len(i)) - (stops - counts)[i]
        j = order[starts[i] + within]
        in_order = np.lexsort((j, i))
        yield i[in_order], j[in_order]
        low = high


def _shared(a: Boxes, b: Boxes, i: Int64s, j: Int64s) -> tuple[Int64s, Int64s, Boxes]:
    """Which of the pairs ``a[i[k]]`` and ``b[j[k]]`` meet, and where."""
    low = np.maximum(a.offsets[i], b.offsets[j])
    high = np.minimum(a.ends[i], b.ends[j])
    meet = (low < high).all(axis=1)
    return i[meet], j[meet], Boxes(low[meet], (high - low)[meet])
