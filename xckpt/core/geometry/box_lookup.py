"""Which of some boxes holds another one, found without looking at all of them."""

from __future__ import annotations

import numpy as np

from xckpt.core.geometry.box import Box, Boxes, Int64s


class BoxLookup:
    """Finds which of some boxes that do not overlap holds another box.

    1. An equal box is found by its hash.
    2. Else the boxes are sorted by their offset in the dimension that tells most of them apart. The
       holder begins neither behind the box nor further before its end than the longest one reaches.

    Example:
        >>> lookup = BoxLookup(Boxes.of([((0, 0), (2, 4)), ((2, 0), (3, 4))]))
        >>> lookup.holder(Box((2, 0), (3, 4))), lookup.holder(Box((3, 1), (1, 2)))
        (1, 1)
        >>> lookup.holder(Box((1, 0), (2, 4))) is None
        True
    """

    def __init__(self, boxes: Boxes) -> None:
        self._boxes = boxes
        self._numbers = {box: number for number, box in enumerate(boxes)}
        self._dimension = 0
        self._order = np.zeros(0, np.int64)
        self._sorted = np.zeros(0, np.int64)
        if len(boxes) > 1 and boxes.rank:
            distinct = [len(np.unique(column)) for column in boxes.offsets.T]
            self._dimension = int(np.argmax(distinct))
            self._order = np.argsort(boxes.offsets[:, self._dimension], kind="stable")
            self._sorted = boxes.offsets[self._order, self._dimension]

    def holder(self, box: Box) -> int | None:
        """The number of the box that holds all of ``box``; None if there is none."""
        number = self._numbers.get(box)
        if number is not None:
            return number
        boxes, low, end = self._boxes, np.array(box.offsets), np.array(box.ends)
        near = self._near(box)
        holds = (boxes.offsets[near] <= low).all(axis=1) & (end <= boxes.ends[near]).all(axis=1)
        holders = near[holds]
        return int(holders[0]) if len(holders) else None

    def _near(self, box: Box) -> Int64s:
        """The numbers of the boxes that may hold a box, as far as one dimension says."""
        if len(self._order) == 0:
            return np.arange(len(self._boxes))
        d = self._dimension
        longest = int(self._boxes.sizes[:, d].max())
        start = np.searchsorted(self._sorted, box.ends[d] - longest)
        stop = np.searchsorted(self._sorted, box.offsets[d], side="right")
        return self._order[start:stop]
