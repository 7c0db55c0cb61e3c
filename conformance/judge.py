"""Trying a law on random cases, counting, and looking for the smallest case that fails.

1. Hypothesis draws the cases from a seed. Every one is tried, whatever came of those before; one
   about which the law has nothing to say (`Unfit`) is not counted, and another is drawn for it.
2. If some failed, they are drawn again, and the first that fails is made smaller and smaller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy

from conformance.cases import Case, cases, to_json
from conformance.implementation import Even, Implementation, Refused
from conformance.outcome import Outcome

__all__ = ["ANY_DRAW", "Unfit", "drawn_for", "judge", "judge_all", "message"]


ANY_DRAW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
"""What Hypothesis is not to complain of: cases are large, and many may be `Unfit`."""


class Unfit(Exception):
    """A law has nothing to say about a case."""


def drawn_for(implementation: Implementation) -> SearchStrategy[Case]:
    """Any cases, or for who asks for it even ones."""
    return cases(even=isinstance(implementation, Even) and implementation.even)


def judge(
    name: str,
    law: Callable[[Implementation, Case], None],
    implementation: Implementation,
    *,
    examples: int,
    seed: int,
) -> Outcome:
    """What comes of a law.

    Args:
        name: the law's.
        law: raises what is wrong, or `Refused`, or `Unfit`.
        implementation: what is judged.
        examples: how many.
        seed: the same cases come for the same seed.
    """
    outcome = Outcome(name)

    def count(case: Case) -> None:
        try:
            law(implementation, case)
        except Unfit:
            hypothesis.reject()
        except Refused as refusal:
            outcome.refused += 1
            outcome.refusals[str(refusal)] += 1
        except Exception as error:
            outcome.failed += 1
            # The first one, in case none fails when all are tried again.
            outcome.error = outcome.error or f"{message(error)} (it failed only once)"
            outcome.smallest = outcome.smallest or repr(case)
        else:
            outcome.passed += 1

    def shrink(case: Case) -> None:
        try:
            law(implementation, case)
        except (Refused, Unfit):
            hypothesis.reject()
        except Exception as error:
            # The last to come here is the smallest.
            outcome.error, outcome.smallest = message(error), repr(case)
            outcome.case = to_json(case)
            raise

    drawn = drawn_for(implementation)
    with contextlib.suppress(Unsatisfiable):  # no case is fit, so none is counted
        _try(count, drawn, examples, seed)
    if outcome.failed:
        with contextlib.suppress(Exception):
            _try(shrink, drawn, examples, seed)
    return outcome


def judge_all(
    laws: Mapping[str, Callable[[Implementation, Case], None]],
    implementation: Implementation,
    *,
    examples: int,
    seed: int,
    only: str = "",
) -> Iterator[Outcome]:
    """What comes of each law, by its name; of one alone if ``only`` names it."""
    for name, law in laws.items():
        if only in ("", name):
            yield judge(name, law, implementation, examples=examples, seed=seed)


def _try(
    check: Callable[[Case], None], drawn: SearchStrategy[Case], examples: int, seed: int
) -> None:
    tried = hypothesis.given(drawn)(check)
    tried = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=ANY_DRAW,
        phases=(Phase.generate, Phase.shrink),
        verbosity=hypothesis.Verbosity.quiet,
    )(tried)
    hypothesis.seed(seed)(tried)()


def message(error: BaseException) -> str:
    """An error in one paragraph; of several at once, each."""
    own = f"{type(error).__name__}: {error}".strip()
    if isinstance(error, BaseExceptionGroup):
        return "; ".join([own, *map(message, error.exceptions)])
    return own
