"""Strided copies: what they touch, and what is left of them in a box."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.core.metadata import ChunkStorageMetadata
from xckpt.mapping.copy_elements import copy_elements, view
from xckpt.mapping.strided_copy import CONSTANT, Arithmetic, StridedCopy, restrict


@st.composite
def copies(draw: st.DrawFn, rank: int) -> StridedCopy:
    """Any copy at all, nested or not, with strides of any sign on the target's side."""
    axes = draw(st.integers(0, 4))
    sizes = tuple(draw(st.integers(1, 4)) for _ in range(axes))
    strides = tuple(tuple(draw(st.integers(-2, 5)) for _ in range(rank)) for _ in range(axes))
    offsets = tuple(draw(st.integers(0, 6)) for _ in range(rank))
    # Each element of the source has a number of its own, which shows where a copy comes from.
    weights = [1]
    for size in sizes:
        weights.append(weights[-1] * size)
    source = tuple((weight,) for weight in weights[:-1])
    return StridedCopy("s", "t", sizes, (0,), source, offsets, strides)


def moves(copy: StridedCopy) -> set[tuple[int, tuple[int, ...]]]:
    """Every element that a copy moves: index in the source and place in the target."""
    found = set()
    for index in product(*(range(n) for n in copy.sizes)):
        read = copy.source_offsets[0] + sum(
            a * row[0] for a, row in zip(index, copy.source_strides, strict=True)
        )
        written = tuple(
            offset + sum(a * row[d] for a, row in zip(index, copy.target_strides, strict=True))
            for d, offset in enumerate(copy.target_offsets)
        )
        found.add((read, written))
    return found


@given(st.data(), st.integers(0, 3))
def test_restriction_keeps_just_what_goes_into_the_box(data: st.DataObject, rank: int) -> None:
    copy = data.draw(copies(rank))
    low = tuple(data.draw(st.integers(-2, 12)) for _ in range(rank))
    size = tuple(data.draw(st.integers(0, 8)) for _ in range(rank))
    kept = restrict([copy], ChunkStorageMetadata(low, size))
    inside = {
        (read, place)
        for read, place in moves(copy)
        if all(o <= at < o + n for at, o, n in zip(place, low, size, strict=True))
    }
    assert set().union(*(moves(part) for part in kept)) == inside
    assert sum(part.elements for part in kept) == len(inside)


@given(st.data(), st.integers(1, 3))
def test_the_boxes_hold_all_that_is_touched_and_no_more(data: st.DataObject, rank: int) -> None:
    copy = data.draw(copies(rank))
    box = copy.target_box
    places = np.array([place for _, place in moves(copy)]).reshape(-1, rank)
    assert tuple(places.min(axis=0)) == box.offsets
    assert tuple(places.max(axis=0) - places.min(axis=0) + 1) == box.sizes


@given(st.data(), st.integers(0, 3))
def test_simplifying_moves_the_same_elements(data: st.DataObject, rank: int) -> None:
    copy = data.draw(copies(rank))
    simple = copy.simplified()
    assert moves(simple) == moves(copy)
    assert len(simple.sizes) <= len(copy.sizes)
    assert simple.simplified() == simple


@given(st.data())
def test_cutting_an_axis_shares_its_elements_out(data: st.DataObject) -> None:
    copy = data.draw(copies(2))
    if not copy.sizes:
        return
    axis = data.draw(st.integers(0, len(copy.sizes) - 1))
    at = data.draw(st.integers(0, copy.sizes[axis]))
    parts = [copy.cut(axis, 0, at), copy.cut(axis, at, copy.sizes[axis])]
    assert moves(parts[0]) | moves(parts[1]) == moves(copy)
    assert parts[0].elements + parts[1].elements == copy.elements


def test_a_constant_has_no_way_back() -> None:
    with pytest.raises(ValueError, match="came from no leaf"):
        StridedCopy(CONSTANT, "t", (2,), (), ((),), (0,), ((1,),)).inverse()


def test_the_way_back_undoes_the_arithmetic_last_step_first() -> None:
    steps = (Arithmetic("scale", "float32", "float32", 2.0), Arithmetic("cast", "float32", "int8"))
    copy = StridedCopy("s", "t", (2,), (0,), ((1,),), (0,), ((1,),), steps)
    assert [(s.operation, s.source, s.target) for s in copy.inverse().arithmetic] == [
        ("cast", "int8", "float32"),
        ("divide", "float32", "float32"),
    ]
    assert copy.inverse().inverse() == copy


@pytest.mark.parametrize("offset, size", [(-1, 2), (3, 2), (0, 5)])
def test_a_view_never_reaches_outside(offset: int, size: int) -> None:
    with pytest.raises(IndexError, match="a copy touches"):
        view(np.zeros(4), (offset,), ((1,),), (size,))


def test_elements_of_another_type_are_not_put_into_a_target() -> None:
    copy = StridedCopy("s", "t", (2,), (0,), ((1,),), (0,), ((1,),))
    with pytest.raises(TypeError, match="float32 elements do not go into float64"):
        copy_elements(copy, np.zeros(2, np.float32), np.zeros(2))


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("operation, number", [("scale", 3.0), ("divide", 0.7), ("add", -1.25)])
def test_arithmetic_computes_in_float32_and_rounds_once(
    dtype: str, operation: str, number: float
) -> None:
    from xckpt.core.dtypes import numpy_dtype

    kind = numpy_dtype(dtype)
    values = np.linspace(-3, 3, 41).astype(kind)
    step = Arithmetic(operation, dtype, dtype, number)  # pyright: ignore[reportArgumentType]
    wide = np.float32 if kind.itemsize < 4 else kind.type
    functions = {"scale": np.multiply, "divide": np.divide, "add": np.add}
    expected = functions[operation](values.astype(wide), wide(number)).astype(kind)
    assert step(values).tobytes() == expected.tobytes()


@given(st.floats(-(2.0**20), 2.0**20, width=32), st.floats(1 / 64, 64.0))
def test_what_is_scaled_there_and_back_keeps_the_stated_bound(value: float, factor: float) -> None:
    values = np.array([value], np.float32)
    there = Arithmetic("scale", "float32", "float32", factor)
    back = there.inverse()(there(values))
    # Two roundings, each a relative 2^-24; where nothing is subnormal.
    if value == 0 or abs(value) > 1e-30:
        assert abs(float(back[0]) - value) <= abs(value) * (2 * 2.0**-24 + 2.0**-46)


@given(st.floats(-(2.0**20), 2.0**20, width=32))
def test_what_is_cast_there_and_back_keeps_the_stated_bound(value: float) -> None:
    there = Arithmetic("cast", "float32", "bfloat16")
    back = there.inverse()(there(np.array([value], np.float32)))
    if value == 0 or abs(value) > 1e-30:
        assert abs(float(back[0]) - value) <= abs(value) * 2.0**-8
