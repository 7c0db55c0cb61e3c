"""Work in threads within a budget of bytes, and progress as it is done.

1. `Pool.reserve` blocks until the bytes fit the budget; what is larger than the budget waits until
   nothing else is in flight and then goes alone.
2. `Pool.submit` has a task run in a thread. The threads begin with `Pool.start`, or when `reserve`
   has to wait: until then the caller's own Python runs undisturbed, while TensorStore's threads
   work on what it has begun. After the first failure nothing new is started.
3. Leaving the ``with`` block waits for everything in flight and raises the first failure.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from xckpt.options import Progress, default_threads

__all__ = ["Pool", "ProgressCounter"]


class Pool:
    """A thread pool with a budget of bytes.

    Example:
        >>> done = []
        >>> with Pool(threads=2, budget=100) as pool:
        ...     pool.reserve(10)
        ...     pool.submit(lambda: (done.append(10), pool.release(10)))
        >>> done
        [10]
    """

    def __init__(self, *, threads: int | None, budget: int) -> None:
        self.budget = max(1, budget)
        self._used = 0
        self._freed = threading.Condition()
        self._failure: BaseException | None = None
        self._executor = ThreadPoolExecutor(threads or default_threads(), "xckpt")
        self._waiting: list[Callable[[], object]] | None = []

    @property
    def failed(self) -> bool:
        """Whether a task has failed, so that there is no point in going on."""
        return self._failure is not None

    def reserve(self, size: int) -> None:
        """Wait until ``size`` bytes fit the budget, and take them."""
        if not self.has_room(size):
            self.start()
        size = min(size, self.budget)
        with self._freed:
            self._freed.wait_for(lambda: self._used + size <= self.budget or self.failed)
            self._used += size

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

    def submit(self, task: Callable[[], object]) -> None:
        """Have a task run in a thread, unless one has failed already."""
        if self._waiting is None:
            self._executor.submit(self._run, task)
        else:
            self._waiting.append(task)

    def start(self) -> None:
        """Let the threads begin; from now on tasks run as they are submitted."""
        tasks, self._waiting = self._waiting or [], None
        for task in tasks:
            self._executor.submit(self._run, task)

    def _run(self, task: Callable[[], object]) -> None:
        if self.failed:
            return
        try:
            task()
        except BaseException as error:
            self.fail(error)

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self._failure is None:
            self._failure = error
        self.start()
        self._executor.shutdown(wait=True)
        if error is None and self._failure is not None:
            raise self._failure


class ProgressCounter:
    """Counts bytes from several threads and tells a callback, one call at a time.

    Example:
        >>> counter = ProgressCounter(8, print)
        >>> counter.add(8)
        Progress(done=8, total=8)
    """

    def __init__(self, total: int, callback: Callable[[Progress], None] | None) -> None:
        self.total = total
        self.done = 0
        self._callback = callback
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
