"""Handing verified chunks to the other ranks of a host through shared memory.

Each rank listens on a Unix socket; what it publishes lies in an anonymous shared segment of a few
slots, whose file descriptor it passes to each taker.

1. A taker connects, says its rank, gets the descriptor and maps it.
2. The publisher reads a chunk into a free slot, verifies it, and tells each taker (chunk, slot).
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
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xckpt.core.plan.host_reads import SharedReads
from xckpt.errors import StorageError

_HELLO = struct.Struct("<q")
_SEGMENT = struct.Struct("<qq")
_READY = struct.Struct("<qq")
_TAKEN = struct.Struct("<q")

_PATIENCE = 1.0
"""Seconds without a new taker before the missing ones are called."""

_ALIGNMENT = 64
"""Bytes; what every dtype and every vector instruction is content with."""

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
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address)
        self._listener.listen(1024)
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._takers: dict[int, tuple[socket.socket, threading.Lock]] = {}
        self._changed = threading.Condition()
        self._free: list[int] = []
        self._left: dict[int, int] = {}
        self._slots: Sequence[Bytes] = ()
        self._closed = False
        self._failure: BaseException | None = None
        self._on_failure: Callable[[BaseException], None] = lambda error: None

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
        for address, count in share.sources:
            self._thread(self._take_from, address, count, share.rank, take)
        if share.publish:
            slot_bytes = -(-slot_bytes // _ALIGNMENT) * _ALIGNMENT
            count = max(1, min(budget // slot_bytes, len(share.publish)))
            descriptor = _anonymous_file(count * slot_bytes)
            try:
                self._slots = _slots(descriptor, count, slot_bytes)
                self._free = list(range(count))
                self._meet(share, descriptor, count, slot_bytes)
            finally:
                os.close(descriptor)

    def _meet(self, share: SharedReads, descriptor: int, count: int, slot_bytes: int) -> None:
        """Accept every taker and pass it the segment.

        A taker that failed before it came here never connects, so while waiting its own listener
        is called: it answers as long as the process is in the load. Such a call says no rank.
        """
        counts = share.takers
        self._listener.settimeout(_PATIENCE)
        while missing := counts.keys() - self._takers.keys():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                for rank in missing:
                    _call(share.addresses[rank], rank)
                continue
            connection.settimeout(None)
            self._sockets.append(connection)
            with contextlib.suppress(EOFError):
                (rank,) = _HELLO.unpack(_receive(connection, _HELLO.size))
                try:
                    socket.send_fds(connection, [_SEGMENT.pack(count, slot_bytes)], [descriptor])
                except OSError as error:
                    raise _lost(error) from error
                self._takers[rank] = (connection, threading.Lock())
                self._thread(self._await_answers, connection, counts[rank])

    def slot(self, size: int) -> tuple[int, Bytes]:
        """A free slot's number and its first ``size`` bytes; waits until there is one.

        Raises:
            StorageError: a peer was lost; or whatever this rank itself has failed with.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._failure)
            self._raise()
            number = self._free.pop()
        return number, self._slots[number][:size]

    def publish(self, chunk: int, slot: int, takers: Sequence[int]) -> None:
        """Tell the takers that ``chunk`` is in ``slot``; the publisher lets go of it separately."""
        with self._changed:
            self._left[slot] = len(takers) + 1
        for taker in takers:
            connection, lock = self._takers[taker]
            try:
                with lock:
                    connection.sendall(_READY.pack(chunk, slot))
            except OSError as error:
                raise _lost(error) from error

    def let_go(self, slot: int) -> None:
        """One who needed the slot does so no longer; after the last one it is free."""
        with self._changed:
            self._left[slot] -= 1
            if self._left[slot] == 0:
                self._free.append(slot)
                self._changed.notify_all()

    def finish(self) -> None:
        """Wait until everything expected was taken, here and by the others.

        Raises:
            StorageError: a peer was lost; or whatever this rank itself has failed with.
        """
        for thread in self._threads:
            thread.join()
        self._raise()

    def fail(self, error: BaseException) -> None:
        """Stop waiting: this rank has failed, and slots that it holds will not be free again."""
        # First, since those who wait here complain as well once they wake, and know less.
        self._on_failure(error)
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def close(self) -> None:
        """Close every socket, so that no peer waits for this rank, and end what still delivers."""
        with self._changed:
            self._closed = True
        for connection in (*self._sockets, self._listener):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        for thread in self._threads:
            thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _take_from(
        self, address: str, count: int, rank: int, take: Callable[[int, Bytes], None]
    ) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with self._changed:
            if self._closed:  # before this thread came to run
                connection.close()
                return
            self._sockets.append(connection)
        connection.connect(address)
        connection.sendall(_HELLO.pack(rank))
        slots = _receive_slots(connection)
        for _ in range(count):
            chunk, slot = _READY.unpack(_receive(connection, _READY.size))
            try:
                take(chunk, slots[slot])
            except BaseException as error:
                self.fail(error)
                raise
            connection.sendall(_TAKEN.pack(slot))

    def _await_answers(self, connection: socket.socket, count: int) -> None:
        for _ in range(count):
            (slot,) = _TAKEN.unpack(_receive(connection, _TAKEN.size))
            self.let_go(slot)

    def _thread(self, target: Callable[..., None], *arguments: object) -> None:
        def run() -> None:
            try:
                target(*arguments)
            except BaseException as error:
                self.fail(_lost(error))

        thread = threading.Thread(target=run, name="xckpt-exchange", daemon=True)
        self._threads.append(thread)
        thread.start()


def _lost(error: BaseException) -> StorageError:
    return StorageError(f"another rank of this host was lost: {error!r}")


def _call(address: str, rank: int) -> None:
    """Connect to a rank and hang up.

    Raises:
        StorageError: the rank no longer listens.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(address)
    except OSError as error:
        raise StorageError(f"rank {rank} of this host failed before it began to read") from error


def _anonymous_file(size: int) -> int:
    """A descriptor of memory without a name; the kernel frees it with its last user."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("xckpt")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, max(size, 1))
    return descriptor


def _slots(descriptor: int, count: int, slot_bytes: int) -> list[Bytes]:
    mapped = mmap.mmap(descriptor, max(count * slot_bytes, 1))
    whole = np.frombuffer(mapped, np.uint8)
    return [whole[n * slot_bytes : (n + 1) * slot_bytes] for n in range(count)]


def _receive_slots(connection: socket.socket) -> list[Bytes]:
    header, descriptors, _, _ = socket.recv_fds(connection, _SEGMENT.size, 1)
    if len(header) != _SEGMENT.size or not descriptors:
        raise EOFError("the peer closed its socket")
    try:
        return _slots(descriptors[0], *_SEGMENT.unpack(header))
    finally:
        os.close(descriptors[0])


def _receive(connection: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise EOFError("the peer closed its socket")
        parts += part
    return parts
