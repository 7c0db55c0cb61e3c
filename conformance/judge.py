"""Trying a law on random cases, counting, and looking for the smallest case that fails.

1. Hypothesis draws the cases from a seed. Every one is tried, whatever came of those before.
2. If some failed, they are drawn again, and the first that fails is made smaller and smaller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.strategies import SearchStrategy

from conformance.cases import Case, to_json
from conformance.implementation import Implementation, Refused
from conformance.outcome import Outcome

__all__ = ["judge", "message"]


def judge(
    name: str,
    law: Callable[[Implementation, Case], None],
    implementation: Implementation,
    drawn: SearchStrategy[Case],
    *,
    examples: int,
    seed: int,
) -> Outcome:
    """What comes of a law.

    Args:
        name: the law's.
        law: raises what is wrong, or `Refused`.
        implementation: what is judged.
        drawn: the cases.
        examples: how many.
        seed: the same cases come for the same seed.
    """
    outcome = Outcome(name)

    def count(case: Case) -> None:
        try:
            law(implementation, case)
        except Refused as refusal:
            outcome.refused += 1
            outcome.refusals[str(refusal)] += 1
        except Exception:
            outcome.failed += 1
        else:
            outcome.passed += 1

    def shrink(case: Case) -> None:
        try:
            law(implementation, case)
        except Refused:
            return
        except Exception as error:
            # The last to come here is the smallest.
            outcome.error, outcome.smallest = message(error), repr(case)
            outcome.case = to_json(case)
            raise

    _try(count, drawn, examples, seed)
    if outcome.failed:
        with contextlib.suppress(Exception):
            _try(shrink, drawn, examples, seed)
    return outcome


def _try(
    check: Callable[[Case], None], drawn: SearchStrategy[Case], examples: int, seed: int
) -> None:
    tried = hypothesis.given(drawn)(check)
    tried = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        phases=(Phase.generate, Phase.shrink),
        verbosity=hypothesis.Verbosity.quiet,
    )(tried)
    hypothesis.seed(seed)(tried)()


def message(error: BaseException) -> str:
    """An error in one paragraph."""
    return f"{type(error).__name__}: {error}".strip()
