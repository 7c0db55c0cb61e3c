"""The threads of an exchange; one may fail while others wait for peers."""

from __future__ import annotations

import threading
from collections.abc import Callable

from xckpt.engine.ranks.alive import WORK, AwaitedThread


class Threads:
    """Threads that run until all have ended or something has failed.

    Args:
        fail: called with the error of a thread, by that thread; it calls `failed`.
    """

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        self._fail = fail
        self._failure: BaseException | None = None
        self._threads: list[AwaitedThread] = []
        self._running = 0
        self._changed = threading.Condition()
        """Notified when a thread ends, and of the failure."""

    def start(self, target: Callable[..., None], *arguments: object) -> None:
        """Call a function in a thread of its own."""
        work = WORK.get()

        def run() -> None:
            WORK.set(work)
            try:
                target(*arguments)
            except BaseException as error:
                self._fail(error)
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

        with self._changed:
            self._running += 1
        thread = AwaitedThread(run, "xckpt-exchange")
        thread.start()  # before `join` waits for it, which a thread that cannot start would end
        self._threads.append(thread)

    def failed(self, error: BaseException) -> None:
        """Note the first failure, of a thread or of anything else."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until all threads have ended.

        Raises:
            BaseException: the first failure, as soon as there is one: other threads may wait for
                peers that wait for this rank.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or not self._running)
        if self._failure is not None:
            raise self._failure

    def join(self) -> None:
        """Wait until all threads have ended, whatever has failed."""
        for thread in self._threads:
            thread.join()
