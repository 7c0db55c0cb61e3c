"""Reading packed chunks: those that lie close together in one request.

1. The chunks that are wanted are put in order by their places (`xckpt.storage.packs.places`).
2. Ranges of a pack (`xckpt.core.manifest.packs.runs`) are asked for, within the budget; threads
   wait for them.
3. Each chunk of a range is verified, and its elements are handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from xckpt.core.manifest.packs import PackRange, runs
from xckpt.errors import CorruptCheckpointError, XckptError
from xckpt.storage.array import digest_bytes
from xckpt.storage.budget import Pool
from xckpt.storage.chunks.chunk import ChunkSource, allocate
from xckpt.storage.chunks.digests import many
from xckpt.storage.chunks.requests import Chunk, ChunkRequest
from xckpt.storage.location import answer, open_store

RANGE_BYTES = 1 << 22
"""What is read at a time."""

GAP_BYTES = 1 << 16
"""What is read in vain rather than asked for in two requests."""


@dataclass(frozen=True, slots=True)
class PackReads:
    """Reads packed chunks in the threads of a pool.

    Args:
        source: the chunks; the digests and places of their arrays are fetched already.
        pool: its threads.
        reserve: takes bytes of the pool's budget, and waits for them.
        land: takes a request and its verified elements; called from several threads.
        refuse: takes the error of a chunk.
    """

    source: ChunkSource
    pool: Pool
    reserve: Callable[[int], None]
    land: Callable[[ChunkRequest, NDArray[np.generic]], None]
    refuse: Callable[[XckptError], None]

    def read(self, requests: Iterable[ChunkRequest]) -> None:
        """Begin to read chunks, within the pool's budget."""
        packs: dict[str, list[tuple[int, ChunkRequest]]] = {}
        places, wanted = self.source.integrity.places, list(requests)
        chunks = [request.chunk for request in wanted]
        numbers = [places.first(chunk.array) + chunk.number for chunk in chunks]
        known = places.places(np.array(numbers, np.int64))
        for request, place in zip(wanted, known, strict=True):
            try:
                chunk = request.chunk
                place = place or places.place(chunk.array, chunk.number)
            except XckptError as error:
                self.refuse(error)
                continue
            packs.setdefault(place.pack, []).append((place.offset, request))
        for key, placed in packs.items():
            offsets = [offset for offset, _ in placed]
            lengths = [request.nbytes for _, request in placed]
            for each in runs(offsets, lengths, gap=GAP_BYTES, most=RANGE_BYTES):
                members = [placed[number] for number in each.members]
                self._begin(key, each, members)

    def _begin(
        self, key: str, each: PackRange, members: Sequence[tuple[int, ChunkRequest]]
    ) -> None:
        """Ask for a range of a pack, and have a thread wait for it."""
        size = each.stop - each.start
        self.reserve(size)
        if self.pool.failed:
            return
        store = open_store(self.source.root)
        asked = store.read(key, byte_range=slice(each.start, each.stop))
        task = partial(self._read, asked, each, members)
        if self.pool.single:
            try:
                task()
            finally:
                self.pool.release(size)
        else:
            self.pool.submit(task, size, reserved=True)

    def _read(
        self,
        asked: ts.Future[ts.KvStore.ReadResult],
        each: PackRange,
        members: Sequence[tuple[int, ChunkRequest]],
    ) -> None:
        """Wait for a range of a pack, and hand over its chunks."""
        try:
            content = self._content(asked, members[0][1].chunk)
        except CorruptCheckpointError:
            for _, request in members:  # some of them may be whole
                self._read_alone(request)
            return
        except XckptError as error:
            self.refuse(error)
            return
        digests = self._digests(members)
        for number, (offset, request) in enumerate(members):
            chunk, low = request.chunk, offset - each.start
            elements = content[low : low + request.nbytes]
            try:
                self.source.verify(chunk, digest_bytes(elements), digests[number])
                data = np.frombuffer(elements, chunk.dtype).reshape(chunk.box.sizes)
                self.land(request, data)
            except XckptError as error:
                self.refuse(error)

    def _digests(self, members: Sequence[tuple[int, ChunkRequest]]) -> list[bytes | None]:
        """The digests of chunks; None for those that only `ChunkSource.verify` can find."""
        chunks = [request.chunk for _, request in members]
        numbers = [chunk.array.first + chunk.number for chunk in chunks]
        rows, found = many(self.source.integrity.digests, np.array(numbers, np.int64))
        content, size = rows.tobytes(), rows.shape[1]
        return [
            content[number * size : (number + 1) * size] if there else None
            for number, there in enumerate(found.tolist())
        ]

    def _content(self, asked: ts.Future[ts.KvStore.ReadResult], first: Chunk) -> bytes:
        """A range of a pack, unverified; ``first`` is the first chunk there.

        Raises:
            CorruptCheckpointError: the pack is missing or truncated.
            StorageError: the storage gave no answer.
        """
        try:
            read = answer(asked, self.source.root)
            if read.state != "value":
                raise ValueError("NOT_FOUND")
        except (OSError, ValueError, RuntimeError) as error:
            raise self.source.translated(first, error) from error
        return read.value

    def _read_alone(self, request: ChunkRequest) -> None:
        chunk = request.chunk
        try:
            data = allocate(chunk.box.sizes, chunk.dtype, chunk.array.leaf)
            self.source.read(chunk, data)
            self.land(request, data)
        except XckptError as error:
            self.refuse(error)
