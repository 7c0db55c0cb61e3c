"""Tasks of a thread that are given to it while the interpreter ends.

Its pools take no more tasks then, before the functions of `atexit` run and threads that outlive the
main one end; a run may be saved and restored there all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Answer = TypeVar("Answer")


def begin_task(threads: ThreadPoolExecutor, task: Callable[[], Answer]) -> Future[Answer]:
    """Begin a task in a thread of a pool; the caller does it where the pool takes none any more.

    Example:
        >>> threads = ThreadPoolExecutor(1)
        >>> threads.shutdown()
        >>> begin_task(threads, lambda: 7).result()
        7
    """
    try:
        return threads.submit(task)
    except RuntimeError as error:
        if "shutdown" not in str(error):  # no thread can be started
            raise
    done: Future[Answer] = Future()
    try:
        done.set_result(task())
    except Exception as error:
        done.set_exception(error)
    return done
