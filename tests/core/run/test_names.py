"""Step names: written in one form, read in all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.core.run.names import step_name, step_number, steps_in

numbers = st.integers(0, 10**12)


@given(numbers, st.sampled_from(["", "step-", "step_", "checkpoint-", "global_step", "iter_"]))
def test_every_usual_name_is_read(number: int, prefix: str) -> None:
    assert step_number(f"{prefix}{number}") == number
    assert step_number(f"{prefix}{number:06d}") == number
    assert step_number(step_name(number)) == number


@given(st.integers(0, 10**8 - 1), st.integers(0, 10**8 - 1))
def test_names_sort_as_numbers_do(a: int, b: int) -> None:
    assert (step_name(a) < step_name(b)) == (a < b)


@pytest.mark.parametrize(
    "name",
    ["", "best", "step-", "step--1", "step-1.tmp", ".5.saving-0", "v1", "1e3", "٣", "9" * 19],
)
def test_other_names_are_no_steps(name: str) -> None:
    assert step_number(name) is None


@given(st.sets(numbers, max_size=5))
def test_steps_come_in_order_and_our_name_counts(found: set[int]) -> None:
    names = [f"checkpoint-{n}" for n in found] + [step_name(n) for n in found] + ["zarr.json"]
    assert list(steps_in(names).items()) == [(n, step_name(n)) for n in sorted(found)]
