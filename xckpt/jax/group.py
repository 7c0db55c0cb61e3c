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
   ranks. A coordinator that gives up leaves a note, which the others find while they wait for it.

If a process dies, JAX notices after its own heartbeat timeout and ends all the others, unless
``jax_enable_recoverability`` is set.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

import jax
from jax._src import distributed, xla_bridge

from xckpt.engine.ranks.waiting import WARN_AFTER, Waiting, silence, wait_in_thread
from xckpt.errors import NoGroupError, RankFailure, RanksFailedError, spelled_ranks

PART_BYTES = 1 << 21
"""Largest value of one key; older services take messages of at most 4 MiB, key included."""
LENGTH_BYTES = 8
"""What the length of the whole takes at the head of the first part."""
SLICE_SECONDS = 1.0
"""How often a rank that waits asks whether others have given up."""
TIMEOUT = 1800.0
"""Seconds that a silent rank is waited for, unless a caller says otherwise."""

_numbers = itertools.count()


class Client(Protocol):
    """What is used of the client of JAX's coordination service; timeouts in milliseconds."""

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        """Set a key that is not set."""
        ...

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """The value of a key, once it is set."""
        ...

    def key_value_delete(self, key: str) -> None:
        """Delete a key and all keys below it."""
        ...

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None:
        """Return when every process waits at the barrier."""
        ...

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]:
        """All keys below a key that are set, with their values."""
        ...


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
        client, rank, size = _service()
        if client is None:
            raise RuntimeError("call jax.distributed.initialize() before making a JaxGroup")
        if not 0 <= coordinator_rank < size:
            raise ValueError(f"coordinator_rank {coordinator_rank} is not in [0, {size})")
        self.rank, self.size, self.coordinator = rank, size, coordinator_rank
        self._client = client
        self.timeout = timeout
        self._warn_after = warn_after
        self._prefix = f"xckpt/{next(_numbers)}"
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

    def gather(self, data: bytes) -> list[bytes] | None:
        """Every rank's bytes on the coordinator, None elsewhere.

        Raises:
            RanksFailedError: ranks were silent for the whole timeout; all of them are listed.
        """
        key = self._next("gather")
        if self.rank != self.coordinator:
            self._put(f"{key}/{self.rank}", data)
            return None
        deadline = time.monotonic() + self.timeout
        answers: dict[int, bytes | None] = {}

        def silent() -> list[int]:
            missing = [rank for rank in self._others() if rank not in answers]
            return [rank for rank in missing if not self._is_set(f"{key}/{rank}/0")]

        waiting = self._waiting(silent)
        for rank in self._others():
            answers[rank] = self._get(f"{key}/{rank}", deadline, waiting)
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
                self._put(f"{key}/{rank}", data[rank])
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
            self._put(key, data)
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
        return f"{self._prefix}/{next(self._calls)}/{operation}"

    def _put(self, key: str, data: bytes) -> None:
        whole = len(data).to_bytes(LENGTH_BYTES, "big") + data
        try:
            for part, start in enumerate(range(0, len(whole), PART_BYTES)):
                self._client.key_value_set_bytes(f"{key}/{part}", whole[start : start + PART_BYTES])
        except RuntimeError as error:
            raise _lost(f"the coordination service failed: {_first_line(error)}") from error

    def _is_set(self, key: str) -> bool:
        try:
            return bool(self._client.blocking_key_value_get_bytes(key, 1))
        except RuntimeError:
            return False

    def _get(self, key: str, deadline: float, waiting: Waiting) -> bytes | None:
        """The value of a key; None if its first part does not come in time."""
        first = self._wait(f"{key}/0", deadline, waiting)
        if first is None:
            return None
        length = LENGTH_BYTES + int.from_bytes(first[:LENGTH_BYTES], "big")
        parts = [first]
        for part in range(1, -(-length // PART_BYTES)):
            more = self._wait(f"{key}/{part}", deadline + SLICE_SECONDS, waiting)
            if more is None:
                return None
            parts.append(more)
        return b"".join(parts)[LENGTH_BYTES:]

    def _wait(self, key: str, deadline: float, waiting: Waiting) -> bytes | None:
        while True:
            left = min(deadline - time.monotonic(), waiting.seconds_left, SLICE_SECONDS)
            try:
                milliseconds = max(10, int(left * 1000))
                return self._client.blocking_key_value_get_bytes(key, milliseconds)
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise _lost(f"the coordination service failed: {_first_line(error)}") from error
            self._raise_if_given_up()
            waiting.remind()
            if time.monotonic() >= deadline:
                return None

    def _from_coordinator(self, key: str) -> bytes:
        # The coordinator times out first, and its note tells more than its silence.
        waiting = self._waiting(lambda: [self.coordinator])
        value = self._get(key, time.monotonic() + self.timeout + SLICE_SECONDS, waiting)
        if value is None:
            raise _silence([self.coordinator], self.timeout)
        return value

    def _meet(self, barrier: str) -> None:
        """Return when every rank has come to this barrier."""

        def silent() -> list[int]:
            came = {
                int(key.rpartition("/")[2])
                for key, _ in self._client.key_value_dir_get_bytes(barrier)
            }
            return [rank for rank in self._others() if rank not in came]

        def wait() -> None:
            self._client.key_value_set_bytes(f"{barrier}/{self.rank}", b".")
            self._client.wait_at_barrier(barrier, int(self.timeout * 1000))

        try:
            wait_in_thread(wait, self._waiting(silent), None)
        except RuntimeError as error:
            text = str(error).split("RPC:")[0].strip()
            missing = silent()
            raise _lost(
                f"not every rank came within {self.timeout:g} s: {spelled_ranks(missing)}: {text}",
                missing,
            ) from error

    def _give_up(self, silent: list[int]) -> NoReturn:
        note = ",".join(map(str, silent)).encode()
        with contextlib.suppress(RuntimeError):
            self._client.key_value_set_bytes(f"{self._prefix}/silent/0", note)
        raise _silence(silent, self.timeout)

    def _raise_if_given_up(self) -> None:
        notes = self._client.key_value_dir_get_bytes(f"{self._prefix}/silent")
        if notes:
            raise _silence([int(rank) for rank in notes[0][1].split(b",")], self.timeout)


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
    client, _, size = _service()
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


def _service() -> tuple[Client | None, int, int]:
    """The client of the coordination service, this process's number, the number of processes.

    JAX has no public door to its key-value store; this is the one place that goes behind.
    """
    state = distributed.global_state
    return state.client, state.process_id or 0, state.num_processes or 1  # type: ignore[return-value]


def _silence(ranks: list[int], seconds: float) -> RanksFailedError:
    return _lost(f"{spelled_ranks(ranks)} {silence(seconds)}", ranks)


def _lost(why: str, ranks: Sequence[int] = ()) -> RanksFailedError:
    error = RanksFailedError(f"lost contact with other ranks: {why}")
    error.failures = tuple(RankFailure(rank, "TimeoutError", str(error)) for rank in ranks)
    return error


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]
