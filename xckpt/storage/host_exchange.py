"""Handing verified chunks to the other ranks of a host through shared memory.

Each rank listens on a Unix socket; what it publishes lies in an anonymous shared segment of a few
slots, whose file descriptor it passes to each taker.

1. A taker connects, says its rank, gets the descriptor and maps it.
2. The publisher reads a chunk into a free slot, verifies it, and sends (chunk, slot) to each taker.
3. A taker copies what it wants out of the slot and answers with the slot's number; after the last
   answer the slot is free again.

Sockets carry no data, only these few bytes; a rank that dies closes them, so no rank waits for it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import LifoQueue
from typing import IO

import numpy as np
from numpy.typing import NDArray

from xckpt.core.plan.host_reads import SharedReads
from xckpt.core.plan.wanted import Countdown
from xckpt.errors import StorageError

_PATIENCE = 1.0
"""Seconds without a new taker before the missing ones are called."""

_ALIGNMENT = 64
"""Bytes; enough for every dtype and every vector instruction."""

_LOST = "another rank of this host was lost"

Bytes = NDArray[np.uint8]


def host_identity() -> str:
    """Equal for processes that can reach each other's sockets and memory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    started = boot.read_text().strip() if boot.exists() else ""
    place = os.stat(tempfile.gettempdir())
    return f"{socket.gethostname()}/{started}/{place.st_dev}/{place.st_ino}"


class Exchange:
    """One rank's end: publishes chunks to takers, and takes chunks from sources."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="xckpt-")
        self.address = os.path.join(self._folder, "socket")
        self._sockets: list[socket.socket] = []
        self._listener = self._socket()
        self._listener.bind(self.address)
        self._listener.listen(1024)
        self._threads: list[threading.Thread] = []
        self._takers: dict[int, tuple[socket.socket, threading.Lock]] = {}
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
            self._thread(self._take_from, self._socket(), address, len(chunks), share.rank, take)
        if share.publish:
            slot_bytes = -(-slot_bytes // _ALIGNMENT) * _ALIGNMENT
            count = max(1, min(budget // slot_bytes, len(share.publish)))
            with _anonymous_file() as file:
                file.truncate(count * slot_bytes)
                self._slots = _mapped(file.fileno(), count, slot_bytes)
                for number in range(count):
                    self._free.put(number)
                self._meet(share, file.fileno())

    def _meet(self, share: SharedReads, descriptor: int) -> None:
        """Accept every taker and pass it the segment.

        A taker that failed before it came here never connects, so while waiting its own listener
        is called: it answers as long as the process is in the load. Such a call says no rank.
        """
        missing = share.takers
        self._listener.settimeout(_PATIENCE)
        while missing:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                for rank in missing:
                    _call(share.addresses[rank], rank)
                continue
            connection.settimeout(None)
            self._sockets.append(connection)
            # A peer that has hung up again stays missing.
            with contextlib.suppress(StorageError):
                (rank,) = _receive(connection, 1)
                _send_slots(connection, descriptor, self._slots)
                self._takers[rank] = (connection, threading.Lock())
                self._thread(self._await_answers, connection, missing.pop(rank))

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
            connection, lock = self._takers[taker]
            with lock:
                _send(connection, chunk, slot)

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
        shutil.rmtree(self._folder, ignore_errors=True)

    def _take_from(
        self,
        connection: socket.socket,
        address: str,
        count: int,
        rank: int,
        take: Callable[[int, Bytes], None],
    ) -> None:
        """Take ``count`` chunks from the rank that listens at an address."""
        with _noticing_loss():
            connection.connect(address)
        _send(connection, rank)
        slots = _receive_slots(connection)
        for _ in range(count):
            chunk, slot = _receive(connection, 2)
            take(chunk, slots[slot])
            _send(connection, slot)

    def _await_answers(self, connection: socket.socket, count: int) -> None:
        """Free the slots whose content a taker has taken."""
        for _ in range(count):
            (slot,) = _receive(connection, 1)
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


def _call(address: str, rank: int) -> None:
    """Connect to a rank and hang up.

    Raises:
        StorageError: the rank no longer listens.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(address)
    except OSError as error:
        raise _peer_lost(f"rank {rank} of this host failed before it began to read") from error


@contextlib.contextmanager
def _noticing_loss() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise _peer_lost(f"{_LOST}: {getattr(error, 'strerror', None) or error}") from error


def _peer_lost(text: str) -> StorageError:
    error = StorageError(text)
    error.is_consequence = True
    return error


def _send(connection: socket.socket, *numbers: int) -> None:
    with _noticing_loss():
        connection.sendall(struct.pack(f"<{len(numbers)}q", *numbers))


def _receive(connection: socket.socket, count: int) -> tuple[int, ...]:
    with _noticing_loss():
        message = connection.recv(8 * count, socket.MSG_WAITALL)
    return _numbers(message, count)


def _numbers(message: bytes, count: int) -> tuple[int, ...]:
    if len(message) != 8 * count:
        raise _peer_lost(f"{_LOST}: it closed its socket")
    return struct.unpack(f"<{count}q", message)


def _send_slots(connection: socket.socket, descriptor: int, slots: Bytes) -> None:
    with _noticing_loss():
        socket.send_fds(connection, [struct.pack("<2q", *slots.shape)], [descriptor])


def _receive_slots(connection: socket.socket) -> Bytes:
    with _noticing_loss():
        shape, descriptors, _, _ = socket.recv_fds(connection, 16, 1)
    try:
        return _mapped(*descriptors, *_numbers(shape, 2))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _mapped(descriptor: int, count: int, slot_bytes: int) -> Bytes:
    """Shared memory, (count, slot_bytes)."""
    mapped = mmap.mmap(descriptor, count * slot_bytes)
    return np.frombuffer(mapped, np.uint8).reshape(count, slot_bytes)


def _anonymous_file() -> IO[bytes]:
    """Memory without a name; the kernel frees it with its last user."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("xckpt"), "r+b")
    return tempfile.TemporaryFile()
