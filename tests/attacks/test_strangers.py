"""Who connects to ranks and is none of theirs; lines between ranks that swallow, delay or cut."""

from __future__ import annotations

import contextlib
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.attacks.victim import Outcome, outcome
from tests.support.time_limit import ALLOWANCE
from xckpt.core.plan.host_reads import SharedReads
from xckpt.engine.ranks.connection import HEADER, Kind
from xckpt.engine.ranks.rendezvous import Invitation, invite, reach
from xckpt.engine.ranks.star import Star
from xckpt.errors import StorageError
from xckpt.storage.host.exchange import Exchange
from xckpt.storage.host.peer import listen

TIMEOUT = 1.5
SLACK = 2.0 * ALLOWANCE


def framed(kind: int, data: bytes, length: int = -1) -> bytes:
    return HEADER.pack(kind, 0, 0, 1, len(data) if length < 0 else length) + data


STRANGERS: dict[str, bytes] = {
    "a wrong token": framed(Kind.HELLO, bytes(16)),
    "half a token": framed(Kind.HELLO, b"x" * 8),
    "no token": framed(Kind.HELLO, b""),
    "half a header": framed(Kind.HELLO, bytes(16))[:7],
    "half a message": framed(Kind.HELLO, bytes(16))[:-3],
    "a huge length": framed(Kind.HELLO, b"", length=1 << 62),
    "the largest length": framed(Kind.MESSAGE, b"", length=(1 << 64) - 1),
    "a web browser": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "words of life without end": framed(Kind.ALIVE, struct.pack("<d", -1e300)) * 20_000,
    "a farewell": framed(Kind.LOST, msgspec.msgpack.encode([[1, "SystemExit", "boo"]])),
    "a message": framed(Kind.MESSAGE, b"plan") * 3,
    "random bytes": np.random.default_rng(0).bytes(1 << 16),
    "nothing": b"",
}


@contextlib.contextmanager
def connected(address: tuple[str, int], content: bytes, count: int) -> Iterator[None]:
    """Connections of a stranger, which stay open."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            peer = stack.enter_context(socket.create_connection(address, 5))
            peer.setblocking(False)
            with contextlib.suppress(OSError):
                peer.send(content)
        yield


def meet(invitation: Invitation, coordinator: Star, timeout: float = TIMEOUT) -> list[Outcome]:
    """Two ranks gather twice, one of them over what the invitation says; both outcomes."""

    def other() -> None:
        links = reach(invitation, 1, 0, timeout)
        star = Star(1, 2, 0, links)
        star.begin()
        try:
            for number in range(2):
                star.gather(f"{number}".encode(), timeout)
                assert star.broadcast(None, timeout) == b"done"
        finally:
            links.close()

    def first() -> None:
        coordinator.begin()
        for number in range(2):
            assert coordinator.gather(b"own", timeout) == [b"own", f"{number}".encode()]
            coordinator.broadcast(b"done", timeout)

    with ThreadPoolExecutor(2) as threads:
        return [each.result() for each in [threads.submit(outcome, c) for c in (first, other)]]


@pytest.mark.parametrize("what", STRANGERS)
def test_a_stranger_is_hung_up_on(what: str) -> None:
    links, invitation = invite(2)
    with connected(("localhost", invitation.port), STRANGERS[what], 3):
        done = meet(invitation, Star(0, 2, 0, links), 10)
    links.close()
    assert [each.kind for each in done] == ["done", "done"], done
    assert max(each.seconds for each in done) < 8 * ALLOWANCE


ODD: dict[str, bytes] = {
    "a loss that is none": framed(Kind.LOST, b"\xc1"),
    "a loss of another release": framed(Kind.LOST, msgspec.msgpack.encode({"ranks": 1})),
    "an empty loss": framed(Kind.LOST, b""),
    "a farewell that is none": framed(Kind.LEFT, b"\xc1"),
    "suspects that are none": framed(Kind.SUSPECTS, b"\xc1"),
    "a kind of another release": framed(77, b"new"),
    "a huge message": framed(Kind.MESSAGE, b"", length=1 << 62),
}
"""What a rank says that has shown the token, and that is no message."""
WORDLESS = {
    "nobody who was lost": framed(Kind.LOST, msgspec.msgpack.encode([])),
    "a message of an earlier call": framed(Kind.MESSAGE, b"old"),
    "a progress of no time": framed(Kind.ALIVE, struct.pack("<d", float("nan"))),
    "a progress in the future": framed(Kind.ALIVE, struct.pack("<d", float("-inf"))),
    "half a message": framed(Kind.MESSAGE, b"x", length=100),
    "half a header": framed(Kind.MESSAGE, b"")[:5],
}
"""What says nothing: the rank is silent."""


def told(content: bytes, operation: int) -> Outcome:
    """What a coordinator says whose rank says something."""
    links, invitation = invite(2)
    rank = reach(invitation, 1, 0, TIMEOUT)
    rank.flush(TIMEOUT)
    content = content[:4] + struct.pack("<I", operation) + content[8:]  # `HEADER`'s third field
    star = Star(0, 2, 0, links)
    star.begin()
    links.greet_callers(1, TIMEOUT)
    rank.to[0].peer.sendall(content)
    try:
        return outcome(lambda: star.gather(b"own", TIMEOUT))
    finally:
        rank.close()
        links.close()


@pytest.mark.parametrize("what", ODD)
def test_a_rank_says_what_is_no_message(what: str) -> None:
    """It is named at once."""
    said = told(ODD[what], 1)
    assert said.kind == "RanksFailedError" and said.seconds < TIMEOUT
    assert "rank 1: it sent bytes that are not a message: does it run the same release" in said.text


@pytest.mark.thorough
@pytest.mark.parametrize("what", WORDLESS)
def test_a_rank_says_nothing_in_many_words(what: str) -> None:
    """It is given up in time."""
    said = told(WORDLESS[what], 0 if "earlier" in what else 1)
    assert said.kind == "RanksFailedError" and said.seconds < TIMEOUT + SLACK
    assert "rank 1: sent nothing for 1.5 s" in said.text


@pytest.mark.thorough
def test_a_thousand_silent_strangers() -> None:
    links, invitation = invite(2)
    with connected(("localhost", invitation.port), b"", 1000):
        done = meet(invitation, Star(0, 2, 0, links), 20)
    links.close()
    assert [each.kind for each in done] == ["done", "done"], done


class Line:
    """A proxy before a coordinator, by which one rank reaches it."""

    def __init__(self, port: int, carry: Callable[[bytes, int], bytes | None]) -> None:
        """``carry`` gives what goes on of some bytes, of which so many came before; None cuts."""
        self._at_once = 1 if carry is single else 1 << 16
        self.listener = socket.create_server(("localhost", 0))
        self.port: int = self.listener.getsockname()[1]
        self._carry = carry
        self._sockets = [self.listener]
        threading.Thread(target=self._accept, args=(port,), daemon=True).start()

    def _accept(self, port: int) -> None:
        with contextlib.suppress(OSError):
            here, _ = self.listener.accept()
            there = socket.create_connection(("localhost", port))
            self._sockets += [here, there]
            threading.Thread(target=self._pass, args=(here, there), daemon=True).start()
            self._pass(there, here)

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        seen = 0
        with contextlib.suppress(OSError):
            while part := one.recv(self._at_once):
                carried = self._carry(part, seen)
                seen += len(part)
                if carried is None:
                    break
                other.sendall(carried)
        for each in (one, other):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for each in self._sockets:
            each.close()


HELLO = HEADER.size + 16


def held_up(part: bytes, seen: int) -> bytes:
    time.sleep(0.3)
    return part


def single(part: bytes, seen: int) -> bytes:
    return part


LINES: dict[str, Callable[[bytes, int], bytes | None]] = {
    "swallows all after the greeting": lambda part, seen: part if seen < HELLO else b"",
    "swallows all": lambda part, seen: b"",
    "is cut after the greeting": lambda part, seen: part if seen < HELLO else None,
    "is cut at once": lambda part, seen: None,
    "is cut in a message": lambda part, seen: part if seen < HELLO else part[:9] or None,
    "delays": held_up,
    "carries single bytes": single,
}


CARRY_ALL = ("delays", "carries single bytes")


@pytest.mark.parametrize("what", LINES)
def test_a_line_between_ranks(what: str) -> None:
    """It works, or both ends are errors in time that name the other."""
    links, invitation = invite(2)
    line = Line(invitation.port, LINES[what])
    invitation = Invitation(invitation.token, "elsewhere", line.port, ["localhost"])
    began = time.monotonic()
    try:
        # A line that carries all is slow at most: on a busy machine, too.
        done = meet(invitation, Star(0, 2, 0, links), 20 if what in CARRY_ALL else TIMEOUT)
    finally:
        line.close()
        links.close()
    if what in CARRY_ALL:
        assert [each.kind for each in done] == ["done", "done"], done
        return
    for rank, each in enumerate(done):
        assert each.kind == "RanksFailedError", done
        assert f"rank {1 - rank}" in each.text or f"rank {rank}" in each.text
    assert time.monotonic() - began < TIMEOUT + SLACK


CALLERS: dict[str, bytes | None] = {
    "a rank that takes nothing": struct.pack("<q", 99),
    "a negative rank": struct.pack("<q", -1),
    "half a number": b"\1\0",
    "nothing, and hangs up": None,
}


@pytest.mark.parametrize("what", CALLERS)
def test_a_stranger_at_the_exchange_of_a_host(what: str) -> None:
    """What another process of this user says there is neither believed nor an error."""
    publisher, taker = Exchange(5.0), Exchange(5.0)
    taken: list[int] = []
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.connect(publisher.address)
    content = CALLERS[what]
    if content is not None:
        stranger.send(content)
    if content is None or len(content) < 8:
        stranger.close()
    nothing: Any = lambda *_: None  # noqa: E731
    about: dict[str, Any] = {"slot_bytes": 8, "budget": 64, "receive": nothing}
    about["on_failure"] = nothing
    of_publisher = SharedReads(0, publish={7: (1,)}, addresses={1: taker.address})
    of_taker = SharedReads(1, sources={publisher.address: [7]}, ranks={publisher.address: 0})
    try:
        taker.start(of_taker, take=lambda chunk, memory: taken.append(chunk), **about)
        publisher.start(of_publisher, take=nothing, **about)
        slot, memory = publisher.slot(8)
        memory[:] = 1
        publisher.publish(7, slot, [1])
        publisher.release(slot)
        publisher.finish()
        taker.finish()
    finally:
        stranger.close()
        publisher.close()
        taker.close()
    assert taken == [7]


SLOTS: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "a slot that is not there": ((8, 8), (7, 99)),
    "a slot before the first": ((8, 8), (7, -9)),
    "a chunk that nobody wants": ((8, 8), (8, 0)),
    "more memory than there is": ((1 << 40, 1 << 30), (7, 0)),
    "memory of no length": ((-1, 8), (7, 0)),
    "longer slots than there are": ((8, 1 << 20), (7, 7)),
}


@pytest.mark.parametrize("what", SLOTS)
def test_a_rank_of_this_host_publishes_what_is_none(what: str) -> None:
    shape, chunk = SLOTS[what]
    taker, nothing = Exchange(5.0), lambda *_: None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        address, _ = listen(listener)
        of_taker = SharedReads(1, sources={address: [7]}, ranks={address: 0})
        about: dict[str, Any] = {"slot_bytes": 8, "budget": 64, "receive": nothing}
        taker.start(of_taker, take=nothing, on_failure=nothing, **about)
        connection, _ = listener.accept()
        with connection, tempfile.TemporaryFile() as memory:
            memory.truncate(64)
            connection.recv(8)
            socket.send_fds(connection, [struct.pack("<2q", *shape)], [memory.fileno()])
            connection.sendall(struct.pack("<2q", *chunk))
            with pytest.raises(StorageError, match="rank 0 of this host was lost: it sent bytes"):
                taker.finish()
            taker.close()
