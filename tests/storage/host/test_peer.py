"""What ranks say to each other over one connection."""

from __future__ import annotations

import socket
import struct
import time

import pytest

import xckpt
from xckpt.engine.ranks.alive import WORK
from xckpt.storage.host.peer import Peer


def test_the_last_word_of_a_rank_that_has_ended_is_received() -> None:
    """It has closed its end, where this rank says that it gets on before it listens."""
    here, there = socket.socketpair()
    with here:
        peer = Peer(1, here, 5.0)
        there.sendall(struct.pack("<q", 7))
        there.close()
        WORK.get().moved = time.monotonic()

        def since() -> float:
            peer.say_alive()
            return time.monotonic()

        assert peer.receive(1, since=since) == (7,)
        with pytest.raises(xckpt.StorageError, match="rank 1 of this host was lost"):
            peer.receive(1, since=since)
