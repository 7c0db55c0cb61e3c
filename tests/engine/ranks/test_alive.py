"""The end of a thread is waited for, whatever comes meanwhile."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from xckpt.engine.ranks.alive import AwaitedThread


def test_a_thread_is_waited_for_after_an_interrupt() -> None:
    """Python before 3.13 takes it for ended once an interrupt has come in `Thread.join`."""
    ended: list[int] = []
    here, usr1 = threading.main_thread().ident, signal.SIGUSR1
    assert here is not None

    def interrupt() -> None:
        time.sleep(0.1)
        signal.pthread_kill(here, usr1)
        time.sleep(0.2)
        ended.append(1)

    before = signal.signal(usr1, signal.default_int_handler)
    thread = AwaitedThread(interrupt, "slow")
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            thread.join()
        assert not ended
        thread.join()
    finally:
        signal.signal(usr1, before)
    assert ended == [1] and not thread.is_alive()


def test_no_longer_than_the_caller_wants() -> None:
    over = threading.Event()
    thread = AwaitedThread(over.wait, "waits")
    thread.start()
    thread.join(0.01)
    assert thread.is_alive()
    over.set()
    thread.join()
    assert not thread.is_alive()
