"""A slow test fails; one that waited for a processor does not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support import time_limit
from tests.support.time_limit import Moment


@pytest.mark.parametrize(
    "clock, processor, stalled, seconds",
    [(9, 1, 0, 9), (8, 1, 8, 0.5), (8, 4, 8, 2), (9, 12, 0, 12), (9, 0, 3, 4.5), (8, 6, 9, 3)],
)
def test_the_larger_of_the_processor_and_the_rest_of_the_clock_counts(
    clock: float, processor: float, stalled: float, seconds: float
) -> None:
    before = Moment(100, 10, 1000)
    after = Moment(100 + clock, 10 + processor, 1000 + stalled)
    assert after.since(before) == pytest.approx(seconds)


def test_moments_go_forward() -> None:
    before = Moment.now()
    assert before.processor > 0
    assert 0 <= Moment.now().since(before) < 60


@pytest.mark.parametrize("marks, fails", [([], True), ([pytest.mark.thorough], False)])
@pytest.mark.parametrize("computes", [False, True])
def test_a_slow_test_fails_unless_it_is_thorough(
    request: pytest.FixtureRequest,
    marks: list[pytest.MarkDecorator],
    fails: bool,
    computes: bool,
) -> None:
    item = pytest.Function.from_parent(request.node.parent, name="slow", callobj=lambda: None)
    for mark in marks:
        item.add_marker(mark)
    raised = pytest.raises(pytest.fail.Exception if fails else StopIteration)
    # Undone before the test's own time is taken.
    with pytest.MonkeyPatch.context() as patch, raised as caught:
        patch.setattr(time_limit, "LIMIT", 0.1)
        patch.setattr(time_limit, "ALLOWANCE", 1.0)
        # A busy machine waits: the clock alone counts here.
        patch.setattr(time_limit, "PRESSURE", Path("/nowhere"))
        limited = time_limit.pytest_runtest_call(item)
        next(limited)
        take(0.2, computes=computes)
        limited.send("its result")
    if fails:
        assert "a test of the default tier has 0 s" in str(caught.value)
    else:
        assert isinstance(caught.value, StopIteration) and caught.value.value == "its result"


def take(seconds: float, *, computes: bool) -> None:
    if not computes:
        time.sleep(seconds)
    before = time.process_time()
    while computes and time.process_time() < before + seconds:
        pass


def test_a_quick_test_passes(request: pytest.FixtureRequest) -> None:
    limited = time_limit.pytest_runtest_call(request.node)
    next(limited)
    with pytest.raises(StopIteration):
        limited.send(None)
