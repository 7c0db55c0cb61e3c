"""Signals that a run notes: a forked child has no part in it."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event

import pytest

from xckpt.engine.run.preemption import Preemption

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def watching() -> Iterator[Preemption]:
    preemption = Preemption()
    preemption.watch()
    yield preemption
    preemption.rest()


def _sleep(runs: Event) -> None:
    runs.set()
    time.sleep(60)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # from JAX, if imported
def test_a_forked_child_is_ended_by_the_signal(watching: Preemption) -> None:
    runs = FORK.Event()
    child = FORK.Process(target=_sleep, args=(runs,), daemon=True)
    child.start()
    assert runs.wait(30)
    child.terminate()
    child.join(30)
    ended = child.exitcode
    child.kill()
    assert ended == -signal.SIGTERM
    assert not watching.asked()


def test_the_parent_goes_on_noting_it(watching: Preemption) -> None:
    signal.raise_signal(signal.SIGTERM)
    assert watching.asked()
