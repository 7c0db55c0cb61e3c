"""A rank that works says so: others wait as long as it gets on, and no longer.

1. What moves bytes or files notes the time: ``WORK.get().moved = time.monotonic()``, after each
   slab, file or request. It is a statement, not a call: it stands in the innermost loops of a save.
   A call of the system that does not return notes nothing.
2. `working` surrounds a rank's own part of a step. Where the group can pass it on, a thread tells
   the others now and then how long ago this rank last got on, unless that was said already.
3. The same thread hears the others meanwhile: a coordinator that works for long finds out that a
   rank is lost, and says so, while it works. What counts progress then ends the work (`get_on`).
4. A thread that does a part of the work is started with the `WORK` of it.
5. A rank that takes chunks from another gets on as that one does: it takes over the time, not the
   moment at which it heard of it. So what has stopped is nowhere taken for alive.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from xckpt.engine.ranks.waiting import Presence, given_up
from xckpt.errors import RankFailure, RanksFailedError

BEAT_SECONDS: Final = 5.0
"""How often a rank says that it is alive, unless the timeout is short."""
HEED_SECONDS: Final = 0.5
"""How often a rank that works hears the others, at least."""


@dataclass(slots=True)
class Work:
    """A rank's own part of a step, or whatever one process does alone."""

    moved: float = field(default_factory=time.monotonic)
    """When it last got on, by `time.monotonic`."""
    is_heard: bool = False
    """Whether others hear of it."""
    failures: Sequence[RankFailure] = ()
    """Why it is in vain, once that is known."""

    def get_on(self) -> None:
        """Note that it gets on, at a moment at which it may as well end.

        Raises:
            RanksFailedError: ranks were lost meanwhile, or have left.
        """
        self.moved = time.monotonic()
        if self.failures:
            raise given_up(self.failures)


_ALONE: Final = Work()
WORK: Final[ContextVar[Work]] = ContextVar("WORK", default=_ALONE)
"""What this thread works at."""


@runtime_checkable
class HeartbeatGroup(Protocol):
    """A group whose ranks can tell the others that they get on."""

    @property
    def beat(self) -> float:
        """Seconds between two words of a rank that works; ``math.inf`` for none."""
        ...

    def say_alive(self, seconds_ago: float) -> None:
        """This rank is at its own part of a step, and got on so many seconds ago."""
        ...

    def heed(self, began: float, away: float) -> None:
        """Hear the others while this rank works at its part of a step.

        Args:
            began: since when, by `time.monotonic`; later by the time in which it did not run.
            away: how long it did not run since it last heard them, seconds.

        Raises:
            RanksFailedError: ranks are lost, or have left; the others hear of it.
        """
        ...


def beat_of(timeout: float) -> float:
    """Seconds between two words of a rank that others wait for at most so long.

    Example:
        >>> beat_of(1800.0), beat_of(2.0)
        (5.0, 0.5)
    """
    return min(BEAT_SECONDS, timeout / 4)


@contextlib.contextmanager
def working(group: object, *, heeds: bool = False) -> Generator[None]:
    """This rank's own part of a step: as long as it gets on, the others hear of it.

    Args:
        group: the ranks.
        heeds: whether the others owe something to this step, so that a loss ends it.

    Example:
        >>> class Loud:
        ...     beat = 0.01
        ...     def say_alive(self, seconds_ago):
        ...         print("alive")
        ...     def heed(self, began, away):
        ...         pass
        >>> with working(Loud()):
        ...     WORK.get().moved = time.monotonic()
        ...     time.sleep(0.1)
        alive
    """
    if not isinstance(group, HeartbeatGroup) or group.beat == float("inf"):
        yield
        return
    work, over = Work(is_heard=True), threading.Event()
    before = WORK.set(work)
    thread = threading.Thread(
        target=_talk, args=(group, work, over, heeds), name="xckpt-alive", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        try:
            thread.join()
        except BaseException:
            thread.join()  # the connections are this thread's again
            raise
        finally:
            WORK.reset(before)


def _talk(group: HeartbeatGroup, work: Work, over: threading.Event, heeds: bool) -> None:
    said = began = spoke = work.moved
    presence = Presence()
    while not over.wait(min(group.beat, HEED_SECONDS)):
        try:
            if heeds:
                away = presence.away()
                began += away
                group.heed(began, away)
        except RanksFailedError as error:
            work.failures = error.failures
            return
        moved, now = work.moved, time.monotonic()
        if moved > said and now - spoke >= group.beat:
            said, spoke = moved, now
            group.say_alive(now - moved)
