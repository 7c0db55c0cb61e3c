"""Which chunks are wanted, and which parts of each go where; pure, nothing is read here.

Boxes of arrays are split into their chunks. A chunk that several boxes meet is requested once, with
a part for each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from xckpt.core.geometry.box import Box
from xckpt.core.manifest.entries import ZarrArray
from xckpt.storage.chunks.chunk import Chunk, chunks_of


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a chunk that goes to one destination."""

    destination: int
    """The number of the destination."""
    box: Box | None
    """Which elements, counted from the chunk's first; None for all of it."""
    region: tuple[slice, ...]
    """Where they go in the destination; empty for all of it."""


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    """A chunk and everything that is wanted of it."""

    chunk: Chunk
    parts: list[Part] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the chunk's elements."""
        return self.chunk.nbytes


class ChunkRequests(dict[int, ChunkRequest]):
    """Requests by the number of the chunk's digest in the checkpoint.

    Example:
        >>> array = ZarrArray("w", 0, "int8", (0,), (9,), (4,))
        >>> requests = ChunkRequests()
        >>> requests.add(array, Box((4,), (5,)))
        0
        >>> [(n, str(request.chunk.box)) for n, request in requests.items()]
        [(1, '[4, 8)'), (2, '[8, 9)')]
        >>> requests.parts
        [2]
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[int] = []
        """For each destination, how many parts it gets."""

    def add(self, array: ZarrArray, box: Box) -> int:
        """Request a non-empty box of an array; returns the number of its destination."""
        destination = len(self.parts)
        count = 0
        for chunk in chunks_of(array, box):
            count += 1
            request = self.get(array.first + chunk.number)
            if request is None:
                request = self[array.first + chunk.number] = ChunkRequest(chunk)
            request.parts.append(_part(destination, box, chunk.box))
        self.parts.append(count)
        return destination

    @property
    def arrays(self) -> list[ZarrArray]:
        """The arrays that are read, each once."""
        return list(
            {request.chunk.array.path: request.chunk.array for request in self.values()}.values()
        )


def _part(destination: int, wanted: Box, chunk: Box) -> Part:
    """The part of a chunk that a box has; both are counted from the array's first element."""
    if wanted == chunk:
        return Part(destination, None, ())
    shared = wanted.meets(chunk)
    assert shared is not None
    whole = shared == chunk
    region = shared.slices(wanted.offsets)
    return Part(destination, None if whole else shared.relative_to(chunk.offsets), region)
