"""Every model whose leaves transformers converts itself: all that is inferred is what it does."""

from __future__ import annotations

import pytest

from tests.models.inferring import INFERRED, inferred, resnet_differences
from tests.models.outcomes import ROUNDING

QUICK = ("gpt2",)
"""Whose square weights are not those of linear layers."""

EACH = [
    pytest.param(name, id=name, marks=() if name in QUICK else pytest.mark.models)
    for name in INFERRED
]


@pytest.mark.parametrize("name", EACH)
def test_what_is_certain_is_what_the_oracle_does(name: str) -> None:
    for each in inferred(INFERRED[name]):
        assert not each.wrong, each.direction
        assert not each.left, each.direction
        assert not each.inference.ambiguous, each.direction
        # Twelve layers are one rule; here two or three are.
        assert len(each.inference.mapping.rules) < len(each.inference.certain)


@pytest.mark.models
def test_a_resnet_gives_the_same_outputs_with_its_running_statistics() -> None:
    for inference, apart in resnet_differences():
        assert not inference.ambiguous
        left = (*inference.unmatched.source, *inference.unmatched.target)
        assert all(name.endswith("num_batches_tracked") for name in left)
        assert apart < ROUNDING
