"""The processes of a JAX job as a `Group`, over the coordination service of `jax.distributed`.

Bytes travel through the service's key-value store, never through device collectives, so a save
leaves the accelerators alone and may run beside a training step.

1. Every group takes the next number of its process, every collective the next number of its group;
   both are in each key. So all processes must make their groups in the same order: make a group in
   the thread that calls ``save_async``, then use it in the background.
2. A value is cut into parts of at most 2 MiB, one message each; the first begins with the number of
   bytes of the whole.
3. A value for one reader is deleted by that reader. A broadcast ends in a barrier, after which the
   coordinator deletes it.
4. A rank that hears nothing for longer than the timeout raises `RanksFailedError` with the silent
   ranks. A coordinator that gives up leaves a note, which the others find while they wait
   for it; so does a rank that is interrupted.
5. The service lives in one of the processes. Each call to it is made in a thread and given up when
   the time of the step is over, in case that process is stopped.

If a process dies, JAX notices after its own heartbeat timeout and ends all the others, unless
``jax_enable_recoverability`` is set.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NoReturn

import jax
import numpy as np
from jax._src import xla_bridge

from xckpt.core.geometry.spread import Processes
from xckpt.engine.ranks.group import KeptPlans
from xckpt.engine.ranks.patience import GRACE_SECONDS, SUSPECT_SECONDS
from xckpt.engine.ranks.waiting import SLICE_SECONDS, WARN_AFTER, Waiting, wait_in_thread
from xckpt.errors import NoGroupError, RankFailure, RanksFailedError, spelled_ranks
from xckpt.jax.notes import Notes
from xckpt.jax.service import InTime, lost, service, silent_ranks

LOOK_SECONDS = 0.7
"""How often a rank that waits looks at the notes; `SLICE_SECONDS` once one is suspected."""
TIMEOUT = 1800.0
"""Seconds that a silent rank is waited for, unless a caller says otherwise."""

_numbers = itertools.count()

_kept_plans: dict[int, KeptPlans] = {}
"""Coordinator -> the plans of the saves of all processes."""


class JaxGroup:
    """All processes of the job that `jax.distributed.initialize` set up.

    Args:
        coordinator_rank: the process that makes the global decisions and commits.
        timeout: longest wait for another process in one collective, in seconds. It has to outlast
            the slowest rank's writing.
        warn_after: seconds of waiting after which a warning in the log names the silent ranks.

    Raises:
        RuntimeError: `jax.distributed.initialize` was not called.
        ValueError: there is no such coordinator.

    Example:
        >>> import jax
        >>> jax.distributed.initialize(...)  # doctest: +SKIP
        >>> group = JaxGroup(timeout=600)  # doctest: +SKIP
        >>> group.rank, group.size  # doctest: +SKIP
        (0, 16)
    """

    rank: int
    size: int
    coordinator: int

    def __init__(
        self,
        *,
        coordinator_rank: int = 0,
        timeout: float = TIMEOUT,
        warn_after: float = WARN_AFTER,
    ) -> None:
        client, rank, size = service()
        if client is None:
            raise RuntimeError("call jax.distributed.initialize() before making a JaxGroup")
        if not 0 <= coordinator_rank < size:
            raise ValueError(f"coordinator_rank {coordinator_rank} is not in [0, {size})")
        self.rank, self.size, self.coordinator = rank, size, coordinator_rank
        self._client = InTime(client)
        self.timeout, self.processes = timeout, Processes("jax", np.arange(size))
        self.kept_plans = _kept_plans.setdefault(coordinator_rank, KeptPlans())
        self._suspects: dict[int, float] = {}
        """Rank -> until when it is waited for, at most."""
        self._operation, self._warn_after = 0, warn_after
        self._prefix = f"xckpt/{next(_numbers)}"
        self._notes = Notes(self._client, self._prefix, rank, timeout)
        self._calls = itertools.count()

    def within(self, seconds: float) -> JaxGroup:
        """Another group of the same processes with another timeout; all processes make it."""
        return self._again(seconds)

    def in_background(self) -> JaxGroup:
        """Another group of the same processes, for use in another thread; all processes make it."""
        return self._again(self.timeout)

    def _again(self, timeout: float) -> JaxGroup:
        return JaxGroup(
            coordinator_rank=self.coordinator, timeout=timeout, warn_after=self._warn_after
        )

    def begin(self) -> None:
        """See `CarefulGroup`."""
        self._operation += 1
        self._calls = itertools.count()
        self._suspects.clear()

    def leave(self, error: BaseException) -> None:
        """See `CarefulGroup`."""
        # What the ranks have said to each other has `failures`.
        if not getattr(error.__cause__ or error, "failures", ()):
            self._notes.leave(self._operation, [RankFailure.of(self.rank, error)])

    def suspect(self, ranks: Sequence[int]) -> None:
        """See `SuspectingGroup`."""
        self._hurry(ranks)
        # The coordinator may have waited in vain for another, which itself waits for a lost one.
        self._notes.suspect(self._operation, ranks)

    def _hurry(self, ranks: Iterable[int]) -> None:
        # Others wait for the coordinator's verdict, for which it waits a moment itself.
        patience = SUSPECT_SECONDS + GRACE_SECONDS * (self.rank != self.coordinator)
        for rank in ranks:
            self._suspects.setdefault(rank, time.monotonic() + patience)

    def gather(self, data: bytes) -> list[bytes] | None:
        """Every rank's bytes on the coordinator, None elsewhere.

        Raises:
            RanksFailedError: ranks were silent for the whole timeout; all of them are listed.
        """
        key = self._next("gather")
        if self.rank != self.coordinator:
            self._client.put(f"{key}/{self.rank}", data)
            return None
        deadline = time.monotonic() + self.timeout
        answers: dict[int, bytes | None] = {}

        def silent() -> list[int]:
            missing = [rank for rank in self._others() if rank not in answers]
            return [rank for rank in missing if not self._client.is_set(f"{key}/{rank}/0")]

        waiting = self._waiting(silent)
        for rank in self._others():
            wait = partial(self._wait, rank, deadline, waiting)
            answers[rank] = self._client.get(f"{key}/{rank}", wait)
        self._client.key_value_delete(key)
        received = {rank: value for rank, value in answers.items() if value is not None}
        if len(received) < len(answers):
            self._give_up([rank for rank in answers if rank not in received])
        received[self.rank] = data
        return [received[rank] for rank in range(self.size)]

    def scatter(self, data: Sequence[bytes] | None) -> bytes:
        """Entry ``rank`` of the coordinator's list.

        Raises:
            RanksFailedError: the coordinator was silent for the whole timeout, or has given up.
        """
        key = self._next("scatter")
        if self.rank == self.coordinator:
            assert data is not None
            for rank in self._others():
                self._client.put(f"{key}/{rank}", data[rank])
            return data[self.rank]
        value = self._from_coordinator(f"{key}/{self.rank}")
        self._client.key_value_delete(f"{key}/{self.rank}")
        return value

    def broadcast(self, data: bytes | None) -> bytes:
        """The coordinator's bytes.

        Raises:
            RanksFailedError: ranks were silent for the whole timeout, or the coordinator gave up.
        """
        key = self._next("broadcast")
        if self.rank == self.coordinator:
            assert data is not None
            self._client.put(key, data)
            self._meet(f"{key}/read")
            self._client.key_value_delete(key)
            return data
        value = self._from_coordinator(key)
        self._meet(f"{key}/read")
        return value

    def _waiting(self, silent: Callable[[], Sequence[int]]) -> Waiting:
        return Waiting(self.rank, self.coordinator, silent, warn_after=self._warn_after)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _next(self, operation: str) -> str:
        until = time.monotonic() + self.timeout + GRACE_SECONDS
        self._client.until = min(until, self._suspects.get(0, until))
        return f"{self._prefix}/{self._operation}/{next(self._calls)}/{operation}"

    def _wait(
        self, rank: int, deadline: float, waiting: Waiting, key: str, late: float
    ) -> bytes | None:
        while True:
            until = min(deadline, self._suspects.get(rank, deadline)) + late
            often = SLICE_SECONDS if self._suspects else LOOK_SECONDS
            left = min(until - time.monotonic(), waiting.seconds_left, often)
            try:
                milliseconds = max(10, int(left * 1000))
                return self._client.blocking_key_value_get_bytes(key, milliseconds)
            except RanksFailedError:
                raise
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise lost(
                        f"the coordination service failed: {str(error).splitlines()[0]}"
                    ) from error
            self._hurry(self._notes.look(self._operation))
            waiting.remind()
            if time.monotonic() >= until:
                return None

    def _from_coordinator(self, key: str) -> bytes:
        # The coordinator times out first, and its note tells more than its silence.
        waiting = self._waiting(lambda: [self.coordinator])
        deadline = time.monotonic() + self.timeout + GRACE_SECONDS
        value = self._client.get(key, partial(self._wait, self.coordinator, deadline, waiting))
        if value is None:
            raise silent_ranks([self.coordinator], self.timeout)
        return value

    def _meet(self, barrier: str) -> None:
        """Return when every rank has come to this barrier."""

        def silent() -> list[int]:
            came = self._client.numbers_below(barrier)
            return [rank for rank in self._others() if rank not in came]

        def wait() -> None:
            self._client.key_value_set_bytes(f"{barrier}/{self.rank}", b".")
            self._client.wait_at_barrier(barrier, int(self.timeout * 1000))

        text = "it did not come to an end"
        try:
            if wait_in_thread(wait, self._waiting(silent), self.timeout + GRACE_SECONDS):
                return
        except RuntimeError as error:
            text = str(error).split("RPC:")[0].strip()
        self._client.until = time.monotonic() + GRACE_SECONDS / 2
        try:
            missing = silent()
        except RuntimeError:
            missing = [0]  # the process that has the service
        raise lost(
            f"not every rank came within {self.timeout:g} s: {spelled_ranks(missing)}: {text}",
            missing,
        )

    def _give_up(self, silent: list[int]) -> NoReturn:
        error = silent_ranks(silent, self.timeout)
        self._notes.leave(self._operation, error.failures)
        raise error


def current_group(
    coordinator_rank: int = 0, process_group: object = None, timeout: float | None = None
) -> JaxGroup | None:
    """A group of all processes if JAX runs in several, else None; initialises no backend.

    None also for a ``process_group``: JAX has no groups of some processes.

    Raises:
        ValueError: there is no such coordinator.
        NoGroupError: JAX runs in several processes, but without `jax.distributed`, so they cannot
            coordinate.

    Example:
        >>> current_group() is None
        True
    """
    if process_group is not None:
        return None
    client, _, size = service()
    if client is not None:
        if size == 1:
            return None
        return JaxGroup(coordinator_rank=coordinator_rank, timeout=timeout or TIMEOUT)
    if xla_bridge.backends_are_initialized() and jax.process_count() > 1:
        raise NoGroupError(
            f"JAX runs in {jax.process_count()} processes that cannot coordinate a checkpoint: "
            f"call jax.distributed.initialize() at the start of the program"
        )
    return None
