"""A grid is kept exactly where each of its chunks lies inside one of the boxes."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.tilings import Box, Shape, Tiling, tiled_shapes
from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.grid import Grid, GridOptions, cells, choose_grid
from xckpt.core.geometry.kept_grid import still_fits


@st.composite
def tilings_and_chunks(draw: st.DrawFn) -> tuple[Shape, Tiling, Shape]:
    shape, boxes = draw(tiled_shapes())
    chunk = tuple(draw(st.integers(1, size + 1)) for size in shape)
    return shape, boxes, chunk


def inside(part: Box, whole: Box) -> bool:
    (low, size), (start, extent) = part, whole
    return all(
        s <= lo and lo + n <= s + e for lo, n, s, e in zip(low, size, start, extent, strict=True)
    )


@given(tilings_and_chunks())
@example(((), [((), ())], ()))
@example(((5,), [((0,), (4,)), ((4,), (1,))], (4,)))
@example(((5,), [((0,), (5,))], (1 << 29,)))
def test_each_chunk_lies_in_one_box(case: tuple[Shape, Tiling, Shape]) -> None:
    """One that is mostly padding does not count: of 20 bytes a save made a file of 2 GiB."""
    shape, tiling, chunk = case
    boxes = Boxes.of(tiling, rank=len(shape))
    boxes = boxes.take(boxes.elements > 0)
    grid = Grid.of(Boxes.whole(shape), [chunk], [None])
    if not len(boxes):
        return
    _, units = cells((0,) * len(shape), shape, shape, chunk)
    lie = all(
        any(inside((unit.offsets, unit.sizes), (box.offsets, box.sizes)) for box in boxes)
        for unit in units
    )
    mostly_data = all(c < 2 * n for c, n in zip(chunk, shape, strict=True))
    assert still_fits(grid, shape, boxes) == (lie and mostly_data)


@given(tiled_shapes(), st.sampled_from([8, 64, 1000]))
def test_the_grid_of_a_tiling_fits_it(case: tuple[Shape, Tiling], chunk_bytes: int) -> None:
    """So a save with the shards of its base keeps all grids, pieces too."""
    shape, tiling = case
    boxes = Boxes.of(tiling, rank=len(shape))
    boxes = boxes.take(boxes.elements > 0)
    if len(boxes):
        grid = choose_grid(shape, 4, boxes, GridOptions(chunk_bytes))
        assert still_fits(grid, shape, boxes)


def test_pieces_fit_the_same_boxes_alone() -> None:
    pieces = Boxes.of([((0,), (7,)), ((7,), (13,))])
    grid = Grid.of(pieces, [(7,), (13,)], [None, None])
    assert still_fits(grid, (20,), pieces)
    assert not still_fits(grid, (20,), Boxes.of([((0,), (7,)), ((7,), (6,)), ((13,), (7,))]))
    assert not still_fits(grid, (20,), Boxes.whole((20,)))
