"""Ctrl-C at a chosen moment, for a test that goes on afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial


@contextmanager
def interrupts() -> Iterator[Callable[[], None]]:
    """A function that interrupts the main thread; to be called by another.

    It sends SIGUSR1, so that an interrupt that comes too late does not end the run of the tests.
    """
    main, usr1 = threading.main_thread().ident, signal.SIGUSR1
    assert main is not None
    before = signal.signal(usr1, signal.default_int_handler)
    try:
        yield partial(signal.pthread_kill, main, usr1)
    finally:
        signal.signal(usr1, before)
