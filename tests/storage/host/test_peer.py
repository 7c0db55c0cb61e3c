"""What ranks say to each other over one connection."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

import numpy as np
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


@pytest.mark.parametrize("why", ["the socket is full", "another thread sends"])
def test_a_rank_that_says_that_it_is_alive_waits_for_nobody(why: str) -> None:
    """The other end may wait itself, until the thread that says so has received its answers."""
    here, there = socket.socketpair()
    with here, there:
        peer = Peer(1, here, PATIENCE)
        here.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                here.send(b"x")

        def send() -> None:
            with contextlib.suppress(xckpt.StorageError):
                peer.send(7)

        sends = threading.Thread(target=send)
        if why == "another thread sends":
            sends.start()
            time.sleep(0.1)  # until it waits for the other end
        WORK.get().moved = began = time.monotonic()
        peer.say_alive()
        assert time.monotonic() - began < PATIENCE / 4
        there.close()
        if sends.ident:
            sends.join()


MANY = 2_000
"""Numbers that do not all fit into the memory of a socket."""


PATIENCE = 60.0


@pytest.fixture
def _short_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xckpt.storage.host.peer.CALL_SECONDS", 0.2)


@pytest.mark.usefixtures("_short_beats")
def test_a_rank_that_takes_its_time_is_waited_for_while_another_thread_listens() -> None:
    """Both threads set the time that the socket waits; neither may shorten the other's patience."""
    here, there = socket.socketpair()
    with here, there:
        peer, other = Peer(1, here, PATIENCE), Peer(0, there, PATIENCE)
        heard: list[int] = []
        listens = threading.Thread(target=lambda: heard.extend(peer.receive(1)))
        listens.start()

        def answer() -> None:
            time.sleep(3 * peer.beat)
            taken.extend(other.receive(1)[0] for _ in range(MANY))
            other.send(7)

        taken: list[int] = []
        answers = threading.Thread(target=answer)
        answers.start()
        for number in range(MANY):
            peer.send(number)
        answers.join()
        listens.join()
    assert taken == [*range(MANY)]
    assert heard == [7]


@pytest.mark.usefixtures("_short_beats")
def test_a_rank_without_room_for_a_chunk_is_waited_for_before_the_next_one() -> None:
    """The number of a chunk waits as its bytes do."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    with here, there:
        peer, other = Peer(1, here, PATIENCE), Peer(0, there, PATIENCE)
        here.setblocking(False)
        full = 0
        for _ in range(5):  # the kernel moves what it has taken to the other end, and takes more
            with contextlib.suppress(BlockingIOError):
                while True:
                    full += here.send(bytes(1 << 16))
            time.sleep(0.01)

        def take() -> None:
            time.sleep(3 * peer.beat)
            other.receive_bytes(np.empty(full, np.uint8))
            numbers.append(other.receive(2))

        numbers: list[tuple[int, ...]] = []
        takes = threading.Thread(target=take)
        takes.start()
        here.settimeout(peer.beat)  # as a wait for the last chunk has set it
        peer.send(5, 3)
        takes.join()
    assert numbers == [(5, 3)]
