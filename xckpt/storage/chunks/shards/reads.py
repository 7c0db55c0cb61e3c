"""Reading chunks that lie in zarr shards: all that are wanted of a shard in one go.

1. Chunks are grouped by their shard.
2. A local shard is opened once, its index is checked once, and its chunks are read one behind
   another, straight to where they go or slab by slab.
3. In a bucket, chunks that lie close together are one request (`xckpt.storage.chunks.range_reads`):
   a shard that is wanted as a whole is read as a whole. Chunks are looked for where a writer of
   this package puts them; the digest of each says whether it is there. A range that reaches the
   last chunk includes the index, which must be the expected one. TensorStore, which goes by the
   index, reads all other shards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Box
from xckpt.core.geometry.shards.index import shard_entries
from xckpt.core.manifest.packs import PackRange, runs
from xckpt.errors import XckptError
from xckpt.storage.array import digest_array
from xckpt.storage.chunks.chunk import allocate
from xckpt.storage.chunks.plain_files import is_leading, slab_elements, stored_bytes
from xckpt.storage.chunks.range_reads import GAP_BYTES, RANGE_BYTES, RangeReads
from xckpt.storage.chunks.requests import Chunk, ChunkRequest
from xckpt.storage.chunks.shards.files import (
    ShardFile,
    sealed,
    shard_box,
    start_in_shard,
    unit_length,
)

SHARD_BYTES = 1 << 25
"""Bytes that are read of a shard in one request, if the budget is four times that."""


class Placed(NamedTuple):
    """A chunk that is wanted, and where it lies in its shard."""

    request: ChunkRequest
    offset: int


class ShardReads(RangeReads[Sequence[Placed]]):
    """Reads chunks of zarr shards for a window; the chunks consist of elements only."""

    def read(self, requests: Iterable[ChunkRequest]) -> None:
        """Begin to read chunks, within the window's budget."""
        shards: dict[str, list[ChunkRequest]] = {}
        for request in requests:
            key = request.chunk.array.key(request.chunk.box.offsets)
            shards.setdefault(key, []).append(request)
        local = self.window.source.root.driver == "file"
        for key, members in shards.items():
            if not self.window.pool.failed:
                self._begin_file(key, members) if local else self._begin_ranges(key, members)

    def _begin_ranges(self, key: str, requests: Sequence[ChunkRequest]) -> None:
        """Request the wanted chunks of a shard."""
        array, box = requests[0].chunk.array, requests[0].chunk.box
        part, nbytes = shard_box(array, box), stored_bytes(array)
        assert array.shard is not None
        entries = shard_entries(part.sizes, array.shard, array.chunk, item_size(array.dtype))
        index = sealed(entries)
        end = unit_length(array, part.sizes) - len(index)
        starts = [start_in_shard(entries, array, each.chunk.box, part, end) for each in requests]
        placed = [Placed(*each) for each in zip(requests, starts, strict=True)]
        most = max(RANGE_BYTES, min(SHARD_BYTES, self.window.pool.budget // 4))
        offsets = np.array(starts, np.int64)
        for each in runs(offsets, np.full_like(offsets, nbytes), gap=GAP_BYTES, most=most):
            members = [placed[number] for number in each.members.tolist()]
            if each.stop == end:
                whole = PackRange(each.start, end + len(index), each.members)
                self.begin(key, whole, members, index)
            else:
                self.begin(key, each, members)

    def first(self, members: Sequence[Placed]) -> Chunk:
        """The first chunk of a range."""
        return members[0].request.chunk

    def take(self, content: bytes | memoryview, start: int, members: Sequence[Placed]) -> None:
        """Verify the chunks of a range that was read from byte ``start`` on, and land them."""
        for request, offset in members:
            data = _elements(request.chunk, content, offset - start)
            try:
                self.window.source.verify(request.chunk, digest_array(data))
                self.land(request, data)
            except XckptError as error:
                self.refuse(error)

    def read_alone(self, members: Sequence[Placed]) -> None:
        """Read chunks one by one."""
        for request, _ in members:
            self.read_one(request)

    def _begin_file(self, key: str, requests: Sequence[ChunkRequest]) -> None:
        """Have a thread read what is wanted of a local shard, one chunk at a time."""
        window, size = self.window, max(request.held for request in requests)
        window.reserve(size)
        window.prepare(requests)
        task = partial(self._read_file, f"{window.source.root.path}/{key}", requests)
        window.pool.run(task, size)

    def _read_file(self, path: str, requests: Sequence[ChunkRequest]) -> None:
        """Read chunks of a local shard, in the order in which they lie there."""
        first = requests[0].chunk
        self.window.source.check_open()
        try:
            with self.window.source.file_errors(first):
                file = ShardFile(path, first.array, first.box)
        except XckptError:
            self.read_alone([Placed(request, 0) for request in requests])
            return
        with contextlib.closing(file):
            for request in requests:
                try:
                    self._read_chunk(file, request)
                except XckptError as error:
                    self.refuse(error)

    def _read_chunk(self, file: ShardFile, request: ChunkRequest) -> None:
        """Read a chunk of an open shard, verify it, and hand it over."""
        window, chunk = self.window, request.chunk
        with window.source.file_errors(chunk):
            file.go_to_chunk(chunk.box)
            if is_leading(chunk.box.sizes, chunk.array.chunk):
                data, digest = None, self._deliver(file, request)
            else:
                padded = allocate(chunk.array.chunk, chunk.dtype, chunk.array.leaf)
                file.fill(padded)
                data = np.ascontiguousarray(padded[Box.whole(chunk.box.sizes).slices()])
                digest = digest_array(data)
        window.source.verify(chunk, digest)
        if data is not None:
            window.deliver(request, data)
        window.landed(request)

    def _deliver(self, file: ShardFile, request: ChunkRequest) -> bytes:
        """Deliver a chunk, whose elements come next in the file; returns their digest."""
        chunk, into = request.chunk, self.window.direct_view(request)
        if into is not None:
            file.fill(into)
        else:
            elements = slab_elements(chunk.box.sizes, chunk.dtype.itemsize)
            memory = allocate((elements,), chunk.dtype, chunk.array.leaf)
            for at, slab in file.slabs(chunk.box.sizes, memory):
                self.window.deliver(request, slab, at)
        return file.digest()


def _elements(chunk: Chunk, content: bytes | memoryview, start: int) -> NDArray[np.generic]:
    """A chunk's elements, from where its bytes begin; they are padded at the array's edges."""
    sizes, stored = chunk.box.sizes, chunk.array.chunk
    data = np.frombuffer(content, chunk.dtype, prod(stored), start).reshape(stored)
    return data if stored == sizes else np.ascontiguousarray(data[Box.whole(sizes).slices()])
