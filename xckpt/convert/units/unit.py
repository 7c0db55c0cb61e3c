"""Parts and units, what they read, and what it costs to read and to write them.

1. A part is a box of one target tensor. A unit is some parts that are read, copied and written
   together.
2. `source_reads` says which boxes of the source a unit reads: one box for all copies from a tensor
   if little else is in it, and otherwise a box for each copy.
3. A unit reads each part of a source tensor once, so a chunk is read twice only if it lies across
   the border of two units. `Costs` counts the bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Box, Shape
from xckpt.mapping.resolve import ResolvedMapping
from xckpt.mapping.strided_copy import StridedCopy

DENSE = 2.0
"""Copies share one box if it has at most this many times the elements that they want."""

Chunks = Callable[[str], Shape]
"""Tensor name -> elements per dimension that are stored together."""


@dataclass(frozen=True, slots=True)
class TargetPart:
    """A box of a target tensor."""

    name: str
    box: Box


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """Parts that are made together.

    Example:
        >>> WorkUnit((), target_bytes=8, source_bytes=24).nbytes
        32
    """

    parts: tuple[TargetPart, ...]
    target_bytes: int
    source_bytes: int
    number: int = 0
    """Its place among all units of the conversion."""

    @property
    def nbytes(self) -> int:
        """Memory that it takes to make it."""
        return self.target_bytes + self.source_bytes


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
    by_source: defaultdict[str, list[tuple[int, StridedCopy]]] = defaultdict(list)
    for number, copy in copies:
        if not copy.is_constant:
            by_source[copy.source].append((number, copy))
    reads: list[SourceRead] = []
    for name, entries in by_source.items():
        by_box: defaultdict[Box, list[tuple[int, StridedCopy]]] = defaultdict(list)
        for number, copy in entries:
            by_box[copy.source_box].append((number, copy))
        around = hull(by_box)
        wanted = sum(copy.elements for _, copy in entries)
        apart = sum(box.elements * len(shared) for box, shared in by_box.items())
        together = around.elements <= max(DENSE * wanted, apart)
        boxes = {around: entries} if together else by_box
        reads += [SourceRead(name, box, tuple(shared)) for box, shared in boxes.items()]
    return reads


def hull(boxes: Collection[Box]) -> Box:
    """The smallest box that holds some boxes; there is at least one.

    Example:
        >>> hull([Box((0, 4), (2, 1)), Box((1, 0), (1, 2))])
        Box(offsets=(0, 0), sizes=(2, 5))
    """
    low = tuple(map(min, zip(*(box.offsets for box in boxes), strict=True)))
    ends = tuple(map(max, zip(*(box.ends for box in boxes), strict=True)))
    return Box(low, tuple(b - a for a, b in zip(low, ends, strict=True)))


@dataclass(frozen=True, slots=True)
class Costs:
    """What parts read and write, in bytes.

    Example:
        >>> from xckpt.convert.conversion import unchanged
        >>> from xckpt.mapping.spec import TensorSpec
        >>> resolved = unchanged({"w": TensorSpec((4, 8), "int8")})
        >>> costs = Costs(resolved, source_chunks=lambda name: (2, 8), target_chunks=None)
        >>> row = TargetPart("w", Box((1, 0), (1, 8)))
        >>> costs.nbytes(row), costs.fetched(costs.reads([row]))
        (8, 16)
    """

    resolved: ResolvedMapping
    source_chunks: Chunks
    """What is read together, by source tensor."""
    target_chunks: Chunks | None
    """What must be written together, by target tensor; None for any box."""

    def whole(self, name: str) -> TargetPart:
        """All of a target."""
        return TargetPart(name, Box.whole(self.resolved.targets[name].shape))

    def copies(self, part: TargetPart) -> tuple[StridedCopy, ...]:
        """The copies that make up a part."""
        return self.resolved.copies_into(part.name, part.box)

    def reads(self, parts: Sequence[TargetPart]) -> list[SourceRead]:
        """What parts read together."""
        return source_reads(
            (number, copy) for number, part in enumerate(parts) for copy in self.copies(part)
        )

    def target_chunk(self, name: str, axis: int) -> int:
        """Elements along an axis of a target that must be written together."""
        return self.target_chunks(name)[axis] if self.target_chunks else 1

    def nbytes(self, part: TargetPart) -> int:
        """Bytes of a part's elements."""
        return part.box.elements * item_size(self.resolved.targets[part.name].dtype)

    def unit(self, parts: Sequence[TargetPart]) -> WorkUnit:
        """The unit of some parts."""
        source_bytes = sum(read.box.elements * self._item_size(read) for read in self.reads(parts))
        return WorkUnit(tuple(parts), sum(map(self.nbytes, parts)), source_bytes)

    def fetched(self, reads: Iterable[SourceRead]) -> int:
        """Bytes of the chunks that reads touch, of each read by itself."""
        sources = self.resolved.sources
        return sum(
            read.box.whole_chunks(self.source_chunks(read.name), sources[read.name].shape).elements
            * self._item_size(read)
            for read in reads
        )

    def waste(self, units: Sequence[WorkUnit]) -> float:
        """Bytes fetched for each byte that is wanted."""
        reads = [read for unit in units for read in self.reads(unit.parts)]
        wanted = (
            copy.elements * self._item_size(read) for read in reads for _, copy in read.copies
        )
        return self.fetched(reads) / max(1, sum(wanted))

    def _item_size(self, read: SourceRead) -> int:
        return item_size(self.resolved.sources[read.name].dtype)
