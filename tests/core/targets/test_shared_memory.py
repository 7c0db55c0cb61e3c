"""Which views share memory, and whether what is stored for them agrees, against NumPy itself."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.examples import examples
from xckpt.core.leaf import Extent
from xckpt.core.targets.shared_memory import agree, overlapping, overlapping_pairs

Array = NDArray[np.int16]
MEMORY = np.zeros((6, 6), np.int16)


def extent_of(array: Array) -> Extent:
    start = array.__array_interface__["data"][0]
    return Extent(start, array.shape, array.strides, array.itemsize)


slices = st.builds(
    lambda low, size, step: slice(low, low + size, step),
    st.integers(0, 5),
    st.integers(1, 6),
    st.integers(1, 3),
)
views = st.builds(
    lambda keys, flip, turn: MEMORY[keys][::flip].T if turn else MEMORY[keys][::flip],
    st.tuples(slices, slices),
    st.sampled_from([1, -1]),
    st.booleans(),
)


def places(array: Array) -> set[int]:
    """The addresses of all elements."""
    steps = np.indices(array.shape).reshape(array.ndim, -1).T @ np.array(array.strides)
    return set((extent_of(array).start + steps).tolist())


@examples(200)
@given(st.lists(views, min_size=1, max_size=6))
def test_views_meet_that_have_an_element_in_common(arrays: list[Array]) -> None:
    extents = [extent_of(array) for array in arrays]
    ranges = [each.range() for each in extents]
    found: list[tuple[int, int]] = []
    for group in overlapping([low for low, _ in ranges], [high for _, high in ranges]):
        found += overlapping_pairs({n: extents[n] for n in group})
    firsts = [n for n, each in enumerate(extents) if each not in extents[:n]]
    expected = {(extents.index(each), n) for n, each in enumerate(extents) if n not in firsts}
    for at, first in enumerate(firsts):
        for second in firsts[at + 1 :]:
            if places(arrays[first]) & places(arrays[second]):
                expected.add((first, second))
    assert len(found) == len(set(found))
    assert set(found) == expected


@examples(100)
@given(views, views, st.integers(0, 3))
def test_elements_agree_that_memory_can_hold_together(
    one: Array, other: Array, changed: int
) -> None:
    MEMORY[...] = np.arange(36).reshape(6, 6)
    ours, theirs = one.copy(), other.copy()
    theirs.reshape(-1)[: min(changed, theirs.size)] += 1
    holds = MEMORY.copy()
    one[...], other[...] = ours, theirs
    expected = np.array_equal(one, ours)
    MEMORY[...] = holds
    assert agree(extent_of(one), ours, extent_of(other), theirs) == expected
