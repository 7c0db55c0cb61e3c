"""Which rows of a tensor dimension a rank holds: integer arithmetic, without torch.

A mesh axis that shards a tensor dimension is a `Cut` of it: into how many parts, and which part is
this rank's. Several mesh axes may cut one dimension, and torch writes down the order of those cuts
in two ways that agree for sizes that divide evenly and differ for others:

1. **Nested** (`nested`): one cut after the other, each by `torch.chunk`: parts of
   ``ceil(n / parts)`` rows, the last ones shorter or empty. The result is one interval.
   ``Shard`` placements cut left to right. FSDP2 over tensor parallelism cuts right to left, and
   says so by a ``_StridedShard`` whose ``split_factor`` is the number of parts that the cuts done
   before it make; `cut_order` recovers the order from the factors.
2. **Literal** (`literal`): a ``_StridedShard`` as it is defined on its own: the dimension is first
   cut into ``split_factor`` pieces, every piece into ``parts``, and the rank holds its part of
   *each* piece. The result is up to ``split_factor`` intervals. Reshaping a DTensor makes these.
   torch up to 2.9 cuts them into ``split_factor * parts`` at once (`striped`), which puts other
   rows together where that does not divide evenly.

`readings` gives the readings of a list of cuts, the likelier one first; the caller takes
the first whose size is the local tensor's. Taking the wrong one cannot go unnoticed: the ranks'
sizes add up under one reading only, so a wrong pick leaves a gap and an overlap in the cover.

`combined` combines the intervals of all dimensions into boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product

from xckpt.core.geometry.box import Boxes

Interval = tuple[int, int]
"""Rows ``[lo, hi)`` of a tensor dimension."""
View = tuple[slice, ...]
"""The slices of a local tensor that hold a box."""
StridedRows = Callable[[int, Sequence["Cut"]], tuple[Interval, ...]]
"""The rows of a dimension that are left after cuts, as `literal` and `striped` give them."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A mesh axis that shards a tensor dimension, seen from one rank."""

    parts: int
    """The size of the mesh axis."""
    part: int
    """The rank's coordinate on it, in ``[0, parts)``."""
    factor: int = 1
    """``split_factor`` of a ``_StridedShard``; 1 for a ``Shard``."""


def chunk(interval: Interval, parts: int, part: int) -> Interval:
    """Part ``part`` of an interval that `torch.chunk` cuts into ``parts``; it may be empty.

    Example:
        >>> [chunk((10, 17), 4, part) for part in range(4)]
        [(10, 12), (12, 14), (14, 16), (16, 17)]
        >>> chunk((0, 3), 2, 1), chunk((0, 5), 4, 3)
        ((2, 3), (5, 5))
    """
    lo, hi = interval
    step = -(-(hi - lo) // parts)
    return min(lo + step * part, hi), min(lo + step * (part + 1), hi)


def nested(size: int, cuts: Sequence[Cut]) -> tuple[Interval, ...]:
    """The rows left after one cut after the other, first to last; no interval if none are.

    Example:
        >>> nested(7, [Cut(parts=2, part=0), Cut(parts=3, part=1)])
        ((2, 4),)
    """
    interval = (0, size)
    for cut in cuts:
        interval = chunk(interval, cut.parts, cut.part)
    return (interval,) if interval[0] < interval[1] else ()


def literal(size: int, cuts: Sequence[Cut]) -> tuple[Interval, ...]:
    """The rows left when each cut first splits into ``factor`` pieces and takes a part of each.

    The intervals ascend and do not touch.

    Example:
        >>> literal(9, [Cut(parts=4, part=1, factor=2)])
        ((2, 4), (6, 7))
    """

    def part_of_each(length: int, cut: Cut) -> Iterator[Interval]:
        pieces = (chunk((0, length), cut.factor, piece) for piece in range(cut.factor))
        return (chunk(piece, cut.parts, cut.part) for piece in pieces)

    return _cut_in_turn(size, cuts, part_of_each)


def striped(size: int, cuts: Sequence[Cut]) -> tuple[Interval, ...]:
    """The rows left when each cut makes ``factor * parts`` pieces and takes every ``parts``-th.

    So torch up to 2.9 cuts a ``_StridedShard``. It is `literal` where the pieces are equal.

    Example:
        >>> literal(6, [Cut(parts=2, part=1, factor=2)])
        ((2, 3), (5, 6))
        >>> striped(6, [Cut(parts=2, part=1, factor=2)])
        ((2, 4),)
    """

    def every_other(length: int, cut: Cut) -> Iterator[Interval]:
        pieces = cut.factor * cut.parts
        return (chunk((0, length), pieces, piece) for piece in range(cut.part, pieces, cut.parts))

    return _cut_in_turn(size, cuts, every_other)


def length(intervals: Sequence[Interval]) -> int:
    """How many rows the intervals hold."""
    return sum(hi - lo for lo, hi in intervals)


def cut_order(cuts: Sequence[Cut]) -> list[int] | None:
    """The order of the cuts, if the factors encode one; else None.

    A factor is the number of parts that the earlier ones among the cuts to its right make.

    Example:
        >>> cut_order([Cut(2, 0), Cut(2, 0)])  # Shard, Shard: left to right
        [0, 1]
        >>> cut_order([Cut(3, 0, factor=2), Cut(2, 0)])  # FSDP2 over tensor parallelism
        [1, 0]
        >>> cut_order([Cut(2, 0, factor=5)]) is None  # a reshape
        True
    """
    order: list[int] = []
    for index in reversed(range(len(cuts))):
        position, parts = 0, 1
        while parts != cuts[index].factor:
            if position == len(order):
                return None
            parts *= cuts[order[position]].parts
            position += 1
        order.insert(position, index)
    return order


def readings(
    size: int, cuts: Sequence[Cut], strided: StridedRows = literal
) -> list[tuple[Interval, ...]]:
    """The rows that the cuts may stand for: one reading, or two that differ, the likelier first.

    Args:
        size: rows of the dimension.
        cuts: the mesh axes that cut it, first to last.
        strided: how torch cuts a ``_StridedShard`` on its own: `literal`, or `striped`.

    Example:
        >>> readings(8, [Cut(2, 0, factor=2), Cut(2, 1)])
        [((4, 6),)]
        >>> readings(7, [Cut(3, 2, factor=2), Cut(2, 0)])  # FSDP2 holds nothing, torch's text row 6
        [(), ((6, 7),)]
    """
    written = strided(size, cuts)
    order = cut_order(cuts)
    if order is None:
        return [written]
    ordered = nested(size, [cuts[index] for index in order])
    return [ordered] if ordered == written else [ordered, written]


def combined(held: Sequence[Sequence[Interval]]) -> tuple[Boxes, list[View]]:
    """The boxes that a rank holds, and the slices of its local tensor that hold each.

    They are every combination of the dimensions' intervals, in the order of the local tensor.

    Example:
        >>> boxes, views = combined([[(0, 2), (5, 6)], [(4, 8)]])
        >>> boxes
        Boxes([0, 2) x [4, 8), [5, 6) x [4, 8))
        >>> views[1]
        (slice(2, 3, None), slice(0, 4, None))
    """
    local = [pairwise(accumulate((hi - lo for lo, hi in rows), initial=0)) for rows in held]
    views = [tuple(slice(*rows) for rows in choice) for choice in product(*local)]
    boxes = [([lo for lo, _ in rows], [hi - lo for lo, hi in rows]) for rows in product(*held)]
    return Boxes.of(boxes, rank=len(held)), views


def _cut_in_turn(
    size: int, cuts: Sequence[Cut], wanted: Callable[[int, Cut], Iterable[Interval]]
) -> tuple[Interval, ...]:
    """The rows left; ``wanted`` says for a number of rows which positions one cut keeps."""
    held: tuple[Interval, ...] = ((0, size),) if size else ()
    for cut in cuts:
        held = tuple(_joined(_rows(held, wanted(length(held), cut))))
    return held


def _rows(held: Sequence[Interval], wanted: Iterable[Interval]) -> Iterator[Interval]:
    """Intervals of positions within the rows held, as intervals of the rows themselves.

    Both ascend, so that one walk is enough.
    """
    rows = iter(held)
    lo, hi = next(rows, (0, 0))
    first = 0  # the position of row `lo`
    for start, stop in wanted:
        while start < stop:
            if start - first >= hi - lo:
                first += hi - lo
                lo, hi = next(rows)
                continue
            taken = min(stop - first, hi - lo)
            yield lo + start - first, lo + taken
            start = first + taken


def _joined(intervals: Iterator[Interval]) -> list[Interval]:
    """The same rows with neighbours that touch made one."""
    joined: list[Interval] = []
    for lo, hi in intervals:
        if joined and joined[-1][1] == lo:
            lo = joined.pop()[0]
        joined.append((lo, hi))
    return joined
