"""The strategies give what they promise."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.tilings import chunk_edges, holders, paint, tiled_shapes


@given(tiled_shapes())
@examples(50)
def test_a_tiling_covers_its_shape_exactly_once(tiled):
    shape, boxes = tiled
    assert (paint(shape, boxes) == 1).all()


def test_chunk_edges_are_those_of_ceiling_division():
    assert chunk_edges(10, 4) == [0, 3, 6, 9, 10]
    assert chunk_edges(4, 3) == [0, 2, 4, 4]
    assert chunk_edges(0, 2) == [0, 0, 0]


@given(st.data())
@examples(20)
def test_every_box_has_a_holder(data):
    held = data.draw(holders(5, 3))
    assert len(held) == 5
    assert all(ranks and ranks == sorted(set(ranks)) and max(ranks) < 3 for ranks in held)
