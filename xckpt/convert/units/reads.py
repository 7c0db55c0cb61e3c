"""What is read of the sources: boxes around what copies take, cut along stored chunks.

1. `source_reads` reads one box for all copies from a tensor if little else is in it, and otherwise
   a box for each copy.
2. `blocks` cuts a box along stored chunks, into whole chunks as far as the box has them whole.
3. `restrict_sources` restricts copies to a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Box
from xckpt.core.geometry.grid import cells
from xckpt.core.metadata import TensorStorageMetadata
from xckpt.mapping.strided_copy import StridedCopy, restrict

DENSE = 2.0
"""Copies share one box if it has at most this many times the elements that they want."""

BLOCK_BYTES = 1 << 23
"""Bytes read at a time of a stored tensor that has no chunks, or small ones."""


@dataclass(frozen=True, slots=True)
class SourceRead:
    """A box that a unit reads of a source tensor."""

    name: str
    box: Box
    copies: tuple[tuple[int, StridedCopy], ...]
    """(number of the part, copy) of each copy that takes its elements there."""


def source_reads(copies: Iterable[tuple[int, StridedCopy]]) -> list[SourceRead]:
    """What to read for some copies: one box a source tensor, unless most of it is not wanted.

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
        apart = sum(box.elements for box in boxes)
        if around.elements <= max(DENSE * wanted, apart):
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
    ends = tuple(map(max, zip(*(box.ends for box in boxes), strict=True)))
    return Box(low, tuple(b - a for a, b in zip(low, ends, strict=True)))


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
    """A box of a stored tensor in blocks of whole chunks, as far as the box has them whole.

    Args:
        stored: the tensor.
        number: which of its arrays the box lies in.
        part: the box, in elements of the tensor.
    """
    array = stored.arrays[number]
    item = item_size(stored.properties.dtype)
    block = [1] * len(array.sizes)
    if stored.grid is not None:
        block = [int(size) for size in stored.grid.chunks[number]]
    for axis in reversed(range(len(block))):
        room = max(1, BLOCK_BYTES // (prod(block) * item))
        block[axis] = min(max(1, array.sizes[axis]), block[axis] * room)
    wanted = part.relative_to(array.offsets)
    for cell in cells(wanted.offsets, wanted.ends, array.sizes, block)[1]:
        inside = cell.meets(wanted)
        if inside is not None:
            yield inside.shifted(array.offsets)
