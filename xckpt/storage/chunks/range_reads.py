"""Chunks that lie in one object with others: a range of it with several is read in one request.

1. `RangeReads.begin` asks for a range, within the budget of a window; a thread waits for it.
2. `RangeReads.take` verifies each chunk of the range, and hands its elements over.
3. Where the range is not what was expected, each chunk is read on its own: some may be whole, and
   an error names the chunk.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import tensorstore as ts

from xckpt.core.manifest.packs import PackRange
from xckpt.errors import CorruptCheckpointError, XckptError
from xckpt.storage.chunks.chunk import allocate
from xckpt.storage.chunks.requests import Chunk, ChunkRequest
from xckpt.storage.location import answer

if TYPE_CHECKING:
    from xckpt.storage.chunks.window import ChunkWindow

RANGE_BYTES = 1 << 22
"""What is read of a pack at a time."""

GAP_BYTES = 1 << 16
"""What is read in vain rather than asked for in two requests."""

Members = TypeVar("Members")
"""The chunks of a range."""


class RangeReads(abc.ABC, Generic[Members]):
    """Reads ranges of objects for a window.

    Args:
        window: takes the chunks. The digests of their arrays are fetched already.
    """

    def __init__(self, window: ChunkWindow) -> None:
        self.window = window

    @abc.abstractmethod
    def first(self, members: Members) -> Chunk:
        """The first chunk of a range."""

    @abc.abstractmethod
    def take(self, content: bytes, start: int, members: Members) -> None:
        """Verify the chunks of a range that was read from byte ``start`` on, and land them."""

    @abc.abstractmethod
    def read_alone(self, members: Members) -> None:
        """Read chunks one by one."""

    def begin(
        self, key: str, each: PackRange, members: Members, end: bytes = b"", least: int = 0
    ) -> None:
        """Ask for a range of an object, and have a thread wait for it.

        Args:
            key: of the object.
            each: which bytes.
            members: the chunks that lie there.
            end: what the range ends with.
            least: bytes that it takes of the budget at least.
        """
        window, size = self.window, max(least, each.stop - each.start)
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
        self, asked: ts.Future[ts.KvStore.ReadResult], start: int, members: Members, end: bytes
    ) -> None:
        """Wait for a range, and hand over its chunks."""
        try:
            content = self._content(asked, members)
            if not content.endswith(end):
                raise CorruptCheckpointError("the range does not end as it has to")
        except CorruptCheckpointError:
            self.read_alone(members)
        except XckptError as error:
            self.window.refuse(error)
        else:
            self.take(content, start, members)

    def _content(self, asked: ts.Future[ts.KvStore.ReadResult], members: Members) -> bytes:
        """A range, unverified.

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
            raise source.translated(self.first(members), error) from error
        return read.value

    def read_one(self, request: ChunkRequest) -> None:
        """Read a chunk by itself."""
        chunk = request.chunk
        try:
            data = allocate(chunk.box.sizes, chunk.dtype, chunk.array.leaf)
            self.window.source.read(chunk, data)
            self.window.land(request, data)
        except XckptError as error:
            self.window.refuse(error)


def read_together(window: ChunkWindow, requests: Sequence[ChunkRequest]) -> None:
    """Begin to read chunks that lie in packs and in zarr shards; most checkpoints have neither."""
    sharded = [each for each in requests if each.chunk.array.place is None]
    if sharded:
        from xckpt.storage.chunks.shards.reads import ShardReads

        ShardReads(window).read(sharded)
    if len(sharded) < len(requests):
        from xckpt.storage.packs.read_packs import read_listed

        read_listed(window, [each for each in requests if each.chunk.array.place is not None])
