"""The judges of runs judge: a simple manager passes, and every fault is caught."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.crash.recording import Recorder
from conformance.implementations.managers.faulty import FAULTY
from conformance.runs import crashes, promises
from conformance.runs.promises import LAWS
from conformance.runs.readers import says_deleted

MANAGERS = "conformance.implementations.managers"


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    """One for `Simple` and all that are made of it."""
    with crashes.recorder(f"{MANAGERS}.simple") as started:
        yield started


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_is_caught(name: str, recorder: Recorder) -> None:
    law, _ = FAULTY[name]
    module = f"{MANAGERS}.faulty:{name}"
    (found,) = promises.run(module, examples=60, seed=1, only=law, recorder=recorder)
    assert found.failed and found.error, f"{name} is not caught by {law}"


def test_a_simple_manager_keeps_all(recorder: Recorder) -> None:
    found = list(promises.run(f"{MANAGERS}.simple", examples=40, seed=1, recorder=recorder))
    assert [outcome.law for outcome in found] == [*LAWS]
    for outcome in found:
        assert outcome.passed and not outcome.failed, f"{outcome.law}: {outcome.error}"


# What needs no process of its own.
QUICK = ("failure-raised", "falls-back", "ranks-agree")


@pytest.mark.parametrize("law", QUICK)
def test_xckpt_keeps_a_promise(law: str) -> None:
    (found,) = promises.run(f"{MANAGERS}.xckpt", examples=1, seed=1, only=law)
    assert found.passed and not found.failed and not found.refused, found.error


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_xckpt_keeps_every_promise() -> None:
    for found in promises.run(f"{MANAGERS}.xckpt", examples=200, seed=1):
        assert found.passed and not found.failed and not found.refused, found.error


def test_every_promise_has_a_fault_that_breaks_it() -> None:
    assert {law for law, _ in FAULTY.values()} == {*LAWS}


def test_what_says_that_a_step_was_deleted() -> None:
    assert says_deleted(OSError("step 3 was removed while it was read"))
    assert not says_deleted(OSError("step 3 is corrupt: chunk 0 is missing and not found"))
