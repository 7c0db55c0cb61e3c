"""The connection to another rank: numbers and shared memory over a Unix socket, on this host;
numbers and bytes over TCP, on another (`xckpt.storage.host.far`).

A rank that has closed its end is an error at once, a silent one after a timeout, and both errors
name it. A rank that reads from a slow disk sends notes between two chunks that it makes progress.
On Linux the sockets have no files, so that nothing stays of a process that is killed; elsewhere the
next `listen` removes it. Processes of other users are refused.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import selectors
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from xckpt.engine.limits import FILES
from xckpt.engine.ranks.alive import WORK
from xckpt.engine.ranks.waiting import OTHER_RELEASE, SILENT, Presence, given_up, silence
from xckpt.errors import RankFailure, RanksFailedError, StorageError

CALL_SECONDS: Final = 1.0
"""How long a rank may take just to accept a connection."""
ALIVE: Final = -1
"""In place of a chunk's number: the sender makes progress; milliseconds since then follow."""
FOLDER: Final = "xckpt-sockets-"
"""Prefix of a socket's folder; the process number and a unique part follow."""

Bytes = NDArray[np.uint8]
Moved = TypeVar("Moved")


def silent(ranks: Iterable[int], seconds: float) -> RanksFailedError:
    """The error about ranks that did not answer in time."""
    return given_up([RankFailure(rank, SILENT, silence(seconds)) for rank in ranks])


class Peer:
    """The connection to another rank, which every error names.

    Every method raises `StorageError` where the rank has closed the connection, and
    `RanksFailedError` where it was silent for ``patience`` seconds.

    Args:
        rank: the rank at the other end.
        connection: a socket; it is closed by its owner.
        patience: seconds.
        where: words for the rank's place.
    """

    def __init__(
        self, rank: int, connection: socket.socket, patience: float, where: str = "of this host"
    ) -> None:
        self.rank = rank
        self._where = where
        self._connection = connection
        self._patience = patience
        self._lock = threading.Lock()
        self._said = WORK.get().moved
        self._away = 0.0
        """Seconds in which this process did not run while it received."""
        connection.settimeout(patience)

    def speaks_otherwise(self) -> StorageError:
        """The error where it sends what no rank of this release sends."""
        return peer_lost(f"rank {self.rank} {self._where} was lost: {OTHER_RELEASE}")

    @property
    def beat(self) -> float:
        """Seconds between two notes of progress."""
        return min(CALL_SECONDS, self._patience / 4)

    def awake(self) -> float:
        """The clock of the peer's silence: it stands while this process does not run, seconds."""
        return time.monotonic() - self._away

    def connect(self, address: str) -> None:
        """Connect to the rank's address."""
        with self._naming():
            self._connection.connect(address)
            if not is_own(self._connection):
                raise OSError("another user listens at its address")

    def send(self, *numbers: int) -> None:
        """Send numbers; calls from several threads are fine."""
        self.send_bytes(_message(*numbers))

    def say_alive(self) -> None:
        """Say how long ago this rank made progress, unless that was said before.

        It never waits: the other end may wait itself until this thread has received what it sent.
        Where another thread sends just now, or the socket is full, the other end hears enough.
        If the other end is closed, nothing is raised: its last message may still be received.
        """
        moved = WORK.get().moved
        if moved <= self._said or not self._lock.acquire(blocking=False):
            return
        try:
            if _has_room(self._connection):
                self._said = moved
                with contextlib.suppress(StorageError):
                    self._send(_message(ALIVE, int(1000 * (time.monotonic() - moved))))
        finally:
            self._lock.release()

    def receive_chunk(self) -> tuple[int, int]:
        """Receive a chunk's number, and the number that belongs to it."""
        heard, work = self.awake(), WORK.get()
        while True:
            number, other = self.receive(2, since=lambda heard=heard: heard)
            now = self.awake()
            heard = now if number != ALIVE else max(heard, now - other / 1000)
            # This rank waits for the other, and counts its progress as its own.
            work.moved = max(work.moved, heard + self._away)
            if number != ALIVE:
                return number, other

    def receive(self, count: int, since: Callable[[], float] | None = None) -> tuple[int, ...]:
        """Receive ``count`` numbers; ``since`` is when the rank became silent, see `awake`."""
        message = b""
        with self._naming():
            while len(message) < 8 * count:
                rest = 8 * count - len(message)
                part = self._patiently(lambda rest=rest: self._connection.recv(rest), since)
                message += part
                if not part:
                    raise OSError("it closed its socket")
        return struct.unpack(f"<{count}q", message)

    def send_bytes(self, memory: Bytes) -> None:
        """Send memory, contiguous."""
        with self._lock:
            self._send(memory)

    def _send(self, memory: Bytes) -> None:
        """Send memory; the lock is held."""
        with self._naming():
            rest = memory.data
            while rest:
                rest = rest[self._patiently(lambda rest=rest: self._connection.send(rest)) :]

    def receive_bytes(self, memory: Bytes) -> None:
        """Fill memory, contiguous."""
        with self._naming():
            rest = memory.data
            while rest:
                count = self._patiently(lambda rest=rest: self._connection.recv_into(rest))
                if not count:
                    raise OSError("it closed its socket")
                rest = rest[count:]

    def send_slots(self, descriptor: int, slots: Bytes) -> None:
        """Send shared memory."""
        with self._naming():
            shape = struct.pack("<2q", *slots.shape)
            self._patiently(lambda: socket.send_fds(self._connection, [shape], [descriptor]))

    def receive_slots(self) -> Bytes:
        """Receive shared memory.

        Raises:
            StorageError: also where this process may open no more files.
            OSError: there is no address space left for it.
        """
        with self._naming():
            found = self._patiently(lambda: socket.recv_fds(self._connection, 16, 1))
            shape, descriptors, flags, _ = found
            if len(shape) < 16 or not (descriptors or flags & socket.MSG_CTRUNC):
                raise OSError("it closed its socket")
        if not descriptors:
            what = f"the memory that rank {self.rank} shares"
            raise StorageError(f"{what}: {os.strerror(errno.EMFILE)}; {FILES}")
        try:
            count, slot_bytes = struct.unpack("<2q", shape)
            there = os.fstat(descriptors[0]).st_size
            if min(count, slot_bytes) < 1 or count * slot_bytes > there:
                raise self.speaks_otherwise()
            return mapped(descriptors[0], count, slot_bytes)
        finally:
            os.close(descriptors[0])

    def _patiently(
        self, move: Callable[[], Moved], since: Callable[[], float] | None = None
    ) -> Moved:
        """What a call of the socket moves; silence counts from now on, or as ``since`` says."""
        began, presence = self.awake(), Presence()
        while True:
            left = self._patience - (self.awake() - (since() if since is not None else began))
            if left <= 0:
                raise TimeoutError
            self._connection.settimeout(min(left, self.beat))
            try:
                return move()
            except TimeoutError:
                pass
            finally:
                away = presence.away()  # first: another thread may add to `_away` meanwhile
                self._away += away

    @contextlib.contextmanager
    def _naming(self) -> Generator[None, None, None]:
        try:
            yield
        except TimeoutError as error:
            raise silent([self.rank], self._patience) from error
        except OSError as error:
            why = error.strerror or error
            raise peer_lost(f"rank {self.rank} {self._where} was lost: {why}") from error


def _message(*numbers: int) -> Bytes:
    """Numbers as they are sent."""
    return np.frombuffer(struct.pack(f"<{len(numbers)}q", *numbers), np.uint8)


def _has_room(connection: socket.socket) -> bool:
    """Whether a few bytes can be sent without a wait; also where the other end is closed."""
    with selectors.PollSelector() as poll:
        poll.register(connection, selectors.EVENT_WRITE)
        return bool(poll.select(0))


def call(address: str, rank: int) -> None:
    """Connect to a rank and hang up.

    Raises:
        StorageError: the rank no longer listens.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(CALL_SECONDS)
            connection.connect(address)
    except TimeoutError:
        return  # it hangs, which the caller's timeout handles
    except OSError as error:
        raise peer_lost(f"rank {rank} of this host failed before it began to read") from error


def peer_lost(text: str) -> StorageError:
    """The error about a lost rank, which has raised an error of its own."""
    error = StorageError(text)
    error.is_consequence = True
    return error


def listen(
    listener: socket.socket, *, abstract: bool = sys.platform == "linux"
) -> tuple[str, str | None]:
    """Have a socket listen at an address that peers of this host find.

    Args:
        listener: a Unix socket.
        abstract: at an address without a file.

    Returns:
        The address, and the folder that it lies in, if it is a file.
    """
    folder = None
    if abstract:
        address = f"\0xckpt-{secrets.token_hex(16)}"
    else:
        _remove_leftovers()
        folder = tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-")
        address = os.path.join(folder, "socket")
    listener.bind(address)
    listener.listen(1024)
    return address, folder


def _remove_leftovers() -> None:
    """Remove the folders of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        process = folder.name.removeprefix(FOLDER).partition("-")[0]
        with contextlib.suppress(ValueError, PermissionError):
            try:
                os.kill(int(process), 0)
            except ProcessLookupError:
                shutil.rmtree(folder, ignore_errors=True)


def close_all(connections: Iterable[socket.socket]) -> None:
    """Close sockets, so that no thread and no rank waits at either end."""
    for each in connections:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()


def is_own(connection: socket.socket) -> bool:
    """Whether the process at the other end is this user's; anyone can find an abstract address."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # the folder of the socket is this user's alone
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", found)[1] == os.geteuid()


def mapped(descriptor: int, count: int, slot_bytes: int) -> Bytes:
    """Shared memory, (count, slot_bytes)."""
    mapped = mmap.mmap(descriptor, count * slot_bytes)
    return np.frombuffer(mapped, np.uint8).reshape(count, slot_bytes)
