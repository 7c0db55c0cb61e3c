"""Parts of large tensors: all of them, in order, small enough."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from xckpt.core.geometry.box import Box
from xckpt.core.geometry.slabs import blocks, runs

SIZES = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4)), max_size=4)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Box, tuple[int, ...]]:
    """A box of an array, and the shape of its chunks."""
    sizes = draw(SIZES)
    low = [draw(st.integers(0, size)) for size, _ in sizes]
    high = [draw(st.integers(a, size)) for a, (size, _) in zip(low, sizes, strict=True)]
    box = Box(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))
    return box, tuple(step for _, step in sizes)


@given(cases(), st.integers(1, 60))
def test_blocks_hold_each_element_once_and_end_where_chunks_do(
    case: tuple[Box, tuple[int, ...]], most: int
) -> None:
    box, chunk = case
    seen = np.zeros(box.ends, np.int64)
    found = list(blocks(box, chunk, most))
    for part in found:
        seen[part.slices()] += 1
        lows = zip(part.offsets, chunk, box.offsets, strict=True)
        assert all(low % step == 0 or low == first for low, step, first in lows)
        ends = zip(part.ends, chunk, box.ends, strict=True)
        assert all(end % step == 0 or end == last for end, step, last in ends)
        assert part.elements <= max(most, prod(chunk))
    assert (seen[box.slices()] == 1).all() and seen.sum() == box.elements
    assert found == sorted(found, key=lambda part: part.offsets)
    assert len(found) < 2 or box.elements > most


@given(cases(), st.integers(1, 60))
def test_runs_follow_each_other_in_c_order(case: tuple[Box, tuple[int, ...]], most: int) -> None:
    box, chunk = case
    whole = np.arange(prod(box.ends)).reshape(box.ends)
    parts = list(runs(box, chunk, most))
    read = [whole[part.slices()].reshape(-1) for part in parts]
    expected = whole[box.slices()].reshape(-1)
    assert np.concatenate([*read, np.zeros(0, np.int64)]).tolist() == expected.tolist()
    assert all(part.elements <= most for part in parts)


def test_runs_end_where_chunks_do() -> None:
    parts = list(runs(Box((3, 0), (20, 8)), (4, 8), 10 * 8))
    assert [(part.offsets[0], part.ends[0]) for part in parts] == [(3, 12), (12, 20), (20, 23)]
