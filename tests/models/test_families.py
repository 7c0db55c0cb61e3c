"""Every family, both ways, against transformers' own conversion and the models' outputs.

The few of `QUICK` run with all tests; the rest is marked ``models`` and run by ``make
test-models``, since XLA takes seconds to compile each model.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import conversions
from tests.models.catalogue import CASES
from tests.models.conftest import Note
from tests.support.ranks import Ranks

QUICK = ("llama", "gpt2", "bert BertModel", "llama biased, scanned, pairs")

EACH = [
    pytest.param(name, id=name, marks=() if name in QUICK else pytest.mark.models) for name in CASES
]


@pytest.mark.parametrize("name", EACH)
def test_both_ways(name: str, tmp_path: Path, two_ranks: Ranks, note: Note) -> None:
    models = conversions.models(CASES[name])
    for convert in (conversions.to_flax, conversions.to_torch):
        outcome = convert(name, models, tmp_path, two_ranks)
        note(outcome)
        assert outcome.good, outcome
