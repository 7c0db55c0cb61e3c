"""Signals that a run notes: what was there before hears of them at its end, a child has no part."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from tests.support.fork_server import context
from xckpt.api.run.folder import RunFolder
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
    for _ in range(6000):  # a signal just before a sleep is handled after it
        time.sleep(0.01)


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


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_child_is_ended_by_a_signal_that_comes_before_it_runs(watching: Preemption) -> None:
    """Python forgets what comes so early, where it has a handler of its own."""
    for _ in range(4):
        child = os.fork()
        if child == 0:
            time.sleep(2)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert not watching.asked()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.parametrize("own", [True, False])
def test_a_forked_child_has_the_handler_that_was_there(own: bool) -> None:
    """Of runs inside each other, and not where a handler was set meanwhile."""
    first = lambda *_: None  # noqa: E731
    before = signal.signal(signal.SIGTERM, first)
    runs = [Preemption(), Preemption()]
    try:
        for run in runs:
            run.watch()
        last = signal.getsignal(signal.SIGTERM) if own else (lambda *_: None)
        signal.signal(signal.SIGTERM, last)
        if (child := os.fork()) == 0:
            os._exit(signal.getsignal(signal.SIGTERM) is not (first if own else last))
        assert os.waitpid(child, 0)[1] == 0
        assert signal.getsignal(signal.SIGTERM) == last
    finally:
        for run in reversed(runs):
            run.rest()
        signal.signal(signal.SIGTERM, before)


def test_the_parent_goes_on_noting_it(watching: Preemption) -> None:
    signal.raise_signal(signal.SIGTERM)
    assert watching.asked()


@pytest.fixture
def called() -> Iterator[list[int]]:
    """The signals that a handler of the user's has received."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    yield received
    signal.signal(signal.SIGTERM, before)


def test_the_handler_that_was_there_hears_of_each_signal_once(called: list[int]) -> None:
    preemption = Preemption([signal.SIGTERM])
    handler = signal.getsignal(signal.SIGTERM)
    for times in (1, 2):
        assert preemption.watch() and not preemption.asked()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert preemption.asked() and len(called) == times - 1
        preemption.rest()
        assert len(called) == times and signal.getsignal(signal.SIGTERM) is handler


@given(st.permutations(["watch"] * 3 + ["rest"] * 3), st.integers(0, 6))
def test_runs_that_begin_and_end_in_any_order_leave_nothing(order: list[str], at: int) -> None:
    """Whichever run begins or ends first: the runs that go on note a signal, and nothing stays."""
    received: list[int] = []
    mine = lambda number, frame: received.append(number)  # noqa: E731
    before = signal.signal(signal.SIGTERM, mine)
    try:
        runs = [Preemption() for _ in range(3)]
        begun, ended = 0, 0
        noted: list[Preemption] = []
        for number, what in enumerate(order):
            if number == at:
                noted = runs[ended:begun]
                signal.raise_signal(signal.SIGTERM)
                assert all(run.asked() for run in noted)
            if what == "watch":
                runs[begun].watch()
                begun += 1
            elif ended < begun:
                runs[ended].rest()
                ended += 1
        for run in runs[ended:begun]:
            run.rest()
        assert signal.getsignal(signal.SIGTERM) is mine
        assert bool(received) == (at < len(order))
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_run_that_begins_again_after_another_notes_a_signal(called: list[int]) -> None:
    """The handlers of both lead to each other."""
    one, other = Preemption(), Preemption()
    for step in (one.watch, other.watch, one.rest, one.watch):
        step()
    signal.raise_signal(signal.SIGTERM)
    assert one.asked() and other.asked()
    one.rest()
    other.rest()
    assert called and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL


def _hand_on(handler: Callable[..., object], *arguments: object) -> None:
    handler(*arguments)


def test_a_handler_that_was_set_meanwhile_stays_and_hands_on(called: list[int]) -> None:
    """As that of a trainer that chains: after the run the signal comes to what was there before."""
    preemption = Preemption()
    for times in (1, 2):
        preemption.watch()
        ours: Any = signal.getsignal(signal.SIGTERM)
        theirs = partial(_hand_on, ours)
        signal.signal(signal.SIGTERM, theirs)
        signal.raise_signal(signal.SIGTERM)
        assert preemption.asked()
        preemption.rest()
        assert signal.getsignal(signal.SIGTERM) is theirs
        heard = len(called)
        signal.raise_signal(signal.SIGTERM)
        assert len(called) == heard + 1, times


def _end_after_a_run(chained: bool) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    outer, inner = Preemption(), Preemption()
    outer.watch()
    inner.watch()
    if chained:
        ours: Any = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, partial(_hand_on, ours))
    outer.rest()
    inner.rest()
    signal.raise_signal(signal.SIGTERM)
    time.sleep(60)


@pytest.mark.parametrize("chained", [False, True])
def test_after_a_run_a_signal_ends_the_process_as_before(chained: bool) -> None:
    process = context().Process(target=_end_after_a_run, args=(chained,), daemon=True)
    process.start()
    process.join(30)
    ended = process.exitcode
    process.kill()
    assert ended == -signal.SIGTERM


def test_another_thread_leaves_the_handlers_alone() -> None:
    before, preemption = signal.getsignal(signal.SIGTERM), Preemption()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(preemption.watch).result()
        assert signal.getsignal(signal.SIGTERM) is before
        pool.submit(preemption.rest).result()
    assert signal.getsignal(signal.SIGTERM) is before and not preemption.asked()


def test_a_run_that_cannot_begin_leaves_the_signals_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def collect(folder: RunFolder) -> None:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGTERM)
    run = xckpt.CheckpointManager(tmp_path, full_every=np.int64(3))
    monkeypatch.setattr(RunFolder, "collect", collect)
    with pytest.raises(KeyboardInterrupt), run:
        pass
    assert signal.getsignal(signal.SIGTERM) == before
