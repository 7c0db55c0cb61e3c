"""xckpt keeps every law of the conformance suite."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from conformance.cases import Case, cases
from conformance.implementations.xckpt import IMPLEMENTATION
from conformance.properties import LAWS


@pytest.mark.parametrize("law", LAWS)
@given(case=cases())
@settings(max_examples=20)
def test_xckpt_keeps(law: str, case: Case) -> None:
    LAWS[law](IMPLEMENTATION, case)
