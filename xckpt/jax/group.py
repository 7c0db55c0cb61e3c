"""The processes of a JAX job as a `Group`, over the coordination service of `jax.distributed`.

Bytes travel through the service's key-value store, never through device collectives, so a save
leaves the accelerators alone and may run beside a training step.

1. Every save or load takes the next number of its process, whichever group it has, and every
   collective the next number in it; both are in each key. So processes that make different calls
   meet, and say so (`xckpt.jax.course`). A group for another thread (`JaxGroup.in_background`)
   takes its number where it is made: all processes must make it in the same order as other calls.
2. A value is cut into parts of at most 2 MiB, one message each; the first begins with the number of
   bytes of the whole.
3. A value for one reader is deleted by that reader. A broadcast ends in a barrier, after which the
   coordinator deletes it.
4. A rank that hears nothing for longer than the timeout raises `RanksFailedError` with the silent
   ranks; so does a coordinator that works at its own part. A coordinator that gives up leaves a
   note, which the others find while they wait for it; so does a rank that is interrupted. A rank
   that works, or a coordinator that waits, leaves notes that it is alive (`xckpt.jax.notes`): the
   time counts from the last of them.
5. The service lives in one of the processes. Each call to it is made in a thread and given up when
   the time of the step is over, in case that process is stopped.

If a process dies, JAX notices after its own heartbeat timeout and ends all the others, unless
``jax_enable_recoverability`` is set.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Final

import jax
import numpy as np
from jax._src import xla_bridge

from xckpt.core.geometry.spread import Processes
from xckpt.engine.limits import naming_limit
from xckpt.engine.ranks.alive import beat_of
from xckpt.engine.ranks.group import KeptPlans
from xckpt.engine.ranks.patience import GRACE_SECONDS, LONGEST
from xckpt.engine.ranks.waiting import WARN_AFTER
from xckpt.errors import NoGroupError, RankFailure
from xckpt.jax.course import COURSE
from xckpt.jax.notes import Notes
from xckpt.jax.service import InTime, service
from xckpt.jax.waits import Waits

TIMEOUT = 1800.0
"""Seconds that a silent rank is waited for, unless a caller says otherwise."""

_kept_plans: dict[int, KeptPlans] = {}
"""Coordinator -> the plans of the saves of all processes."""


class JaxGroup:
    """All processes of the job that `jax.distributed.initialize` set up.

    Args:
        coordinator_rank: the process that makes the global decisions and commits.
        timeout: seconds to wait for a process that neither answers nor makes progress with what it
            writes or reads.
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
    turn: AbstractContextManager[object] = threading.RLock()
    """See `OperationGroup`. All groups of a process take the next number of one row."""

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
        self._client, timeout = InTime(client), min(timeout, LONGEST)
        self.timeout: Final = timeout
        self.processes: Final = Processes("jax", np.arange(size))
        self.kept_plans: Final = _kept_plans.setdefault(coordinator_rank, KeptPlans())
        self._warn_after, self._calls = warn_after, 0
        self._call: int | None = None
        self._notes = Notes(self._client, rank, coordinator_rank, timeout)
        self._own_numbers: Iterator[str] | None = None
        self._waits = Waits(
            self._client, self._notes, (rank, size, coordinator_rank), timeout, warn_after
        )

    def within(self, seconds: float) -> JaxGroup:
        """Another group of the same processes with another timeout."""
        return self._again(seconds)

    def in_background(self) -> JaxGroup:
        """Another group of the same processes, for use in another thread; all processes make it."""
        group = self._again(self.timeout)
        first = COURSE.next(group._notes)
        more = (f"{first}.{count}" for count in itertools.count(1))
        group._own_numbers = itertools.chain([str(first)], more)
        group.turn = nullcontext()
        return group

    def _again(self, timeout: float) -> JaxGroup:
        return JaxGroup(
            coordinator_rank=self.coordinator, timeout=timeout, warn_after=self._warn_after
        )

    def begin(self) -> None:
        """See `OperationGroup`."""
        self._calls = 0
        own = self._own_numbers
        self._notes.begin(str(COURSE.next(self._notes)) if own is None else next(own))
        self._waits.begin()
        is_last = self._notes.operation == str(COURSE.last)  # else it is in a later one
        if self._call is not None and is_last:
            self._notes.call(self._call)

    def name_call(self, call: int) -> None:
        """See `CallNamingGroup`."""
        self._call = call

    @property
    def beat(self) -> float:
        """See `HeartbeatGroup`."""
        return beat_of(self.timeout)

    def say_alive(self, seconds_ago: float) -> None:
        """See `HeartbeatGroup`."""
        self._notes.say_alive(seconds_ago)

    def heed(self, began: float, away: float) -> None:
        """See `HeartbeatGroup`; only a coordinator looks for others.

        Raises:
            RanksFailedError: ranks are lost, or have left.
        """
        if self.rank == self.coordinator:
            self._waits.heed(self._key("gather"), began, away)

    def leave(self, error: BaseException) -> None:
        """See `OperationGroup`."""
        # The errors between ranks have `failures`.
        if not getattr(error.__cause__ or error, "failures", ()):
            self._notes.leave([RankFailure.of(self.rank, naming_limit(error))])

    def suspect(self, ranks: Sequence[int]) -> None:
        """See `SuspectingGroup`."""
        self._notes.suspect(ranks)

    def gather(self, data: bytes) -> list[bytes] | None:
        """Every rank's bytes on the coordinator, None elsewhere.

        Raises:
            RanksFailedError: ranks were silent for the whole timeout; all of them are listed.
        """
        key = self._next("gather")
        if self.rank != self.coordinator:
            self._client.put(f"{key}/{self.rank}", data)
            return None
        answers: dict[int, bytes | None] = {}

        def silent() -> list[int]:
            missing = [rank for rank in self._others() if rank not in answers]
            return [rank for rank in missing if not self._client.is_set(f"{key}/{rank}/0")]

        waiting = self._waits.saying(silent)
        for rank in self._others():
            wait = partial(self._waits.wait, rank, self.timeout, waiting)
            answers[rank] = self._client.get(f"{key}/{rank}", wait)
        self._client.key_value_delete(key)
        received = {rank: value for rank, value in answers.items() if value is not None}
        if len(received) < len(answers):
            self._waits.give_up([rank for rank in answers if rank not in received])
        self._notes.look()  # have others given up, while this process was stopped?
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
            self._waits.meet(f"{key}/read")
            self._client.key_value_delete(key)
            return data
        value = self._from_coordinator(key)
        self._waits.meet(f"{key}/read")
        return value

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _next(self, operation: str) -> str:
        if not self._notes.operation:
            self.begin()
        self._waits.next_step()
        key, self._calls = self._key(operation), self._calls + 1
        return key

    def _key(self, operation: str) -> str:
        return f"xckpt/{self._notes.operation}/{self._calls}/{operation}"

    def _from_coordinator(self, key: str) -> bytes:
        # The coordinator times out first, and its note says more than its silence.
        about = self.coordinator, self.timeout + GRACE_SECONDS
        wait = partial(self._waits.wait, *about, self._waits.saying(lambda: [self.coordinator]))
        if (value := self._client.get(key, wait)) is None:
            self._waits.give_up([self.coordinator])
        return value


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
