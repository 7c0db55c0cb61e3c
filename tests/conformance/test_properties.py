"""xckpt keeps every law of the conformance suite, whatever framework carries the shards."""

from __future__ import annotations

import pytest
from hypothesis import given, reject

from conformance.cases import Case, cases
from conformance.implementation import Even, Refused, find
from conformance.judge import Unfit
from conformance.laws.properties import LAWS
from tests.support.examples import examples


@pytest.mark.parametrize("law", LAWS)
@given(case=cases())
@examples(10, 200)
def test_xckpt_keeps(law: str, case: Case) -> None:
    try:
        LAWS[law](find("conformance.implementations.xckpt"), case)
    except Unfit:
        reject()


# The law itself is judged by `make conformance-reshard`, on hundreds of cases each.
@pytest.mark.parametrize("module", ["xckpt_torch", "xckpt_jax", "reader", "crossed"])
def test_frameworks_reshard(module: str) -> None:
    implementation = find(f"conformance.implementations.{module}")
    outcomes: list[bool] = []

    @given(case=cases(even=isinstance(implementation, Even) and implementation.even))
    @examples(5)
    def reshards(case: Case) -> None:
        try:
            LAWS["reshard"](implementation, case)
        except Refused:
            outcomes.append(False)
        else:
            outcomes.append(True)

    reshards()
    assert any(outcomes)  # how many must fit is judged there, too
