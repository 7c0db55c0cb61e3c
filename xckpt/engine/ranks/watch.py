"""The time and bytes of a save or load on this rank: in the log, and for a metrics function.

1. A `Watch` times the call, and each of its steps (`Watch.step`, DEBUG in the log).
2. `WatchedGroup` times the calls in which this rank waits for others.
3. At the end, one INFO line gives bytes, seconds, GiB/s and the time waited, and the metrics
   function gets the same as a `Metrics`.

A call without a listener has no watch: see `xckpt.options.is_watched`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Final, Protocol, TypeVar

from xckpt.core.dtypes import item_size
from xckpt.core.metadata import Metadata, TensorStorageMetadata
from xckpt.core.plan.items import LoadPlan, SavePlan, WriteItems
from xckpt.engine.ranks.alive import HeartbeatGroup
from xckpt.engine.ranks.group import Group, SuspectingGroup
from xckpt.options import LoadOptions, SaveOptions, is_watched, with_progress
from xckpt.progress import Metrics, Progress

logger: Final = logging.getLogger("xckpt")

Step = Callable[[str], AbstractContextManager[object]]
"""Gives the context of a step, by its name."""

T = TypeVar("T")
Result = TypeVar("Result")


class WaitingRank(Protocol):
    """What a watch knows of the ranks: which one this is, and how long it has waited for others."""

    rank: int
    size: int
    waited: float
    """Seconds."""


class WatchedGroup:
    """A group that counts the seconds spent in its collectives: waiting for other ranks.

    Example:
        >>> from xckpt.engine.ranks.group import LocalGroup
        >>> group = WatchedGroup(LocalGroup())
        >>> group.gather(b"plan"), group.waited < 1
        ([b'plan'], True)
    """

    def __init__(self, group: Group, waited: float = 0.0) -> None:
        self.rank: int = group.rank
        self.size: int = group.size
        self.coordinator: int = group.coordinator
        self.waited: float = waited
        self._group = group

    def gather(self, data: bytes) -> list[bytes] | None:
        """See `Group`."""
        with self._waiting():
            return self._group.gather(data)

    def scatter(self, data: Sequence[bytes] | None) -> bytes:
        """See `Group`."""
        with self._waiting():
            return self._group.scatter(data)

    def broadcast(self, data: bytes | None) -> bytes:
        """See `Group`."""
        with self._waiting():
            return self._group.broadcast(data)

    def suspect(self, ranks: Sequence[int]) -> None:
        """See `SuspectingGroup`."""
        if isinstance(self._group, SuspectingGroup):
            self._group.suspect(ranks)

    @property
    def beat(self) -> float:
        """See `HeartbeatGroup`."""
        return self._group.beat if isinstance(self._group, HeartbeatGroup) else math.inf

    def say_alive(self, seconds_ago: float) -> None:
        """See `HeartbeatGroup`."""
        if isinstance(self._group, HeartbeatGroup):
            self._group.say_alive(seconds_ago)

    def heed(self, began: float, away: float) -> None:
        """See `HeartbeatGroup`."""
        if isinstance(self._group, HeartbeatGroup):
            self._group.heed(began, away)

    @contextlib.contextmanager
    def _waiting(self) -> Generator[None, None, None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.waited += time.perf_counter() - started


class Watch:
    """Times one save, load or conversion; a context around it, and around its parts.

    Args:
        operation: ``"save"``, ``"load"``, ...; see `Metrics`.
        where: the path or URL.
        metrics: called with what it took.

    Example:
        >>> from xckpt.engine.ranks.group import LocalGroup
        >>> with Watch("save", "run/7", print) as watch:
        ...     group = watch.watched(LocalGroup())
        ...     with watch.step("write"):
        ...         watch.bytes = 1 << 20  # doctest: +ELLIPSIS
        Metrics(operation='save', path='run/7', rank=0, ranks=1, bytes=1048576, shared=0, ...)
    """

    def __init__(
        self, operation: str, where: str, metrics: Callable[[Metrics], object] | None
    ) -> None:
        self.operation = operation
        self.where = where
        self.bytes = 0
        """Bytes of tensors that this rank writes or reads."""
        self.shared = 0
        """Those of them that are shared with the base of a save."""
        self.steps: dict[str, float] = {}
        """Step -> its seconds on this rank."""
        self._metrics = metrics
        self.ranks: WaitingRank | None = None
        """Counts the waiting; None while there is no other rank."""
        self._depth = 0
        self._started = time.perf_counter()

    @classmethod
    def of(
        cls, operation: str, path: str | os.PathLike[str], options: SaveOptions | LoadOptions
    ) -> Watch:
        """The watch of a call with these options; for calls that are watched alone."""
        return cls(operation, os.fspath(path), options.metrics)

    def watched(self, group: Group) -> WatchedGroup:
        """The group with its waiting counted, including what was waited before."""
        watched = WatchedGroup(group, self.ranks.waited if self.ranks else 0.0)
        self.ranks = watched
        return watched

    @contextlib.contextmanager
    def step(self, name: str) -> Generator[None, None, None]:
        """Time a step."""
        logger.debug("%s %s: rank %d: %s", self.operation, self.where, self._rank, name)
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self.steps[name] = self.steps.get(name, 0.0) + seconds
            call = f"{self.operation} {self.where}"
            logger.debug("%s: rank %d: %s took %.3f s", call, self._rank, name, seconds)

    def run(self, name: str, function: Callable[[T], Result], value: T) -> Result:
        """Call a function as a step."""
        with self.step(name):
            return function(value)

    @property
    def _rank(self) -> int:
        return 0 if self.ranks is None else self.ranks.rank

    def __enter__(self) -> Watch:
        if not self._depth:
            self._started = time.perf_counter()
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self.end(kind.__name__ if kind else "")

    def end(self, error: str = "") -> None:
        """Log what it took and call the metrics function; ``error`` is the class of a failure."""
        ranks = self.ranks
        taken = Metrics(
            operation=self.operation,
            path=self.where,
            rank=self._rank,
            ranks=1 if ranks is None else ranks.size,
            bytes=self.bytes,
            shared=self.shared,
            seconds=time.perf_counter() - self._started,
            waited_seconds=0.0 if ranks is None else ranks.waited,
            steps=self.steps,
            error=error,
        )
        logger.info("%s", taken.line())
        if self._metrics is not None:
            try:
                self._metrics(taken)
            except Exception:
                # The save or load itself has succeeded.
                logger.exception("the metrics function failed")


@contextlib.contextmanager
def watched_call(
    options: LoadOptions, call: str, path: str | os.PathLike[str]
) -> Generator[LoadOptions]:
    """The options of a call of one rank, which is timed if there is a listener; its bytes are those
    of its progress.

    Example:
        >>> with watched_call(LoadOptions(metrics=print), "copy", "run/7") as shown:
        ...     shown.progress(Progress(done=8, total=8))  # doctest: +ELLIPSIS
        Metrics(operation='copy', path='run/7', rank=0, ranks=1, bytes=8, shared=0, ...)
    """
    with with_progress(options, call, 0, path) as shown:
        if not is_watched(options):
            yield shown
            return
        watcher = shown.progress

        def count(progress: Progress) -> None:
            if progress.unit == "bytes":
                watch.bytes = progress.done
            if callable(watcher):
                watcher(progress)

        with Watch.of(call, path, options) as watch:
            yield replace(shown, progress=count)


def bytes_written(plan: SavePlan) -> int:
    """Bytes of the tensors' boxes in a rank's share of a save."""
    return int(WriteItems.of(plan.items).sizes().sum())


def bytes_read(plan: LoadPlan, metadata: Metadata) -> int:
    """Bytes that the tensors' items of a rank's load plan fill."""
    total = 0
    for item in plan.items:
        stored = metadata.state_dict_metadata.get(item.storage_index.fqn)
        if isinstance(stored, TensorStorageMetadata):
            total += math.prod(item.lengths) * item_size(stored.dtype)
    return total
