"""xckpt under any order of actions, and the machine on implementations with faults."""

from __future__ import annotations

import pytest

from conformance.crash import machine
from conformance.implementation import Implementation
from conformance.implementations.xckpt import IMPLEMENTATION
from conformance.outcome import Outcome


def outcome(implementation: Implementation, examples: int) -> Outcome:
    (found,) = machine.run(implementation, examples=examples, seed=1)
    return found


@pytest.mark.parametrize("runs", [4, pytest.param(100, marks=pytest.mark.thorough)])
def test_xckpt_in_any_order(runs: int) -> None:
    found = outcome(IMPLEMENTATION, runs)
    assert found.failed == 0, f"{found.error}\n{found.smallest}"
    assert found.passed >= runs and not found.refusals
