"""The parts of `jax.distributed`'s coordination service that are used; every call ends in time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from jax._src import distributed

from xckpt.engine.ranks.patience import GRACE_SECONDS
from xckpt.engine.ranks.waiting import SILENT, Waiting, silence, wait_in_thread
from xckpt.errors import RankFailure, RanksFailedError, ranks_in_words

PART_BYTES = 1 << 21
"""Largest value of one key; older services take messages of at most 4 MiB, key included."""
LENGTH_BYTES = 8
"""Bytes of the total length, at the head of the first part."""

Answer = TypeVar("Answer")


class Client(Protocol):
    """The methods used of the client of JAX's coordination service; timeouts in milliseconds."""

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        """Set a key that is not set, or any."""
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


class InTime:
    """A client whose calls end in time, even if the process that answers is stopped."""

    def __init__(self, client: Client) -> None:
        self.until: float = math.inf
        """When calls are given up, by `time.monotonic`."""
        self.away: float = 0.0
        """Seconds in which this process did not run while it waited for answers."""
        self._asked = math.inf
        """When the first call since the last answer began."""
        self._client = client

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        """See `Client`."""
        self._call(lambda: self._client.key_value_set_bytes(key, value, allow_overwrite))

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """See `Client`."""
        return self._call(lambda: self._client.blocking_key_value_get_bytes(key, timeout_in_ms))

    def key_value_delete(self, key: str) -> None:
        """See `Client`."""
        self._call(lambda: self._client.key_value_delete(key))

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None:
        """See `Client`."""
        self._call(lambda: self._client.wait_at_barrier(barrier_id, timeout_in_ms))

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]:
        """See `Client`."""
        return self._call(lambda: self._client.key_value_dir_get_bytes(key))

    def put(self, key: str, data: bytes) -> None:
        """Set a value, in parts."""
        whole = len(data).to_bytes(LENGTH_BYTES, "big") + data
        try:
            for part, start in enumerate(range(0, len(whole), PART_BYTES)):
                self.key_value_set_bytes(f"{key}/{part}", whole[start : start + PART_BYTES])
        except RanksFailedError:
            raise
        except RuntimeError as error:
            raise failed(error) from error

    def value_of(self, key: str) -> bytes | None:
        """The value of a key, if it is set."""
        try:
            return self.blocking_key_value_get_bytes(key, 1)
        except RuntimeError:
            return None

    def is_set(self, key: str) -> bool:
        """Whether a key is set."""
        return bool(self.value_of(key))

    def get(self, key: str, wait: Callable[[str, float], bytes | None]) -> bytes | None:
        """The value of a key; None if its first part does not come in time."""
        first = wait(f"{key}/0", 0.0)
        if first is None:
            return None
        length = LENGTH_BYTES + int.from_bytes(first[:LENGTH_BYTES], "big")
        parts = [first]
        for part in range(1, -(-length // PART_BYTES)):
            more = wait(f"{key}/{part}", GRACE_SECONDS)
            if more is None:
                return None
            parts.append(more)
        return b"".join(parts)[LENGTH_BYTES:]

    def numbers_below(self, key: str) -> set[int]:
        """The numbers that are set below a key."""
        return {int(set_.rpartition("/")[2]) for set_, _ in self.key_value_dir_get_bytes(key)}

    def _call(self, function: Callable[[], Answer]) -> Answer:
        answers: list[Answer] = []
        now = time.monotonic()
        seconds, self._asked = max(0.1, self.until - now), min(self._asked, now)
        nothing_to_say = Waiting(0, 0, lambda: (), warn_after=math.inf)

        def call() -> None:
            try:
                answers.append(function())
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):  # which the client itself may say
                    self._asked = math.inf
                raise
            self._asked = math.inf

        if wait_in_thread(call, nothing_to_say, seconds, excuse=self._excuse):
            return answers[0]
        raise silent_ranks([0], time.monotonic() - min(self._asked, now))

    def _excuse(self, away: float) -> None:
        self.away += away
        self.until += away
        self._asked += away


def service() -> tuple[Client | None, int, int]:
    """The client of the coordination service, this process's number, the number of processes.

    JAX has no public access to its key-value store; only this function reaches behind.
    """
    state = distributed.global_state
    return state.client, state.process_id or 0, state.num_processes or 1  # type: ignore[return-value]


def failed(error: RuntimeError) -> RanksFailedError:
    """The error about a service that answered with another one."""
    return lost(f"the coordination service failed: {str(error).splitlines()[0]}")


def silent_ranks(ranks: Sequence[int], seconds: float) -> RanksFailedError:
    """The error about ranks that did not answer in time."""
    return lost(f"{ranks_in_words(ranks)} {silence(seconds)}", ranks)


def lost(why: str, ranks: Sequence[int] = ()) -> RanksFailedError:
    """The error about ranks, or a service, that cannot be reached."""
    error = RanksFailedError(f"lost contact with other ranks: {why}")
    error.failures = tuple(RankFailure(rank, SILENT, str(error)) for rank in ranks)
    return error
