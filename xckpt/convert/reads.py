"""What is read of the sources: boxes around what copies take, cut along what is stored together.

1. `source_reads` puts the copies from one tensor into one box, if that has little else in it, and
   otherwise reads each copy's box apart.
2. `blocks` cuts a box along stored chunks, into whole ones as far as it has them whole.
3. `restrict_sources` leaves of copies what lies in a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Box
from xckpt.core.geometry.grid import cells
from xckpt.core.metadata import TensorStorageMetadata
from xckpt.core.plan.load_checks import stored_boxes
from xckpt.mapping.strided_copy import StridedCopy, restrict

__all__ = ["SourceRead", "blocks", "hull", "restrict_sources", "source_reads"]


DENSE = 2.0
"""A box is read whole if it has at most this many times the elements that are wanted of it."""

BLOCK_BYTES = 1 << 23
"""What is read at a time, bytes, of a stored tensor that has no chunks."""


@dataclass(frozen=True, slots=True)
class SourceRead:
    """A box that a unit reads of a source tensor."""

    name: str
    box: Box
    copies: tuple[tuple[int, StridedCopy], ...]
    """(number of the part, copy) of each copy that takes its elements there."""


def source_reads(copies: Iterable[tuple[int, StridedCopy]]) -> list[SourceRead]:
    """What to read for some copies: one box a source tensor, unless that is mostly in vain.

    Args:
        copies: (number of the part, copy); constants read nothing and are left out.

    Example:
        >>> halves = [StridedCopy("w", "ab"[i], (2,), (2 * i,), ((1,),), (0,), ((1,),))
        ...           for i in range(2)]
        >>> [(reading.name, reading.box.sizes) for reading in source_reads(enumerate(halves))]
        [('w', (4,))]
    """
    by_source: dict[str, list[tuple[int, StridedCopy]]] = {}
    for number, copy in copies:
        if copy.source:
            by_source.setdefault(copy.source, []).append((number, copy))
    found: list[SourceRead] = []
    for name, group in by_source.items():
        boxes = [copy.source_box for _, copy in group]
        around = hull(boxes)
        wanted = sum(copy.elements for _, copy in group)
        apart = sum(prod(box.sizes) for box in boxes)
        if prod(around.sizes) <= max(DENSE * wanted, apart):
            found.append(SourceRead(name, around, tuple(group)))
        else:
            found += _apart(name, group, boxes)
    return found


def _apart(
    name: str, group: Sequence[tuple[int, StridedCopy]], boxes: Sequence[Box]
) -> list[SourceRead]:
    """A reading for each distinct box."""
    shared: dict[Box, list[tuple[int, StridedCopy]]] = {}
    for entry, box in zip(group, boxes, strict=True):
        shared.setdefault(box, []).append(entry)
    return [SourceRead(name, box, tuple(entries)) for box, entries in shared.items()]


def hull(boxes: Sequence[Box]) -> Box:
    """The smallest box that holds some boxes; there is at least one."""
    low = tuple(map(min, zip(*(box.offsets for box in boxes), strict=True)))
    ends = (tuple(a + n for a, n in zip(box.offsets, box.sizes, strict=True)) for box in boxes)
    high = tuple(map(max, zip(*ends, strict=True)))
    return Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))


def restrict_sources(copies: Sequence[StridedCopy], box: Box) -> tuple[StridedCopy, ...]:
    """The copies of just those elements that lie in a box of the source."""
    return tuple(
        replace(_turned(part), arithmetic=copy.arithmetic)
        for copy in copies
        for part in restrict([_turned(replace(copy, arithmetic=()))], box)
    )


def _turned(copy: StridedCopy) -> StridedCopy:
    """A copy with its sides exchanged, whatever is computed on the way."""
    return replace(
        copy,
        source=copy.target,
        target=copy.source,
        source_offsets=copy.target_offsets,
        source_strides=copy.target_strides,
        target_offsets=copy.source_offsets,
        target_strides=copy.source_strides,
    )


def blocks(stored: TensorStorageMetadata, number: int, part: Box) -> Iterator[Box]:
    """A part of a stored array in blocks of whole chunks, as far as the part has them whole."""
    array = stored_boxes(stored)[number]
    item = item_size(stored.properties.dtype)
    block = [1] * len(array.sizes)
    if stored.grid is not None:
        block = [int(size) for size in stored.grid.chunks[number]]
    for axis in reversed(range(len(block))):
        room = max(1, BLOCK_BYTES // (prod(block) * item))
        block[axis] = min(max(1, array.sizes[axis]), block[axis] * room)
    low = _minus(part.offsets, array.offsets)
    high = tuple(a + n for a, n in zip(low, part.sizes, strict=True))
    for cell in cells(low, high, array.sizes, block)[1]:
        start = [max(a, b) for a, b in zip(cell.offsets, low, strict=True)]
        ends = zip(cell.offsets, cell.sizes, high, strict=True)
        stop = [min(a + n, b) for a, n, b in ends]
        offsets = tuple(a + o for a, o in zip(start, array.offsets, strict=True))
        yield Box(offsets, _minus(stop, start))


def _minus(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))
