"""xckpt loses no committed checkpoint, wherever it is cut off; faults in that are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from conformance.crash import crash
from conformance.crash.recording import Recorder
from conformance.implementation import Implementation
from conformance.implementations.simple import IMPLEMENTATION as SIMPLE
from conformance.implementations.xckpt import IMPLEMENTATION
from tests.conformance.crash import places

LAWS = ("crash-save", "crash-overwrite", "crash-delete", "save-after-crash")

THOROUGH = pytest.mark.thorough

RecorderOf = Callable[[Implementation], Recorder]


@pytest.fixture(scope="module")
def recorder_of() -> Iterator[RecorderOf]:
    """One process for each implementation, for all its laws."""
    started: dict[str, Recorder] = {}
    with ExitStack() as stack:

        def recorder(implementation: Implementation) -> Recorder:
            if implementation.name not in started:
                started[implementation.name] = stack.enter_context(Recorder(implementation))
            return started[implementation.name]

        yield recorder


def check(
    recorder_of: RecorderOf, implementation: Implementation, law: str, examples: int, least: int
) -> None:
    """Hold a law, and see that a save was cut off at at least so many places."""
    recorder = recorder_of(implementation)
    (found,) = crash.run(implementation, examples=examples, seed=1, only=law, recorder=recorder)
    assert found.law == law
    assert found.failed == 0 < found.passed, f"{found.error}\n{found.smallest}"
    if law in ("crash-save", "crash-overwrite"):
        assert found.passed >= least


@pytest.mark.parametrize("law", LAWS)
def test_every_kill_and_some_power_cuts(recorder_of: RecorderOf, law: str) -> None:
    check(recorder_of, IMPLEMENTATION, law, 8, 120)


OVER_ANOTHER = [
    law if law in ("crash-overwrite", "save-after-crash") else pytest.param(law, marks=THOROUGH)
    for law in LAWS
]
"""Where nothing was, and in a delete, all ways to commit are one."""


@pytest.mark.parametrize("law", OVER_ANOTHER)
@pytest.mark.parametrize(
    "place",
    [places.Generations(), pytest.param(places.InPlace(), marks=THOROUGH)],
    ids=lambda p: p.name,
)
def test_other_ways_to_commit(recorder_of: RecorderOf, place: Implementation, law: str) -> None:
    check(recorder_of, place, law, 8, 120)


def test_chunks_written_in_slabs(recorder_of: RecorderOf) -> None:
    check(recorder_of, places.Slabs(), "crash-overwrite", 8, 150)


@pytest.mark.thorough
def test_shards_for_other_readers(recorder_of: RecorderOf) -> None:
    check(recorder_of, places.ForReaders(), "crash-overwrite", 3, 50)


@pytest.mark.parametrize("law", [pytest.param("crash-save", marks=THOROUGH), "crash-overwrite"])
@pytest.mark.parametrize(
    "place",
    [places.Together(), pytest.param(places.TogetherBeside(), marks=THOROUGH)],
    ids=lambda p: p.name,
)
def test_files_that_are_synced_together(
    recorder_of: RecorderOf, place: Implementation, law: str
) -> None:
    check(recorder_of, place, law, 4, 50)


@pytest.mark.thorough
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(
    "place",
    [IMPLEMENTATION, places.Generations(), places.InPlace(), places.Slabs()],
    ids=lambda p: p.name,
)
def test_every_power_cut(recorder_of: RecorderOf, place: Implementation, law: str) -> None:
    check(recorder_of, place, law, 1_000_000, 700)


@pytest.mark.thorough
@pytest.mark.parametrize("law", ["crash-save", "crash-overwrite"])
def test_every_power_cut_of_shards(recorder_of: RecorderOf, law: str) -> None:
    check(recorder_of, places.ForReaders(), law, 1_000_000, 120)


@pytest.mark.thorough
def test_all_laws_are_judged(recorder_of: RecorderOf) -> None:
    """In one run too, with the same counts."""
    found = list(crash.run(SIMPLE, examples=4, seed=1))
    recorder = recorder_of(SIMPLE)
    assert tuple(outcome.law for outcome in found) == LAWS
    for outcome in found:
        (alone,) = crash.run(SIMPLE, examples=4, seed=1, only=outcome.law, recorder=recorder)
        assert (alone.passed, alone.failed) == (outcome.passed, outcome.failed)


@pytest.mark.parametrize(
    "faulty",
    [
        places.TreeNotSynced(),
        places.Rewriting(),
        places.ParentNotSynced(),
        pytest.param(places.TwoSteps(), marks=THOROUGH),
        pytest.param(places.SlabsNotSynced(), marks=THOROUGH),
        pytest.param(places.NotSyncedTogether(), marks=THOROUGH),
        pytest.param(places.NamesNotSynced(), marks=THOROUGH),
    ],
    ids=lambda faulty: faulty.name,
)
def test_faults_are_found(faulty: Implementation) -> None:
    (found,) = crash.run(faulty, examples=8, seed=1, only="crash-overwrite", stop=True)
    assert found.failed == 1 and found.error
