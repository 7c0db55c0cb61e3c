"""xckpt loses no committed checkpoint, wherever it is cut off; faults in that are found."""

from __future__ import annotations

import pytest

from conformance.crash import crash
from conformance.implementation import Implementation
from conformance.implementations.xckpt import IMPLEMENTATION
from conformance.outcome import Outcome
from tests.conformance.crash import places

LAWS = ("crash-save", "crash-overwrite", "crash-delete", "save-after-crash")


def outcomes(implementation: Implementation, examples: int) -> dict[str, Outcome]:
    found = list(crash.run(implementation, examples=examples, seed=1))
    assert tuple(outcome.law for outcome in found) == LAWS
    return {outcome.law: outcome for outcome in found}


def check(found: dict[str, Outcome], operations: int) -> None:
    for outcome in found.values():
        assert outcome.failed == 0, f"{outcome.error}\n{outcome.smallest}"
    assert found["crash-save"].passed > operations < found["crash-overwrite"].passed


def test_every_kill_and_some_power_cuts() -> None:
    check(outcomes(IMPLEMENTATION, 40), 150)


@pytest.mark.parametrize("place", [places.Generations(), places.InPlace()], ids=lambda p: p.name)
def test_other_ways_to_commit(place: Implementation) -> None:
    check(outcomes(place, 20), 150)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "place", [IMPLEMENTATION, places.Generations(), places.InPlace()], ids=lambda p: p.name
)
def test_every_power_cut(place: Implementation) -> None:
    check(outcomes(place, 1_000_000), 700)


LONG = pytest.mark.thorough


@pytest.mark.parametrize(
    "faulty",
    [
        places.TwoSteps(),
        places.TreeNotSynced(),
        pytest.param(places.Rewriting(), marks=LONG),
        pytest.param(places.ParentNotSynced(), marks=LONG),
    ],
    ids=lambda faulty: faulty.name,
)
def test_faults_are_found(faulty: Implementation) -> None:
    (found,) = crash.run(faulty, examples=60, seed=1, only="crash-overwrite")
    assert found.failed
