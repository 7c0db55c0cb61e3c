"""Sending verified chunks to ranks of other hosts, and receiving theirs.

Each rank listens on a TCP port; its invitation (`xckpt.engine.ranks.rendezvous`) goes to the others
with what it wants. Both sides show a half of the invitation's token, so neither accepts a foreign
process as a rank.

1. A receiver connects to each rank that sends to it, and states its rank.
2. The sender has a thread for each receiver: it sends a chunk's number, its length in bytes and its
   bytes. If the receiver has no room, TCP makes the sender wait.
3. The receiver has a thread for each sender: it waits for memory, then fills that.

Received chunks have memory of their own, apart from chunks to be sent: a rank whose memory is full
of chunks to be sent still receives, so that no two ranks wait for each other.

A rank that dies closes its sockets; one that is silent is given up, by its number, in `patience`
seconds.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Final

import msgspec
import numpy as np

from xckpt.core.plan.host_reads import SharedReads
from xckpt.engine.ranks.links import TOKEN_BYTES
from xckpt.engine.ranks.rendezvous import Invitation, connect, listen
from xckpt.errors import StorageError
from xckpt.storage.host.greetings import accepted
from xckpt.storage.host.peer import Bytes, Peer, close_all, peer_lost

HALF: Final = TOKEN_BYTES // 2
GREETING: Final = struct.Struct(f"<{HALF}sq")
"""What a receiver says first: a half of the token, and its rank."""
ELSEWHERE: Final = "of another host"

Parcel = tuple[int, Bytes, Callable[[], None]]
"""A chunk's number, its bytes, and what is called once they are sent."""


class FarRanks:
    """One rank's end of the connections to ranks of other hosts.

    Args:
        patience: seconds that a silent rank is waited for.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._listener, self._invitation = listen()
        self._sockets = [self._listener]
        self._closed = False
        self._lock = threading.Lock()
        self._parcels: dict[int, SimpleQueue[Parcel | None]] = {}
        """The queue of chunks to send to each rank; None ends it."""

    @property
    def reach(self) -> bytes:
        """Where others find this rank."""
        return msgspec.msgpack.encode(self._invitation)

    def start(self, share: SharedReads, thread: Callable[..., None]) -> None:
        """Begin to accept the ranks that receive from this one.

        Args:
            share: what this rank sends.
            thread: runs a function with arguments in a thread, and fails the load if that fails.
        """
        if share.receivers:
            self._parcels = {rank: SimpleQueue() for rank in share.receivers}
            reaches = {rank: _invitation(share.reaches[rank]) for rank in share.receivers}
            thread(self._accept, dict(share.receivers), reaches, thread)

    def send(self, rank: int, parcel: Parcel) -> None:
        """Send a chunk, in the rank's turn; its memory has to stay until it is sent."""
        self._parcels[rank].put(parcel)

    def receive_from(
        self,
        share: SharedReads,
        sender: int,
        room: Callable[[int], tuple[int, Bytes]],
        take: Callable[[int, int, Bytes], None],
    ) -> None:
        """Receive all chunks that a rank sends to this one.

        Args:
            share: what this rank receives.
            sender: the rank.
            room: gives the number of a slot and its memory, for a number of bytes.
            take: called with each chunk: its number, the slot's number, its bytes.

        Raises:
            StorageError: the rank was lost.
            RanksFailedError: the rank was silent.
        """
        invitation, expected = _invitation(share.reaches[sender]), set(share.receives[sender])
        try:
            connection = connect(invitation)
        except ConnectionError as error:
            raise peer_lost(
                f"rank {sender} {ELSEWHERE} was lost: {error}; where hosts do not reach each other "
                f"use LoadOptions(share_reads='host')"
            ) from error
        self._adopt(connection)
        peer = Peer(sender, connection, self._patience, ELSEWHERE)
        peer.send_bytes(_as_bytes(GREETING.pack(invitation.token[:HALF], share.rank)))
        if not _shows(peer, invitation.token[HALF:]):
            raise peer_lost(f"rank {sender} {ELSEWHERE} was lost: another process has its port")
        while expected:
            chunk, length = peer.receive_chunk()
            if chunk not in expected:
                raise peer_lost(f"rank {sender} {ELSEWHERE} sent chunk {chunk}, not asked for")
            expected.discard(chunk)
            slot, memory = room(length)
            peer.receive_bytes(memory)
            take(chunk, slot, memory)

    def close(self) -> None:
        """Close every socket, so that no rank waits for this one, and end the threads."""
        for parcels in self._parcels.values():
            parcels.put(None)
        with self._lock:
            self._closed = True
        close_all(self._sockets)

    def _adopt(self, connection: socket.socket) -> None:
        """Have `close` close a connection.

        Raises:
            StorageError: it has closed the others already.
        """
        with self._lock:
            if not self._closed:
                self._sockets.append(connection)
                return
        connection.close()
        raise peer_lost("the load has ended")

    def _accept(
        self,
        missing: dict[int, int],
        reaches: Mapping[int, Invitation],
        thread: Callable[..., None],
    ) -> None:
        """Accept every receiver, and begin to send to it."""

        def calling(rank: int) -> None:
            _call(reaches[rank], rank)

        greetings = accepted(self._listener, missing, self._patience, calling, GREETING.size)
        for connection, greeting in greetings:
            self._adopt(connection)
            shown, rank = GREETING.unpack(greeting)
            known = hmac.compare_digest(shown, self._invitation.token[:HALF])
            if not known or rank not in missing:
                connection.close()  # it is none of the ranks
                continue
            # A rank that has closed its connection again stays missing.
            with contextlib.suppress(StorageError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                peer = Peer(rank, connection, self._patience, ELSEWHERE)
                peer.send_bytes(_as_bytes(self._invitation.token[HALF:]))
                thread(self._send_to, peer, missing.pop(rank))

    def _send_to(self, peer: Peer, count: int) -> None:
        parcels = self._parcels[peer.rank]
        for _ in range(count):
            parcel = _next(parcels, peer)
            if parcel is None:
                return
            chunk, memory, sent = parcel
            peer.send(chunk, len(memory))
            peer.send_bytes(memory)
            sent()


def _invitation(reach: bytes) -> Invitation:
    return msgspec.msgpack.decode(reach, type=Invitation)


def _next(parcels: SimpleQueue[Parcel | None], peer: Peer) -> Parcel | None:
    """The next chunk to send; meanwhile this rank says that it makes progress."""
    while True:
        with contextlib.suppress(Empty):
            return parcels.get(timeout=peer.beat)
        peer.say_alive()


def _as_bytes(content: bytes) -> Bytes:
    return np.frombuffer(content, np.uint8)


def _shows(peer: Peer, expected: bytes) -> bool:
    """Whether the other end sends a half of the token."""
    shown = np.empty(len(expected), np.uint8)
    peer.receive_bytes(shown)
    return hmac.compare_digest(shown.tobytes(), expected)


def _call(invitation: Invitation, rank: int) -> None:
    """Connect to a rank and close the connection.

    Raises:
        StorageError: the rank no longer listens.
    """
    try:
        connect(invitation).close()
    except ConnectionError as error:
        raise peer_lost(f"rank {rank} {ELSEWHERE} failed before it began to read") from error
