"""Packs: which bytes are read at a time, and places that overlap, against brute force."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from xckpt.core.manifest.packs import PLACE, overlap, runs

spans = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), max_size=12)


@examples(200)
@given(spans, st.integers(0, 20), st.integers(1, 100))
def test_ranges_hold_every_chunk_once_and_little_else(
    placed: list[tuple[int, int]], gap: int, most: int
) -> None:
    offsets, lengths = np.array(placed, np.int64).reshape(-1, 2).T
    found = list(runs(offsets, lengths, gap=gap, most=most))
    assert sorted(n for each in found for n in each.members.tolist()) == list(range(len(placed)))
    for each in found:
        covered: set[int] = set()
        for number in each.members:
            low, high = offsets[number], offsets[number] + lengths[number]
            assert each.start <= low and high <= each.stop
            covered |= set(range(low, high))
        vain = sorted(set(range(each.start, each.stop)) - covered)
        assert {each.start, each.stop - 1} <= covered
        assert not vain or max(np.diff(sorted(covered))) - 1 <= gap
        assert each.stop - each.start <= max(most, *(lengths[n] for n in each.members))


places = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=8
)


@examples(200)
@given(places)
def test_an_overlap_is_found_wherever_there_is_one(placed: list[tuple[int, int, int]]) -> None:
    stored = np.array([(pack, low) for pack, low, _ in placed], PLACE)
    found = overlap(stored, np.array([length for *_, length in placed], np.int64))

    def meet(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
        (pack, low, length), (pack_2, low_2, length_2) = one, other
        shares = pack == pack_2 and low < low_2 + length_2 and low_2 < low + length
        return shares and one != other

    wrong = {n for n, one in enumerate(placed) if any(meet(one, other) for other in placed)}
    assert (found is None) == (not wrong) and (found is None or found in wrong)
