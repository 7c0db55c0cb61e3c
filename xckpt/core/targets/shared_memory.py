"""Finding targets of a load in place that share memory.

1. Each box of such a target says where its elements are: an `Extent`.
2. `overlapping` sorts the ranges of addresses in columns. Most loads end here: no ranges overlap.
3. `overlapping_pairs`: equal extents, as those of tied weights, overlap without further checks. For
   all others NumPy says exactly whether they share an element: interleaved views share none.
4. `agree` lays the stored elements of two of them over each other, as memory would hold them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xckpt.core.leaf import Extent

_EFFORT = 1 << 16
"""Steps that NumPy may take for a pair; a pair that is undecided by then counts as overlapping."""


@dataclass(frozen=True, slots=True)
class _Interface:
    """An extent, as NumPy asks for it; nothing is read there."""

    __array_interface__: dict[str, object]


def overlapping(low: Sequence[int], high: Sequence[int]) -> list[list[int]]:
    """The numbers of the ranges [low, high) that others meet, together with those.

    Example:
        >>> overlapping([0, 8, 4], [4, 12, 8]), overlapping([0, 8, 4, 20], [4, 12, 9, 30])
        ([], [[1, 2]])
    """
    lows, highs = np.array(low, np.int64), np.array(high, np.int64)
    order = np.argsort(lows, kind="stable")
    meets = lows[order][1:] < np.maximum.accumulate(highs[order])[:-1]
    if not meets.any():
        return []
    groups = np.split(order, np.flatnonzero(~meets) + 1)
    return [sorted(group.tolist()) for group in groups if len(group) > 1]


def overlapping_pairs(extents: Mapping[int, Extent]) -> Iterator[tuple[int, int]]:
    """Pairs of extents that have memory in common; of several that are equal, each with the first.

    Args:
        extents: by number; none is empty.

    Example:
        >>> whole = Extent(800, (8,), (4,), 4)
        >>> even, odd = Extent(800, (4,), (8,), 4), Extent(804, (4,), (8,), 4)
        >>> list(overlapping_pairs({0: even, 1: odd}))
        []
        >>> list(overlapping_pairs({0: even, 1: odd, 2: whole, 3: even}))
        [(0, 3), (0, 2), (1, 2)]
    """
    first: dict[Extent, int] = {}
    for number, extent in extents.items():
        if (same := first.setdefault(extent, number)) != number:
            yield same, number
    ranges = {number: extents[number].range() for number in first.values()}
    rest = sorted(ranges, key=ranges.__getitem__)
    for at, number in enumerate(rest):
        for other in rest[at + 1 :]:
            if ranges[other][0] >= ranges[number][1]:
                break
            if _share(extents[number], extents[other]):
                yield min(number, other), max(number, other)


def _share(one: Extent, other: Extent) -> bool:
    try:
        # NumPy's types know of two efforts only.
        return np.shares_memory(_view(one), _view(other), max_work=_EFFORT)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _view(extent: Extent) -> NDArray[np.generic]:
    """An array whose elements would be there."""
    about: dict[str, object] = {
        "version": 3,
        "shape": extent.shape,
        "strides": extent.strides,
        "typestr": f"|V{extent.item}",
        "data": (extent.start, False),
    }
    return np.asarray(_Interface(about))


def agree(
    one: Extent, elements: NDArray[np.generic], other: Extent, others: NDArray[np.generic]
) -> bool:
    """Whether memory can hold the elements of both extents: they are equal where both lie.

    Args:
        one: where the first lie.
        elements: the first, of the extent's shape.
        other: where the second lie.
        others: the second, of that extent's shape.

    Example:
        >>> one, other = Extent(0, (4,), (1,), 1), Extent(2, (4,), (1,), 1)
        >>> numbers = np.arange(6, dtype=np.int8)
        >>> agree(one, numbers[:4], other, numbers[2:]), agree(one, numbers[:4], other, numbers[:4])
        (True, False)
    """
    low = min(one.range()[0], other.range()[0])
    size = max(one.range()[1], other.range()[1]) - low
    memory, filled = np.zeros(size, np.uint8), np.zeros(size, np.bool_)
    _bytes_in(memory, one, low)[...] = _bytes_of(elements)
    _bytes_in(filled, one, low)[...] = True
    differs = _bytes_in(memory, other, low) != _bytes_of(others)
    return not (differs & _bytes_in(filled, other, low)).any()


def _bytes_in(memory: NDArray[np.generic], extent: Extent, low: int) -> NDArray[np.generic]:
    """The bytes of an extent's elements in memory that begins at the address ``low``."""
    shape, strides = (*extent.shape, extent.item), (*extent.strides, 1)
    return np.ndarray(shape, memory.dtype, memory.data, extent.start - low, strides)


def _bytes_of(elements: NDArray[np.generic]) -> NDArray[np.uint8]:
    """The bytes of each element, in a dimension behind the others."""
    flat = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
    return flat.reshape(*elements.shape, elements.dtype.itemsize)
