"""Ranks of one host hand each other chunks; a rank that is lost never leaves another waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import xckpt
from conformance.implementations.threads import ThreadGroup, results
from tests.support.sharded_arrays import cut
from xckpt.core.plan.host_reads import Announcement, SharedReads, share_reads
from xckpt.engine.ranks.rendezvous import host_identity
from xckpt.errors import StorageError
from xckpt.storage.host import exchange as module
from xckpt.storage.host.exchange import Exchange

SIZE = 1000
PATIENCE = 20.0


def content(chunk: int) -> NDArray[np.uint8]:
    return np.random.default_rng(chunk).integers(0, 256, SIZE, np.uint8)


class Rank:
    """One participant: publishes what the test gives it and keeps what it takes."""

    def __init__(self, chunks: range) -> None:
        self.exchange = Exchange()
        self.chunks = chunks
        self.taken: dict[int, NDArray[np.uint8]] = {}
        self.failures: list[BaseException] = []

    def announcement(self) -> Announcement:
        wanted = np.array(self.chunks, np.int64).tobytes()
        return Announcement(host_identity(), self.exchange.address, wanted)

    def take(self, chunk: int, data: NDArray[np.uint8]) -> None:
        self.taken[chunk] = data[:SIZE].copy()

    def run(self, share: SharedReads, slots: int, dies_after: int | None = None) -> None:
        try:
            self.exchange.start(
                share,
                slot_bytes=SIZE,
                budget=slots * SIZE,
                take=self.take,
                on_failure=self.failures.append,
            )
            for done, (chunk, takers) in enumerate(share.publish.items()):
                if done == dies_after:
                    return
                slot, memory = self.exchange.slot(SIZE)
                memory[:] = content(chunk)
                self.exchange.publish(chunk, slot, takers)
                self.exchange.release(slot)
            self.exchange.finish()
        except (StorageError, OSError, EOFError) as error:
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
    shares = share_reads([rank.announcement() for rank in ranks])
    together([lambda r=r, s=s: r.run(s, slots) for r, s in zip(ranks, shares, strict=True)])
    for rank, share in zip(ranks, shares, strict=True):
        assert not rank.failures
        assert sorted(rank.taken) == sorted(chain(*share.sources.values()))
        for chunk, data in rank.taken.items():
            assert (data == content(chunk)).all()


def test_a_rank_that_stops_in_the_middle_fails_the_others() -> None:
    ranks = [Rank(range(20)) for _ in range(3)]
    shares = share_reads([rank.announcement() for rank in ranks])
    deaths = [None, 2, None]
    together(
        [
            lambda r=r, s=s, d=d: r.run(s, 2, d)
            for r, s, d in zip(ranks, shares, deaths, strict=True)
        ]
    )
    assert ranks[0].failures
    assert ranks[2].failures


def test_a_rank_that_never_comes_fails_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.05)
    ranks = [Rank(range(20)) for _ in range(3)]
    shares = share_reads([rank.announcement() for rank in ranks])
    ranks[1].exchange.close()
    together([lambda n=n: ranks[n].run(shares[n], 2) for n in (0, 2)])
    assert ranks[0].failures
    assert ranks[2].failures


def test_a_late_rank_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.05)
    ranks = [Rank(range(6)) for _ in range(2)]
    shares = share_reads([rank.announcement() for rank in ranks])
    late = threading.Event()
    threading.Timer(0.4, late.set).start()
    together(
        [lambda: ranks[0].run(shares[0], 2), lambda: (late.wait(), ranks[1].run(shares[1], 2))]
    )
    assert not ranks[0].failures
    assert not ranks[1].failures
    assert len(ranks[0].taken) + len(ranks[1].taken) == 6


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
