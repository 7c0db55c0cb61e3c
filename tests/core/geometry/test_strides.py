"""Views whose elements share memory, judged by writing to each element in turn."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from xckpt.core.geometry.strides import is_one_to_one


@given(st.data())
def test_no_two_elements_share_a_byte(data: st.DataObject) -> None:
    item = data.draw(st.sampled_from([1, 2, 4]))
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=4)))
    strides = tuple(data.draw(st.integers(0, 20)) for _ in shape)
    # One byte at a time, so that elements that share some of their bytes are found too.
    memory = np.zeros(4 * 4 * 20 + 4, np.uint8)
    view = as_strided(memory, (*shape, item), (*strides, 1))
    for index in np.ndindex(shape):
        view[index] += 1
    assert is_one_to_one(shape, strides, item) == bool(memory.max(initial=0) <= 1)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_what_slices_and_transposes_make_is_known_without_looking(shape: list[int]) -> None:
    array = np.zeros([2 * size for size in shape], np.float32)
    view = array[tuple(slice(None, None, -2) for _ in shape)].T
    assert is_one_to_one(view.shape, view.strides, view.itemsize)
    large = tuple(size * 100_000 for size in shape)
    steps = tuple(prod(large[axis + 1 :]) for axis in range(len(large)))
    assert is_one_to_one(large, steps)
    assert not is_one_to_one((100_000, 100_000), (3, 4))
    # An axis of one element has any stride.
    assert is_one_to_one((100_000, 1), (1, 0))
