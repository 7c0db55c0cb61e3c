"""Waiting until all ranks that take part have connected and said who they are.

1. All that connect are heard side by side, so a silent stranger keeps no rank waiting.
2. A rank that failed before this point never connects. So each missing one is called now and then
   at its own address: it answers as long as its process takes part in the load.
3. Ranks that are still missing after the patience are named.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Final, cast

from xckpt.engine.ranks.waiting import Presence
from xckpt.storage.host.peer import silent

ACCEPT_SECONDS: Final = 1.0
"""Seconds between two calls of the missing ranks."""


def accepted(
    listener: socket.socket,
    missing: Mapping[int, int],
    patience: float,
    call: Callable[[int], None],
    greeting: int,
) -> Generator[tuple[socket.socket, bytes]]:
    """Connections, each with what it says first, until no rank is missing any more.

    Args:
        listener: where they connect.
        missing: the ranks; the caller takes out each that has come.
        patience: seconds that silent ranks are waited for.
        call: calls a rank; raises `StorageError` if it no longer listens.
        greeting: how many bytes a rank says first.

    Raises:
        RanksFailedError: ranks were silent.
    """
    pause, presence, began = min(ACCEPT_SECONDS, patience), Presence(), time.monotonic()
    deadline, due = began + patience, began + pause
    with contextlib.closing(_Strangers(listener, greeting)) as strangers:
        while missing:
            yield from strangers.heard(pause)
            deadline += presence.away()
            # By the clock: strangers may connect all the time.
            if not missing or (now := time.monotonic()) < due:
                continue
            if now >= deadline:
                raise silent(missing, patience)
            due = now + pause
            for rank in missing:
                call(rank)


class _Strangers:
    """Connections that have not said yet who they are.

    Args:
        listener: where they connect.
        greeting: how many bytes each says first.
    """

    def __init__(self, listener: socket.socket, greeting: int) -> None:
        self._listener, self._greeting = listener, greeting
        self._said: dict[socket.socket, bytes] = {}
        # A poll ends when another thread closes the listener; the default selector may not.
        self._sockets = selectors.PollSelector()
        self._sockets.register(listener, selectors.EVENT_READ)

    def heard(self, seconds: float) -> Iterator[tuple[socket.socket, bytes]]:
        """Those that have said all by now, after a wait of so many seconds at most."""
        for key, _ in self._sockets.select(seconds):
            connection = cast(socket.socket, key.fileobj)
            if connection is self._listener:
                self._welcome()
            elif said := self._hear(connection):
                yield connection, said

    def close(self) -> None:
        """Hang up on those that are left."""
        self._sockets.close()
        for connection in self._said:
            connection.close()

    def _welcome(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        self._said[connection] = b""
        self._sockets.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> bytes:
        """All that a connection says first, once it has; it is forgotten then, or if it closed."""
        part, before = b"", self._said[connection]
        with contextlib.suppress(OSError):
            part = connection.recv(self._greeting - len(before))
        said = self._said[connection] = before + part
        if part and len(said) < self._greeting:
            return b""
        self._sockets.unregister(connection)
        del self._said[connection]
        if not part:
            connection.close()
            return b""
        return said
