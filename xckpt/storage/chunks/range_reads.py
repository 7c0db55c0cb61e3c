"""Chunks that lie in one object with others: a range of it with several is read in one request.

1. `RangeReads.begin` asks for a range, within the budget of a window; a thread waits for it.
2. Each chunk of the range is verified, and its elements are handed over.
3. Where the range is not what was expected, each chunk is read on its own: some may be whole, and
   an error names the chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from xckpt.core.geometry.box import Box
from xckpt.core.manifest.packs import PackRange
from xckpt.errors import CorruptCheckpointError, XckptError
from xckpt.storage.array import digest_array
from xckpt.storage.chunks.chunk import allocate
from xckpt.storage.chunks.digests import many
from xckpt.storage.chunks.requests import Chunk, ChunkRequest
from xckpt.storage.location import answer

if TYPE_CHECKING:
    from xckpt.storage.chunks.window import ChunkWindow

RANGE_BYTES = 1 << 22
"""What is read of a pack at a time."""

GAP_BYTES = 1 << 16
"""What is read in vain rather than asked for in two requests."""


class Placed(NamedTuple):
    """A chunk that is wanted, and where it lies in an object."""

    request: ChunkRequest
    offset: int


@dataclass(frozen=True, slots=True)
class RangeReads:
    """Reads ranges of objects for a window.

    Args:
        window: takes the chunks. The digests of their arrays are fetched already.
    """

    window: ChunkWindow

    def begin(self, key: str, each: PackRange, members: Sequence[Placed], end: bytes = b"") -> None:
        """Ask for a range of an object, and have a thread wait for it.

        Args:
            key: of the object.
            each: which bytes.
            members: the chunks that lie there.
            end: what the range ends with.
        """
        window, size = self.window, each.stop - each.start
        window.reserve(size)
        if window.pool.failed:
            return
        asked = window.source.store.read(key, byte_range=slice(each.start, each.stop))
        task = partial(self._read, asked, each.start, members, end)
        if window.pool.single:
            try:
                task()
            finally:
                window.pool.release(size)
        else:
            window.pool.submit(task, size, reserved=True)

    def _read(
        self,
        asked: ts.Future[ts.KvStore.ReadResult],
        start: int,
        members: Sequence[Placed],
        end: bytes,
    ) -> None:
        """Wait for a range, and hand over its chunks."""
        try:
            content = self._content(asked, members[0].request.chunk)
            if not content.endswith(end):
                raise CorruptCheckpointError("the range does not end as it has to")
        except CorruptCheckpointError:
            self.read_alone(members)
            return
        except XckptError as error:
            self.window.refuse(error)
            return
        for (request, offset), digest in zip(members, self._digests(members), strict=True):
            data = _elements(request.chunk, content, offset - start)
            try:
                self.window.source.verify(request.chunk, digest_array(data), digest)
                self.window.land(request, data)
            except XckptError as error:
                self.window.refuse(error)

    def _digests(self, members: Sequence[Placed]) -> list[bytes | None]:
        """The digests of chunks; None for those that only `ChunkSource.verify` can find."""
        chunks = [member.request.chunk for member in members]
        numbers = [chunk.array.first + chunk.number for chunk in chunks]
        rows, found = many(self.window.source.integrity.digests, np.array(numbers, np.int64))
        content, size = rows.tobytes(), rows.shape[1]
        return [
            content[number * size : (number + 1) * size] if there else None
            for number, there in enumerate(found.tolist())
        ]

    def _content(self, asked: ts.Future[ts.KvStore.ReadResult], first: Chunk) -> bytes:
        """A range, unverified; ``first`` is the first chunk there.

        Raises:
            CorruptCheckpointError: the object is missing or truncated.
            StorageError: the storage gave no answer.
        """
        source = self.window.source
        try:
            read = answer(asked, source.root)
            if read.state != "value":
                raise ValueError("NOT_FOUND")
        except (OSError, ValueError, RuntimeError) as error:
            raise source.translated(first, error) from error
        return read.value

    def read_alone(self, members: Sequence[Placed]) -> None:
        """Read chunks one by one."""
        for request, _ in members:
            chunk = request.chunk
            try:
                data = allocate(chunk.box.sizes, chunk.dtype, chunk.array.leaf)
                self.window.source.read(chunk, data)
                self.window.land(request, data)
            except XckptError as error:
                self.window.refuse(error)


def read_together(window: ChunkWindow, requests: Iterable[ChunkRequest]) -> None:
    """Begin to read chunks that lie in packs and in zarr shards; most checkpoints have neither."""
    packed, sharded = list[ChunkRequest](), list[ChunkRequest]()
    for request in requests:
        (sharded if request.chunk.array.place is None else packed).append(request)
    if sharded:
        from xckpt.storage.chunks.shards.reads import ShardReads

        ShardReads(window).read(sharded)
    if packed:
        from xckpt.storage.packs.read_packs import PackReads

        PackReads(window).read(packed)


def _elements(chunk: Chunk, content: bytes, start: int) -> NDArray[np.generic]:
    """A chunk's elements, from where its bytes begin; those of a shard are padded at its edges."""
    array, sizes = chunk.array, chunk.box.sizes
    stored = sizes if array.shard is None or array.place is not None else array.chunk
    data = np.frombuffer(content, chunk.dtype, prod(stored), start).reshape(stored)
    return data if stored == sizes else np.ascontiguousarray(data[Box.whole(sizes).slices()])
