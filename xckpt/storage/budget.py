"""What a call may take: threads within a budget of bytes, time, tries; and progress as it is done.

1. `Pool.reserve` blocks until the bytes fit the budget. More bytes than the budget wait until
   nothing else is in flight.
2. `Pool.submit` has a task run in a thread, within the budget. After the first failure nothing new
   is started.
3. A `Reservation` is released with the last of the parts of what it was made for.
4. Leaving the ``with`` block waits for everything in flight and raises the first failure.
5. On few processors the caller should work alone (`Pool.alone`): TensorStore's own threads keep
   them busy, and Python threads would only compete for the interpreter.
6. `Access` says how often and how long a storage is asked; `xckpt.storage.location.answer` waits by
   it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from xckpt.options import StorageOptions, default_threads, processors, storage_option
from xckpt.progress import Progress

FEW_PROCESSORS = 4
"""Up to this many, TensorStore's threads leave none to spare. Measured on 2 only."""

IN_FLIGHT = 256
"""Small objects on their way at a time: after one has failed, so many are waited for."""

RETRIES: Final = 16
"""How often a bucket is asked again; at half of all answers 503, one of 100,000 requests fails."""
REQUEST_SECONDS: Final = 60.0
CLEANUP_SECONDS: Final = 1.5
"""How long what was written may be removed for, once the time of a call is over."""


@dataclass(slots=True)
class Access:
    """How often and how long a storage is asked in one call of the user's.

    The time of a call begins with `start`; where it was not called, `timeout` counts for each wait.

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
    """0 for what suits the storage."""
    until: float = math.inf
    """When the time of the call is over, by `time.monotonic`."""
    heard: float = 0.0
    """When the storage answered last."""

    @classmethod
    def of(cls, options: StorageOptions | None) -> Access:
        """What options and environment say.

        Raises:
            ValueError: a variable of the environment holds no number.
        """
        access = cls()
        for name in ("retries", "timeout", "request_timeout", "concurrency"):
            value = storage_option(options, name)
            if value is not None:
                setattr(access, name, value)
        return access

    def start(self) -> None:
        """A call of the user's begins."""
        self.until = time.monotonic() + self.timeout

    def clean_up(self) -> None:
        """What was written is to be removed now, for which there is always some time."""
        self.until = max(self.until, time.monotonic() + CLEANUP_SECONDS)

    @property
    def is_over(self) -> bool:
        """Whether there is no time left, or the storage was found dead."""
        return time.monotonic() >= self.until

    @property
    def left(self) -> float:
        """Seconds that a wait may take from now on."""
        return max(0.0, min(self.timeout, self.until - time.monotonic()))


def share_of(memory_bytes: int, ranks: int, taken: int = 0) -> int:
    """What a rank may have in flight of its host's budget; at least an eighth of its share.

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


class Pool:
    """A thread pool with a budget of bytes.

    Example:
        >>> done = []
        >>> with Pool(threads=2, budget=100) as pool:
        ...     pool.submit(lambda: done.append(10), 10)
        >>> done
        [10]
    """

    def __init__(self, *, threads: int | None, budget: int) -> None:
        self.budget = max(1, budget)
        self._used = 0
        self._freed = threading.Condition()
        self._failure: BaseException | None = None
        self.single = threads == 1
        """Whether there is one thread, the caller's."""
        self.alone = threads == 1 or (threads is None and processors() <= FEW_PROCESSORS)
        """Whether the caller should digest and wait itself, where that is all there is to do."""
        self._executor = ThreadPoolExecutor(threads or default_threads(), "xckpt")

    @property
    def failed(self) -> bool:
        """Whether a task has failed, so that there is no point in going on."""
        return self._failure is not None

    def reserve(self, size: int) -> None:
        """Wait until ``size`` bytes fit the budget, and take them."""
        with self._freed:
            self._freed.wait_for(lambda: self.has_room(size))
            self._used += min(size, self.budget)

    def has_room(self, size: int) -> bool:
        """Whether `reserve` would not wait."""
        with self._freed:
            return self._used + min(size, self.budget) <= self.budget or self.failed

    def release(self, size: int) -> None:
        """Give reserved bytes back."""
        with self._freed:
            self._used -= min(size, self.budget)
            self._freed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Note a failure, in a task or elsewhere: nothing new is started."""
        with self._freed:
            if self._failure is None:
                self._failure = error
            self._freed.notify_all()

    def submit(self, task: Callable[[], object], size: int = 0, *, reserved: bool = False) -> None:
        """Have a task run in a thread, unless one has failed already.

        Args:
            task: what to run.
            size: bytes that must fit the budget first; they are given back after the task.
            reserved: whether the caller has reserved them.
        """
        if size and not reserved:
            self.reserve(size)
        self._executor.submit(self._run, task, size)

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
        if error is not None and self._failure is None:
            self._failure = error
        try:
            self._executor.shutdown(wait=True)
        except BaseException as interrupt:
            # What the threads use is let go of next: first they must have ended.
            self.fail(interrupt)
            self._executor.shutdown(wait=True)
            raise
        if error is None and self._failure is not None:
            raise self._failure


@dataclass(slots=True)
class Reservation:
    """The part of the budget that an item holds until its last unit is written."""

    pool: Pool
    size: int
    units: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    def unit_done(self) -> None:
        """A unit is written, or never will be."""
        with self.lock:
            self.units -= 1
            last = self.units == 0
        if last:
            self.pool.release(self.size)


class ProgressCounter:
    """Counts bytes from several threads and reports them to a callback, one call at a time.

    Example:
        >>> counter = ProgressCounter(8, print)
        >>> counter.add(8)
        Progress(done=8, total=8)
    """

    def __init__(self, total: int, callback: Callable[[Progress], None] | bool | None) -> None:
        self.total = total
        self.done = 0
        # True is made a progress bar by the call that knows what it is for.
        self._callback = None if isinstance(callback, bool) else callback
        self._lock = threading.Lock()

    def expect(self, size: int) -> None:
        """Expect ``size`` more bytes than was known at the beginning."""
        with self._lock:
            self.total += size

    def add(self, size: int) -> None:
        """Count ``size`` more bytes."""
        if self._callback is None:
            return
        with self._lock:
            self.done += size
            self._callback(Progress(self.done, self.total))
