"""The suite judges: a simple implementation passes, and every fault is caught by its law."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given, settings

from conformance import crash, damage, properties, refusals
from conformance.cases import Case, cases
from conformance.implementation import Implementation, Refused
from conformance.implementations.faulty import FAULTY, Faulty
from conformance.implementations.simple import IMPLEMENTATION
from conformance.implementations.xckpt import IMPLEMENTATION as XCKPT

LAWS = {**properties.LAWS, **refusals.LAWS, **damage.LAWS}
OWN = {**refusals.LAWS, **damage.LAWS}

Law = Callable[[Implementation, Case], None]

WANTED = {
    "off by one": "MissesLastRow", "last writer wins": "LastWriterWins",
    "silent fill": "FillsMissingFiles", "cast": "SavesSinglePrecision",
    "partial replicas": "DropsPartialReplicas", "overwrite": "RemovesThenWrites",
    "stale": "KeepsStaleFiles", "axes": "SwapsAxes", "-0.0": "LosesNegativeZero",
    "nan": "OneNotANumber", "empty": "IgnoresEmptyArrays", "shape": "ListsFirstBox",
    "delete": "DeletesData",
}  # fmt: skip


def failure(law: Law, implementation: Implementation, examples: int) -> str:
    """What the first case that fails raises; empty if none does."""

    def check(case: Case) -> None:
        try:
            law(implementation, case)
        except Refused:
            hypothesis.event("refused")

    chosen = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=(Phase.generate,),
        verbosity=Verbosity.quiet,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    try:
        hypothesis.seed(1)(chosen(given(cases())(check)))()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("law", LAWS)
def test_a_simple_implementation_passes(law: str) -> None:
    assert failure(LAWS[law], IMPLEMENTATION, 20) == ""


@pytest.mark.parametrize("law", OWN)
def test_xckpt_passes(law: str) -> None:
    assert failure(OWN[law], XCKPT, 20) == ""


def named(faults: Sequence[Faulty]) -> list[object]:
    return [pytest.param(fault, id=type(fault).__name__) for fault in faults]


@pytest.mark.parametrize("fault", named([f for f in FAULTY if f.caught_by in LAWS]))
def test_a_fault_is_caught(fault: Faulty) -> None:
    found = failure(LAWS[fault.caught_by], fault, 300)
    assert found.startswith(("AssertionError", "ValueError")), f"{fault.name} is not caught"


@pytest.mark.parametrize("fault", named([f for f in FAULTY if f.caught_by not in LAWS]))
def test_a_fault_in_a_commit_is_caught(fault: Faulty) -> None:
    (found,) = crash.run(fault, examples=4, seed=1, only=fault.caught_by)
    assert found.failed


def test_a_simple_implementation_survives_crashes() -> None:
    for outcome in crash.run(IMPLEMENTATION, examples=10, seed=1):
        assert outcome.failed == 0 < outcome.passed, f"{outcome.error}\n{outcome.smallest}"


def test_every_law_has_a_fault_that_it_catches() -> None:
    catching = {fault.caught_by for fault in FAULTY}
    needed = set(LAWS) - {"saved-again", "replicas"}
    assert needed <= catching
    assert {type(fault).__name__ for fault in FAULTY} >= set(WANTED.values())
    assert len({fault.name for fault in FAULTY}) == len(FAULTY) > 30
