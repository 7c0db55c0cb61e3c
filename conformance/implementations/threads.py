"""Ranks as threads of one process, for implementations that let a caller bring the collectives.

Every collective is a meeting: each rank puts down what it has and waits until all have. A rank that
fails leaves, and whoever waits for it raises `LostRankError` instead of waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["LostRankError", "ThreadGroup", "on_ranks"]

Result = TypeVar("Result")

SECONDS = 60.0
"""How long a rank waits for the others."""


class LostRankError(Exception):
    """A rank that this one waits for has failed."""


class _Meeting:
    """Where the ranks put down what they have and see what the others brought."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._brought: list[Any] = [None] * size

    def meet(self, rank: int, mine: object) -> list[Any]:
        try:
            self._brought[rank] = mine
            self._barrier.wait(SECONDS)
            found = list(self._brought)
            self._barrier.wait(SECONDS)  # nobody brings the next thing before all have looked
        except threading.BrokenBarrierError:
            raise LostRankError(f"rank {rank} waits for a rank that has failed") from None
        return found

    def leave(self) -> None:
        self._barrier.abort()


@dataclass(frozen=True, slots=True)
class ThreadGroup:
    """One rank's end of a group, as `xckpt.engine.group.Group` says."""

    rank: int
    meeting: _Meeting
    coordinator: int = 0

    @property
    def size(self) -> int:
        return self.meeting.size

    def gather(self, data: bytes) -> list[bytes] | None:
        found = self.meeting.meet(self.rank, data)
        return found if self.rank == self.coordinator else None

    def scatter(self, data: Sequence[bytes] | None) -> bytes:
        return self.meeting.meet(self.rank, data)[self.coordinator][self.rank]

    def broadcast(self, data: bytes | None) -> bytes:
        return self.meeting.meet(self.rank, data)[self.coordinator]

    def barrier(self) -> None:
        self.meeting.meet(self.rank, None)


def on_ranks(size: int, function: Callable[[ThreadGroup], Result]) -> list[Result]:
    """Call ``function`` in a thread a rank, all at once.

    Raises:
        Exception: the error of the first rank that failed by itself.
    """
    meeting = _Meeting(size)

    def run(rank: int) -> Result:
        try:
            return function(ThreadGroup(rank, meeting))
        except BaseException:
            meeting.leave()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [future.exception() for future in futures]
    own = [error for error in errors if error and not isinstance(error, LostRankError)]
    for error in own or filter(None, errors):
        raise error
    return [future.result() for future in futures]
