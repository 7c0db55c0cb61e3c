"""Carrying out one rank's reads: every chunk once, straight to where it is wanted if possible.

1. `ChunkWishes` splits all read items into chunks: which parts of which chunks does whom want.
2. A chunk that fills a contiguous part of one destination is read straight into it. Any other is
   read into scratch memory and copied to everyone who wants a part.
3. With an `Exchange`, chunks that other ranks of the host want too are read into shared memory by
   one rank and delivered by each.
4. All reads are begun in one thread. It waits for them too, verifies, delivers and commits, or has
   others do so where there are processors for it (`Pool.alone`). An item is committed when its last
   element has landed.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import dtype_name, numpy_dtype
from xckpt.core.geometry.box import Box
from xckpt.core.geometry.grid import cells
from xckpt.core.plan.host_reads import Publication, SharedReads
from xckpt.core.plan.items import ReadItem
from xckpt.core.plan.load import LoadPlanner
from xckpt.errors import PlanError
from xckpt.options import LoadOptions
from xckpt.storage.budget import Pool, ProgressCounter
from xckpt.storage.chunk import SMALL_BYTES, ArrayKey, ChunkSource, PendingRead, allocate
from xckpt.storage.errors import storage_errors
from xckpt.storage.host_exchange import Exchange

__all__ = ["ChunkReads", "ChunkWishes", "WantedChunk"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wish:
    """A part of a chunk that an item wants."""

    item: int
    """Number of the item."""
    source: tuple[slice, ...]
    """Where the part is in the chunk; empty for all of it."""
    destination: tuple[slice, ...]
    """Where it goes in the item's destination; empty for all of it."""
    elements: int


@dataclass(frozen=True, slots=True)
class WantedChunk:
    """A chunk and everything that is wanted of it."""

    array: ArrayKey
    number: int
    """Its number in the array, C order."""
    offsets: Shape
    """Its first element in the array."""
    sizes: Shape
    """Its elements inside the array."""
    dtype: np.dtype[np.generic]
    wishes: list[Wish]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.sizes) * self.dtype.itemsize


class ChunkWishes:
    """What a rank's items want, by chunk; chunks are numbered as their digests are."""

    def __init__(self, source: ChunkSource, items: Sequence[ReadItem]) -> None:
        self.items = items
        self.chunks: dict[int, WantedChunk] = {}
        for number, item in enumerate(items):
            self._add(source, number, item)

    def _add(self, source: ChunkSource, item_number: int, item: ReadItem) -> None:
        key = (item.storage_index.fqn, item.storage_index.index or 0)
        array = source.array(key)
        low = item.storage_offsets
        high = tuple(a + n for a, n in zip(low, item.lengths, strict=True))
        numbers, boxes = cells(low, high, array.shape, array.chunk)
        dtype = numpy_dtype(array.dtype)
        for number, cell in zip(numbers.tolist(), boxes, strict=True):
            wish = _wish(item_number, low, high, cell)
            chunk = self.chunks.get(array.first + number)
            if chunk is None:
                chunk = WantedChunk(key, number, cell.offsets, cell.sizes, dtype, [])
                self.chunks[array.first + number] = chunk
            chunk.wishes.append(wish)

    @property
    def arrays(self) -> list[ArrayKey]:
        """The arrays that are read."""
        return list(dict.fromkeys(chunk.array for chunk in self.chunks.values()))


def _wish(item: int, low: Shape, high: Shape, cell: Box) -> Wish:
    """What an item that wants ``[low, high)`` of an array wants of one of its chunks."""
    if low == cell.offsets and all(
        h - o == n for h, o, n in zip(high, low, cell.sizes, strict=True)
    ):
        return Wish(item, (), (), prod(cell.sizes))
    parts = [
        (max(a, o), min(b, o + n), o, a)
        for a, b, o, n in zip(low, high, cell.offsets, cell.sizes, strict=True)
    ]
    return Wish(
        item,
        tuple(slice(start - o, stop - o) for start, stop, o, _ in parts),
        tuple(slice(start - a, stop - a) for start, stop, _, a in parts),
        prod(stop - start for start, stop, _, _ in parts),
    )


@dataclass(slots=True)
class _Destination:
    """Where an item's elements go, resolved when its first chunk comes."""

    item: ReadItem
    missing: int
    resolved: object = None
    host: NDArray[np.generic] | None = None
    copied: bool = False
    """Whether `host` is not the destination's own memory, and to be copied there in the end."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """A chunk that is being read."""

    chunk: WantedChunk
    pending: PendingRead
    direct: bool
    """Whether it goes straight to its destination."""


class ChunkReads:
    """The reads of one rank."""

    def __init__(
        self, source: ChunkSource, wishes: ChunkWishes, planner: LoadPlanner, options: LoadOptions
    ) -> None:
        self.source = source
        self.chunks = wishes.chunks
        self.arrays = wishes.arrays
        self.planner = planner
        self.options = options
        self.destinations = [_Destination(item, prod(item.lengths)) for item in wishes.items]
        self.lock = threading.Lock()
        self._begun: deque[_Begun] = deque()
        self._under_way: dict[int, PendingRead] = {}
        total = sum(chunk.nbytes for chunk in self.chunks.values())
        self.progress = ProgressCounter(total, options.progress)

    def run(self, share: SharedReads, exchange: Exchange | None) -> None:
        """Read everything, in threads; chunks of other ranks come through the exchange.

        After a failure nothing is written any more: what is under way ends before it is raised, so
        that the targets can be loaded from elsewhere.
        """
        try:
            self._run(share, exchange)
        except BaseException:
            self._drain()
            raise

    def _run(self, share: SharedReads, exchange: Exchange | None) -> None:
        published = {publication.chunk for publication in share.publish}
        taken = set(share.taken) & set(self.chunks)
        with Pool(threads=self.options.threads, budget=self.options.memory_bytes) as pool:
            if exchange is not None:
                with storage_errors(self.source.home):
                    exchange.start(
                        share,
                        slot_bytes=max((self.chunks[n].nbytes for n in published), default=0),
                        budget=self.options.memory_bytes,
                        take=self._take,
                        on_failure=pool.fail,
                    )
                for publication in share.publish:
                    pool.submit(partial(self._publish, publication, exchange))
            own = [c for n, c in self.chunks.items() if n not in published and n not in taken]
            large = deque(chunk for chunk in own if chunk.nbytes > SMALL_BYTES)
            while large and pool.has_room(large[0].nbytes) and not pool.failed:
                self._submit(large.popleft(), pool)
            # Now that TensorStore is busy with large chunks.
            documents = self.source.request_documents(self.arrays)
            for chunk in own:
                if chunk.nbytes <= SMALL_BYTES and not pool.failed:
                    self._submit(chunk, pool)
            while large and not pool.failed:
                self._submit(large.popleft(), pool)
            while self._begun and not pool.failed:
                self._finish(self._begun.popleft(), pool)
            self.source.check(documents)
        if exchange is not None:
            exchange.finish()

    def _submit(self, chunk: WantedChunk, pool: Pool) -> None:
        """Start reading a chunk, within the budget; this thread or another will finish it."""
        while self._begun and not pool.has_room(chunk.nbytes):
            self._finish(self._begun.popleft(), pool)
        pool.reserve(chunk.nbytes)
        begun = self._begin(chunk)
        if chunk.nbytes <= SMALL_BYTES or pool.alone:
            self._begun.append(begun)
        else:
            pool.submit(partial(self._finish, begun, pool))

    def _begin(self, chunk: WantedChunk) -> _Begun:
        """Start reading a chunk, straight to its destination if possible."""
        direct = self._direct(chunk)
        into = allocate(chunk.sizes, chunk.dtype, chunk.array[0]) if direct is None else direct
        cell = (chunk.offsets, chunk.sizes)
        pending = self.source.begin(chunk.array, chunk.number, cell, into)
        with self.lock:
            self._under_way[id(pending)] = pending
        return _Begun(chunk, pending, direct is not None)

    def _drain(self) -> None:
        """Wait for reads that nobody will finish."""
        with self.lock:
            under_way = list(self._under_way.values())
        for pending in under_way:
            with contextlib.suppress(ValueError):
                pending.future.result()

    def _finish(self, begun: _Begun, pool: Pool) -> None:
        """Wait for a chunk, verify it, and take it to those who want it."""
        chunk = begun.chunk
        try:
            self.source.finish(begun.pending)
            if begun.direct:
                self._landed(chunk.wishes[0])
            else:
                self._deliver(chunk, begun.pending.into)
        finally:
            with self.lock:
                del self._under_way[id(begun.pending)]
            pool.release(chunk.nbytes)
        self.progress.add(chunk.nbytes)

    def _publish(self, publication: Publication, exchange: Exchange) -> None:
        """Read a chunk into shared memory, for this rank and for others."""
        chunk = self.chunks[publication.chunk]
        slot, memory = exchange.slot(chunk.nbytes)
        data = memory.view(chunk.dtype).reshape(chunk.sizes)
        try:
            self.source.read(chunk.array, chunk.number, (chunk.offsets, chunk.sizes), data)
            exchange.publish(publication.chunk, slot, publication.takers)
            self._deliver(chunk, data)
        except BaseException as error:
            exchange.fail(error)
            raise
        exchange.let_go(slot)
        self.progress.add(chunk.nbytes)

    def _take(self, number: int, memory: NDArray[np.uint8]) -> None:
        """Copy what is wanted out of a chunk that another rank has read and verified."""
        chunk = self.chunks.get(number)
        if chunk is not None:
            data = memory[: chunk.nbytes].view(chunk.dtype).reshape(chunk.sizes)
            self._deliver(chunk, data)
            self.progress.add(chunk.nbytes)

    def _deliver(self, chunk: WantedChunk, data: NDArray[np.generic]) -> None:
        for wish in chunk.wishes:
            host = self._host(wish.item)
            part = host[wish.destination] if wish.destination else host
            np.copyto(part, data[wish.source], casting="unsafe")
            self._landed(wish)

    def _direct(self, chunk: WantedChunk) -> NDArray[np.generic] | None:
        """The destination itself, if the chunk can be read straight into it."""
        wish = chunk.wishes[0]
        if len(chunk.wishes) != 1 or wish.elements != prod(chunk.sizes):
            return None
        host = self._host(wish.item)
        part = host[wish.destination] if wish.destination else host
        suits = part.flags.c_contiguous and part.flags.aligned and part.flags.writeable
        return part if suits and part.dtype == chunk.dtype else None

    def _host(self, number: int) -> NDArray[np.generic]:
        """An item's destination as host memory, resolved once."""
        destination = self.destinations[number]
        with self.lock:
            if destination.host is None:
                destination.resolved = self.planner.resolve_tensor(destination.item)
                destination.host = self._host_memory(destination)
            return destination.host

    def _host_memory(self, destination: _Destination) -> NDArray[np.generic]:
        item = destination.item
        host = self.planner.adapters.writable_numpy(destination.resolved)
        destination.copied = host is None
        if host is None:
            key = (item.storage_index.fqn, item.storage_index.index or 0)
            dtype = numpy_dtype(self.source.array(key).dtype)
            host = allocate(item.lengths, dtype, item.dest_index.fqn)
        if host.shape != tuple(item.lengths) or dtype_name(host.dtype) is None:
            raise PlanError(
                f"{item.dest_index.fqn}: resolve_tensor must return {item.lengths} elements, got "
                f"{host.dtype} of shape {host.shape}"
            )
        return host

    def _landed(self, wish: Wish) -> None:
        """Count what has arrived; commit the item with its last element."""
        destination = self.destinations[wish.item]
        with self.lock:
            destination.missing -= wish.elements
            done = destination.missing == 0
        if done:
            host, resolved = destination.host, destination.resolved
            assert host is not None
            if destination.copied:
                self.planner.adapters.copy_into(resolved, host)
            self.planner.commit_tensor(destination.item, resolved)
            destination.host = destination.resolved = None
