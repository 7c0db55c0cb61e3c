"""The chunks that a rank reads for others, and those that others read for it.

1. A chunk that other ranks want too is read into a slot of memory that they share
   (`xckpt.storage.host.exchange`), and this rank copies the part that it wants.
2. The place of a chunk in a zarr shard of a bucket is known without the shard's index, so that it
   is one request (`xckpt.storage.host.shared_shards`).
3. A chunk that another rank has read comes in such memory, verified; one from another host is
   verified here.
4. Chunks of packs go together, in blocks (`xckpt.storage.host.shared_blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from xckpt.core.plan.host_reads import SharedReads
from xckpt.storage.array import digest_bytes
from xckpt.storage.chunks.chunk import ChunkSource
from xckpt.storage.chunks.plain_files import are_plain
from xckpt.storage.chunks.requests import ChunkRequest, ChunkRequests
from xckpt.storage.chunks.window import ChunkWindow
from xckpt.storage.host.exchange import Exchange
from xckpt.storage.host.shared_blocks import SLOT_BYTES, SharedBlocks
from xckpt.storage.location import storage_errors


@dataclass(frozen=True, slots=True)
class SharedChunks:
    """The chunks that go between ranks."""

    source: ChunkSource
    requests: ChunkRequests
    window: ChunkWindow
    exchange: Exchange
    share: SharedReads
    blocks: SharedBlocks

    def start(self, budget: int) -> None:
        """Begin to publish and to take, in threads."""
        share, blocks = self.share, [number for number in self.share.own if number in self.blocks]
        own = [self.requests[number] for number in share.own if number not in self.blocks]
        sizes = [
            SLOT_BYTES if number in self.blocks else self.requests[number].nbytes
            for number in (*share.own, *share.received)
        ]
        with storage_errors(self.source.home):
            self.exchange.start(
                share,
                slot_bytes=max(sizes, default=0),
                budget=budget,
                take=self.take,
                receive=self.receive,
                on_failure=self.window.pool.fail,
            )
        self.blocks.read(blocks)
        sharded = [request for request in own if self._is_sharded(request)]
        if sharded:
            from xckpt.storage.host.shared_shards import SharedShards

            SharedShards(self.window, self.publish_read, self.exchange.fail).read(sharded)
        for request in own:
            if not self._is_sharded(request):
                self.window.pool.submit(partial(self.publish, request))

    def _is_sharded(self, request: ChunkRequest) -> bool:
        """Whether a chunk lies in a zarr shard of a bucket, as its elements and nothing else."""
        in_bucket = self.source.root.driver != "file" and request.chunk.array.shard is not None
        return in_bucket and are_plain(self.source.manifest.codecs)

    def publish(self, request: ChunkRequest) -> None:
        """Read a chunk into shared memory, for this rank and for others."""
        try:
            slot, memory = self.exchange.slot(request.nbytes)
            self.source.read(request.chunk, _elements(request, memory))
            self._hand_over(request, slot, memory)
        except BaseException as error:
            self.exchange.fail(error)
            raise

    def publish_read(self, request: ChunkRequest, data: NDArray[np.generic]) -> None:
        """Hand a chunk over that was read and verified."""
        slot, memory = self.exchange.slot(request.nbytes)
        _elements(request, memory)[...] = data
        self._hand_over(request, slot, memory)

    def receive(self, number: int, slot: int, memory: NDArray[np.uint8]) -> None:
        """Verify a chunk that another host has sent, for this rank and for others."""
        if number in self.blocks:
            self.blocks.receive(number, slot, memory)
            return
        request, chunk = self.requests[number], self.requests[number].chunk
        if digest_bytes(memory.data) != self.source.integrity.digests.of(chunk.array, chunk.number):
            raise self.source.damage(chunk, "another host sent bytes that were not saved")
        self._hand_over(request, slot, memory)

    def _hand_over(self, request: ChunkRequest, slot: int, memory: NDArray[np.uint8]) -> None:
        """Publish the chunk in a slot, and copy the part that this rank wants."""
        number = request.chunk.array.first + request.chunk.number
        takers, far = self.share.publish.get(number, ()), self.share.sends.get(number, ())
        self.exchange.publish(number, slot, takers, far, len(memory))
        self.window.deliver(request, _elements(request, memory))
        self.window.landed(request)
        self.exchange.release(slot)

    def take(self, number: int, memory: NDArray[np.uint8]) -> None:
        """Copy the wanted part of a chunk that another rank has read and verified."""
        if number in self.blocks:
            self.blocks.take(number, memory)
            return
        request = self.requests.get(number)
        if request is not None:
            self.window.deliver(request, _elements(request, memory[: request.nbytes]))
            self.window.landed(request)


def _elements(request: ChunkRequest, memory: NDArray[np.uint8]) -> NDArray[np.generic]:
    """The elements of a chunk that memory holds."""
    return memory.view(request.chunk.dtype).reshape(request.chunk.box.sizes)
