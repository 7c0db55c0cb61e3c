"""xckpt loses no committed checkpoint, wherever it is cut off; faults in that are found."""

from __future__ import annotations

import pytest

from conformance.crash import crash
from conformance.implementation import Implementation
from conformance.implementations.simple import IMPLEMENTATION as SIMPLE
from conformance.implementations.xckpt import IMPLEMENTATION
from tests.conformance.crash import places

LAWS = ("crash-save", "crash-overwrite", "crash-delete", "save-after-crash")


def check(implementation: Implementation, law: str, examples: int, operations: int) -> None:
    """Hold a law, and see that a save was cut off at more than so many places."""
    (found,) = crash.run(implementation, examples=examples, seed=1, only=law)
    assert found.law == law
    assert found.failed == 0 < found.passed, f"{found.error}\n{found.smallest}"
    if law in ("crash-save", "crash-overwrite"):
        assert found.passed > operations


@pytest.mark.parametrize("law", LAWS)
def test_every_kill_and_some_power_cuts(law: str) -> None:
    check(IMPLEMENTATION, law, 40, 150)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(
    "place",
    [places.Generations(), pytest.param(places.InPlace(), marks=pytest.mark.thorough)],
    ids=lambda p: p.name,
)
def test_other_ways_to_commit(place: Implementation, law: str) -> None:
    check(place, law, 20, 150)


def test_chunks_written_in_slabs() -> None:
    check(places.Slabs(), "crash-overwrite", 8, 150)


@pytest.mark.parametrize("law", ["crash-save", "crash-overwrite"])
@pytest.mark.parametrize(
    "place",
    [places.Together(), pytest.param(places.TogetherBeside(), marks=pytest.mark.thorough)],
    ids=lambda p: p.name,
)
def test_files_that_are_synced_together(place: Implementation, law: str) -> None:
    check(place, law, 4, 50)


@pytest.mark.thorough
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(
    "place",
    [IMPLEMENTATION, places.Generations(), places.InPlace(), places.Slabs()],
    ids=lambda p: p.name,
)
def test_every_power_cut(place: Implementation, law: str) -> None:
    check(place, law, 1_000_000, 700)


def test_all_laws_are_judged() -> None:
    """In one run too, with the same counts."""
    found = list(crash.run(SIMPLE, examples=4, seed=1))
    assert tuple(outcome.law for outcome in found) == LAWS
    for outcome in found:
        (alone,) = crash.run(SIMPLE, examples=4, seed=1, only=outcome.law)
        assert (alone.passed, alone.failed) == (outcome.passed, outcome.failed)


@pytest.mark.parametrize(
    "faulty",
    [
        places.TwoSteps(),
        places.TreeNotSynced(),
        places.Rewriting(),
        places.ParentNotSynced(),
        places.SlabsNotSynced(),
        pytest.param(places.NotSyncedTogether(), marks=pytest.mark.thorough),
        pytest.param(places.NamesNotSynced(), marks=pytest.mark.thorough),
    ],
    ids=lambda faulty: faulty.name,
)
def test_faults_are_found(faulty: Implementation) -> None:
    (found,) = crash.run(faulty, examples=60, seed=1, only="crash-overwrite", stop=True)
    assert found.failed == 1 and found.error
