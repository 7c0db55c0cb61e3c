"""The pool keeps to its budget, stops at the first failure, and raises it."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.interrupts import interrupts
from xckpt.progress import Progress
from xckpt.storage.budget import Pool, ProgressCounter


@examples(30)
@given(
    sizes=st.lists(st.integers(0, 150), max_size=30),
    budget=st.integers(1, 100),
    threads=st.integers(1, 4),
)
def test_the_budget_is_kept(sizes: list[int], budget: int, threads: int) -> None:
    lock = threading.Lock()
    flying: list[int] = []
    done: list[int] = []
    peaks: list[int] = [0]

    def task(size: int, pool: Pool) -> None:
        time.sleep(0.0002)
        with lock:
            flying.remove(size)
            done.append(size)
        pool.release(size)

    with Pool(threads=threads, budget=budget) as pool:
        for size in sizes:
            pool.reserve(size)
            with lock:
                flying.append(size)
                # What is larger than the budget takes all of it, so it goes alone.
                peaks.append(sum(min(each, budget) for each in flying))
            pool.submit(partial(task, size, pool))
    assert sorted(done) == sorted(sizes)
    assert max(peaks) <= budget


@examples(30)
@given(
    sizes=st.lists(st.integers(0, 150), max_size=30),
    budget=st.integers(1, 100),
    threads=st.integers(1, 4),
)
def test_a_task_holds_its_bytes_as_long_as_it_runs(
    sizes: list[int], budget: int, threads: int
) -> None:
    lock = threading.Lock()
    flying: list[int] = []
    peaks: list[int] = []

    def task(size: int) -> None:
        with lock:
            flying.append(size)
            peaks.append(sum(min(each, budget) for each in flying))
        time.sleep(0.0002)
        with lock:
            flying.remove(size)

    with Pool(threads=threads, budget=budget) as pool:
        for size in sizes:
            pool.submit(partial(task, size), size)
    assert len(peaks) == len(sizes)
    assert max(peaks, default=0) <= budget


def fail() -> None:
    raise OSError("the first")


def test_the_first_failure_is_raised_and_stops_the_rest() -> None:
    ran: list[int] = []

    def work() -> None:
        with Pool(threads=1, budget=10) as pool:
            pool.submit(fail)
            for number in range(100):
                pool.submit(partial(ran.append, number))

    with pytest.raises(OSError, match="the first"):
        work()
    assert ran == []


def test_waiting_for_room_ends_with_a_failure() -> None:
    def work() -> None:
        with Pool(threads=1, budget=10) as pool:
            pool.reserve(10)
            pool.submit(fail)
            pool.reserve(10)

    with pytest.raises(OSError, match="the first"):
        work()


def test_a_failure_of_the_caller_wins() -> None:
    ran: list[int] = []
    first = threading.Event()

    def work() -> None:
        with Pool(threads=1, budget=10) as pool:
            pool.submit(partial(first.wait, 60))
            pool.submit(partial(ran.append, 1))
            threading.Timer(0.05, first.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert ran == []


def test_an_interrupt_waits_for_what_is_running() -> None:
    """Python takes a thread for ended once an interrupt has come in the wait for its end."""
    ended: list[int] = []

    def work() -> None:
        with Pool(threads=2, budget=10) as pool:
            pool.submit(lambda: (time.sleep(0.3), ended.append(1)))
            threading.Timer(0.1, interrupt).start()

    with interrupts() as interrupt, pytest.raises(KeyboardInterrupt):
        work()
    assert ended == [1]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_pool_that_has_ended_refuses_tasks(threads: int) -> None:
    """It would keep them, and no thread would run them."""
    ran: list[int] = []
    with Pool(threads=threads, budget=10) as pool:
        pool.submit(partial(ran.append, 1))
    for late in (pool.submit, pool.run):
        with pytest.raises(RuntimeError, match="has ended"):
            late(partial(ran.append, 2), 4)
    assert ran == [1] and pool.has_room(10)


def test_a_task_that_comes_while_a_pool_ends_is_refused() -> None:
    """The threads may have ended already."""
    ending = threading.Event()

    def late(pool: Pool) -> None:
        ending.wait(60)
        time.sleep(0.01)
        pool.submit(fail)

    def work() -> None:
        with Pool(threads=2, budget=10) as pool:
            pool.submit(partial(late, pool))
            threading.Timer(0.02, ending.set).start()

    with pytest.raises(RuntimeError, match="has ended"):
        work()


def test_few_processors_are_left_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    for processors, alone in ((1, True), (4, True), (5, False), (64, False)):
        monkeypatch.setattr("xckpt.storage.budget.processors", lambda number=processors: number)
        with Pool(threads=None, budget=1) as chosen, Pool(threads=1, budget=1) as one:
            assert (chosen.alone, one.alone) == (alone, True)
        with Pool(threads=2, budget=1) as two:
            assert not two.alone


def test_a_failure_from_elsewhere_is_raised() -> None:
    def work() -> None:
        with Pool(threads=1, budget=10) as pool:
            pool.fail(OSError("a peer is lost"))
            pool.fail(OSError("later"))

    with pytest.raises(OSError, match="a peer is lost"):
        work()


def test_progress_is_reported_one_call_at_a_time() -> None:
    seen: list[Progress] = []
    inside = threading.Lock()

    def note(progress: Progress) -> None:
        assert inside.acquire(blocking=False), "two calls at once"
        time.sleep(0.0005)
        seen.append(progress)
        inside.release()

    counter = ProgressCounter(90, note)
    counter.expect(10)
    with Pool(threads=8, budget=100) as pool:
        for _ in range(100):
            pool.submit(partial(counter.add, 1))
    assert seen == [Progress(done, 100) for done in range(1, 101)]
