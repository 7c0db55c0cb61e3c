"""Cases are what they promise, and survive a file."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from conformance.cases import (
    Case,
    cases,
    checksum,
    contents,
    dtypes,
    from_json,
    numpy_dtype,
    to_json,
)
from conformance.implementation import Array
from conformance.tilings import Placed, shapes, tilings
from tests.support.examples import examples


def counts(shape: tuple[int, ...], placed: tuple[Placed, ...]) -> np.ndarray:
    found = np.zeros(shape, np.int64)
    for each in placed:
        found[(*each.box.region, ...)] += 1
    return found


@given(st.data())
@examples(100)
def test_a_tiling_covers_its_shape_exactly_once(data: st.DataObject) -> None:
    shape, ranks = data.draw(shapes()), data.draw(st.integers(1, 5))
    tiling = data.draw(tilings(shape, ranks))
    assert (counts(shape, tiling) == 1).all()
    assert all(each.ranks and set(each.ranks) <= set(range(ranks)) for each in tiling)
    assert len({each.box for each in tiling}) == len(tiling)


@given(cases())
@examples(30)
def test_a_case_survives_a_file(case: Case) -> None:
    again = from_json(json.loads(json.dumps(to_json(case))))
    assert again == case
    assert checksum(again) == checksum(case)
    assert repr(again) == repr(case)


@given(cases())
@examples(30)
def test_wanted_boxes_lie_in_the_array(case: Case) -> None:
    for rank in case.wanted():
        for wanted in rank.values():
            ends = [
                o + n <= side
                for box in wanted.boxes
                for o, n, side in zip(box.offsets, box.sizes, wanted.array.shape, strict=True)
            ]
            assert all(ends)


@pytest.mark.parametrize("dtype", dtypes())
def test_contents_are_bits_that_a_copy_keeps(dtype: str) -> None:
    values = contents(Array((7, 11), dtype), 3)
    assert (values.shape, values.dtype) == ((7, 11), numpy_dtype(dtype))
    assert np.array(values).tobytes() == values.tobytes()
    assert len(set(values.tobytes())) > 1
    assert values.tobytes() != contents(Array((7, 11), dtype), 4).tobytes()


@pytest.mark.parametrize(
    "dtype, unsigned", [("float16", "u2"), ("float32", "u4"), ("float64", "u8")]
)
def test_contents_have_both_zeros_and_payloads(dtype: str, unsigned: str) -> None:
    values = contents(Array((500,), dtype), 0)
    zeros = values[values == 0]
    payloads = set(values[np.isnan(values)].view(unsigned).tolist())
    assert set(np.signbit(zeros).tolist()) == {True, False}
    assert len(payloads) > 2


@pytest.mark.parametrize(
    "wish",
    [
        lambda case: case.savers == 3,
        lambda case: any(0 in leaf.array.shape for leaf in case.leaves),
        lambda case: any(len(leaf.array.shape) == 5 for leaf in case.leaves),
        lambda case: any(leaf.array.shape == () for leaf in case.leaves),
        lambda case: any(len(each.ranks) == 2 for leaf in case.leaves for each in leaf.source),
        lambda case: any(0 in each.box.sizes for leaf in case.leaves for each in leaf.source),
        lambda case: any(len(leaf.source) > 4 for leaf in case.leaves),
    ],
)  # fmt: skip
def test_cases_come_to(wish) -> None:
    quick = settings(max_examples=2000, database=None, phases=[Phase.generate])
    assert wish(find(cases(), wish, settings=quick))


@pytest.mark.thorough  # `test_judges.py` has a failure shrunk
def test_a_case_shrinks_to_what_matters() -> None:
    quick = settings(max_examples=1000, database=None)
    case = find(
        cases(), lambda case: any(len(leaf.source) > 1 for leaf in case.leaves), settings=quick
    )
    (leaf,) = case.leaves
    assert (len(leaf.source), len(leaf.target), leaf.array.shape) == (2, 1, (1,))
    assert case.savers <= 3
