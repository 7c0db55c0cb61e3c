"""How a process of a JAX job waits for others: for a key that one sets, for all at a barrier.

1. A wait ends when nothing is heard of a rank for the timeout; the notes of the others count
   (`xckpt.jax.notes`), and are looked at now and then.
2. A coordinator that works at its own part of a step looks too: for notes, and for silent ranks
   that have not done their part. So it names a lost rank while it works.
3. A rank that gives others up leaves a note.
4. While this process itself does not run (a scheduler has suspended the job), it hears nothing:
   that time is no silence of others. The service counts it, so ranks meet again at another barrier.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from xckpt.engine.ranks.alive import beat_of
from xckpt.engine.ranks.patience import GRACE_SECONDS
from xckpt.engine.ranks.waiting import SLICE_SECONDS, Waiting, given_up, wait_in_thread
from xckpt.errors import RankFailure, RanksFailedError, ranks_in_words
from xckpt.jax.notes import Notes
from xckpt.jax.service import InTime, failed, lost, silent_ranks

LOOK_SECONDS = 0.7
"""How often a rank that waits looks at the notes; `SLICE_SECONDS` once one is suspected."""


class Waits:
    """The waits of one rank.

    Args:
        client: the coordination service.
        notes: what the ranks of the group leave for each other.
        ranks: this process's rank, how many there are, and the coordinator.
        timeout: seconds that a silent rank is waited for.
        warn_after: seconds of waiting after which a warning in the log names the silent ranks.
    """

    def __init__(
        self,
        client: InTime,
        notes: Notes,
        ranks: tuple[int, int, int],
        timeout: float,
        warn_after: float,
    ) -> None:
        self._client = client
        self._notes = notes
        self._rank, size, self._coordinator = ranks
        self._others = [rank for rank in range(size) if rank != self._rank]
        self._timeout = timeout
        self._warn_after = warn_after
        self._came: set[int] = set()
        """Ranks that have done their part of the step at which this one works."""
        self._began = 0.0
        """Since when this rank waits in this step; later by the time in which it did not run."""
        self._was_away = False
        """Whether there was such a time in this step."""
        self._failed: Sequence[RankFailure] = ()
        """Why the save or load that goes on has failed."""

    def begin(self) -> None:
        """The next save or load begins."""
        self._failed = ()
        self._came.clear()

    def next_step(self) -> None:
        """The next step begins.

        Raises:
            RanksFailedError: ranks were lost before it.
        """
        if self._failed:
            raise given_up(self._failed)  # the others have raised and are gone
        self._came.clear()
        self._notes.renew()
        self._began, self._was_away = time.monotonic(), False

    def heed(self, key: str, began: float, away: float) -> None:
        """The coordinator hears the others while it works; their parts will lie under ``key``.

        Raises:
            RanksFailedError: ranks are lost, or have left.
        """
        try:
            self._notes.renew()
            self._notes.excuse(away)
            self._notes.look()
            late = [rank for rank in self._others if self._is_late(rank, f"{key}/{rank}", began)]
            if late:
                self.give_up(late)
        except RanksFailedError as error:
            self._failed = error.failures
            raise
        except RuntimeError:
            pass  # the service failed, as the next step finds

    def _is_late(self, rank: int, key: str, began: float) -> bool:
        """Whether a rank that has not done its part of this step has been silent for too long."""
        now = time.monotonic()
        if rank in self._came or now < self._notes.deadline(rank, began, self._timeout):
            return False
        if self._client.is_set(f"{key}/0"):
            self._came.add(rank)
        return rank not in self._came

    def saying(self, silent: Callable[[], Sequence[int]]) -> Waiting:
        """Says in the log who is waited for."""
        return Waiting(self._rank, self._coordinator, silent, warn_after=self._warn_after)

    def wait(
        self, rank: int, timeout: float, waiting: Waiting, key: str, late: float
    ) -> bytes | None:
        """The value of a key that a rank sets; None if it does not in time.

        Args:
            rank: the rank.
            timeout: seconds without a word from it.
            waiting: says in the log who is waited for.
            key: the key.
            late: seconds that it may take longer.
        """
        said = self._began
        while True:
            until = self._notes.deadline(rank, self._began, timeout) + late
            before = self._client.away
            often = SLICE_SECONDS if self._notes.suspects_some else LOOK_SECONDS
            left = min(until - time.monotonic(), waiting.seconds_left, often)
            try:
                milliseconds = max(10, int(left * 1000))
                return self._client.blocking_key_value_get_bytes(key, milliseconds)
            except RanksFailedError:
                raise
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise failed(error) from error
            if self._excused(self._client.away - before):
                continue
            if self._rank == self._coordinator and time.monotonic() - said > beat_of(self._timeout):
                said = time.monotonic()
                self._notes.say_alive(0.0)
            self._notes.look()
            self._notes.compare_calls()
            waiting.remind()
            if time.monotonic() >= until:
                return None

    def _excused(self, away: float) -> bool:
        """Whether there were seconds in which this process did not run: no silence of others."""
        if away:
            self._was_away = True
            self._began += away
            self._notes.excuse(away)
        return away > 0

    def meet(self, barrier: str) -> None:
        """Return when every rank has come to this barrier.

        Raises:
            RanksFailedError: some rank did not, or was too late; or ranks have given up.
        """

        def silent() -> list[int]:
            came = self._client.numbers_below(barrier)
            return [rank for rank in self._others if rank not in came]

        attempts = itertools.count()
        while True:
            text, waited = self._come(barrier, next(attempts), self.saying(silent))
            if not text:
                return
            if not self._was_away:
                break
            self._was_away = False
            self._notes.renew()
        self._client.until = time.monotonic() + GRACE_SECONDS / 2
        try:
            missing = silent()
        except RuntimeError:
            missing = [0]  # the process that has the service
        late = self._timeout - waited
        if not missing and late > GRACE_SECONDS:
            missing = [self._rank]
            text = f"this process came {late:.1f} s after the first one, or later"
        why = f"not every rank came within {self._timeout:g} s: {ranks_in_words(missing)}: {text}"
        error = lost(why, missing)
        if missing:
            self._notes.leave(error.failures)
        raise error

    def _come(self, barrier: str, attempt: int, waiting: Waiting) -> tuple[str, float]:
        """Come to a barrier: why not all ranks did, empty if they did; and the seconds waited."""
        before, began = self._client.away, time.monotonic()
        unfinished = "it did not come to an end"
        said: list[str] = []

        def wait() -> None:
            try:
                self._client.key_value_set_bytes(f"{barrier}/{self._rank}", b".", True)
                self._client.wait_at_barrier(f"{barrier}/{attempt}", int(self._timeout * 1000))
            except RanksFailedError:  # the service is silent; `meet` looks who came
                said.append(unfinished)
            except RuntimeError as error:
                said.append(str(error).split("RPC:")[0].strip())

        seconds = self._timeout + GRACE_SECONDS
        if not wait_in_thread(wait, waiting, seconds, _looking_at(self._notes)):
            said.append(unfinished)
        away = self._client.away - before
        self._excused(away)
        return "".join(said[:1]), time.monotonic() - began - away

    def give_up(self, silent: Sequence[int]) -> NoReturn:
        """Tell the others that ranks are lost, and raise that."""
        error = silent_ranks(silent, self._timeout)
        self._notes.leave(error.failures)
        raise error


def _looking_at(notes: Notes) -> Callable[[], bool]:
    """Looks at the notes now and then while it is asked often; ends no wait but by raising.

    The function raises a RanksFailedError if ranks have given up or left, or make other calls.
    """
    due = time.monotonic() + LOOK_SECONDS

    def look() -> bool:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + LOOK_SECONDS
            try:
                notes.look()
                notes.compare_calls()
            except RanksFailedError:
                raise
            except RuntimeError:
                pass  # the service failed, as the wait itself finds
        return False

    return look
