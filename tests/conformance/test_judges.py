"""The suite judges: a simple implementation passes, and every fault is caught by its law."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import hypothesis
import pytest
from hypothesis import Phase, Verbosity, given, settings
from hypothesis.strategies import integers

from conformance.cases import Case, cases
from conformance.crash import crash
from conformance.implementation import Implementation, Refused
from conformance.implementations.faulty import FAULTY, Faulty
from conformance.implementations.simple import IMPLEMENTATION
from conformance.implementations.xckpt import IMPLEMENTATION as XCKPT
from conformance.judge import ANY_DRAW, Unfit, judge
from conformance.laws import damage, properties, refusals
from conformance.outcome import Outcome

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
        except Unfit:
            hypothesis.reject()

    chosen = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=(Phase.generate,),
        verbosity=Verbosity.quiet,
        suppress_health_check=ANY_DRAW,
    )
    try:
        hypothesis.seed(1)(chosen(given(cases())(check)))()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("law", LAWS)
def test_a_simple_implementation_passes(law: str) -> None:
    assert failure(LAWS[law], IMPLEMENTATION, 5) == ""


EXAMPLES = 12


def tried(name: str, law: Law, examples: int = EXAMPLES) -> Outcome:
    return judge(name, law, IMPLEMENTATION, examples=examples, seed=1)


@pytest.mark.parametrize("law", OWN)
def test_only_cases_that_could_be_spoilt_are_counted(law: str) -> None:
    spoilt: list[Case] = []

    def count(implementation: Implementation, case: Case) -> None:
        LAWS[law](implementation, case)
        spoilt.append(case)

    found = tried(law, count)
    assert found.passed == len(spoilt) == EXAMPLES and not found.failed


def test_a_law_that_fits_no_case_passes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    # Hundreds are drawn before Hypothesis gives up, so they are cheap ones.
    monkeypatch.setattr("conformance.judge.drawn_for", lambda implementation: integers())

    def unfit(implementation: Implementation, case: Case) -> None:
        raise Unfit

    found = tried("unfit", unfit, examples=2)
    assert (found.passed, found.refused, found.failed) == (0, 0, 0)
    assert found.verdict == "not supported"


def test_a_failure_that_does_not_come_again_is_reported() -> None:
    calls = 0

    def once(implementation: Implementation, case: Case) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise TimeoutError("a rank hangs")

    found = tried("once", once)
    assert (found.failed, found.error) == (1, "TimeoutError: a rank hangs (it failed only once)")


def test_a_failure_shrinks_past_cases_that_do_not_fit() -> None:
    def large(implementation: Implementation, case: Case) -> None:
        if len(case.leaves) < 2:
            raise Unfit
        assert case.savers < 2, "two ranks"

    found = tried("large", large)
    assert found.failed and found.error.startswith("AssertionError: two ranks")
    assert found.case is not None and found.case["savers"] == len(found.case["leaves"]) == 2


@pytest.mark.parametrize("law", OWN)
def test_xckpt_passes(law: str) -> None:
    assert failure(OWN[law], XCKPT, 10) == ""


def named(faults: Sequence[Faulty]) -> list[object]:
    return [pytest.param(fault, id=type(fault).__name__) for fault in faults]


@pytest.mark.parametrize("fault", named([f for f in FAULTY if f.caught_by in LAWS]))
def test_a_fault_is_caught(fault: Faulty) -> None:
    found = failure(LAWS[fault.caught_by], fault, 300)
    assert found.startswith(("AssertionError", "ValueError")), f"{fault.name} is not caught"


@pytest.mark.parametrize("fault", named([f for f in FAULTY if f.caught_by not in LAWS]))
def test_a_fault_in_a_commit_is_caught(fault: Faulty) -> None:
    (found,) = crash.run(fault, examples=4, seed=1, only=fault.caught_by, stop=True)
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
