"""Handing verified chunks to other ranks: those of a host through shared memory.

Each rank listens on a Unix socket; what it publishes lies in an anonymous shared segment of a few
slots, whose file descriptor it passes to each taker.

1. A taker connects, says its rank, gets the descriptor and maps it.
2. The publisher reads a chunk into a free slot, verifies it, and sends (chunk, slot) to each taker.
3. A taker copies what it wants out of the slot and answers with the slot's number; after the last
   answer the slot is free again.
4. Ranks of other hosts are sent what is in a slot (`xckpt.storage.host.far`); what they send comes
   into slots set apart for that, and is published as if it had been read.

Sockets carry no data, only these few bytes; a rank that dies closes them, so no rank waits for it.
A rank that hangs is given up, by its number, when an answer that it owes has not come for
`patience` seconds, or when its reads have made no progress for as long. On Linux the sockets have
no files; elsewhere the next exchange removes what was left.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from xckpt.core.plan.host_reads import SharedReads
from xckpt.errors import StorageError
from xckpt.storage.host.far import FarRanks
from xckpt.storage.host.greetings import accepted
from xckpt.storage.host.peer import Bytes, Peer, call, close_all, is_own, listen
from xckpt.storage.host.slots import Slots
from xckpt.storage.host.threads import Threads

RANK: Final = struct.Struct("<q")
"""What a taker says first."""
PATIENCE: Final = 1800.0
"""Seconds that a silent rank is waited for, unless the group of the load says otherwise."""


class Exchange:
    """One rank's end: publishes chunks to takers, and takes chunks from sources.

    Args:
        patience: seconds that a silent rank is waited for.
        far: the connections to other hosts, if chunks go between hosts.
    """

    def __init__(self, patience: float = PATIENCE, far: FarRanks | None = None) -> None:
        self._patience = patience
        self._far = far
        self._sockets: list[socket.socket] = []
        self._listener = self._socket()
        address, self._folder = listen(self._listener)
        self.address: Final = address
        self._owed: dict[int, deque[float]] = {}
        """Taker -> when the chunks were published that it has not yet answered."""
        self._threads = Threads(self.fail)
        self._takers: dict[int, Peer] = {}
        self._slots = Slots()
        self._on_failure: Callable[[BaseException], None] = lambda error: None

    def _socket(self) -> socket.socket:
        """A socket that `close` closes."""
        self._sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self._sockets[-1].settimeout(self._patience)
        return self._sockets[-1]

    def start(
        self,
        share: SharedReads,
        *,
        slot_bytes: int,
        budget: int,
        take: Callable[[int, Bytes], None],
        receive: Callable[[int, int, Bytes], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Meet the takers and begin to take from the sources, in threads.

        Args:
            share: what this rank publishes and expects.
            slot_bytes: the largest chunk that it publishes or sends, bytes.
            budget: bytes of shared memory that it may use.
            take: called with each chunk taken, ``(chunk number, its bytes)``.
            receive: called with each chunk that another host has sent, ``(chunk number, number of
                its slot, its bytes)``; it calls `publish` and `release`.
            on_failure: called when a peer is lost.
        """
        self._on_failure = on_failure
        for address, chunks in share.sources.items():
            source = Peer(share.ranks[address], self._socket(), self._patience)
            self._threads.start(self._take_from, source, address, set(chunks), share.rank, take)
        if share.own or share.receives:
            with self._slots.make(share, slot_bytes, budget) as file:
                self._meet(share, file.fileno())
            self._meet_far(share, receive)

    def _meet_far(self, share: SharedReads, receive: Callable[[int, int, Bytes], None]) -> None:
        """Begin to send to ranks of other hosts, and to receive from them."""
        if self._far is not None:
            self._far.start(share, self._threads.start)
            room = partial(self.slot, received=True)
            for sender in share.receives:
                self._threads.start(self._far.receive_from, share, sender, room, receive)

    def _meet(self, share: SharedReads, descriptor: int) -> None:
        """Accept every taker and pass it the segment. A call by a waiting rank names no rank."""
        missing, addresses = share.takers, share.addresses

        def calling(rank: int) -> None:
            call(addresses[rank], rank)

        greetings = accepted(self._listener, missing, self._patience, calling, RANK.size)
        for connection, greeting in greetings:
            self._sockets.append(connection)
            (rank,) = RANK.unpack(greeting)
            if rank not in missing or not is_own(connection):
                connection.close()  # it is none of the ranks
                continue
            # A peer that has closed its connection again stays missing.
            with contextlib.suppress(StorageError):
                taker = self._takers[rank] = Peer(rank, connection, self._patience)
                taker.send_slots(descriptor, self._slots.memory)
                self._owed[rank] = deque()
                self._threads.start(self._await_answers, taker, missing.pop(rank))

    def slot(self, size: int, *, received: bool = False) -> tuple[int, Bytes]:
        """A free slot, for what this rank reads or another host sends; see `Slots.take`.

        Raises:
            StorageError: a peer was lost; or whatever this rank itself has failed with.
        """
        return self._slots.take(size, received=received)

    def publish(
        self, chunk: int, slot: int, takers: Sequence[int], far: Sequence[int] = (), size: int = 0
    ) -> None:
        """Tell the takers that ``chunk`` is in ``slot``; the publisher, too, calls `release`.

        Args:
            chunk: its number.
            slot: number of the slot.
            takers: ranks of this host.
            far: ranks of other hosts, to which the first ``size`` bytes are sent.
            size: bytes.
        """
        self._slots.use(slot, len(takers) + len(far) + 1)
        for taker in takers:
            self._owed[taker].append(self._takers[taker].awake())
            self._takers[taker].send(chunk, slot)
        for rank in far:
            assert self._far is not None
            self._far.send(
                rank, (chunk, self._slots.memory[slot, :size], partial(self.release, slot))
            )

    def release(self, slot: int) -> None:
        """Count one user of a slot as done; with the last one the slot is free."""
        self._slots.release(slot)

    def finish(self) -> None:
        """Wait until everything expected was taken, here and by the others, or something failed.

        After a failure `close` ends the threads that wait for peers.

        Raises:
            StorageError: a peer was lost; or whatever this rank itself has failed with.
        """
        self._threads.wait()

    def fail(self, error: BaseException) -> None:
        """Stop waiting: this rank has failed, and slots that it holds will not be free again."""
        # First, because threads that wait for a slot fail too once they wake, and tell less.
        self._on_failure(error)
        self._threads.failed(error)
        self._slots.fail(error)

    def close(self) -> None:
        """Close every socket, so that no peer waits for this rank, and end delivering threads."""
        self._slots.fail(StorageError("the load has ended"))
        if self._far is not None:
            self._far.close()
        close_all(self._sockets)
        self._threads.join()
        self._slots.let_go()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _take_from(
        self,
        source: Peer,
        address: str,
        expected: set[int],
        rank: int,
        take: Callable[[int, Bytes], None],
    ) -> None:
        """Take chunks from the rank that listens at an address."""
        source.connect(address)
        source.send(rank)
        slots = source.receive_slots()
        while expected:
            chunk, slot = source.receive_chunk()
            if chunk not in expected or not 0 <= slot < len(slots):
                raise source.speaks_otherwise()
            expected.discard(chunk)
            take(chunk, slots[slot])
            source.send(slot)

    def _await_answers(self, taker: Peer, count: int) -> None:
        """Free the slots whose content a taker has taken."""
        owed = self._owed[taker.rank]
        for _ in range(count):
            (slot,) = taker.receive(1, since=partial(self._since, taker))
            if not owed or not self._slots.is_used(slot):
                raise taker.speaks_otherwise()
            owed.popleft()
            self.release(slot)

    def _since(self, taker: Peer) -> float:
        """Since when an answer is owed; a taker that owes none hears of this rank's progress."""
        owed = self._owed[taker.rank]
        if owed:
            return owed[0]
        taker.say_alive()
        return taker.awake()
