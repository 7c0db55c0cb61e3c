"""Reading packed chunks: those that lie close together in one request.

1. The chunks that are wanted are put in order by their places (`xckpt.storage.packs.places`), in
   columns.
2. Ranges of a pack (`xckpt.core.manifest.packs.runs`) are asked for, within the budget
   (`xckpt.storage.chunks.range_reads`).
3. Each chunk of a range is verified, and its elements are handed over; by one thread at a time
   where the chunks are small.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Int64s
from xckpt.core.manifest.packs import runs
from xckpt.errors import XckptError
from xckpt.storage.array import digest_bytes
from xckpt.storage.chunks.range_reads import GAP_BYTES, RANGE_BYTES, RangeReads
from xckpt.storage.chunks.requests import Chunk, ChunkRequest, ChunkRequests

if TYPE_CHECKING:
    from xckpt.storage.chunks.window import ChunkWindow

FILE_BYTES = 1 << 20
"""What is read of a local pack at a time: its chunks are copied while they are in the cache."""

IN_TURN_BYTES = 1 << 18
"""Chunks of fewer bytes, on average, are taken by one thread at a time. Python does most of that
work: threads that wait for the interpreter at each chunk make it take up to twice as long."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedChunks:
    """Wanted packed chunks; their rows are numbered from 0."""

    numbers: Int64s
    """The numbers of their digests, (n,)."""
    places: Int64s
    """The numbers of their places, (n,)."""
    nbytes: Int64s
    """Bytes of their elements, (n,)."""
    request: Callable[[int], ChunkRequest]
    """Gives the request for the chunk of a row."""
    fill: Callable[[int, memoryview], bool]
    """Delivers the verified bytes of a row; False if it cannot."""


class PackedRange(NamedTuple):
    """Rows of packed chunks that lie in one range."""

    rows: Int64s
    offsets: Int64s
    """Their first bytes in the pack."""


class PackReads(RangeReads[PackedRange]):
    """Reads packed chunks for a window; their places are fetched already."""

    def __init__(self, window: ChunkWindow, wanted: PackedChunks) -> None:
        super().__init__(window)
        self._wanted = wanted
        self._in_turn = threading.Lock()

    def read(self) -> None:
        """Begin to read the chunks, within the window's budget."""
        places, wanted = self.window.source.integrity.places, self._wanted
        about = wanted.places, wanted.nbytes, lambda row: wanted.request(row).chunk.array.leaf
        try:
            pack, offset, found = places.columns(*about)
        except XckptError as error:
            self.refuse(error)
            return
        for row in np.flatnonzero(~found).tolist():
            self._look_up(row, pack, offset, found)
        most = FILE_BYTES if self.window.source.root.driver == "file" else RANGE_BYTES
        for each in np.unique(pack[found]).tolist():
            rows = np.flatnonzero(found & (pack == each))
            key, about = places.pack(each), (offset[rows], wanted.nbytes[rows])
            for part in runs(*about, gap=GAP_BYTES, most=most):
                members = rows[part.members]
                self.begin(key, part, PackedRange(members, offset[members]))

    def _look_up(self, row: int, pack: Int64s, offset: Int64s, found: NDArray[np.bool_]) -> None:
        """Look up a place that was not among those fetched together."""
        chunk = self._wanted.request(row).chunk
        places = self.window.source.integrity.places
        try:
            pack[row], offset[row] = places.of_chunk(chunk.array, chunk.number)
            found[row] = True
        except XckptError as error:
            self.refuse(error)

    def first(self, members: PackedRange) -> Chunk:
        """The first chunk of a range."""
        return self._wanted.request(int(members.rows[0])).chunk

    def take(self, content: bytes | memoryview, start: int, members: PackedRange) -> None:
        """Verify the chunks of a range that was read from byte ``start`` on, and land them."""
        rows, lows, view = members.rows, members.offsets - start, memoryview(content)
        nbytes = self._wanted.nbytes[rows]
        parts = [view[a:b] for a, b in np.stack([lows, lows + nbytes], axis=1).tolist()]
        with self._in_turn if nbytes.mean() < IN_TURN_BYTES else nullcontext():
            self._take(rows, parts)

    def _take(self, rows: Int64s, parts: Sequence[memoryview]) -> None:
        wanted, source = self._wanted, self.window.source
        digests = list(map(digest_bytes, parts))
        saved, there = source.integrity.digests.rows(wanted.numbers[rows])
        right = there.all() and b"".join(digests) == saved.tobytes()  # as most are
        if right:
            source.count(sum(map(len, parts)))
        for row, part, digest in zip(rows.tolist(), parts, digests, strict=True):
            try:
                if not right:
                    source.verify(wanted.request(row).chunk, digest)
                if not wanted.fill(row, part):
                    self._land(wanted.request(row), part)
            except XckptError as error:
                self.refuse(error)

    def _land(self, request: ChunkRequest, content: memoryview) -> None:
        chunk = request.chunk
        data = np.frombuffer(content, chunk.dtype).reshape(chunk.box.sizes)
        self.land(request, data)

    def read_alone(self, members: PackedRange) -> None:
        """Read chunks one by one."""
        for row in members.rows.tolist():
            self.read_one(self._wanted.request(row))


def packed_rows(window: ChunkWindow, requests: ChunkRequests, rows: Int64s) -> PackedChunks:
    """The packed chunks of some rows."""
    alone, wanted = requests.alone[rows].data, rows.data  # which make a number when it is asked for

    def fill(row: int, content: memoryview) -> bool:
        destination = alone[row]
        return destination >= 0 and window.fill(destination, content, requests.dtype(destination))

    columns = requests.numbers[rows], requests.places[rows], requests.nbytes[rows]
    return PackedChunks(*columns, lambda row: requests.at(wanted[row]), fill)


def read_rows(window: ChunkWindow, requests: ChunkRequests, rows: Int64s) -> None:
    """Begin to read the packed chunks of some rows."""
    PackReads(window, packed_rows(window, requests, rows)).read()


def read_listed(window: ChunkWindow, requests: Sequence[ChunkRequest]) -> None:
    """Begin to read packed chunks."""
    chunks = [each.chunk for each in requests]
    rows = [(each.array.first, each.array.place, each.number, each.nbytes) for each in chunks]
    first, place, number, nbytes = np.array(rows, np.int64).T
    columns = first + number, place + number, nbytes
    wanted = PackedChunks(*columns, requests.__getitem__, lambda row, content: False)
    PackReads(window, wanted).read()
