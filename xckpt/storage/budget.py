"""The limits of a call: threads within a budget of bytes, time, tries; and its progress.

1. `Pool.reserve` blocks until the bytes fit the budget. More bytes than the budget wait until
   nothing else is in flight.
2. `Pool.submit` has a task run in a thread, within the budget, unless one has failed before.
3. A `Reservation` is released with the last part of its item.
4. Leaving the ``with`` block waits for everything in flight and raises the first failure.
5. On few processors the caller should work alone (`Pool.alone`): TensorStore's own threads keep
   them busy, and Python threads would only compete for the interpreter.
6. `Access` says how often and how long a storage is asked (`xckpt.storage.location.answer`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final, TypeVar

from xckpt.core.plan.wanted import Countdown
from xckpt.engine.limits import naming_limit
from xckpt.engine.ranks.alive import WORK
from xckpt.options import STORAGE, CallOptions, default_threads, processors, storage_option
from xckpt.progress import Progress

T = TypeVar("T")
R = TypeVar("R")

FEW_PROCESSORS = 4
"""With up to this many processors, TensorStore's threads use all of them. Measured on 2 only."""
IN_FLIGHT = 256
"""Small objects in flight at a time: after a failure at most this many are waited for."""

RETRIES: Final = 16
"""How often a bucket is asked again; at half of all answers 503, one of 100,000 requests fails."""
REQUEST_SECONDS: Final = 60.0
MOST: Final = 1 << 30  # requests or seconds, 34 years: clocks and TensorStore count that far
CLEANUP_SECONDS: Final = 1.5
"""How long the removal of written objects may take once the time of a call is over."""


@dataclass(slots=True)
class Access:
    """How often and how long a storage is asked in one call of the user's.

    The time of a call begins with `start`; without that call, `timeout` counts for each wait.

    Example:
        >>> access = Access(timeout=5.0)
        >>> access.start()
        >>> 4.9 < access.left <= 5.0
        True
    """

    retries: int = RETRIES
    timeout: float = math.inf
    request_timeout: float = REQUEST_SECONDS
    concurrency: int = 0
    """0 for the storage's default."""
    until: float = math.inf
    """When the time of the call ends, by `time.monotonic`."""
    end: float = math.inf
    """When the time of a longer call ends, of which this one is a part."""
    heard: float = 0.0
    """When the storage answered last."""

    @classmethod
    def of(cls, options: CallOptions | None) -> Access:
        """What options and environment say.

        Raises:
            ValueError: a variable of the environment holds no number.
        """
        access = cls()
        for name in STORAGE:
            if (value := storage_option(options, name)) is not None:
                setattr(access, name, min(value, MOST))
        return access

    def start(self, *, parts: bool = False) -> None:
        """A call of the user's begins; those that are ``parts`` of it end with it."""
        self.until = min(time.monotonic() + self.timeout, self.end)
        self.end = self.until if parts else self.end

    def clean_up(self) -> None:
        """Begin to remove what was written; there is always some time for that."""
        self.until = max(self.until, time.monotonic() + CLEANUP_SECONDS)

    @property
    def is_over(self) -> bool:
        """Whether no time is left, or the storage counts as dead."""
        return time.monotonic() >= self.until

    @property
    def left(self) -> float:
        """Seconds that a wait may take from now on."""
        return max(0.0, min(self.timeout, self.until - time.monotonic()))


def share_of(memory_bytes: int, ranks: int, taken: int = 0) -> int:
    """Bytes that a rank may have in flight of its host's budget; at least an eighth of its share.

    Args:
        memory_bytes: the budget of the host.
        ranks: how many share it.
        taken: bytes that this rank's plan takes of its share.

    Example:
        >>> share_of(256, 8), share_of(256, 8, 20), share_of(256, 8, 500)
        (32, 12, 4)
    """
    share = memory_bytes // ranks
    return max(share - taken, share // 8, 1)


class Budget:
    """Bytes that threads may take together.

    Example:
        >>> budget = Budget(100)
        >>> budget.reserve(70), budget.has_room(40)
        (True, False)
    """

    def __init__(self, budget: int) -> None:
        self.budget: int = max(1, budget)
        self._used = 0
        self._freed = threading.Condition()

    @property
    def failed(self) -> bool:
        """Whether continuing, and so waiting, is pointless: never."""
        return False

    def reserve(self, size: int, unless: Callable[[], object] = bool) -> bool:
        """Wait until ``size`` bytes fit the budget, and take them; whether they are taken.

        ``unless`` ends the wait once it is true; it is asked whenever something is released.
        """
        with self._freed:
            if not self.has_room(size):
                self._freed.wait_for(lambda: self.has_room(size) or unless())
                if not self.has_room(size):
                    return False
            self._used += min(size, self.budget)
            return True

    def has_room(self, size: int) -> bool:
        """Whether `reserve` would not wait."""
        return self._used + min(size, self.budget) <= self.budget or self.failed

    def release(self, size: int) -> None:
        """Give reserved bytes back."""
        with self._freed:
            self._used -= min(size, self.budget)
            self._freed.notify_all()


class Pool(Budget):
    """A thread pool with a budget of bytes.

    Example:
        >>> done = []
        >>> with Pool(threads=2, budget=100) as pool:
        ...     pool.submit(lambda: done.append(10), 10)
        >>> done
        [10]
    """

    def __init__(self, *, threads: int | None, budget: int) -> None:
        super().__init__(budget)
        self._failure: BaseException | None = None
        self.single: Final = threads == 1
        """Whether there is one thread, the caller's."""
        self.alone: Final = threads == 1 or (threads is None and processors() <= FEW_PROCESSORS)
        """Whether the caller should digest and wait itself, if nothing else is to be done."""
        self._most = threads or default_threads()
        self._ended = False
        # No executor, for each holds one lock of the process while it starts a thread: a handler of
        # signals that comes then, and saves, would wait for ever. Its futures cost time, besides.
        self._threads: dict[threading.Thread, threading.Event] = {}
        self._work = WORK.get()
        self._tasks: SimpleQueue[tuple[Callable[[], object], int] | None] = SimpleQueue()

    @property
    def failed(self) -> bool:
        """Whether a task has failed, so that continuing is pointless."""
        return self._failure is not None

    def fail(self, error: BaseException) -> None:
        """Note a failure, in a task or elsewhere: nothing new is started."""
        with self._freed:
            if self._failure is None:
                self._failure = error
            self._freed.notify_all()

    def submit(self, task: Callable[[], object], size: int = 0) -> None:
        """Have a task run in a thread, unless one has failed already.

        ``size`` bytes must fit the budget first; they are given back after the task.

        Raises:
            RuntimeError: the ``with`` block has ended, so no thread would run it.
        """
        self._refuse_late()
        if size:
            self.reserve(size)
        self._hand_over(task, size)

    def run(self, task: Callable[[], object], size: int) -> None:
        """Run a task whose bytes the caller has reserved: here if there is no other thread.

        Raises:
            RuntimeError: see `submit`; the bytes stay reserved.
        """
        self._refuse_late()
        if not self.single:
            self._hand_over(task, size)
            return
        try:
            task()
        finally:
            self.release(size)

    def _refuse_late(self) -> None:
        if self._ended:
            raise RuntimeError("the pool's with block has ended: no thread would run this task")

    def _hand_over(self, task: Callable[[], object], size: int) -> None:
        self._tasks.put((task, size))
        if len(self._threads) < self._most:
            name = f"xckpt_{len(self._threads)}"
            ended = threading.Event()
            thread = threading.Thread(target=self._serve, args=(ended,), name=name, daemon=True)
            self._threads[thread] = ended  # first, for an interrupt may end the wait for its start
            try:
                thread.start()
            except RuntimeError as error:
                del self._threads[thread]
                if not self._threads:
                    raise naming_limit(error) from error
                self._most = len(self._threads)  # the system allows no more threads

    def _serve(self, ended: threading.Event) -> None:
        WORK.set(self._work)
        while (task := self._tasks.get()) is not None:
            self._run(*task)
            del task  # it may hold much memory
        self._tasks.put(None)  # for the next thread
        ended.set()

    def _run(self, task: Callable[[], object], size: int) -> None:
        try:
            if not self.failed:
                task()
        except BaseException as error:
            self.fail(error)
        finally:
            if size:
                self.release(size)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._ended = True
        if error is not None and self._failure is None:
            self._failure = error
        try:
            self._end_threads()
        except BaseException as interrupt:
            # The caller releases next what the threads use: they must have ended first.
            self.fail(interrupt)
            self._end_threads()
            raise
        if error is None and self._failure is not None:
            raise self._failure

    def _end_threads(self) -> None:
        self._tasks.put(None)
        for thread, ended in tuple(self._threads.items()):
            if thread.ident is not None:  # else it comes when a failure has ended all, if at all
                ended.wait()  # before Python 3.13 a join that was interrupted waits no more
                thread.join()


def in_threads(function: Callable[[T], R], items: Iterable[T], threads: int) -> list[R]:
    """Call a function for each item, in threads; what it returns, in the order of the items."""
    results: dict[int, R] = {}
    with Pool(threads=threads, budget=1) as pool:
        for number, item in enumerate(items):
            pool.submit(lambda n=number, it=item: results.update({n: function(it)}))
    return [results[number] for number in range(len(results))]


@dataclass(slots=True)
class Reservation:
    """The part of the budget that an item holds until its last unit is written."""

    pool: Pool
    size: int
    units: Countdown

    def unit_done(self) -> None:
        """A unit is written, or never will be."""
        if self.units.land(1) == 0:
            self.pool.release(self.size)


Watcher = Callable[[Progress], None] | bool | None
"""The callback for progress; see `xckpt.LoadOptions`."""


class ProgressCounter:
    """Counts bytes, or files, from several threads; the callback gets one call at a time.

    Example:
        >>> counter = ProgressCounter(8, print)
        >>> counter.add(8)
        Progress(done=8, total=8, unit='bytes')
    """

    def __init__(self, total: int, callback: Watcher, unit: str = "bytes") -> None:
        self.total: int = total
        self._unit = unit
        self.done: int = 0
        # The call that knows its purpose turns True into a progress bar.
        self._callback = None if isinstance(callback, bool) else callback
        self._lock = threading.Lock()

    def expect(self, size: int) -> None:
        """Expect ``size`` more bytes than was known at the beginning."""
        with self._lock:
            self.total += size

    def add(self, size: int) -> None:
        """Count ``size`` more bytes.

        Raises:
            RanksFailedError: other ranks were lost meanwhile: the work is in vain.
        """
        WORK.get().advance()
        if self._callback is None:
            return
        with self._lock:
            self.done += size
            self._callback(Progress(self.done, self.total, self._unit))
