"""Every family, both ways, against transformers' own conversion and the models' outputs.

The few of `QUICK` run with all tests, those of `THOROUGH` in that tier; the rest is marked
``models`` and run by ``make test-models``, since XLA takes seconds to compile each model.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import conversions
from tests.models.catalogue import CASES
from tests.models.conftest import Note
from tests.support.ranks import Ranks

QUICK = ("gpt2",)
THOROUGH = ("llama", "llama biased, scanned, pairs", "bert BertModel")


def _marks(name: str) -> tuple[pytest.MarkDecorator, ...]:
    if name in QUICK:
        return ()
    return (pytest.mark.thorough if name in THOROUGH else pytest.mark.models,)


EACH = [pytest.param(name, id=name, marks=_marks(name)) for name in CASES]


@pytest.mark.parametrize("name", EACH)
def test_both_ways(name: str, tmp_path: Path, two_ranks: Ranks, note: Note) -> None:
    models = conversions.models(CASES[name])
    for convert in (conversions.to_flax, conversions.to_torch):
        outcome = convert(name, models, tmp_path, two_ranks)
        note(outcome)
        assert outcome.good, outcome
