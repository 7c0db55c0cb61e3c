"""The time in which a process does not run is no silence of others."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from tests.support.interrupts import interrupts
from xckpt.engine.ranks.alive import WORK, working
from xckpt.engine.ranks.connection import Frame, Kind
from xckpt.engine.ranks.links import TOKEN_BYTES, Links
from xckpt.engine.ranks.patience import Patience
from xckpt.engine.ranks.waiting import Presence, silence


def test_presence_is_asked_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    away: list[float] = []
    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", lambda: 10.0)
        presence = Presence()
        for now in (10.5, 40.5, 41.0):
            patched.setattr(time, "monotonic", lambda now=now: now)
            away.append(presence.away())
    assert away == [0.0, 30.0, 0.0]


@pytest.mark.parametrize("seconds, lost", [(0.0, []), (30.0, []), (100.0, [1])])
def test_a_rank_has_its_timeout_beside_the_time_away(
    monkeypatch: pytest.MonkeyPatch, seconds: float, lost: list[int]
) -> None:
    """A hundred seconds are silence, if this process ran all the time."""
    here, there = socket.socketpair()
    links = Links(bytes(TOKEN_BYTES))
    links.add(1, here)
    began = time.monotonic()
    patience = Patience(0, 0, links, lambda rank: "")
    away = 0.0 if lost else seconds
    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", lambda: began + seconds)
        found = patience.hear([1], lambda rank: None, began + away, away, 5.0)
    assert [failure.rank for failure in found] == lost
    links.close()
    there.close()


def test_what_is_sent_is_no_sign_of_life() -> None:
    """The kernel takes the first bytes for a process that is stopped, too."""
    here, there = socket.socketpair()
    links = Links(bytes(TOKEN_BYTES))
    links.add(1, here)
    before = links.to[1].heard
    links.send(1, Frame(Kind.ALIVE, 1, 1, b"12345678"))
    assert links.to[1].heard == before
    links.close()
    there.close()


def test_a_silence_is_named_in_round_seconds() -> None:
    assert silence(1.74758).startswith("sent nothing for 1.75 s;")
    assert silence(1800.0).startswith("sent nothing for 1800 s;")


def test_after_an_interrupt_nothing_more_is_said() -> None:
    """Python takes a thread for ended once an interrupt has come in the wait for its end."""
    said: list[str] = []

    class Slow:
        beat = 0.02

        def say_alive(self, seconds_ago: float) -> None:
            said.append("begun")
            time.sleep(0.3)
            said.append("ended")

        def heed(self, began: float, away: float) -> None: ...

    def work() -> None:
        with working(Slow()):
            WORK.get().moved = time.monotonic()
            time.sleep(0.1)
            threading.Timer(0.1, interrupt).start()

    with interrupts() as interrupt, pytest.raises(KeyboardInterrupt):
        work()
    assert said == ["begun", "ended"]
