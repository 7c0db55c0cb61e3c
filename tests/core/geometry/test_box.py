"""One box: its methods are what slicing a NumPy array gives."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from xckpt.core.geometry.box import Box

SHAPES = st.lists(st.integers(1, 6), max_size=3).map(tuple)


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    """A shape and two boxes in it."""
    shape = draw(SHAPES)
    ends = [[draw(st.tuples(*[st.integers(0, n)] * 2)) for n in shape] for _ in range(2)]
    one, other = (
        Box(tuple(min(e) for e in box), tuple(max(e) - min(e) for e in box)) for box in ends
    )
    return shape, one, other


def numbers(shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Each element's number, in an array of the shape."""
    return np.arange(np.prod(shape, dtype=int)).reshape(shape)


@given(cases())
def test_the_elements_are_those_of_the_slices(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, box, other = case
    array = numbers(shape)
    here, there = set(array[box.slices()].flat), set(array[other.slices()].flat)
    assert box.elements == len(here)
    shared = box.meets(other)
    assert (set() if shared is None else set(array[shared.slices()].flat)) == here & there
    if there:
        assert box.holds(other) == (there <= here)


@given(cases())
def test_a_part_is_cut_out_of_what_was_cut_out(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, box, other = case
    array, shared = numbers(shape), box.meets(other)
    if shared is not None:
        part = array[box.slices()][shared.slices(origin=box.offsets)]
        np.testing.assert_array_equal(part, array[shared.slices()])


@given(cases())
def test_moving_a_box_there_and_back(case: tuple[tuple[int, ...], Box, Box]) -> None:
    _, box, other = case
    assert box.shifted(other.offsets).relative_to(other.offsets) == box
    assert box.relative_to(box.offsets) == Box.whole(box.sizes)


def test_a_box_as_people_read_it() -> None:
    assert str(Box((0, 8), (3, 8))) == "[0, 3) x [8, 16)"
    assert str(Box((), ())) == "the scalar"
    assert str(Box((3,), (0,))) == "[3, 3)"
