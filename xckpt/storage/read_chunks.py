"""Carrying out one rank's reads: every chunk once, straight to where it is wanted if possible.

1. `requests_of` splits all read items into chunks: which parts of which chunks go where.
2. `PlannedDestinations` asks the planner for an item's destination when its first chunk comes, and
   commits the item when its last part has landed.
3. `read_items` reads all chunks through one `ChunkWindow`. With an `Exchange`, chunks that other
   ranks of the host want too are read into shared memory by one rank and delivered by each.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from xckpt.core.adapter import Adapters
from xckpt.core.dtypes import dtype_name, numpy_dtype
from xckpt.core.geometry.box import Box
from xckpt.core.plan.host_reads import SharedReads
from xckpt.core.plan.items import ReadItem
from xckpt.core.plan.load import LoadPlanner
from xckpt.core.plan.wanted import Countdown
from xckpt.errors import PlanError
from xckpt.options import LoadOptions
from xckpt.storage.budget import ProgressCounter
from xckpt.storage.chunks.chunk import ChunkSource, allocate
from xckpt.storage.chunks.window import ChunkRequests, ChunkWindow
from xckpt.storage.host_exchange import Exchange
from xckpt.storage.location import storage_errors


def requests_of(source: ChunkSource, items: Sequence[ReadItem]) -> ChunkRequests:
    """The chunks that items read; destination ``n`` is that of item ``n``."""
    requests = ChunkRequests()
    for item in items:
        array = source.array(item.storage_index.fqn, item.storage_index.index)
        requests.add(array, Box(item.storage_offsets, item.lengths))
    return requests


@dataclass(slots=True)
class _Destination:
    """Where an item's elements go."""

    item: ReadItem
    dtype: str
    """The element type of what is read."""
    missing: Countdown
    """How many parts, or elements, are still to land."""
    resolved: object = None
    """What the planner gave for it."""
    memory: NDArray[np.generic] | None = None
    copied: bool = False
    """Whether `memory` is scratch memory that is copied to `resolved` in the end."""


class PlannedDestinations:
    """Destinations that a planner resolves, and that are committed when all of each has landed.

    They are numbered as they are added. Calls of the other methods from several threads are fine.
    """

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner = planner
        self._all: list[_Destination] = []
        self._lock = threading.Lock()

    def add(self, item: ReadItem, dtype: str, missing: int) -> None:
        """Add an item's destination.

        Args:
            item: the read item.
            dtype: the element type of what is read.
            missing: how much is to come, in the unit that `landed` counts.
        """
        self._all.append(_Destination(item, dtype, Countdown(missing)))

    def memory(self, number: int) -> NDArray[np.generic]:
        """An item's destination as host memory, resolved once.

        Raises:
            PlanError: the planner gave something of other sizes.
            LeafTooLargeError: there is no memory.
        """
        destination = self._all[number]
        with self._lock:
            if destination.memory is None:
                destination.resolved = self._planner.resolve_tensor(destination.item)
                destination.memory = _host_memory(destination, self._planner.adapters)
            return destination.memory

    def is_scratch(self, number: int) -> bool:
        """Whether a resolved destination is memory that is copied to where it goes in the end."""
        return self._all[number].copied

    def landed(self, number: int, count: int = 1) -> bool:
        """Count what has come; with the last of it the item is committed, and this is True."""
        destination = self._all[number]
        if destination.missing.land(count):
            return False
        memory, resolved = destination.memory, destination.resolved
        assert memory is not None
        if destination.copied:
            self._planner.adapters.copy_into(resolved, memory)
        self._planner.commit_tensor(destination.item, resolved)
        destination.memory = destination.resolved = None
        return True


def _host_memory(destination: _Destination, adapters: Adapters) -> NDArray[np.generic]:
    item = destination.item
    memory = adapters.writable_numpy(destination.resolved)
    destination.copied = memory is None
    if memory is None:
        memory = allocate(item.lengths, numpy_dtype(destination.dtype), item.dest_index.fqn)
    if memory.shape != tuple(item.lengths) or dtype_name(memory.dtype) is None:
        raise PlanError(
            f"{item.dest_index.fqn}: resolve_tensor must return {item.lengths} elements, got "
            f"{memory.dtype} of shape {memory.shape}"
        )
    return memory


@dataclass(frozen=True, slots=True)
class _SharedChunks:
    """The chunks that go between the ranks of this host."""

    source: ChunkSource
    requests: ChunkRequests
    window: ChunkWindow
    exchange: Exchange

    def start(self, share: SharedReads, budget: int) -> None:
        """Begin to publish and to take, in threads."""
        sizes = [self.requests[number].nbytes for number in share.publish]
        with storage_errors(self.source.home):
            self.exchange.start(
                share,
                slot_bytes=max(sizes, default=0),
                budget=budget,
                take=self.take,
                on_failure=self.window.pool.fail,
            )
        for number, takers in share.publish.items():
            self.window.pool.submit(partial(self.publish, number, takers))

    def publish(self, number: int, takers: Sequence[int]) -> None:
        """Read a chunk into shared memory, for this rank and for others."""
        request = self.requests[number]
        slot, memory = self.exchange.slot(request.nbytes)
        data = memory.view(request.chunk.dtype).reshape(request.chunk.box.sizes)
        try:
            self.source.read(request.chunk, data)
            self.exchange.publish(number, slot, takers)
            self.window.deliver(request, data)
            self.window.landed(request)
        except BaseException as error:
            self.exchange.fail(error)
            raise
        self.exchange.let_go(slot)

    def take(self, number: int, memory: NDArray[np.uint8]) -> None:
        """Copy what is wanted out of a chunk that another rank has read and verified."""
        request = self.requests.get(number)
        if request is not None:
            content = memory[: request.nbytes].view(request.chunk.dtype)
            self.window.deliver(request, content.reshape(request.chunk.box.sizes))
            self.window.landed(request)


def read_items(
    source: ChunkSource,
    items: Sequence[ReadItem],
    requests: ChunkRequests,
    planner: LoadPlanner,
    options: LoadOptions,
    share: SharedReads,
    exchange: Exchange | None,
) -> None:
    """Read the chunks of items; those that other ranks publish come through the exchange.

    After a failure nothing is written any more, so that the targets can be loaded from elsewhere.

    Raises:
        CorruptCheckpointError: a chunk or zarr.json is not what was saved.
        StorageError: the storage refused, or another rank of this host was lost.
    """
    destinations = PlannedDestinations(planner)
    for item, parts in zip(items, requests.parts, strict=True):
        array = source.array(item.storage_index.fqn, item.storage_index.index)
        destinations.add(item, array.dtype, parts)
    total = sum(request.nbytes for request in requests.values())
    elsewhere = set(share.publish).union(*share.sources.values())
    with ChunkWindow(
        source,
        destinations.memory,
        destinations.landed,
        threads=options.threads,
        budget=options.memory_bytes,
        progress=ProgressCounter(total, options.progress),
    ) as window:
        if exchange is not None:
            _SharedChunks(source, requests, window, exchange).start(share, options.memory_bytes)
        own = [request for number, request in requests.items() if number not in elsewhere]
        window.read(own, requests.arrays)
    if exchange is not None:
        exchange.finish()
