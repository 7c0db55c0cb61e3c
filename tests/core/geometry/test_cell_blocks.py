"""Chunks in blocks: all of them, each once, in C order, and no block above its limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from xckpt.core.geometry.box import Box
from xckpt.core.geometry.cell_blocks import cell_at, cell_blocks, count_met
from xckpt.core.geometry.grid import cells


@st.composite
def arrays(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Box]:
    """A shape, a chunk shape and a box that is not empty."""
    axes = [
        (draw(st.integers(1, 9)), draw(st.integers(1, 5))) for _ in range(draw(st.integers(0, 3)))
    ]
    lows = [draw(st.integers(0, size - 1)) for size, _ in axes]
    sizes = [draw(st.integers(1, size - low)) for (size, _), low in zip(axes, lows, strict=True)]
    shape, chunk = tuple(size for size, _ in axes), tuple(step for _, step in axes)
    return shape, chunk, Box(tuple(lows), tuple(sizes))


@given(arrays(), st.integers(1, 12))
def test_blocks_have_the_chunks_of_the_box(array, most):
    shape, chunk, box = array
    numbers, boxes = cells(box.offsets, box.ends, shape, chunk)
    assert count_met(box, chunk) == len(numbers)
    found: list[int] = []
    for block in cell_blocks(box, chunk, most):
        inside = cells(block.offsets, block.ends, shape, chunk)[0].tolist()
        assert count_met(block, chunk) == len(inside) <= most
        found += inside
    assert found == numbers.tolist()
    assert [cell_at(number, shape, chunk) for number in found] == list(boxes)


def test_billions_of_chunks_are_not_listed():
    box = Box((0, 0), (1 << 40, 1 << 20))
    assert count_met(box, (1, 1)) == 1 << 60
    assert next(cell_blocks(box, (1, 1), 1000)) == Box((0, 0), (1, 1000))
