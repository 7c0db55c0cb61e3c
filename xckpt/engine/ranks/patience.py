"""How long a rank waits for others, over `Links`, and which ranks count as lost then.

1. A rank is silent when nothing was received from it for the timeout, counted from the beginning of
   the wait. Any frame counts: a coordinator that waits itself says so, and so does a rank that
   works and makes progress (`Kind.ALIVE`).
2. A rank on which another has timed out elsewhere is waited for only a moment longer (`suspect`).
3. A rank that has not connected may be known to be dead.
4. A rank that waits long says what it calls (`Board`): the error about a silent one names its call.
5. While this process is suspended (by a scheduler, say) it hears nothing. That time does not count
   as silence of others (`Presence`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from xckpt.engine.ranks.alive import beat_of
from xckpt.engine.ranks.links import Links
from xckpt.engine.ranks.waiting import (
    CLOSED,
    NO_MESSAGE,
    OTHER_RELEASE,
    SILENT,
    WARN_AFTER,
    Board,
    Presence,
    Waiting,
    silence,
)
from xckpt.errors import RankFailure

LONGEST: Final = 1e6
"""Seconds that a rank is waited for, at most: no socket waits for an endless time."""
GRACE_SECONDS: Final = 0.75
"""How much longer the others wait than the coordinator: its answer says more than its silence."""
SUSPECT_SECONDS: Final = 0.4
"""How long the coordinator waits for a rank on which another has timed out."""
TICK_SECONDS: Final = 0.1
"""How often the clock is looked at."""
KILLED: Final = (
    "the process was probably killed (out of memory?) or has crashed; see its own log "
    "(the connection ended: {})"
)


def ended(why: str) -> str:
    """What a rank has done whose connection has ended."""
    return OTHER_RELEASE if why == NO_MESSAGE else KILLED.format(why)


def suspected_until(*, is_coordinator: bool) -> float:
    """Until when a rank waits for one on which another has timed out, by `time.monotonic`."""
    # The others wait for the coordinator's verdict, so they wait a moment longer than it.
    return time.monotonic() + SUSPECT_SECONDS + (0.0 if is_coordinator else GRACE_SECONDS)


class Patience:
    """What a rank knows about the ranks that it waits for.

    Args:
        rank: the rank that waits.
        coordinator: the rank that decides.
        links: the connections.
        death: says how a rank died that has not connected; empty unless it is known to be dead.
        board: where ranks that wait long say what they call, if there is such a place.
    """

    def __init__(
        self,
        rank: int,
        coordinator: int,
        links: Links,
        death: Callable[[int], str],
        board: Board | None = None,
    ) -> None:
        self.board: Final = board or Board()
        self.suspects: dict[int, float] = {}
        """Rank -> until when it is waited for, at most."""
        self.warn_after = WARN_AFTER
        """Seconds of waiting after which a warning names the silent ranks."""
        self._rank = rank
        self._coordinator = coordinator
        self._links = links
        self._death = death

    def suspect(self, ranks: Sequence[int]) -> None:
        """Wait no longer than a moment for ranks from now on."""
        until = suspected_until(is_coordinator=self._rank == self._coordinator)
        for rank in ranks:
            self.suspects.setdefault(rank, until)

    def excuse(self, away: float) -> None:
        """Do not count as silence the seconds in which this process did not run."""
        if away:
            for link in self._links.to.values():
                link.heard = min(time.monotonic(), link.heard + away)

    def hear(
        self,
        ranks: Sequence[int],
        look: Callable[[int], object],
        began: float,
        away: float,
        timeout: float,
    ) -> list[RankFailure]:
        """The ranks that are lost while this one does its own part of a step.

        Args:
            ranks: those that owe it a message, which is kept.
            look: called with each; raises if it is lost or has left.
            began: see `HeartbeatGroup.heed`.
            away: the same.
            timeout: seconds without a word from a rank. Only the coordinator counts them.
        """
        self._links.turn(0)
        self.excuse(away)
        for rank in ranks:
            look(rank)
        to = self._links.to
        missing = {rank: None for rank in ranks if rank not in to or not to[rank].frames}
        return self.lost_of(missing, began, timeout) if self._rank == self._coordinator else []

    def wait(
        self,
        ranks: Sequence[int],
        take: Callable[[int], bool],
        timeout: float,
        give_up: Callable[[Sequence[RankFailure]], object],
        say_alive: Callable[[Mapping[int, None]], object],
    ) -> None:
        """Wait until ``take`` is true of each rank; it is asked again when there is news.

        Args:
            ranks: those that are waited for.
            take: whether the wait for a rank is over.
            timeout: seconds without a frame from a rank.
            give_up: what is done about lost ranks; unless it raises, the wait for them is over.
            say_alive: called now and then with the ranks that are still waited for.
        """
        missing: dict[int, None] = dict.fromkeys(ranks)
        began = beat = look = time.monotonic()
        presence = Presence()
        about = self._rank, self._coordinator, lambda: list(missing)
        waiting = Waiting(*about, warn_after=self.warn_after)
        news: Sequence[int] = ranks
        while True:
            for rank in news:
                if rank in missing and take(rank):
                    del missing[rank]
            now = time.monotonic()
            if missing and now >= look:
                look = now + TICK_SECONDS
                waiting.remind()
                if lost := self.lost_of(missing, began, timeout):
                    give_up(lost)
                for failure in lost:
                    del missing[failure.rank]
                if now >= beat:
                    beat = now + beat_of(timeout)
                    say_alive(missing)
                    if now - began > timeout / 2:
                        self.board.tell()
            if not missing:
                self.board.forget()
                return
            news = self._links.turn(max(0.0, look - time.monotonic()))
            away = presence.away()
            began += away
            self.excuse(away)

    def _refused(self) -> str:
        return (
            f"rank {self._coordinator} could not accept its connection: {self._links.refused}; "
            f"has that process left many files open, or do others of its machine?"
        )

    def lost_of(
        self, missing: Mapping[int, None], began: float, timeout: float
    ) -> list[RankFailure]:
        """The ranks whose time is over, or that have died before they connected.

        Args:
            missing: those that are waited for.
            began: since when.
            timeout: seconds without a word from a rank.
        """
        lost: list[RankFailure] = []
        now = time.monotonic()
        seconds = timeout - GRACE_SECONDS * (self._rank != self._coordinator)
        for rank in missing:
            link = self._links.to.get(rank)
            heard = began if link is None else max(began, link.heard)
            death = self._death(rank) if link is None and now - began > TICK_SECONDS else ""
            if death:
                lost.append(RankFailure(rank, CLOSED, KILLED.format(death)))
            elif link is None and self._links.refused:
                lost.append(RankFailure(rank, CLOSED, self._refused()))
            elif now >= min(heard + timeout, self.suspects.get(rank, now + 1)):
                why = silence(seconds, self.board.elsewhere(rank))
                lost.append(RankFailure(rank, SILENT, why))
        return lost
