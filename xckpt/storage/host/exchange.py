"""Handing verified chunks to the other ranks of a host through shared memory.

Each rank listens on a Unix socket; what it publishes lies in an anonymous shared segment of a few
slots, whose file descriptor it passes to each taker.

1. A taker connects, says its rank, gets the descriptor and maps it.
2. The publisher reads a chunk into a free slot, verifies it, and sends (chunk, slot) to each taker.
3. A taker copies what it wants out of the slot and answers with the slot's number; after the last
   answer the slot is free again.

Sockets carry no data, only these few bytes; a rank that dies closes them, so no rank waits for it.
One that hangs is given up, by its number, when an answer that it owes has not come for `patience`
seconds. On Linux the sockets have no files; elsewhere the next exchange removes what was left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import LifoQueue
from typing import IO

import numpy as np

from xckpt.core.plan.host_reads import SharedReads
from xckpt.core.plan.wanted import Countdown
from xckpt.errors import StorageError
from xckpt.storage.host.peer import Bytes, Peer, call, is_own, listen, mapped, silent

_PATIENCE = 1.0
"""Seconds without a new taker before the missing ones are called."""

PATIENCE = 1800.0
"""Seconds that a silent rank is waited for, unless the group of the load says otherwise."""

_ALIGNMENT = 64
"""Bytes; enough for every dtype and every vector instruction."""


class Exchange:
    """One rank's end: publishes chunks to takers, and takes chunks from sources."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._sockets: list[socket.socket] = []
        self._listener = self._socket()
        self.address, self._folder = listen(self._listener)
        self._owed: dict[int, deque[float]] = {}
        """Taker -> when the chunks were published that it has not answered."""
        self._threads: list[threading.Thread] = []
        self._takers: dict[int, Peer] = {}
        self._slots: Bytes = np.empty((0, 0), np.uint8)
        """The shared memory, a slot a row."""
        self._free: LifoQueue[int] = LifoQueue()
        """Numbers of the slots that hold nothing; after a failure any number. The slot that became
        free last is used first: its pages are there, in all processes, and perhaps in a cache."""
        self._users: dict[int, Countdown] = {}
        """Number of a slot -> how many still need what it holds."""
        self._failure: BaseException | None = None
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
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Meet the takers and begin to take from the sources, in threads.

        Args:
            share: what this rank publishes and expects.
            slot_bytes: the largest chunk that it publishes, bytes.
            budget: bytes of shared memory that it may use.
            take: called with each chunk taken, ``(chunk number, its bytes)``.
            on_failure: called when a peer is lost.
        """
        self._on_failure = on_failure
        for address, chunks in share.sources.items():
            source = Peer(share.ranks[address], self._socket(), self._patience)
            self._thread(self._take_from, source, address, len(chunks), share.rank, take)
        if share.publish:
            slot_bytes = -(-slot_bytes // _ALIGNMENT) * _ALIGNMENT
            count = max(1, min(budget // slot_bytes, len(share.publish)))
            with _anonymous_file() as file:
                file.truncate(count * slot_bytes)
                self._slots = mapped(file.fileno(), count, slot_bytes)
                for number in range(count):
                    self._free.put(number)
                self._meet(share, file.fileno())

    def _meet(self, share: SharedReads, descriptor: int) -> None:
        """Accept every taker and pass it the segment.

        A taker that failed before it came here never connects, so while waiting its own listener
        is called: it answers as long as the process is in the load. Such a call says no rank.
        """
        missing = share.takers
        deadline = time.monotonic() + self._patience
        while missing:
            self._listener.settimeout(min(_PATIENCE, self._patience))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise silent(missing, self._patience) from None
                for rank in missing:
                    call(share.addresses[rank], rank)
                continue
            self._sockets.append(connection)
            if not is_own(connection):
                connection.close()
                continue
            # A peer that has hung up again stays missing.
            with contextlib.suppress(StorageError):
                (rank,) = Peer(min(missing), connection, self._patience).receive(1)
                taker = self._takers[rank] = Peer(rank, connection, self._patience)
                taker.send_slots(descriptor, self._slots)
                self._owed[rank] = deque()
                self._thread(self._await_answers, taker, missing.pop(rank))

    def slot(self, size: int) -> tuple[int, Bytes]:
        """A free slot's number and its first ``size`` bytes; waits until there is one.

        Raises:
            StorageError: a peer was lost; or whatever this rank itself has failed with.
        """
        number = self._free.get()
        if self._failure is not None:
            self._free.put(number)  # for the next waiting thread
            raise self._failure
        return number, self._slots[number, :size]

    def publish(self, chunk: int, slot: int, takers: Sequence[int]) -> None:
        """Tell the takers that ``chunk`` is in ``slot``; the publisher, too, calls `release`."""
        self._users[slot] = Countdown(len(takers) + 1)
        for taker in takers:
            self._owed[taker].append(time.monotonic())
            self._takers[taker].send(chunk, slot)

    def release(self, slot: int) -> None:
        """Count one user of a slot as done; with the last one the slot is free."""
        if self._users[slot].land(1) == 0:
            self._free.put(slot)

    def finish(self) -> None:
        """Wait until everything expected was taken, here and by the others.

        Raises:
            StorageError: a peer was lost; or whatever this rank itself has failed with.
        """
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def fail(self, error: BaseException) -> None:
        """Stop waiting: this rank has failed, and slots that it holds will not be free again."""
        # First: threads that wait for a slot fail too once they wake, with less to say.
        self._on_failure(error)
        self._failure = self._failure or error
        self._free.put(0)

    def close(self) -> None:
        """Close every socket, so that no peer waits for this rank, and end what still delivers."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()
        self._slots = np.empty((0, 0), np.uint8)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _take_from(
        self,
        source: Peer,
        address: str,
        count: int,
        rank: int,
        take: Callable[[int, Bytes], None],
    ) -> None:
        """Take ``count`` chunks from the rank that listens at an address."""
        source.connect(address)
        source.send(rank)
        slots = source.receive_slots()
        for _ in range(count):
            chunk, slot = source.receive(2)
            take(chunk, slots[slot])
            source.send(slot)

    def _await_answers(self, taker: Peer, count: int) -> None:
        """Free the slots whose content a taker has taken."""
        owed = self._owed[taker.rank]
        for _ in range(count):
            # Nothing is owed before something is published.
            (slot,) = taker.receive(1, since=lambda: owed[0] if owed else time.monotonic())
            owed.popleft()
            self.release(slot)

    def _thread(self, target: Callable[..., None], *arguments: object) -> None:
        def run() -> None:
            try:
                target(*arguments)
            except BaseException as error:
                self.fail(error)

        thread = threading.Thread(target=run, name="xckpt-exchange", daemon=True)
        self._threads.append(thread)
        thread.start()


def _anonymous_file() -> IO[bytes]:
    """Memory without a name; the kernel frees it with its last user."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("xckpt"), "r+b")
    return tempfile.TemporaryFile()
