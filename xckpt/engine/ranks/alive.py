"""A rank that works says so: the others wait as long as it makes progress, and no longer.

1. Code that moves bytes or files notes the time after each slab, file or request:
   ``WORK.get().moved = time.monotonic()``. It is a statement, not a call, because it stands in the
   innermost loops of a save. A system call that does not return notes nothing.
2. `working` surrounds a rank's own part of a step. Where the group can pass it on, a thread tells
   the others at intervals how long ago this rank made progress, if it made any since the last time.
3. The same thread hears the others meanwhile. So a coordinator that works for long learns that a
   rank is lost, and says so, while it works. The next note of progress then ends the work
   (`Work.advance`).
4. A thread that does a part of some work is started with that `WORK`.
5. A rank that takes chunks from another rank takes over the time of that rank's progress, not the
   time at which it heard of it. So a rank that has stopped is never taken for alive.
6. A thread that uses what its caller gets back is an `AwaitedThread`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
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
    """When it last made progress, by `time.monotonic`."""
    is_heard: bool = False
    """Whether other ranks hear of it."""
    failures: Sequence[RankFailure] = ()
    """Why it is in vain, once that is known."""

    def advance(self) -> None:
        """Note progress, at a moment when the work may as well end.

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
    """A group whose ranks can tell the others that they make progress."""

    @property
    def beat(self) -> float:
        """Seconds between two messages of a rank that works; ``math.inf`` for no messages."""
        ...

    def say_alive(self, seconds_ago: float) -> None:
        """Say that this rank works at its part of a step, and made progress some seconds ago."""
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
    """Seconds between two messages of a rank that others wait for, for at most ``timeout``.

    Example:
        >>> beat_of(1800.0), beat_of(2.0)
        (5.0, 0.5)
    """
    return min(BEAT_SECONDS, timeout / 4)


class AwaitedThread(threading.Thread):
    """A daemon whose end can be waited for again after Ctrl-C.

    Before Python 3.13 a thread counts as ended once an interrupt has come in
    `threading.Thread.join`: a second wait returned at once, and the thread went on to write into
    memory that the caller had back. (`xckpt.storage.budget.Pool` does the same by itself.)

    Example:
        >>> done = []
        >>> thread = AwaitedThread(lambda: done.append(1), "example")
        >>> thread.join()  # not started yet: nothing to wait for
        >>> thread.start()
        >>> thread.join()
        >>> done
        [1]
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._has_run = threading.Event()

    def run(self) -> None:
        """Call the target."""
        try:
            super().run()
        finally:
            self._has_run.set()

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended; not at all if it has not started."""
        if self.ident is not None and self._has_run.wait(timeout):
            super().join(timeout)


@contextlib.contextmanager
def working(group: object, *, heeds: bool = False) -> Generator[None]:
    """Around this rank's own part of a step: the others hear of its progress.

    Args:
        group: the ranks.
        heeds: whether the step needs something of the others, so that the loss of one ends it.

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
    thread = AwaitedThread(partial(_talk, group, work, over, heeds), "xckpt-alive")
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
        away = presence.away()
        if away:  # this process did not run: that is no rest
            began, said = began + away, said + away
            work.moved = min(time.monotonic(), work.moved + away)
        try:
            if heeds:
                group.heed(began, away)
        except RanksFailedError as error:
            work.failures = error.failures
            return
        moved, now = work.moved, time.monotonic()
        if moved > said and now - spoke >= group.beat:
            said, spoke = moved, now
            group.say_alive(now - moved)
