"""Parts and units, and what it costs to read and to write them.

A part is a box of one target tensor. A unit is some parts that are read, copied and written
together. What a unit reads of a source tensor is read once, so that a chunk is read twice only
where it lies across the border of two units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Protocol

from xckpt.convert.units.reads import SourceRead, source_reads
from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Box, Shape
from xckpt.mapping.spec import TensorSpec
from xckpt.mapping.strided_copy import StridedCopy, restrict

Chunks = Callable[[str], Shape]
"""Tensor name -> elements per dimension that are stored together."""


class Resolved(Protocol):
    """The part of a resolved mapping that units need."""

    @property
    def sources(self) -> Mapping[str, TensorSpec]:
        """The tensors that are read."""
        ...

    @property
    def targets(self) -> Mapping[str, TensorSpec]:
        """The tensors that are made."""
        ...

    def copies_into(self, name: str, box: Box) -> Sequence[StridedCopy]:
        """The copies that make up a box of a target."""
        ...


@dataclass(frozen=True, slots=True)
class TargetPart:
    """A box of a target tensor."""

    name: str
    box: Box


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """Parts that are made together."""

    parts: tuple[TargetPart, ...]
    target_bytes: int
    source_bytes: int

    @property
    def nbytes(self) -> int:
        """Memory that it takes to make it."""
        return self.target_bytes + self.source_bytes


class Costs:
    """What parts read and write, in bytes; remembers the copies of each target.

    Args:
        resolved: the mapping, resolved.
        source_chunks: what is read together, by source tensor.
        target_chunks: what must be written together, by target tensor; None for any box.
    """

    def __init__(
        self, resolved: Resolved, source_chunks: Chunks, target_chunks: Chunks | None
    ) -> None:
        self.resolved = resolved
        self.source_chunks = source_chunks
        self.target_chunks = target_chunks
        self._copies: dict[str, tuple[StridedCopy, ...]] = {}

    def whole(self, name: str) -> TargetPart:
        """All of a target."""
        return TargetPart(name, Box.whole(self.resolved.targets[name].shape))

    def copies(self, part: TargetPart) -> tuple[StridedCopy, ...]:
        """The copies that make up a part."""
        whole = self.whole(part.name)
        if part.name not in self._copies:
            self._copies[part.name] = tuple(self.resolved.copies_into(part.name, whole.box))
        copies = self._copies[part.name]
        return copies if part == whole else restrict(copies, part.box)

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

    def fetched(self, parts: Sequence[TargetPart]) -> int:
        """Bytes of the chunks that parts touch."""
        return sum(map(self._fetched, self.reads(parts)))

    def _fetched(self, read: SourceRead) -> int:
        spec, chunks = self.resolved.sources[read.name], self.source_chunks(read.name)
        lengths = (
            min(extent, ceil(end / chunk) * chunk) - offset // chunk * chunk
            for offset, end, chunk, extent in zip(
                read.box.offsets, read.box.ends, chunks, spec.shape, strict=True
            )
        )
        return prod(lengths) * self._item_size(read)

    def waste(self, units: Sequence[WorkUnit]) -> float:
        """Bytes fetched for each byte that is wanted."""
        fetched = wanted = 0
        for unit in units:
            for read in self.reads(unit.parts):
                fetched += self._fetched(read)
                wanted += sum(copy.elements for _, copy in read.copies) * self._item_size(read)
        return fetched / max(1, wanted)

    def _item_size(self, read: SourceRead) -> int:
        return item_size(self.resolved.sources[read.name].dtype)
