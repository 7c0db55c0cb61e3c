"""The end of a thread is waited for, whatever comes meanwhile."""

from __future__ import annotations

import threading
import time

import pytest

from tests.support.interrupts import interrupts
from xckpt.engine.ranks.alive import AwaitedThread


def test_a_thread_is_waited_for_after_an_interrupt() -> None:
    """Python before 3.13 takes it for ended once an interrupt has come in `Thread.join`."""
    ended: list[int] = []
    with interrupts() as interrupt:

        def work() -> None:
            time.sleep(0.1)
            interrupt()
            time.sleep(0.2)
            ended.append(1)

        thread = AwaitedThread(work, "slow")
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            thread.join()
        assert not ended
        thread.join()
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
