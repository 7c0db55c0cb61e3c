"""Who writes what: each element once, by a rank that holds it, and no rank far more than others."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.tilings import Box, Shape, Tiling, holders, region, tiled_shapes
from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.grid import GridOptions
from xckpt.core.plan import layout as module
from xckpt.core.plan.layout import SMALLEST_SHARE, Layout, LeafShards, lay_out, share

ITEM = 4


@st.composite
def held_tilings(draw: st.DrawFn) -> tuple[Shape, Tiling, list[list[int]], int]:
    """A shape, its boxes, who holds each, and how many ranks there are."""
    shape, boxes = draw(tiled_shapes())
    ranks = draw(st.integers(1, 6))
    return shape, boxes, draw(holders(len(boxes), ranks)), ranks


def reported(shape: Shape, boxes: Tiling, held: list[list[int]], *, twice: int = 1) -> LeafShards:
    """What the ranks say, in rank order; ``twice`` as a rank with several devices might."""
    rows = [(rank, box) for box, ranks in zip(boxes, held, strict=True) for rank in ranks * twice]
    rows.sort(key=lambda row: row[0])
    return LeafShards(
        shape,
        ITEM,
        Boxes.of([box for _, box in rows], rank=len(shape)),
        np.array([rank for rank, _ in rows], np.int64),
    )


def laid_out(shards: LeafShards, options: GridOptions) -> Layout:
    layout = lay_out(shards, options)
    assert isinstance(layout, Layout), layout
    return layout


@pytest.fixture(autouse=True)
def _share_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks may shrink to a few bytes for the sake of sharing, so that small shapes show it."""
    monkeypatch.setattr(module, "SMALLEST_SHARE", 16)


options = st.builds(GridOptions, st.sampled_from([8, 64, 1000]), st.sampled_from([0, 256]))


@given(held_tilings(), options, st.integers(1, 2))
@example(((), [((), ())], [[0, 1, 2]], 3), GridOptions(), 1)
@example(((0, 3), [((0, 0), (0, 3))], [[0, 1]], 2), GridOptions(), 1)
def test_every_element_goes_to_one_rank_that_holds_it(case, given_options, twice):
    shape, boxes, held, ranks = case
    layout = laid_out(reported(shape, boxes, held, twice=twice), given_options)
    loads = np.zeros(ranks, np.int64)
    writers, parts = share(layout, loads)
    written = np.zeros(shape, int)
    given_loads = np.zeros(ranks, np.int64)
    for rank, part in zip(writers.tolist(), parts, strict=True):
        written[region((part.offsets, part.sizes))] += 1
        given_loads[rank] += prod(part.sizes) * ITEM
        mine = [box for box, own in zip(boxes, held, strict=True) if rank in own]
        assert any(inside((part.offsets, part.sizes), box) for box in mine)
        assert prod(part.sizes) > 0
    assert (written == 1).all()
    assert given_loads.tolist() == loads.tolist()


@given(held_tilings(), options)
def test_parts_are_whole_units(case, given_options):
    shape, boxes, held, ranks = case
    layout = laid_out(reported(shape, boxes, held), given_options)
    _, parts = share(layout, np.zeros(ranks, np.int64))
    for part in parts:
        box = (part.offsets, part.sizes)
        (number,) = [
            n
            for n, array in enumerate(layout.grid.arrays)
            if inside(box, (array.offsets, array.sizes))
        ]
        array, unit = layout.grid.arrays[number], layout.grid.units[number].tolist()
        for d, step in enumerate(unit):
            start = part.offsets[d] - array.offsets[d]
            stop = start + part.sizes[d]
            assert start % step == 0
            assert stop % step == 0 or stop == array.sizes[d]


def inside(part: Box, box: Box) -> bool:
    return all(
        a >= b and a + n <= b + m
        for a, n, b, m in zip(part[0], part[1], box[0], box[1], strict=True)
    )


@given(held_tilings(), options)
def test_the_boxes_are_the_distinct_ones_with_elements(case, given_options):
    shape, boxes, held, _ = case
    layout = laid_out(reported(shape, boxes, held), given_options)
    assert [(box.offsets, box.sizes) for box in layout.boxes] == sorted(
        {box for box in boxes if 0 not in box[1]}
    )


leaf_shapes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=30)


def total_loads(layouts: list[Layout], ranks: int) -> tuple[list[int], int]:
    """Bytes of each rank after sharing the layouts in turn, and the bytes of the largest part."""
    loads = np.zeros(ranks, np.int64)
    largest = 0
    for layout in layouts:
        _, parts = share(layout, loads)
        largest = max(largest, *(prod(part.sizes) * ITEM for part in parts))
    return loads.tolist(), largest


@given(leaf_shapes, st.integers(1, 8), options)
@examples(50)
@example([(3, 1)] * 20, 2, GridOptions(4))
@example([(9, 1)] * 20, 8, GridOptions(4))
def test_replicas_share_the_writing_evenly(leaves, ranks, given_options):
    """Everything on every rank: no rank writes more than the mean and one part."""
    layouts = [
        laid_out(
            reported(shape, [((0, 0), shape)], [list(range(ranks))]),
            given_options,
        )
        for shape in sorted(leaves, key=prod, reverse=True)
    ]
    loads, largest = total_loads(layouts, ranks)
    total = sum(prod(shape) * ITEM for shape in leaves)
    assert sum(loads) == total
    assert max(loads) <= total / ranks + largest


@given(leaf_shapes, st.integers(2, 4), st.integers(1, 4), options)
@examples(50)
@example([(3, 1)] * 20, 2, 2, GridOptions(4))
def test_hybrid_shards_share_the_writing_evenly(leaves, replicas, shards, given_options):
    """Rows sharded inside a replica group, as HSDP does: so is the work inside each shard."""
    layouts = []
    totals = [0] * shards
    for rows, columns in sorted(leaves, key=prod, reverse=True):
        shape = (rows * shards, columns)
        boxes = [((rows * s, 0), (rows, columns)) for s in range(shards)]
        held = [[r * shards + s for r in range(replicas)] for s in range(shards)]
        layouts.append(laid_out(reported(shape, boxes, held), given_options))
        for s in range(shards):
            totals[s] += rows * columns * ITEM
    loads, largest = total_loads(layouts, shards * replicas)
    for s in range(shards):
        group = loads[s::shards]
        assert sum(group) == totals[s]
        assert max(group) <= totals[s] / replicas + largest


@given(st.integers(1, 6), st.integers(1, 20))
@examples(30)
def test_boxes_that_all_ranks_hold_are_dealt_out(ranks, rows):
    """Sharded on each rank's devices and the same on every rank: a rank holds many of the boxes."""
    boxes = [((row, 0), (1, 4)) for row in range(rows)]
    held = [list(range(ranks))] * rows
    loads, largest = total_loads(
        [laid_out(reported((rows, 4), boxes, held), GridOptions(16))], ranks
    )
    assert max(loads) - min(loads) <= largest == 16


WHOLE = [((0, 0), (64, 4))]
UNEVEN = [((0, 0), (48, 4)), ((48, 0), (16, 4))]
HALVES = [((0, 0), (32, 4)), ((32, 0), (32, 4))]


@pytest.mark.parametrize(
    "boxes, held, given_options, unit",
    [
        (WHOLE, [[0]], GridOptions(), 64),  # no rank to share with
        (WHOLE, [[0, 1, 2, 3]], GridOptions(), 16),
        (WHOLE, [[0, 1, 2]], GridOptions(), 16),  # less than a third: it divides the shape
        (WHOLE, [[0, 1, 2, 3]], GridOptions(64), 4),  # smaller already
        (WHOLE, [[0, 1, 2, 3]], GridOptions(64, 1024), 16),  # so is the chunk, not the shard
        (WHOLE, [[0, 1, 2, 3]], GridOptions(64, 128), 8),
        (HALVES, [[0, 1], [0, 1, 2, 3]], GridOptions(), 16),  # enough for those who are fewer
        (HALVES, [[0], [1, 2, 3]], GridOptions(), 32),
        (UNEVEN, [[0, 1], [0, 1]], GridOptions(), 16),  # what the larger box needs
        (WHOLE, [list(range(128))], GridOptions(), 1),  # no less than the smallest share
    ],
)
def test_chunks_are_small_enough_to_be_shared(boxes, held, given_options, unit):
    grid = laid_out(reported((64, 4), boxes, held), given_options).grid
    assert grid.units.tolist() == [[unit, 4]]


def test_chunks_of_a_mebibyte_are_not_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALLEST_SHARE", SMALLEST_SHARE)
    layout = laid_out(reported((1 << 20,), [((0,), (1 << 20,))], [list(range(64))]), GridOptions())
    assert layout.grid.chunks.tolist() == [[(1 << 20) // ITEM]]


def test_an_overlap_names_ranges_and_ranks():
    shards = LeafShards(
        (4, 8), ITEM, Boxes.of([((0, 0), (3, 8)), ((2, 0), (2, 8))] * 2), np.array([0, 1, 2, 3])
    )
    assert lay_out(shards, GridOptions()) == (
        "[2, 3) x [0, 8) is held twice: [0, 3) x [0, 8) on ranks 0, 2 overlaps [2, 4) x [0, 8) on "
        "ranks 1, 3"
    )


def test_a_gap_names_its_range():
    shards = LeafShards((4, 8), ITEM, Boxes.of([((0, 0), (3, 8))]), np.array([0]))
    gap = "[3, 4) x [0, 8) is held by no rank"
    assert lay_out(shards, GridOptions()) == f"{gap}; beside it: [0, 3) x [0, 8) on rank 0"
    nothing = LeafShards((4, 8), ITEM, Boxes.of([], rank=2), np.zeros(0, np.int64))
    assert lay_out(nothing, GridOptions()) == "[0, 4) x [0, 8) is held by no rank"


def test_a_gap_names_the_ranks_of_what_shares_a_face_with_it():
    quarters = [((row, column), (4, 4)) for row in (0, 4) for column in (0, 4)]
    boxes = [*quarters[:3], ((4, 5), (4, 3)), quarters[0]]
    shards = LeafShards((8, 8), ITEM, Boxes.of(boxes), np.array([3, 1, 2, 0, 7]))
    assert lay_out(shards, GridOptions()) == (
        "[4, 8) x [4, 5) is held by no rank; beside it: [0, 4) x [4, 8) on rank 1, "
        "[4, 8) x [0, 4) on rank 2, [4, 8) x [5, 8) on rank 0"
    )


def test_a_box_outside_names_the_shape_and_many_ranks_shortly():
    shards = LeafShards((4,), ITEM, Boxes.of([((2,), (3,))] * 12), np.arange(12))
    assert lay_out(shards, GridOptions()) == ("[2, 5) on ranks 0-11 lies outside the shape (4,)")


@pytest.mark.parametrize("count, said", [(8, "14"), (9, "14 and 1 more"), (10, "14 and 2 more")])
def test_up_to_eight_ranks_are_named(count, said):
    shards = LeafShards((4,), ITEM, Boxes.of([((2,), (3,))] * count), 2 * np.arange(count))
    problem = lay_out(shards, GridOptions())
    assert problem == f"[2, 5) on ranks 0, 2, 4, 6, 8, 10, 12, {said} lies outside the shape (4,)"


@pytest.mark.parametrize(
    "boxes, held, contested",
    [
        (WHOLE, [[0]], False),
        (WHOLE, [[0, 1]], False),  # two halves
        (WHOLE, [[0, 1, 2]], True),  # four chunks among three
        (WHOLE, [list(range(128))], True),  # more ranks than chunks
        (HALVES, [[0], [1]], False),
        (HALVES, [[0], [1, 2, 3]], True),
    ],
)
def test_one_holder_is_chosen_where_parts_are_unequal_or_few(boxes, held, contested):
    layout = laid_out(reported((64, 4), boxes, held), GridOptions())
    assert layout.contested == contested


def test_a_scalar_without_a_holder():
    shards = LeafShards((), ITEM, Boxes.of([], rank=0), np.zeros(0, np.int64))
    assert lay_out(shards, GridOptions()) == "the scalar is held by no rank"


def test_leaves_that_are_alike_have_one_key():
    one = reported((4, 2), [((0, 0), (4, 2))], [[0, 1]])
    assert one.key() == reported((4, 2), [((0, 0), (4, 2))], [[0, 1]]).key()
    assert one.key() != reported((4, 2), [((0, 0), (4, 2))], [[0, 2]]).key()
    assert one.key() != reported((2, 4), [((0, 0), (2, 4))], [[0, 1]]).key()
    halves = [((0, 0), (2, 2)), ((2, 0), (2, 2))]
    assert one.key() != reported((4, 2), halves, [[0], [1]]).key()
