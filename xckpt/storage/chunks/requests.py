"""Which chunks are to be read, and where their parts go.

`chunks_of` lists the chunks that a box meets. `ChunkRequests` splits boxes of arrays into chunks. A
chunk that several boxes meet is requested once, with a part for each. How many there are is known
before they are listed, and limited by the memory of the options: a manifest of a few bytes can
claim billions.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from xckpt.core.dtypes import item_size, numpy_dtype
from xckpt.core.geometry.box import Box
from xckpt.core.geometry.cell_blocks import cell_blocks, count_met
from xckpt.core.geometry.grid import ZarrArray, cells
from xckpt.core.text.shown import readable_bytes
from xckpt.errors import LeafTooLargeError
from xckpt.storage.budget import share_of

REQUEST_BYTES = 1 << 10
"""Memory that a chunk takes which is to be read, without its elements: its boxes, digest, parts."""

READ_BYTES = 1 << 14
"""Memory of a chunk in flight, without its elements: few bytes are no reason for many reads."""

FEWEST_CHUNKS = 1 << 16
"""So many can always be requested."""


ENUMERATED = 1 << 16
"""Chunks of an array that are listed at a time."""


class Chunk(msgspec.Struct, frozen=True):
    """One chunk of a zarr array."""

    array: ZarrArray
    number: int
    """Its number in the array, C order."""
    box: Box
    """Its elements that are inside the array, counted from the array's first."""

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The element type."""
        return numpy_dtype(self.array.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.box.elements * item_size(self.array.dtype)


def chunks_of(array: ZarrArray, box: Box | None = None) -> Iterator[Chunk]:
    """The chunks that a non-empty box of an array meets; by default all of its chunks."""
    if array.shape == array.chunk:  # as of most leaves
        yield Chunk(array, 0, Box.whole(array.shape))
    elif array.count:
        box = Box.whole(array.shape) if box is None else box
        for block in cell_blocks(box, array.chunk, ENUMERATED):
            numbers, boxes = cells(block.offsets, block.ends, array.shape, array.chunk)
            for number, cell in zip(numbers.tolist(), boxes, strict=True):
                yield Chunk(array, number, cell)


class Part(msgspec.Struct, frozen=True):
    """A part of a chunk that goes to one destination."""

    destination: int
    """The number of the destination."""
    box: Box | None
    """Which elements, counted from the chunk's first; None for all of it."""
    region: tuple[slice, ...]
    """Where they go in the destination; empty for all of it."""


class ChunkRequest(msgspec.Struct, frozen=True):
    """A chunk and everything that is wanted of it."""

    chunk: Chunk
    parts: list[Part] = msgspec.field(default_factory=list[Part])

    @property
    def nbytes(self) -> int:
        """Bytes of the chunk's elements."""
        return self.chunk.nbytes

    @property
    def held(self) -> int:
        """Bytes that it takes while it is in flight."""
        return self.nbytes + READ_BYTES


class ChunkRequests(dict[int, ChunkRequest]):
    """Requests by the number of the chunk's digest in the checkpoint.

    Example:
        >>> array = ZarrArray("w", 0, "int8", (0,), (9,), (4,))
        >>> requests = ChunkRequests()
        >>> requests.add(array, Box((4,), (5,)))
        >>> [(n, str(request.chunk.box)) for n, request in requests.items()]
        [(1, '[4, 8)'), (2, '[8, 9)')]
        >>> [parts for array, parts in requests.destinations]
        [2]
    """

    def __init__(
        self, memory_bytes: int = FEWEST_CHUNKS * REQUEST_BYTES, host_ranks: int = 1
    ) -> None:
        super().__init__()
        self._memory_bytes, self._host_ranks = memory_bytes, host_ranks
        self.destinations: list[tuple[ZarrArray, int]] = []
        """For each destination, the array that it is read from, and how many parts it gets."""

    def add(self, array: ZarrArray, box: Box) -> None:
        """Request a non-empty box of an array for the next destination.

        Raises:
            LeafTooLargeError: so many chunks are within the box that the list of them has no room.
        """
        one = array.shape == array.chunk or array.count == 1  # as most leaves are
        count = len(self) + (1 if one else count_met(box, array.chunk))
        if count > max(FEWEST_CHUNKS, self._memory_bytes // REQUEST_BYTES):
            raise LeafTooLargeError(
                f"{array.leaf or 'the root'}: {box} lies in chunks of {array.chunk}: the list of "
                f"{count:,} chunks takes {readable_bytes(count * REQUEST_BYTES)}, more than "
                f"memory_bytes ({readable_bytes(self._memory_bytes)}); raise "
                "LoadOptions(memory_bytes=), or load less at a time"
            )
        chunks = list(chunks_of(array, box))
        for chunk in chunks:
            number = array.first + chunk.number
            request = self.get(number) or self.setdefault(number, ChunkRequest(chunk))
            request.parts.append(_part(len(self.destinations), box, chunk.box))
        self.destinations.append((array, len(chunks)))

    @property
    def budget(self) -> int:
        """What is over of this rank's share of the memory for the elements of chunks, bytes."""
        return share_of(self._memory_bytes, self._host_ranks, len(self) * REQUEST_BYTES)

    @property
    def arrays(self) -> list[ZarrArray]:
        """The arrays that are read, each once."""
        # A chunk has one array, and an array that has chunks a first digest of its own.
        by_first = {request.chunk.array.first: request.chunk.array for request in self.values()}
        return list(by_first.values())


def _part(destination: int, wanted: Box, chunk: Box) -> Part:
    """The part of a chunk that a box has; both are counted from the array's first element."""
    if wanted == chunk:
        return Part(destination, None, ())
    shared = wanted.meets(chunk)
    assert shared is not None
    whole = shared == chunk
    region = shared.slices(wanted.offsets)
    return Part(destination, None if whole else shared.relative_to(chunk.offsets), region)
