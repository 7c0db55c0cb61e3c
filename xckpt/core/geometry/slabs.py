"""Large tensors a part at a time: boxes that are read one after the other in little memory.

1. `blocks` cuts a box of a stored array along its chunks, so that each chunk is read once.
2. `runs` cuts a box into parts that follow each other in C order, for callers that pass elements
   on as a stream. A chunk is read again for each run that meets it; runs begin where chunks begin,
   if a whole row of chunks fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product
from math import prod

from xckpt.core.geometry.box import Box, Shape


def blocks(box: Box, chunk: Sequence[int], most: int) -> Iterator[Box]:
    """Parts of a box that end where chunks do, in C order of their first elements.

    They grow from the last axis on, so that their rows are long.

    Args:
        box: what to cut, in elements of an array.
        chunk: the shape of the array's chunks, elements.
        most: elements of a part; a single chunk above that goes alone.

    Example:
        >>> [str(part) for part in blocks(Box.whole((5, 4)), (2, 2), 8)]
        ['[0, 2) x [0, 4)', '[2, 4) x [0, 4)', '[4, 5) x [0, 4)']
        >>> [str(part) for part in blocks(Box((1, 0), (5, 8)), (2, 8), 32)]
        ['[1, 4) x [0, 8)', '[4, 6) x [0, 8)']
    """
    if not box.elements:
        return
    sizes = [min(step, size) for step, size in zip(chunk, box.sizes, strict=True)]
    ranges: list[Iterable[tuple[int, int]]] = []
    for axis in reversed(range(len(sizes))):
        low, end, size = box.offsets[axis], box.ends[axis], box.sizes[axis]
        fits = prod(sizes) // sizes[axis] * size <= most
        step = end if fits else chunk[axis] * max(1, most // prod(sizes))
        sizes[axis] = min(size, step)
        ranges.append([*pairwise([low, *range(low - low % step + step, end, step), end])])
    for part in product(*reversed(ranges)):
        yield Box(tuple(low for low, _ in part), tuple(end - low for low, end in part))


def runs(box: Box, chunk: Shape, most: int) -> Iterator[Box]:
    """Parts of a box whose elements, one part after the other, are the box's in C order.

    Args:
        box: what to cut.
        chunk: the chunk's shape, elements: parts end where chunks do, if that is possible.
        most: elements of a part; at least one goes at a time.

    Example:
        >>> [str(part) for part in runs(Box((1, 0), (5, 4)), (2, 4), 12)]
        ['[1, 4) x [0, 4)', '[4, 6) x [0, 4)']
        >>> [str(part) for part in runs(Box((0, 0), (2, 4)), (2, 4), 3)]
        ['[0, 1) x [0, 3)', '[0, 1) x [3, 4)', '[1, 2) x [0, 3)', '[1, 2) x [3, 4)']
    """
    if not box.elements:
        return
    rank = len(box.sizes)
    axis = next((d for d in range(rank) if prod(box.sizes[d + 1 :]) <= most), rank - 1)
    if rank == 0:
        yield box
        return
    rows = max(1, most // prod(box.sizes[axis + 1 :]))
    outer = (range(low, high) for low, high in zip(box.offsets[:axis], box.ends, strict=False))
    for before in product(*outer):
        for low, count in _cuts(box.offsets[axis], box.ends[axis], chunk[axis], rows):
            offsets = (*before, low, *box.offsets[axis + 1 :])
            yield Box(offsets, (1,) * axis + (count, *box.sizes[axis + 1 :]))


def _cuts(low: int, end: int, chunk: int, rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most ``rows`` rows, as (first, count), that end where chunks do if they can."""
    while low < end:
        high = min(end, low + rows)
        aligned = high - high % chunk
        if high < end and aligned > low:
            high = aligned
        yield low, high - low
        low = high
