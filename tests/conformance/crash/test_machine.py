"""xckpt under any order of actions, and the machine on implementations with faults."""

from __future__ import annotations

from conformance.crash import machine
from conformance.implementation import Implementation
from conformance.implementations.xckpt import IMPLEMENTATION
from conformance.outcome import Outcome


def outcome(implementation: Implementation, examples: int) -> Outcome:
    (found,) = machine.run(implementation, examples=examples, seed=1)
    return found


def test_xckpt_in_any_order() -> None:
    found = outcome(IMPLEMENTATION, 25)
    assert found.failed == 0, f"{found.error}\n{found.smallest}"
    assert found.passed >= 25 and not found.refusals
