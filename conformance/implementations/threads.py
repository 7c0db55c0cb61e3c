"""A group whose ranks are threads of one process, for implementations that take a group, and tests.

1. `run_ranks` starts a thread for each rank and calls ``function(group)`` in it.
2. In each collective step of a `ThreadGroup` every rank puts what it has on a table and waits until
   all have; then all look at it.
3. A rank that has left by an exception comes no more, so those who wait for it raise
   `LostRankError`, as do those who wait longer than `SECONDS`.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["LostRankError", "Outcome", "ThreadGroup", "results", "run_ranks"]

Result = TypeVar("Result")

SECONDS = 60
"""How long a rank waits for another."""


class LostRankError(Exception):
    """A rank that this one waits for has failed, or is late."""


class _Table:
    """Where the ranks of one group meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._meetings = 0
        self._left = False
        self._brought: dict[int, object] = {}
        self._found: list[object] = []

    def meet(self, rank: int, mine: object) -> list[object]:
        """What every rank has brought."""
        with self._changed:
            before = self._meetings
            self._brought[rank] = mine
            if len(self._brought) == self.size:
                self._found = [self._brought.pop(rank) for rank in range(self.size)]
                self._meetings += 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._meetings > before or self._left, SECONDS)
            if self._meetings == before:
                raise LostRankError(f"rank {rank} waits for others that have failed or are late")
            # The next meeting takes this rank too, so nothing has replaced it yet.
            return self._found

    def leave(self) -> None:
        """The rank takes part in no further meeting."""
        with self._changed:
            self._left = True
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class ThreadGroup:
    """One rank's end of a group of threads."""

    rank: int
    table: _Table
    coordinator: int = 0

    @property
    def size(self) -> int:
        return self.table.size

    def gather(self, data: bytes) -> list[bytes] | None:
        found = [item for item in self.table.meet(self.rank, data) if isinstance(item, bytes)]
        assert len(found) == self.size
        return found if self.rank == self.coordinator else None

    def scatter(self, data: Sequence[bytes] | None) -> bytes:
        assert (data is not None) == (self.rank == self.coordinator)
        shares = self.table.meet(self.rank, data)[self.coordinator]
        assert isinstance(shares, Sequence) and len(shares) == self.size
        return shares[self.rank]

    def broadcast(self, data: bytes | None) -> bytes:
        assert (data is not None) == (self.rank == self.coordinator)
        found = self.table.meet(self.rank, data)[self.coordinator]
        assert isinstance(found, bytes)
        return found

    def barrier(self) -> None:
        self.table.meet(self.rank, None)


@dataclass(slots=True)
class Outcome(Generic[Result]):
    """What came of one rank: a result or an exception."""

    results: list[Result] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def result(self) -> Result:
        if self.error is not None:
            raise self.error
        return self.results[0]


def run_ranks(
    size: int, function: Callable[[ThreadGroup], Result], *, coordinator: int = 0
) -> list[Outcome[Result]]:
    """Call ``function`` with each rank's group, all at once; fails if a rank doesn't come back."""
    table = _Table(size)
    outcomes: list[Outcome[Result]] = [Outcome() for _ in range(size)]

    def run(rank: int) -> None:
        try:
            outcomes[rank].results.append(function(ThreadGroup(rank, table, coordinator)))
        except BaseException as error:
            outcomes[rank].error = error
            table.leave()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
        assert not thread.is_alive(), f"a rank hangs:\n{_stacks()}"
    return outcomes


def _stacks() -> str:
    """Where every thread of this process is."""
    frames = sys._current_frames()
    return "\n".join(
        f"{thread.name}\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threading.enumerate()
        if thread.ident in frames
    )


def results(
    size: int, function: Callable[[ThreadGroup], Result], *, coordinator: int = 0
) -> list[Result]:
    """What ``function`` returned on each rank; raises the first error that is its own."""
    outcomes = run_ranks(size, function, coordinator=coordinator)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    for error in errors:
        if not isinstance(error, LostRankError):
            raise error
    return [outcome.result for outcome in outcomes]
