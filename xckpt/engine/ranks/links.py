"""The connections of one rank; `Links.turn` sends and receives on all of them at once.

The coordinator listens, and every other rank connects to it, so that there is one connection for
each of them. A connection is taken into `Links.to` once its first frame has shown the group's
token; any other connection is closed.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import selectors
import socket
import time
import weakref
from selectors import EVENT_READ as READ
from selectors import EVENT_WRITE as WRITE
from typing import Final

from xckpt.engine.ranks.connection import ANY_LENGTH, GREETING_BYTES, Connection, Frame, Kind

TOKEN_BYTES: Final = 32
"""Bytes of a token; each side shows one half to the other."""

BACKLOG: Final = 4096
"""Connections that wait to be accepted, at most; few systems have more."""

_all: weakref.WeakSet[Links] = weakref.WeakSet()


class Links:
    """Connections by the rank at their other end.

    Args:
        token: `TOKEN_BYTES` random bytes that only the ranks of the group know.
        listener: where others connect; None on a rank that connects itself.
    """

    def __init__(self, token: bytes, listener: socket.socket | None = None) -> None:
        self.to: dict[int, Connection] = {}
        self.first: Final = token[: TOKEN_BYTES // 2]
        self.second: Final = token[TOKEN_BYTES // 2 :]
        """What the ranks that connect show, and what they are answered."""
        self._listener = listener
        self.refused: str = ""
        """Why this process can accept no further connection; empty while it can."""
        self.sending: set[Connection] = set()
        """Connections that still have something to send."""
        self._strangers: set[Connection] = set()
        self._selector = selectors.DefaultSelector()
        if listener is not None:
            listener.setblocking(False)
            self._selector.register(listener, READ)
        _all.add(self)

    def add(self, rank: int, peer: socket.socket) -> None:
        """Take a connection to a rank, from the side that connects."""
        connection = Connection(peer, GREETING_BYTES)
        connection.rank = rank
        self.to[rank] = connection
        self._strangers.add(connection)
        self._selector.register(peer, READ, connection)

    def send(self, rank: int, frame: Frame) -> None:
        """Send a frame, or begin to: `turn` goes on."""
        connection = self.to[rank]
        connection.send(frame)
        if connection.is_sending and connection not in self.sending:
            self.sending.add(connection)
            self._selector.modify(connection.peer, READ | WRITE, connection)

    def turn(self, seconds: float) -> list[int]:
        """Send and receive what can be; waits at most ``seconds`` for the first of it.

        Returns:
            The ranks that may have new frames, or whose connection has ended.
        """
        touched: list[Connection] = []
        for key, events in self._selector.select(seconds):
            connection: Connection | None = key.data
            if connection is None:
                self._accept()
                continue
            touched.append(connection)
            if events & READ:
                connection.receive()
                if connection in self._strangers:
                    self._greet(connection)
            if events & WRITE:
                connection.flush()
                if not connection.is_sending:
                    self.sending.discard(connection)
                    self._selector.modify(connection.peer, READ, connection)
            self._drop_ended(connection)
        return [connection.rank for connection in touched if connection.rank >= 0]

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(BlockingIOError):
            for _ in range(BACKLOG):  # in one turn: a rank that works rarely looks
                self._accept_from(self._listener)

    def _accept_from(self, listener: socket.socket) -> None:
        try:
            peer, _ = listener.accept()
            no_delay(peer)
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                return  # it has hung up again
            self.refused = os.strerror(error.errno)
            self._selector.unregister(listener)
            raise BlockingIOError from error
        stranger = Connection(peer, GREETING_BYTES)
        self._strangers.add(stranger)
        self._selector.register(peer, READ, stranger)

    def _greet(self, stranger: Connection) -> None:
        """Accept a connection that has shown the token; close any other."""
        if not stranger.frames and not stranger.end:
            return
        self._strangers.discard(stranger)
        if stranger.frames:
            kind, _, rank, shown, _ = stranger.frames.popleft()
            expected = self.second if stranger.rank >= 0 else self.first
            if kind == Kind.HELLO and hmac.compare_digest(shown, expected):
                stranger.limit = ANY_LENGTH
                if stranger.rank < 0:
                    stranger.rank = rank
                    self.to[rank] = stranger
                    self.send(rank, Frame(Kind.HELLO, 0, rank, self.second))
                stranger.receive()
                return
        stranger.finish("it does not belong to the group")

    def _drop_ended(self, connection: Connection) -> None:
        if connection.end and connection.peer.fileno() >= 0:
            self.sending.discard(connection)
            self._selector.unregister(connection.peer)
            connection.close()

    def flush(self, seconds: float) -> None:
        """Try to send what is still to be sent."""
        for connection in self.to.values():
            self._drop_ended(connection)
        deadline = time.monotonic() + seconds
        while self.sending and time.monotonic() < deadline:
            self.turn(deadline - time.monotonic())

    def greet_callers(self, count: int, seconds: float) -> None:
        """Take connections of ranks that have called and were not answered, if this one listens.

        Args:
            count: how many ranks connect in all; there is no wait once they have.
            seconds: how long they are waited for, at most.
        """
        deadline = time.monotonic() + seconds
        while self._listener is not None and len(self.to) < count and time.monotonic() < deadline:
            self.turn(max(0.0, deadline - time.monotonic()))

    def stop_listening(self) -> None:
        """Accept no further connection."""
        if self._listener is not None:
            if not self.refused:
                self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def close(self) -> None:
        """Close everything; nothing more comes."""
        for connection in (*self.to.values(), *self._strangers):
            connection.close()
        self.forget()

    def forget(self) -> None:
        """Close the sockets of this process without sending anything."""
        for connection in (*self.to.values(), *self._strangers):
            connection.peer.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()


def no_delay(peer: socket.socket) -> None:
    """Have small frames sent at once."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _forget_all() -> None:
    """In a forked child: the connections are the parent's, and its death ends them."""
    for links in list(_all):
        links.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
