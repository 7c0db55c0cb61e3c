"""Parts of large tensors: all of them, in order, small enough."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from xckpt.core.geometry.box import Box
from xckpt.core.geometry.slabs import blocks, runs

SIZES = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4)), max_size=4)


@given(SIZES, st.integers(1, 60))
def test_blocks_hold_each_element_once_in_whole_chunks(
    sizes: list[tuple[int, int]], most: int
) -> None:
    shape, chunk = tuple(size for size, _ in sizes), tuple(step for _, step in sizes)
    seen = np.zeros(shape, np.int64)
    for box in blocks(shape, chunk, most):
        seen[box.slices()] += 1
        assert all(low % step == 0 for low, step in zip(box.offsets, chunk, strict=True))
        ends = zip(box.ends, chunk, shape, strict=True)
        assert all(end % step == 0 or end == size for end, step, size in ends)
        assert box.elements <= max(most, prod(chunk))
    assert (seen == 1).all()


@given(SIZES, st.integers(1, 60), st.data())
def test_runs_follow_each_other_in_c_order(
    sizes: list[tuple[int, int]], most: int, data: st.DataObject
) -> None:
    shape, chunk = tuple(size for size, _ in sizes), tuple(step for _, step in sizes)
    low = [data.draw(st.integers(0, size)) for size in shape]
    high = [data.draw(st.integers(a, size)) for a, size in zip(low, shape, strict=True)]
    box = Box(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))
    whole = np.arange(prod(shape)).reshape(shape)
    parts = list(runs(box, chunk, most))
    read = [whole[part.slices()].reshape(-1) for part in parts]
    expected = whole[box.slices()].reshape(-1)
    assert np.concatenate([*read, np.zeros(0, np.int64)]).tolist() == expected.tolist()
    assert all(part.elements <= most for part in parts)


def test_runs_end_where_chunks_do() -> None:
    parts = list(runs(Box((3, 0), (20, 8)), (4, 8), 10 * 8))
    assert [(part.offsets[0], part.ends[0]) for part in parts] == [(3, 12), (12, 20), (20, 23)]
