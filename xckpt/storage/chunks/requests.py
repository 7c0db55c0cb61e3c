"""Which chunks are to be read, and where their parts go.

`chunks_of` lists the chunks of an array. `ChunkRequests` splits boxes of arrays into chunks. A
chunk that several boxes meet is requested once, with a part for each. It holds columns: a
`ChunkRequest` is made when its chunk is about to be read. How many there are is known before they
are listed, and limited by the memory of the options: a manifest of a few bytes can claim billions.
"""

from __future__ import annotations

import functools
from array import array as array_of
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import msgspec
import numpy as np

from xckpt.core.dtypes import item_size, numpy_dtype
from xckpt.core.geometry.box import Box, Int64s
from xckpt.core.geometry.cell_blocks import cell_at, cell_blocks, count_met
from xckpt.core.geometry.grid import ZarrArray, cells
from xckpt.core.manifest.memory import DESTINATION_BYTES, REQUEST_BYTES
from xckpt.core.manifest.stored_arrays import StoredArrays
from xckpt.core.text.shown import readable_bytes
from xckpt.errors import LeafTooLargeError
from xckpt.storage.budget import share_of

READ_BYTES = 1 << 14
"""Memory of a chunk in flight, without its elements: it limits the number of reads of very small
chunks."""

FEWEST_CHUNKS = 1 << 16
"""This many can always be requested."""
FEWEST_BYTES = 1 << 26
"""The list of chunks and destinations may always take this."""

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


def chunks_of(array: ZarrArray) -> Iterator[Chunk]:
    """The chunks of an array, in C order."""
    if array.shape == array.chunk:  # as of most leaves
        yield Chunk(array, 0, Box.whole(array.shape))
    elif array.count:
        for block in cell_blocks(Box.whole(array.shape), array.chunk, ENUMERATED):
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


NO_LEAF = -1
"""In place of a leaf's number: the destination wants something else."""

ONE_PIECE = -2
"""In place of a leaf's number: the destination wants all of a piece of one chunk."""

UNPACKED = -1
"""In place of a place: the chunk lies in no pack."""


class _Rows:
    """Chunks of destinations, as they are added: a row for each."""

    def __init__(self) -> None:
        self.count, self._ones = 0, array_of("q")
        self._columns: list[Sequence[Int64s]] = []

    def add_one(self, *row: int) -> None:
        self.count += 1
        self._ones.extend(row)

    def add(self, number: Int64s, nbytes: Int64s, place: Int64s, destination: Int64s) -> None:
        self.count += len(number)
        self._columns.append((number, nbytes, place, destination))

    def columns(self) -> list[Int64s]:
        """All rows, in the order of the chunks and of the destinations of each."""
        ones = np.frombuffer(self._ones, np.int64).reshape(-1, 4).T
        columns = [np.concatenate(each) for each in zip(ones, *self._columns, strict=True)]
        order = np.argsort(columns[0], kind="stable")
        self._ones, self._columns = array_of("q"), []
        return [column[order] for column in columns]


class ChunkRequests(Mapping[int, ChunkRequest]):
    """Requests by the number of the chunk's digest in the checkpoint; made when asked for.

    Args:
        memory_bytes: what the host may take for the load.
        host_ranks: how many ranks share that.
        stored: the arrays of the checkpoint, for `add_whole`.

    Example:
        >>> array = ZarrArray("w", 0, "int8", (0,), (9,), (4,))
        >>> requests = ChunkRequests()
        >>> requests.add(array, Box((4,), (5,)))
        >>> [(n, str(request.chunk.box)) for n, request in requests.items()]
        [(1, '[4, 8)'), (2, '[8, 9)')]
        >>> requests.nbytes.tolist(), requests.parts.tolist()
        ([4, 1], [2])
    """

    def __init__(
        self,
        memory_bytes: int = FEWEST_CHUNKS * REQUEST_BYTES,
        host_ranks: int = 1,
        stored: StoredArrays | None = None,
    ) -> None:
        self._memory_bytes, self._host_ranks, self._stored = memory_bytes, host_ranks, stored
        self._rows = _Rows()
        self._boxes: dict[int, tuple[ZarrArray, Box]] = {}
        """What destinations want, except those that want a leaf of one chunk."""
        self._leaves: list[int] = []
        """The number of such a leaf for each destination; `NO_LEAF` or `ONE_PIECE` for others."""

    def add(self, array: ZarrArray, box: Box) -> None:
        """Request a non-empty box of an array for the next destination.

        Raises:
            LeafTooLargeError: the list of the chunks in the box would not fit the memory.
        """
        one = array.shape == array.chunk or array.count == 1  # as most leaves are
        count = self._rows.count + (1 if one else count_met(box, array.chunk))
        taken = count * REQUEST_BYTES + len(self._leaves) * DESTINATION_BYTES
        if taken > max(FEWEST_BYTES, self._memory_bytes):
            raise LeafTooLargeError(
                f"{array.leaf or 'the root'}: {box} lies in chunks of {array.chunk}: the list of "
                f"{count:,} chunks takes {readable_bytes(taken)}, more than memory_bytes "
                f"({readable_bytes(self._memory_bytes)}); raise LoadOptions(memory_bytes=), or "
                "load less at a time"
            )
        destination = len(self._leaves)
        self._leaves.append(ONE_PIECE if one and box.sizes == array.shape else NO_LEAF)
        self._boxes[destination] = array, box
        width = item_size(array.dtype)
        if one:
            self._rows.add_one(array.first, prod(array.shape) * width, _place(array), destination)
            return
        for block in cell_blocks(box, array.chunk, ENUMERATED):
            numbers, boxes = cells(block.offsets, block.ends, array.shape, array.chunk)
            place = numbers * 0 + UNPACKED if array.place is None else numbers + array.place
            self._rows.add(
                array.first + numbers,
                boxes.elements * width,
                place,
                np.full(len(numbers), destination),
            )

    def add_whole(self, leaf: int) -> None:
        """Request all of a stored leaf of one chunk, by its number, for the next destination."""
        self._leaves.append(leaf)

    @functools.cached_property
    def _whole(self) -> tuple[Int64s, Int64s]:
        """The destinations that want a leaf of one chunk, and its number."""
        leaves = np.array(self._leaves, np.int64)
        destinations = np.flatnonzero(leaves >= 0)
        return destinations, leaves[destinations]

    def _of_leaves(self) -> tuple[Int64s, Int64s, Int64s]:
        """Number, bytes and place of the chunk of each leaf that is wanted as a whole."""
        stored, leaves = self._stored, self._whole[1]
        if stored is None:
            return leaves, leaves, leaves
        places = np.where(stored.is_packed, stored.place, UNPACKED)
        return stored.first[leaves], stored.nbytes[leaves], places[leaves]

    @functools.cached_property
    def _columns(self) -> tuple[Int64s, Int64s, Int64s, Int64s, Int64s]:
        """Number, bytes and place of each chunk, its first row, and the destination of each row."""
        self._rows.add(*self._of_leaves(), self._whole[0])
        number, nbytes, place, destination = self._rows.columns()
        first = np.flatnonzero(np.diff(number, prepend=-1))
        return number[first], nbytes[first], place[first], first, destination

    @property
    def numbers(self) -> Int64s:
        """The chunks' numbers, ascending, (n,)."""
        return self._columns[0]

    @property
    def nbytes(self) -> Int64s:
        """Bytes of the elements of each, (n,)."""
        return self._columns[1]

    @property
    def held(self) -> Int64s:
        """Bytes that each takes while it is in flight, (n,)."""
        return self.nbytes + READ_BYTES

    @property
    def places(self) -> Int64s:
        """The number of the place of each, (n,), or `UNPACKED`."""
        return self._columns[2]

    @property
    def parts(self) -> Int64s:
        """How many chunks each destination has parts of, (destinations,)."""
        return np.bincount(self._columns[4], minlength=len(self._leaves))

    @functools.cached_property
    def alone(self) -> Int64s:
        """The destination of each chunk that goes there as a whole, and nowhere else; else -1."""
        first, destination = self._columns[3:]
        alone = np.diff(first, append=len(destination)) == 1
        to = destination[first]
        return np.where(alone & (np.array(self._leaves, np.int64)[to] != NO_LEAF), to, -1)

    def dtype(self, destination: int) -> np.dtype[np.generic]:
        """The element type of what a destination wants."""
        known = self._boxes.get(destination)
        if known is not None:
            return numpy_dtype(known[0].dtype)
        assert self._stored is not None
        return numpy_dtype(self._stored.dtype(self._leaves[destination]))

    def at(self, row: int) -> ChunkRequest:
        """The request for the chunk of a row of the columns."""
        number, first, destination = (self._columns[n].data for n in (0, 3, 4))  # Python's ints
        array, wanted = self.wanted(destination[first[row]])
        own = number[row] - array.first
        whole = wanted.sizes == array.shape == array.chunk  # as most are
        box = wanted if whole else cell_at(own, array.shape, array.chunk)
        parts = [_part(destination[first[row]], wanted, box)]
        stop = first[row + 1] if row + 1 < len(first) else len(destination)
        others = destination[first[row] + 1 : stop]
        parts += [_part(each, self.wanted(each)[1], box) for each in others]
        return ChunkRequest(Chunk(array, own, box), parts)

    def wanted(self, destination: int) -> tuple[ZarrArray, Box]:
        """What a destination wants: an array, and a box of it."""
        known = self._boxes.get(destination)
        if known is not None:
            return known
        assert self._stored is not None
        (array,) = self._stored.at(self._leaves[destination])
        return array, Box.whole(array.shape)

    def __getitem__(self, number: int) -> ChunkRequest:
        row = int(np.searchsorted(self.numbers, number))
        if row == len(self) or self.numbers[row] != number:
            raise KeyError(number)
        return self.at(row)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers.tolist())

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def budget(self) -> int:
        """What is left of this rank's share of the memory for the elements of chunks, bytes."""
        taken = self._rows.count * REQUEST_BYTES + len(self._leaves) * DESTINATION_BYTES
        return share_of(self._memory_bytes, self._host_ranks, taken)

    @property
    def unpacked(self) -> Iterator[ZarrArray]:
        """The arrays that are read and are not packed, each once."""
        number, _, place, first, destination = self._columns
        rows = np.flatnonzero(place == UNPACKED)
        behind = 0
        for chunk, wanted in zip(number[rows].data, destination[first[rows]].data, strict=True):
            if chunk >= behind:
                array, _ = self.wanted(wanted)
                behind = array.first + array.count
                yield array

    def ranges(self) -> tuple[Int64s, Int64s, Int64s]:
        """The first digest, number of chunks and first place of each array that is read."""
        added = {array.first: array for array, _ in self._boxes.values()}.values()
        numbers, _, places = self._of_leaves()
        about = [(each.first, each.count, _place(each)) for each in added]
        other = np.array(about, np.int64).reshape(-1, 3)
        return (
            np.concatenate([numbers, other[:, 0]]),
            np.concatenate([np.ones_like(numbers), other[:, 1]]),
            np.concatenate([places, other[:, 2]]),
        )


def _place(array: ZarrArray) -> int:
    return UNPACKED if array.place is None else array.place


def _part(destination: int, wanted: Box, chunk: Box) -> Part:
    """The part of a chunk that a box has; both are counted from the array's first element."""
    if wanted is chunk or wanted == chunk:
        return Part(destination, None, ())
    if wanted.holds(chunk):
        return Part(destination, None, chunk.slices(wanted.offsets))
    shared = wanted.meets(chunk)
    assert shared is not None
    region = shared.slices(wanted.offsets)
    return Part(destination, shared.relative_to(chunk.offsets), region)
