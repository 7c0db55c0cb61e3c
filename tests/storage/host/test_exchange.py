"""Ranks hand each other chunks, on one host and between hosts; a rank that is lost never leaves
another waiting."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

import xckpt
from conformance.implementations.threads import ThreadGroup, results
from tests.support.sharded_arrays import cut
from tests.support.time_limit import ALLOWANCE
from xckpt.core.plan.host_reads import Announcement, SharedReads, packed, share_reads
from xckpt.engine.ranks.rendezvous import Invitation, connect, host_identity
from xckpt.engine.ranks.waiting import OTHER_RELEASE
from xckpt.errors import RanksFailedError, XckptError
from xckpt.storage.host import far, greetings, peer
from xckpt.storage.host.exchange import Exchange
from xckpt.storage.host.far import FarRanks
from xckpt.storage.host.threads import Threads

SIZE = 1000
PATIENCE = 20.0


def content(chunk: int) -> NDArray[np.uint8]:
    return np.random.default_rng(chunk).integers(0, 256, SIZE, np.uint8)


class Rank:
    """One participant: publishes and sends what the test gives it, and keeps what comes."""

    def __init__(self, chunks: range, host: str = "", patience: float = PATIENCE) -> None:
        self.far = FarRanks(patience) if host else None
        self.exchange = Exchange(patience, self.far)
        self.host = host or host_identity()
        self.chunks = chunks
        self.taken: dict[int, NDArray[np.uint8]] = {}
        self.failures: list[BaseException] = []
        self.share = SharedReads(0)

    def announcement(self) -> Announcement:
        wanted = packed(np.array(self.chunks))
        reach = b"" if self.far is None else self.far.reach
        return Announcement(self.host, self.exchange.address, wanted, reach)

    def take(self, chunk: int, data: NDArray[np.uint8]) -> None:
        self.taken[chunk] = data[:SIZE].copy()

    def receive(self, chunk: int, slot: int, data: NDArray[np.uint8]) -> None:
        self.take(chunk, data)
        self.exchange.publish(chunk, slot, self.share.publish.get(chunk, ()))
        self.exchange.release(slot)

    def run(self, share: SharedReads, slots: int, dies_after: int | None = None) -> None:
        self.share = share
        try:
            self.exchange.start(
                share,
                slot_bytes=SIZE,
                budget=slots * SIZE,
                take=self.take,
                receive=self.receive,
                on_failure=self.failures.append,
            )
            for done, chunk in enumerate(share.own):
                if done == dies_after:
                    return
                slot, memory = self.exchange.slot(SIZE)
                memory[:] = content(chunk)
                takers, far = share.publish.get(chunk, ()), share.sends.get(chunk, ())
                self.exchange.publish(chunk, slot, takers, far, SIZE)
                self.exchange.release(slot)
            self.exchange.finish()
        except (XckptError, OSError, EOFError) as error:
            self.failures.append(error)
        finally:
            self.exchange.close()


def together(calls: Sequence[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a rank was left hanging"


@pytest.mark.parametrize("slots", [1, 3, 64])
def test_every_rank_gets_every_chunk(slots: int) -> None:
    ranks = [Rank(range(20)) for _ in range(4)]
    shares = [each.reads() for each in share_reads([rank.announcement() for rank in ranks])]
    together([lambda r=r, s=s: r.run(s, slots) for r, s in zip(ranks, shares, strict=True)])
    for rank, share in zip(ranks, shares, strict=True):
        assert not rank.failures
        assert sorted(rank.taken) == sorted(chain(*share.sources.values()))
        for chunk, data in rank.taken.items():
            assert (data == content(chunk)).all()


def test_a_rank_that_stops_in_the_middle_fails_the_others() -> None:
    ranks = [Rank(range(20)) for _ in range(3)]
    shares = [each.reads() for each in share_reads([rank.announcement() for rank in ranks])]
    deaths = [None, 2, None]
    together(
        [
            lambda r=r, s=s, d=d: r.run(s, 2, d)
            for r, s, d in zip(ranks, shares, deaths, strict=True)
        ]
    )
    assert ranks[0].failures
    assert ranks[2].failures


def test_a_rank_that_answers_otherwise_fails_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    send, greeted = peer.Peer.send, list[peer.Peer]()

    def other(self: peer.Peer, *numbers: int) -> None:
        answers = len(numbers) == 1 and self in greeted
        greeted.append(self)
        send(self, *((99,) if answers else numbers))

    monkeypatch.setattr(peer.Peer, "send", other)
    ranks = [Rank(range(4)) for _ in range(2)]
    shares = [each.reads() for each in share_reads([rank.announcement() for rank in ranks])]
    together([lambda r=r, s=s: r.run(s, 1) for r, s in zip(ranks, shares, strict=True)])
    failures = [*chain(*(rank.failures for rank in ranks))]
    assert all(isinstance(error, XckptError) for error in failures), failures
    assert any(OTHER_RELEASE in str(error) for error in failures)


def test_a_rank_that_never_comes_fails_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greetings, "ACCEPT_SECONDS", 0.05)
    ranks = [Rank(range(20)) for _ in range(3)]
    shares = [each.reads() for each in share_reads([rank.announcement() for rank in ranks])]
    ranks[1].exchange.close()
    together([lambda n=n: ranks[n].run(shares[n], 2) for n in (0, 2)])
    assert ranks[0].failures
    assert ranks[2].failures


def test_a_late_rank_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greetings, "ACCEPT_SECONDS", 0.05)
    ranks = [Rank(range(6)) for _ in range(2)]
    shares = [each.reads() for each in share_reads([rank.announcement() for rank in ranks])]
    late = threading.Event()
    threading.Timer(0.4, late.set).start()
    together(
        [lambda: ranks[0].run(shares[0], 2), lambda: (late.wait(), ranks[1].run(shares[1], 2))]
    )
    assert not ranks[0].failures
    assert not ranks[1].failures
    assert len(ranks[0].taken) + len(ranks[1].taken) == 6


@pytest.mark.parametrize("slots", [1, 3, 64])
@pytest.mark.parametrize("hosts", ["aabb", "abc", "aaabc"])
def test_every_chunk_crosses_once_and_comes_to_every_rank(slots: int, hosts: str) -> None:
    """With one slot of each kind too: what is received has memory of its own."""
    ranks = [Rank(range(24), host) for host in hosts]
    shares = [each.reads() for each in share_reads([rank.announcement() for rank in ranks])]
    together([lambda r=r, s=s: r.run(s, slots) for r, s in zip(ranks, shares, strict=True)])
    assert sum(len(share.own) for share in shares) == 24
    for rank, share in zip(ranks, shares, strict=True):
        assert not rank.failures
        assert sorted([*rank.taken, *share.own]) == list(range(24))
        for chunk, data in rank.taken.items():
            assert (data == content(chunk)).all()


@pytest.mark.parametrize("death", [0, 2])
def test_a_rank_of_another_host_that_stops_is_named(death: int) -> None:
    ranks = [Rank(range(24), host) for host in "abc"]
    shares = [each.reads() for each in share_reads([rank.announcement() for rank in ranks])]
    together(
        [
            lambda r=r, s=s, d=d: r.run(s, 2, d)
            for r, s, d in zip(ranks, shares, [None, death, None], strict=True)
        ]
    )
    assert ranks[0].failures and ranks[2].failures
    first = [str(ranks[survivor].failures[0]) for survivor in (0, 2)]
    # The other one may have been lost first, for the same reason.
    assert any("rank 1 of another host was lost" in each for each in first)


def test_a_rank_of_another_host_that_never_comes_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(greetings, "ACCEPT_SECONDS", 0.05)
    ranks = [Rank(range(24), host) for host in "abc"]
    shares = [each.reads() for each in share_reads([rank.announcement() for rank in ranks])]
    ranks[1].exchange.close()
    together([lambda n=n: ranks[n].run(shares[n], 64) for n in (0, 2)])
    for survivor in (0, 2):
        assert any("rank 1 of another host" in str(each) for each in ranks[survivor].failures)


def test_a_silent_rank_of_another_host_is_given_up() -> None:
    """It is there, and connects to all, but sends nothing."""
    ranks = [Rank(range(8), host, patience=0.6) for host in "ab"]
    shares = [each.reads() for each in share_reads([rank.announcement() for rank in ranks])]
    ended = threading.Event()

    def silent() -> None:
        shares[1].own.clear()
        ranks[1].exchange.start(
            shares[1],
            slot_bytes=SIZE,
            budget=8 * SIZE,
            take=ranks[1].take,
            receive=ranks[1].receive,
            on_failure=ranks[1].failures.append,
        )
        ended.wait(PATIENCE)
        ranks[1].exchange.close()

    def run() -> None:
        ranks[0].run(shares[0], 8)
        ended.set()

    started = time.monotonic()
    together([silent, run])
    assert time.monotonic() - started < 5 * ALLOWANCE
    (failure, *_) = ranks[0].failures
    assert isinstance(failure, RanksFailedError)
    assert [each.rank for each in failure.failures] == [1]


@pytest.mark.parametrize("said", [bytes(40), b"", bytes(5)], ids=["wrong", "silent", "half"])
def test_a_stranger_is_no_rank(said: bytes) -> None:
    """What connects without the token is hung up on, and the ranks meet all the same."""
    ranks = [Rank(range(8), host) for host in "ab"]
    shares = [each.reads() for each in share_reads([rank.announcement() for rank in ranks])]
    with contextlib.ExitStack() as stack:
        strangers: list[socket.socket] = []
        for rank in ranks:
            assert rank.far is not None
            invitation = msgspec.msgpack.decode(rank.far.reach, type=Invitation)
            strangers.append(stack.enter_context(connect(invitation)))
            strangers[-1].sendall(said)
        together([lambda n=n: ranks[n].run(shares[n], 8) for n in (0, 1)])
        for stranger in strangers:
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(40) == b""
    assert not any(rank.failures for rank in ranks)
    assert [len(rank.taken) for rank in ranks] == [4, 4]


def test_strangers_that_connect_all_the_time_hide_no_missing_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:

        def connect_on() -> None:
            until = time.monotonic() + 3.0
            while time.monotonic() < until and not ended.wait(0.02):
                stack.enter_context(socket.create_connection(listener.getsockname()))

        ended = threading.Event()
        thread = threading.Thread(target=connect_on)
        thread.start()
        try:
            with pytest.raises(RanksFailedError) as caught:
                list(greetings.accepted(listener, {5: 1}, 0.3, lambda rank: None, 8))
            assert thread.is_alive(), "not while strangers still came"
        finally:
            ended.set()
            thread.join()
    assert [failure.rank for failure in caught.value.failures] == [5]


def test_a_rank_that_pauses_before_it_says_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may stop a rank there for longer than a call may take."""

    def slowly(invitation: Invitation) -> socket.socket:
        connection = connect(invitation)
        time.sleep(1.2 * peer.CALL_SECONDS)
        return connection

    monkeypatch.setattr(far, "connect", slowly)
    ranks = [Rank(range(8), host) for host in "ab"]
    shares = [each.reads() for each in share_reads([rank.announcement() for rank in ranks])]
    together([lambda n=n: ranks[n].run(shares[n], 8) for n in (0, 1)])
    assert not any(rank.failures for rank in ranks)
    assert [len(rank.taken) for rank in ranks] == [4, 4]


@pytest.mark.parametrize(
    ("boxes", "made", "started"),
    [([], 0, 0), ([(0, 2), (2, 2)], 2, 0), ([(0, 4), (0, 4)], 2, 2)],
    ids=["values", "each its own", "the same"],
)
def test_what_a_load_makes_to_share_reads(
    monkeypatch: pytest.MonkeyPatch, boxes: list[tuple[int, int]], made: int, started: int
) -> None:
    """No socket for a rank that reads no chunk, and none kept where nothing is shared."""
    whole = np.arange(16.0).reshape(4, 4)
    path = f"memory://sharing-{len(boxes)}-{started}"
    xckpt.save(path, {"w": whole, "step": 1}, options=xckpt.SaveOptions(chunk_bytes=64))
    calls: list[str] = []
    for name in ("__init__", "start"):
        monkeypatch.setattr(Exchange, name, noting(getattr(Exchange, name), calls, name))

    def load(group: ThreadGroup) -> object:
        state: dict[str, object] = {"step": 0}
        if boxes:
            low, rows = boxes[group.rank]
            state["w"] = cut(np.zeros((4, 4)), [((low, 0), (rows, 4))])
        xckpt.load_into(path, state, strict=False, group=group)
        return state["step"]

    assert results(2, load) == [1, 1]
    assert (calls.count("__init__"), calls.count("start")) == (made, started)


def noting(function: Callable[..., None], calls: list[str], name: str) -> Callable[..., None]:
    def noted(*args: Any, **options: Any) -> None:
        calls.append(name)
        function(*args, **options)

    return noted


def test_a_thread_that_the_system_refuses_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the end of the load raises that it was never started, and not why."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = Threads(lambda error: None)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        threads.start(print)
    threads.join()
