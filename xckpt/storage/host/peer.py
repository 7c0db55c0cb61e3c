"""The connection to another rank: numbers and shared memory over a Unix socket, on this host;
numbers and bytes over TCP, on another (`xckpt.storage.host.far`).

A rank that has closed its end is an error at once, one that is silent an error in time, and both
name it. On Linux the sockets have no files, so that nothing stays of a process that is killed;
elsewhere the next `listen` removes it. Processes of other users are refused.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xckpt.engine.ranks.waiting import SILENT, given_up, silence
from xckpt.errors import RankFailure, RanksFailedError, StorageError

CALL_SECONDS: Final = 1.0
"""How long a rank that only has to accept a connection may take."""
ACCEPT_SECONDS: Final = 1.0
"""Seconds without a new connection before the missing ranks are called."""
FOLDER: Final = "xckpt-sockets-"
"""How the folder of a socket begins; then come the process and what makes it unique."""

Bytes = NDArray[np.uint8]


def silent(ranks: Iterable[int], seconds: float) -> RanksFailedError:
    """The error about ranks that were waited for in vain."""
    return given_up([RankFailure(rank, SILENT, silence(seconds)) for rank in ranks])


class Peer:
    """The connection to another rank, which is named in all that goes wrong.

    Every method raises `StorageError` where the rank has closed the connection, and
    `RanksFailedError` where it was silent for ``patience`` seconds.

    Args:
        rank: the rank at the other end.
        connection: a socket; it is closed by its owner.
        patience: seconds.
        where: what is said of the rank's place.
    """

    def __init__(
        self, rank: int, connection: socket.socket, patience: float, where: str = "of this host"
    ) -> None:
        self.rank = rank
        self._where = where
        self._connection = connection
        self._patience = patience
        self._lock = threading.Lock()
        connection.settimeout(patience)

    def connect(self, address: str) -> None:
        """Connect to the rank's address."""
        with self._naming():
            self._connection.connect(address)
            if not is_own(self._connection):
                raise OSError("another user listens at its address")

    def send(self, *numbers: int) -> None:
        """Send numbers; calls from several threads are fine."""
        with self._lock, self._naming():
            self._connection.sendall(struct.pack(f"<{len(numbers)}q", *numbers))

    def receive(self, count: int, since: Callable[[], float] | None = None) -> tuple[int, ...]:
        """Receive as many numbers; ``since`` says from when on the rank is silent."""
        began, message = time.monotonic(), b""
        with self._naming():
            while len(message) < 8 * count:
                waited = time.monotonic() - (since() if since is not None else began)
                if waited >= self._patience:
                    raise TimeoutError
                self._connection.settimeout(min(self._patience - waited, CALL_SECONDS))
                with contextlib.suppress(TimeoutError):
                    part = self._connection.recv(8 * count - len(message))
                    message += part
                    if not part:
                        raise OSError("it closed its socket")
        return struct.unpack(f"<{count}q", message)

    def send_bytes(self, memory: Bytes) -> None:
        """Send memory, contiguous."""
        with self._lock, self._naming():
            rest = memory.data
            self._connection.settimeout(self._patience)
            while rest:
                rest = rest[self._connection.send(rest) :]

    def receive_bytes(self, memory: Bytes) -> None:
        """Fill memory, contiguous."""
        with self._naming():
            rest = memory.data
            self._connection.settimeout(self._patience)
            while rest:
                count = self._connection.recv_into(rest)
                if not count:
                    raise OSError("it closed its socket")
                rest = rest[count:]

    def send_slots(self, descriptor: int, slots: Bytes) -> None:
        """Send shared memory."""
        with self._naming():
            shape = struct.pack("<2q", *slots.shape)
            socket.send_fds(self._connection, [shape], [descriptor])

    def receive_slots(self) -> Bytes:
        """Receive shared memory."""
        with self._naming():
            shape, descriptors, _, _ = socket.recv_fds(self._connection, 16, 1)
            try:
                if len(shape) < 16 or not descriptors:
                    raise OSError("it closed its socket")
                count, slot_bytes = struct.unpack("<2q", shape)
                return mapped(descriptors[0], count, slot_bytes)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    @contextlib.contextmanager
    def _naming(self) -> Generator[None, None, None]:
        try:
            yield
        except TimeoutError as error:
            raise silent([self.rank], self._patience) from error
        except OSError as error:
            why = error.strerror or error
            raise peer_lost(f"rank {self.rank} {self._where} was lost: {why}") from error


def accepted(
    listener: socket.socket,
    missing: Mapping[int, int],
    patience: float,
    call: Callable[[int], None],
) -> Generator[socket.socket]:
    """Connections as they come, until no rank is missing any more.

    A rank that failed before it came here never connects, so while waiting each one that is missing
    is called where it listens itself: it answers as long as its process is in the load.

    Args:
        listener: where they connect.
        missing: the ranks; the caller takes out each that has come.
        patience: seconds that silent ranks are waited for.
        call: calls a rank; raises `StorageError` if it no longer listens.

    Raises:
        RanksFailedError: ranks were silent.
    """
    deadline = time.monotonic() + patience
    while missing:
        listener.settimeout(min(ACCEPT_SECONDS, patience))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise silent(missing, patience) from None
            for rank in missing:
                call(rank)
            continue
        yield connection


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
        return  # it hangs, which is for the caller's patience
    except OSError as error:
        raise peer_lost(f"rank {rank} of this host failed before it began to read") from error


def peer_lost(text: str) -> StorageError:
    """The error about a rank that is gone, which has an error of its own."""
    error = StorageError(text)
    error.is_consequence = True
    return error


def listen(
    listener: socket.socket, *, abstract: bool = sys.platform == "linux"
) -> tuple[str, str | None]:
    """Have a socket listen where peers of this host find it.

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


def is_own(connection: socket.socket) -> bool:
    """Whether the process at the other end is this user's; anybody finds an abstract address."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # the folder of the socket is this user's alone
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", found)[1] == os.geteuid()


def mapped(descriptor: int, count: int, slot_bytes: int) -> Bytes:
    """Shared memory, (count, slot_bytes)."""
    mapped = mmap.mmap(descriptor, count * slot_bytes)
    return np.frombuffer(mapped, np.uint8).reshape(count, slot_bytes)
