"""When a run saves, and what it keeps: laws of the policies and of their unions."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import isnan, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.core.run.keeping import deletable, kept
from xckpt.core.run.policies import (
    BY_DEFAULT,
    All,
    Best,
    EveryMinutes,
    EverySteps,
    FirstStep,
    KeepPolicy,
    Latest,
    Moment,
    OnPreemption,
    OnSteps,
    WhenIdle,
    is_due,
    signals_of,
)
from xckpt.core.run.record import StepRecord

times = st.floats(0, 1e5, allow_nan=False)
values = st.floats(allow_nan=True, allow_infinity=True)
metrics = st.dictionaries(st.sampled_from(["loss", "accuracy"]), values)
record_of = st.builds(StepRecord, st.integers(0, 60), times | st.none(), metrics)
runs = st.lists(record_of, max_size=12, unique_by=lambda record: record.number)
keeping: st.SearchStrategy[KeepPolicy] = st.one_of(
    st.builds(Latest, st.integers(1, 5)),
    st.builds(EverySteps, st.integers(1, 20)),
    st.builds(EveryMinutes, st.floats(0.1, 600)),
    st.builds(Best, st.sampled_from(["loss", "other"]), st.integers(1, 3), st.just("min")),
    st.builds(Best, st.just("accuracy"), st.integers(1, 3), st.just("max")),
    st.builds(OnSteps, st.sets(st.integers(0, 60), max_size=3)),
    st.just(All()),
    st.just(lambda records: [99, 1 << 40]),
    st.just(lambda records: ()),
)
policies = st.lists(keeping, max_size=4)


def numbers(records: list[StepRecord]) -> set[int]:
    return {record.number for record in records}


@given(runs, policies)
def test_the_newest_is_never_deleted_whatever_the_policies_say(
    run: list[StepRecord], asked: list[KeepPolicy]
) -> None:
    gone = numbers(deletable(run, asked))
    assert gone | kept(run, asked) == numbers(run) and not gone & kept(run, asked)
    assert not run or max(numbers(run)) not in gone
    assert not {record.number for record in run if record.time is None} & gone


@given(runs, policies, policies)
def test_a_union_keeps_what_its_parts_keep(
    run: list[StepRecord], one: list[KeepPolicy], other: list[KeepPolicy]
) -> None:
    assert kept(run, [*one, *other]) == kept(run, one) | kept(run, other)


@given(runs, st.integers(1, 5), st.integers(0, 3), st.sampled_from(["Latest", "Best"]))
def test_a_larger_number_keeps_more(run: list[StepRecord], n: int, more: int, kind: str) -> None:
    make: dict[str, Callable[[int], KeepPolicy]] = {
        "Latest": Latest,
        "Best": lambda n: Best("loss", n),
    }
    assert kept(run, [make[kind](n)]) <= kept(run, [make[kind](n + more)])


@given(runs, policies)
def test_deleting_twice_deletes_nothing_more(
    run: list[StepRecord], asked: list[KeepPolicy]
) -> None:
    gone = numbers(deletable(run, asked))
    left = [record for record in run if record.number not in gone]
    assert deletable(left, asked) == []


@given(runs, policies)
def test_the_order_of_the_records_is_no_matter(
    run: list[StepRecord], asked: list[KeepPolicy]
) -> None:
    assert deletable(run[::-1], asked) == deletable(run, asked)


@given(runs, st.floats(0.1, 600))
def test_steps_that_are_kept_by_time_are_apart(run: list[StepRecord], minutes: float) -> None:
    in_order = sorted(run, key=lambda record: record.number)
    chosen = [r for r in in_order if r.number in set(EveryMinutes(minutes)(in_order))]
    assert bool(chosen) == any(record.time is not None for record in run)
    for one, other in pairwise(chosen):
        assert one.time is not None and other.time is not None
        assert not 0 <= other.time - one.time < 60 * minutes


@given(runs, st.integers(1, 3))
def test_the_best_are_better_than_all_others(run: list[StepRecord], n: int) -> None:
    best = set(Best("loss", n)(run))
    losses = {record.number: record.metrics.get("loss", nan) for record in run}
    rated = {number: loss for number, loss in losses.items() if not isnan(loss)}
    assert len(best) == min(n, len(rated)) and best <= set(rated)
    assert all(rated[a] <= rated[b] for a in best for b in set(rated) - best)


@given(st.integers(1, 7), st.sets(st.integers(0, 40)), st.integers(0, 5))
def test_every_multiple_is_saved_or_made_up_for(n: int, failing: set[int], start: int) -> None:
    """Saves at some steps fail: after each multiple, the first save that can succeed is made."""
    last, saved = None, list[int]()
    for step in range(start, 41):
        moment = Moment(step, time=0.0, last=last)
        if is_due(moment, [EverySteps(n)]) and step not in failing:
            last = StepRecord(step, 0.0)
            saved.append(step)
    for multiple in range(n * -(-start // n), 41, n):
        able = [
            step
            for step in range(max(multiple, 1), multiple + n)
            if step < 41 and step not in failing
        ]
        if multiple and able:
            assert able[0] in saved


@given(times, times, times, st.floats(0.1, 600))
def test_minutes_pass_once(began: float, last: float, now: float, minutes: float) -> None:
    policy, moment = EveryMinutes(minutes), Moment(3, now, began, StepRecord(1, last))
    past = [since for since in (began, last) if since <= now]
    assert policy(moment) == (not past or now - max(past) >= 60 * minutes)
    # A save is followed by none for so long, whatever the clock did before.
    assert not policy(replace(moment, last=StepRecord(2, now)))


def test_the_default_is_the_first_step_then_whenever_idle_and_on_preemption() -> None:
    busy = Moment(5, time=0.0, last=StepRecord(4), busy=True)
    assert is_due(Moment(0, time=0.0), BY_DEFAULT)
    assert not is_due(busy, BY_DEFAULT)
    assert is_due(replace(busy, busy=False), BY_DEFAULT)
    assert is_due(replace(busy, preempted=True), BY_DEFAULT)
    assert not is_due(replace(busy, step=4, preempted=True), BY_DEFAULT)
    assert FirstStep()(replace(busy, last=None)) and not FirstStep()(busy)
    assert not WhenIdle()(busy) and not OnPreemption()(busy)


def test_a_signal_is_named_alone_or_among_others() -> None:
    alone, among = OnPreemption("SIGUSR1"), OnPreemption([signal.SIGUSR1])
    assert alone == among == OnPreemption(signal.SIGUSR1.value)
    assert signals_of([alone, OnPreemption(), Latest()]) == {signal.SIGUSR1, signal.SIGTERM}
    assert signals_of([OnPreemption([])]) == set()


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: EverySteps(0), ValueError, r"EverySteps\(n\) must be at least 1, got 0"),
        (lambda: EverySteps(True), TypeError, "not a bool"),
        (lambda: Latest(-1), ValueError, "got -1"),
        (lambda: EveryMinutes(0), ValueError, "more than 0 minutes"),
        (lambda: EveryMinutes(10**400), ValueError, "a number that a float holds"),
        (lambda: OnPreemption(None), ValueError, "None is not one"),  # pyright: ignore[reportArgumentType]
        (lambda: OnPreemption("TERM"), ValueError, "'TERM' is not one"),
        (lambda: OnPreemption(["SIGTERM", 0]), ValueError, "0 is not one"),
        (lambda: OnPreemption("SIGKILL"), ValueError, "no process can catch SIGKILL"),
        (lambda: EveryMinutes("5"), TypeError, "not a str"),  # pyright: ignore[reportArgumentType]
        (lambda: Best("loss", mode="low"), ValueError, "'min' or 'max'"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_policies_that_make_no_sense(
    make: Callable[[], object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make()
