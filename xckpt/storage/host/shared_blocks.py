"""Parts of packs that a rank reads for others: many small chunks go between ranks as one block.

1. A chunk of a pack belongs to the block of `BLOCK_BYTES` in which it begins. `blocks_of` finds the
   blocks that this rank wants most of. Each has a number beyond those of all chunks, and goes the
   way that a chunk goes (`xckpt.core.plan.host_reads`).
2. The rank that reads a block for others asks for what it wants of it itself, in one request, and
   hands the bytes over as they are, behind the place where they begin.
3. Each rank verifies the chunks that it takes out of a block. What is not there, because the other
   rank did not want it or could not read it, this rank reads itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from xckpt.core.geometry.box import Int64s
from xckpt.core.manifest.packs import PackRange, runs
from xckpt.core.manifest.rules import count_chunks
from xckpt.core.plan.host_reads import SharedReads
from xckpt.errors import CorruptCheckpointError, XckptError
from xckpt.storage.chunks.chunk import ChunkSource
from xckpt.storage.chunks.range_reads import GAP_BYTES, RANGE_BYTES
from xckpt.storage.chunks.requests import UNPACKED, ChunkRequests
from xckpt.storage.chunks.window import ChunkWindow
from xckpt.storage.host.exchange import Exchange
from xckpt.storage.host.peer import Bytes
from xckpt.storage.packs.read_packs import PackedChunks, PackedRange, PackReads, packed_rows

BLOCK_BYTES: Final = RANGE_BYTES
"""Bytes of a pack in which the chunks of a block begin."""
CHUNK_BYTES: Final = 1 << 18
"""Longer chunks are in no block: they would not fit into the memory for one."""
BLOCKS: Final = 1 << 8
"""Blocks of a pack, at most; what lies behind them, in a pack of 1 GiB, is not shared."""
HANDED_OVER: Final = (
    "these bytes came by way of another rank, which verifies only what it wants itself: xckpt "
    "verify says whether they are damaged where they are stored"
)

_HEAD: Final = struct.Struct("<2q")
"""Before the bytes of a block: where they begin in the pack, and how many they are."""
SLOT_BYTES: Final = _HEAD.size + BLOCK_BYTES + CHUNK_BYTES
"""Memory for any block, bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class PackBlocks:
    """The blocks that a rank would share; chunks are in the order of their blocks and places."""

    rows: Int64s
    """The rows of the chunks among the requests, (n,)."""
    offsets: Int64s
    """Their first bytes in their packs, (n,)."""
    parts: dict[int, slice]
    """The number of each block, ascending -> its chunks among these."""
    packs: dict[int, int]
    """The number of each block -> its pack."""

    @property
    def numbers(self) -> Int64s:
        """The blocks' numbers, ascending."""
        return np.array([*self.parts], np.int64)

    def rows_of(self, numbers: Iterable[int]) -> Int64s:
        """The rows of the chunks of some blocks; numbers of others mean nothing."""
        parts = [self.rows[self.parts[number]] for number in numbers if number in self.parts]
        return np.concatenate([np.empty(0, np.int64), *parts])


NO_BLOCKS: Final = PackBlocks(np.empty(0, np.int64), np.empty(0, np.int64), {}, {})


def blocks_of(source: ChunkSource, requests: ChunkRequests) -> PackBlocks:
    """The blocks of which a rank wants at least half, from its first chunk to its last.

    Raises:
        CorruptCheckpointError: the file of digests or places was altered.
    """
    packed = np.flatnonzero(requests.places != UNPACKED)
    if not len(packed):
        return NO_BLOCKS
    source.integrity.prepare_ranges(*requests.ranges())
    nbytes = requests.nbytes[packed]

    def leaf(row: int) -> str:
        return requests.at(int(packed[row])).chunk.array.leaf

    about = requests.places[packed], nbytes, leaf
    pack, offset, found = source.integrity.places.columns(*about)
    block = offset // BLOCK_BYTES
    suits = np.flatnonzero(found & (nbytes <= CHUNK_BYTES) & (block < BLOCKS))
    order = suits[np.lexsort((offset[suits], block[suits], pack[suits]))]
    first = count_chunks(source.manifest)
    numbers, starts = np.unique((first + pack * BLOCKS + block)[order], return_index=True)
    if not len(numbers):
        return NO_BLOCKS
    wanted = np.add.reduceat(nbytes[order], starts)
    reach = np.maximum.reduceat((offset + nbytes)[order], starts) - offset[order][starts]
    most, stops = 2 * wanted >= reach, np.append(starts[1:], len(order))
    slices = map(slice, starts[most].tolist(), stops[most].tolist())
    parts = dict(zip(numbers[most].tolist(), slices, strict=True))
    packs = {number: int(pack[order[part.start]]) for number, part in parts.items()}
    return PackBlocks(packed[order], offset[order], parts, packs)


class SharedBlocks:
    """The blocks that go between ranks.

    Args:
        window: takes the chunks.
        requests: what this rank wants.
        blocks: those that this rank would share.
        exchange: to and from the other ranks.
        share: what this rank reads for others, and what they read for it.
    """

    def __init__(
        self,
        window: ChunkWindow,
        requests: ChunkRequests,
        blocks: PackBlocks,
        exchange: Exchange,
        share: SharedReads,
    ) -> None:
        self._window, self._blocks = window, blocks
        self._exchange, self._share = exchange, share
        self._wanted: PackedChunks = packed_rows(window, requests, blocks.rows)
        self._taken = PackReads(window, self._wanted)

    def __contains__(self, number: int) -> bool:
        return number in self._blocks.parts

    def read(self, numbers: Iterable[int]) -> None:
        """Begin to read blocks for this rank and for others."""
        places = self._window.source.integrity.places
        for number in numbers:
            members = self._members(number)
            stop = int((members.offsets + self._wanted.nbytes[members.rows]).max())
            span = PackRange(int(members.offsets[0]), stop, members.rows)
            reads = _BlockReads(self._window, self._wanted, self, number)
            reads.begin(places.pack(self._blocks.packs[number]), span, members)

    def _members(self, number: int) -> PackedRange:
        part = self._blocks.parts[number]
        return PackedRange(np.arange(part.start, part.stop), self._blocks.offsets[part])

    def publish(self, number: int, start: int, content: bytes | memoryview) -> None:
        """Hand over the bytes of a block from ``start`` on; none if they could not be read."""
        try:
            slot, memory = self._exchange.slot(_HEAD.size + len(content))
            memory[: _HEAD.size] = np.frombuffer(_HEAD.pack(start, len(content)), np.uint8)
            memory[_HEAD.size :] = np.frombuffer(content, np.uint8)
            takers, far = self._share.publish.get(number, ()), self._share.sends.get(number, ())
            self._exchange.publish(number, slot, takers, far, len(memory))
            self._exchange.release(slot)
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Have the other ranks stop waiting for this one."""
        self._exchange.fail(error)

    def receive(self, number: int, slot: int, memory: Bytes) -> None:
        """Take what another host has sent, and hand it to the others of this one."""
        self._exchange.publish(number, slot, self._share.publish.get(number, ()))
        self.take(number, memory)
        self._exchange.release(slot)

    def take(self, number: int, memory: Bytes) -> None:
        """Verify and land the chunks of a block that another rank has read; read the others."""
        start, size = _HEAD.unpack(memory[: _HEAD.size].tobytes())
        content = memory[_HEAD.size :][: max(0, size)].data
        rows, offsets = self._members(number)
        ends = offsets + self._wanted.nbytes[rows]
        there = (offsets >= start) & (ends <= start + len(content))
        if there.any():
            try:
                self._taken.take(content, start, PackedRange(rows[there], offsets[there]))
            except CorruptCheckpointError as error:
                error.add_note(HANDED_OVER)
                raise
        key = self._window.source.integrity.places.pack(self._blocks.packs[number])
        rows, offsets = rows[~there], offsets[~there]
        about = offsets, self._wanted.nbytes[rows]
        for each in runs(*about, gap=GAP_BYTES, most=RANGE_BYTES):
            members = PackedRange(rows[each.members], offsets[each.members])
            self._taken.read_now(key, each, members)


class _BlockReads(PackReads):
    """Reads one block, for this rank and for others."""

    def __init__(
        self, window: ChunkWindow, wanted: PackedChunks, shared: SharedBlocks, number: int
    ) -> None:
        super().__init__(window, wanted)
        self._shared, self._number = shared, number

    def take(self, content: bytes | memoryview, start: int, members: PackedRange) -> None:
        """Hand the bytes over, and land this rank's chunks."""
        self._shared.publish(self._number, start, content)
        super().take(content, start, members)

    def read_alone(self, members: PackedRange) -> None:
        """Hand nothing over: each rank finds out by itself which chunk is damaged."""
        self._shared.publish(self._number, 0, b"")
        super().read_alone(members)

    def refuse(self, error: XckptError) -> None:
        """Take the error of a chunk."""
        self._shared.fail(error)
        super().refuse(error)
