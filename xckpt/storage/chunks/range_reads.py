"""Chunks that share an object: a range of it with several chunks is read in one request.

1. `RangeReads.begin` asks for a range, within the budget of a window; a thread waits for it. The
   thread itself reads a range of a local file, into memory that the next range uses again.
2. `RangeReads.take` verifies each chunk of the range, and hands its elements over.
3. If the range is not as expected, each chunk is read on its own: some may be whole, and an error
   names the chunk.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from xckpt.core.manifest.packs import PackRange
from xckpt.errors import CorruptCheckpointError, XckptError
from xckpt.storage.chunks.chunk import allocate, open_range
from xckpt.storage.chunks.requests import Chunk, ChunkRequest
from xckpt.storage.location import Reading, answer

if TYPE_CHECKING:
    from xckpt.storage.chunks.window import ChunkWindow

RANGE_BYTES = 1 << 22
"""Bytes that are read of a pack at a time."""

GAP_BYTES = 1 << 16
"""Gap that is read along rather than making two requests, bytes."""

Members = TypeVar("Members")
"""The chunks of a range."""


class RangeReads(abc.ABC, Generic[Members]):
    """Reads ranges of objects for a window.

    Args:
        window: takes the chunks. The digests of their arrays are fetched already.
    """

    def __init__(self, window: ChunkWindow) -> None:
        self.window = window
        self._free: list[NDArray[np.uint8]] = []
        """Memory of ranges, used again: the process would keep it even if it were freed after
        each."""

    @abc.abstractmethod
    def first(self, members: Members) -> Chunk:
        """The first chunk of a range."""

    @abc.abstractmethod
    def take(self, content: bytes | memoryview, start: int, members: Members) -> None:
        """Verify the chunks of a range that was read from byte ``start`` on, and land them."""

    @abc.abstractmethod
    def read_alone(self, members: Members) -> None:
        """Read chunks one by one."""

    def land(self, request: ChunkRequest, data: NDArray[np.generic]) -> None:
        """Hand a verified chunk over."""
        self.window.deliver(request, data)
        self.window.landed(request)

    def refuse(self, error: XckptError) -> None:
        """Take the error of a chunk."""
        self.window.refuse(error)

    def begin(self, key: str, each: PackRange, members: Members, end: bytes = b"") -> None:
        """Ask for a range of an object, and have a thread wait for it.

        Args:
            key: of the object.
            each: which bytes.
            members: the chunks that lie there.
            end: the expected end of the range, in a bucket.
        """
        window, size = self.window, each.stop - each.start
        window.reserve(size)
        if window.pool.failed:
            return
        if window.source.root.driver == "file":
            window.pool.run(partial(self._read_local, key, each, members), size)
        else:
            asked = window.source.store.read(key, byte_range=slice(each.start, each.stop))
            finish = partial(self._read, asked, each.start, members, end)
            task = partial(window.pool.run, finish, size)
            if window.pool.single:  # it would wait for each before it asks for the next
                window.queue.append(task)
            else:
                task()

    def read_now(self, key: str, each: PackRange, members: Members) -> None:
        """Read a range in this thread, beside the budget; see `begin`."""
        if self.window.source.root.driver == "file":
            self._read_local(key, each, members)
        else:
            asked = self.window.source.store.read(key, byte_range=slice(each.start, each.stop))
            self._read(asked, each.start, members, b"")

    def _read(self, asked: Reading, start: int, members: Members, end: bytes) -> None:
        """Wait for a range, and hand over its chunks."""
        try:
            content = self._content(asked, members)
            if not content.endswith(end):
                raise CorruptCheckpointError("the range does not end as expected")
        except CorruptCheckpointError:
            self.read_alone(members)
        except XckptError as error:
            self.refuse(error)
        else:
            self.take(content, start, members)

    def _read_local(self, key: str, each: PackRange, members: Members) -> None:
        """Read a range of a local file, and hand over its chunks."""
        source, chunk, size = self.window.source, self.first(members), each.stop - each.start
        memory = np.empty(0, np.uint8)
        with suppress(IndexError):
            memory = self._free.pop()
        try:
            source.check_open()
            if len(memory) < size:
                memory = allocate((size,), np.dtype(np.uint8), chunk.array.leaf).view(np.uint8)
            with (
                source.file_errors(chunk),
                closing(open_range(source.root, key, *each[:2])) as file,
            ):
                file.fill(memory[:size])
        except CorruptCheckpointError:
            self.read_alone(members)
        except XckptError as error:
            self.refuse(error)
        else:
            self.take(memory[:size].data, each.start, members)
        self._free.append(memory)

    def _content(self, asked: Reading, members: Members) -> bytes:
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
            self.land(request, data)
        except XckptError as error:
            self.refuse(error)


def read_together(window: ChunkWindow, requests: Sequence[ChunkRequest]) -> None:
    """Begin to read chunks that lie in packs and in zarr shards; most checkpoints have neither."""
    sharded = [each for each in requests if each.chunk.array.place is None]
    if sharded:
        from xckpt.storage.chunks.shards.reads import ShardReads

        ShardReads(window).read(sharded)
    if len(sharded) < len(requests):
        from xckpt.storage.packs.read_packs import read_listed

        read_listed(window, [each for each in requests if each.chunk.array.place is not None])
