"""No test of the default tier takes more than five seconds, on a busy machine neither.

1. Before and after each test the clock is read, and what this process and its children that have
   ended have used of processors.
2. The kernel counts how long any process waited for a processor (pressure stall information). A
   wait within that time is the machine's; what is left of the clock is the test's.
3. A test takes the larger of the two: its processor time, or the rest of the clock. Where processes
   wait, shared caches and hyper-threads slow each processor down as well, up to half its speed, so
   both count less by the share of the time that some process waited.
4. Above the limit the test fails, unless it is marked `thorough`. ``XCKPT_TIME_ALLOWANCE``
   multiplies the limit where other jobs share the machine.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

LIMIT = 5.0
"""Seconds."""

ALLOWANCE = float(os.environ.get("XCKPT_TIME_ALLOWANCE", "1"))
"""How many times the limit a test may take; `.ci/run` runs other jobs beside and allows more.

Tests multiply by it what they grant beyond a timeout, too: the law is about a machine of one's own.
"""


def tracer() -> Any:  # not every environment has coverage
    """The running `coverage.Coverage`, None where nothing is traced."""
    coverage = sys.modules.get("coverage")
    return coverage and coverage.Coverage.current()


untraced = pytest.mark.skipif(
    tracer() is not None, reason="a bar on processor time, which tracing uses"
)
"""For tests that hold processor time against a bar; `make coverage` leaves them out."""

PRESSURE = Path("/proc/pressure/cpu")


@dataclass(frozen=True, slots=True)
class Moment:
    """What the clocks say; seconds."""

    clock: float
    processor: float
    stalled: float

    @classmethod
    def now(cls) -> Moment:
        used = os.times()
        processor = used.user + used.system + used.children_user + used.children_system
        return cls(time.monotonic(), processor, _stalled())

    def since(self, before: Moment) -> float:
        """The seconds that are a test's own between two moments, as on a machine that is idle."""
        clock, stalled = self.clock - before.clock, self.stalled - before.stalled
        busy = min(1.0, stalled / clock) if clock else 0.0
        return max(self.processor - before.processor, clock - stalled) / (1 + busy)


def _stalled() -> float:
    """For how long some process has waited for a processor; 0 where the kernel does not say."""
    try:
        first, _, _ = PRESSURE.read_text().partition("\n")
        return int(first.rpartition("total=")[2]) / 1e6
    except (OSError, ValueError):
        return 0.0


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    before = Moment.now()
    result = yield
    seconds = Moment.now().since(before)
    if seconds > LIMIT * ALLOWANCE and item.get_closest_marker("thorough") is None:
        pytest.fail(
            f"took {seconds:.1f} s; a test of the default tier has {LIMIT:.0f} s: make it cheaper,"
            " or mark it `thorough` and keep a smaller one that holds the same law",
            pytrace=False,
        )
    return result


def pytest_sessionfinish() -> None:
    """Save what coverage has seen: xdist kills a worker that takes long to end."""
    if "PYTEST_XDIST_WORKER" in os.environ and (coverage := tracer()) is not None:
        coverage.save()
