"""Waiting for other ranks: the log names the missing ones, and a timeout ends the wait.

1. A `Waiting` belongs to one wait of one rank, and can ask which ranks are silent.
2. After `WARN_AFTER` seconds it logs a warning that names them, and again at growing intervals.
3. `Presence` notices the time in which this process itself did not run.
4. `wait_in_thread` does so for a call that cannot be interrupted: the call runs in a thread, and
   is given up at a deadline, which moves by the time in which this process did not run.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Final

from xckpt.engine.limits import naming_limit
from xckpt.errors import RankFailure, RanksFailedError, ranks_in_words

logger: Final = logging.getLogger("xckpt")

SILENT: Final = "TimeoutError"
"""The kind of failure of a rank that was given up."""
CLOSED: Final = "ConnectionError"
"""The kind of failure of a rank whose connection has ended."""

NO_MESSAGE: Final = "it sent bytes that are not a message"
"""Why a connection ends on which other bytes come: the line has lost some, or the rank runs another
release."""
OTHER_RELEASE: Final = f"{NO_MESSAGE}: does it run the same release of xckpt?"
WARN_AFTER: Final = 15.0
"""Seconds after which a waiting rank first names the missing ones; a group may set others."""
LONGEST_SECONDS: Final = 300.0
SLICE_SECONDS: Final = 0.2
"""How often a rank that waits asks whether others have given up."""
AWAY_SECONDS: Final = 2.0
"""More than passes between two looks at the clock while the process runs."""


class Presence:
    """Notices that this process did not run for a while, as when a scheduler suspends a job.

    It heard nothing in that time, which is therefore no silence of others. A rank that waits asks
    it at intervals shorter than `AWAY_SECONDS`.

    Example:
        >>> Presence().away()
        0.0
    """

    def __init__(self) -> None:
        self._looked = time.monotonic()

    def away(self) -> float:
        """Seconds since the last look, if the process did not run in between; else 0."""
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        return passed if passed > AWAY_SECONDS else 0.0


class Waiting:
    """A rank's wait for others.

    Args:
        rank: the rank that waits.
        coordinator: the rank that decides; it may wait for others itself.
        silent: the ranks that have not answered yet.
        warn_after: seconds after which it first names the missing ranks; the interval doubles up to
            `LONGEST_SECONDS`.
    """

    def __init__(
        self,
        rank: int,
        coordinator: int,
        silent: Callable[[], Sequence[int]],
        *,
        warn_after: float = WARN_AFTER,
    ) -> None:
        self._rank = rank
        self._coordinator = coordinator
        self._silent = silent
        self._began = time.monotonic()
        self._interval = warn_after
        self._next = self._began + self._interval

    @property
    def seconds_left(self) -> float:
        """Seconds until there is something to say."""
        return max(0.0, self._next - time.monotonic())

    def remind(self) -> None:
        """Log the ranks that this one waits for, if it is time to."""
        if self.seconds_left:
            return
        silent = self._silent()
        if silent:
            logger.warning("%s", self._text(silent))
        self._interval = min(2 * self._interval, LONGEST_SECONDS)
        self._next = time.monotonic() + self._interval

    def _text(self, silent: Sequence[int]) -> str:
        seconds = time.monotonic() - self._began
        text = f"rank {self._rank} has waited {seconds:.0f} s for {ranks_in_words(silent)}"
        if list(silent) == [self._coordinator]:
            text += ", the coordinator, which may itself wait for others"
        return (
            f"{text}: is it alive, and does every rank call the same save or load? "
            f"(group=xckpt.LocalGroup() is for one process alone; timeout= ends a wait)"
        )


def wait_in_thread(
    call: Callable[[], None],
    waiting: Waiting,
    seconds: float | None,
    should_stop: Callable[[], bool] = lambda: False,
    excuse: Callable[[float], object] = lambda away: None,
) -> bool:
    """Run a call that waits for other ranks; False if it is given up.

    That happens after ``seconds``, or when ``should_stop``, which is asked now and then, is true.
    The call then continues in its thread, and what it raises is dropped. ``excuse`` is called with
    seconds in which this process did not run.

    Raises:
        StorageError: this process may start no more threads.
        Exception: what the call raises.
    """
    ended: futures.Future[None] = futures.Future()

    def run() -> None:
        try:
            call()
        except BaseException as error:
            ended.set_exception(error)
        else:
            ended.set_result(None)

    try:
        threading.Thread(target=run, name="xckpt-wait", daemon=True).start()
    except RuntimeError as error:
        raise naming_limit(error) from error
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    while True:
        left = min(waiting.seconds_left, SLICE_SECONDS, deadline - time.monotonic())
        presence = Presence()
        futures.wait([ended], max(0.0, left))
        if away := presence.away():
            deadline += away
            excuse(away)
        if ended.done():
            ended.result()
            return True
        waiting.remind()
        if should_stop() or time.monotonic() >= deadline:
            return False


def given_up(failures: Sequence[RankFailure]) -> RanksFailedError:
    """The error of a save or load that has lost ranks, or that some ranks have left."""
    ranks = "1 rank" if len(failures) == 1 else f"{len(failures)} ranks"
    lost = any(failure.kind in (SILENT, CLOSED) for failure in failures)
    summary = f"lost contact with {ranks}" if lost else f"{ranks} left it before the end"
    summary += "; this save or load cannot go on"
    if any(failure.kind == SILENT for failure in failures):
        summary += ", and no other can begin on this process group: make a new one"
    error = RanksFailedError.listing(
        summary,
        [
            f"rank {failure.rank}: {failure.message}"
            if failure.kind in (SILENT, CLOSED)
            else f"rank {failure.rank}: {failure.kind}: {failure.message}".removesuffix(": ")
            for failure in failures
        ],
    )
    error.failures = tuple(failures)
    return error


class Board:
    """Where a rank that waits long says what it calls; this one is of ranks that have none.

    A rank may wait in one call for another that waits for it in another call, over other
    connections: neither hears the other.
    """

    call: int = 0
    """What this rank calls, by its place in `xckpt.engine.ranks.group.CALLS`."""

    def tell(self) -> None:
        """Say what this rank calls: it has waited long."""

    def forget(self) -> None:
        """This rank waits no longer."""

    def elsewhere(self, rank: int) -> str:
        """What a rank that is silent here calls, if it has said so; else empty."""
        return ""


def silence(seconds: float, elsewhere: str = "") -> str:
    """The message about a rank that has been given up."""
    text = f"sent nothing for {round(seconds, 2):g} s"
    if elsewhere:
        return f"{text}: {elsewhere}"
    return (
        f"{text}; is it alive, and did it call the same save or "
        f"load? Usual causes: `if rank == 0:` around the call, no_dist=True on one rank, "
        f"save_async on one and save on another, another coordinator_rank on one"
    )
