"""The grid choice: every unit has one writer, and chunks are as large as asked."""

from __future__ import annotations

import itertools
from math import gcd, prod

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.tilings import Shape, Tiling, chunk_edges, region, tiled_shapes
from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.grid import (
    MAX_CHUNK_BYTES,
    OVERSIZE,
    SHATTERED,
    Grid,
    GridOptions,
    cells,
    choose_grid,
    count_cells,
)
from xckpt.options import MOST_CHUNK_BYTES

targets = st.sampled_from([1, 2, 7, 16, 64, 100, 1000, 1 << 20])
options = st.builds(GridOptions, targets, st.one_of(st.just(0), targets))
item_sizes = st.sampled_from([1, 2, 4, 16])


def full(boxes: Tiling) -> Tiling:
    return [box for box in boxes if 0 not in box[1]]


def chunk_counts(grid: Grid) -> list[int]:
    """Number of chunks of each array."""
    pairs = zip(grid.arrays, grid.chunks.tolist(), strict=True)
    return [count_cells(array.sizes, chunk) for array, chunk in pairs]


def choose(shape: Shape, item: int, boxes: Tiling, given_options: GridOptions) -> Grid:
    return choose_grid(shape, item, Boxes.of(full(boxes), rank=len(shape)), given_options)


def owners(shape: Shape, boxes: Tiling) -> np.ndarray:
    """The number of the box that holds each element."""
    owner = np.full(shape, -1)
    for number, box in enumerate(boxes):
        owner[region(box)] = number
    return owner


@given(tiled_shapes(), item_sizes, options)
@example(((), [((), ())]), 4, GridOptions(1, 0))
@example(((0,), [((0,), (0,))]), 4, GridOptions(1, 7))
@example(((3, 0), [((0, 0), (3, 0))]), 4, GridOptions())
def test_every_unit_lies_in_one_box(tiled, item, given_options):
    shape, boxes = tiled
    grid = choose(shape, item, boxes, given_options)
    owner = owners(shape, boxes)
    covered = np.zeros(shape, int)
    for array, unit, chunk in zip(grid.arrays, grid.units, grid.chunks, strict=True):
        assert (unit >= 1).all() and (chunk >= 1).all() and (unit % chunk == 0).all()
        covered[region((array.offsets, array.sizes))] += 1
        if 0 in array.sizes:
            continue
        zeros = (0,) * len(shape)
        _, units = cells(zeros, array.sizes, array.sizes, tuple(unit.tolist()))
        for cell in units:
            offsets = tuple(a + b for a, b in zip(array.offsets, cell.offsets, strict=True))
            assert len(np.unique(owner[region((offsets, cell.sizes))])) == 1
    assert (covered == 1).all()


@given(tiled_shapes(min_side=1), item_sizes, options)
def test_an_array_is_the_whole_or_one_box(tiled, item, given_options):
    shape, boxes = tiled
    grid = choose(shape, item, boxes, given_options)
    if grid.is_regular(shape):
        assert grid.arrays == Boxes.whole(shape)
    else:
        assert grid.arrays == Boxes.of(full(boxes)) and len(full(boxes)) > 1
    if given_options.shard_bytes <= given_options.chunk_bytes:
        assert grid.shards is None


@given(tiled_shapes(min_side=1), item_sizes, options)
def test_units_keep_to_their_targets(tiled, item, given_options):
    """A chunk is at most the target, `OVERSIZE` times that where boundaries bind, or an element."""
    shape, boxes = tiled
    grid = choose(shape, item, boxes, given_options)
    bound = not grid.is_regular(shape) or len(full(boxes)) == 1
    chunk_most = max(item, given_options.chunk_bytes)
    shard_most = max(item, given_options.shard_bytes, given_options.chunk_bytes)
    for chunk, unit in zip(grid.chunks, grid.units, strict=True):
        assert prod(unit.tolist()) * item <= shard_most * (1 if bound else OVERSIZE)
        # The chunk divides the shard, so a shard binds it as a boundary does.
        exact = bound and grid.shards is None
        assert prod(chunk.tolist()) * item <= chunk_most * (1 if exact else OVERSIZE)


@given(tiled_shapes(min_side=1), item_sizes, targets)
def test_a_regular_grid_does_not_shatter_its_boxes(tiled, item, target):
    shape, boxes = tiled
    grid = choose(shape, item, boxes, GridOptions(target))
    asked = sum(-(-prod(sizes) * item // target) for _, sizes in full(boxes))
    if grid.is_regular(shape) and len(full(boxes)) > 1:
        assert sum(chunk_counts(grid)) <= SHATTERED * asked
    steps = []
    for d, size in enumerate(shape):
        inner = {o[d] for o, _ in full(boxes)} - {0}
        steps.append(gcd(*inner) if inner else size)
    if len(full(boxes)) > 1 and prod(steps) * item <= target:
        # The largest chunks that divide every boundary are within the target.
        assert grid.is_regular(shape) == (count_cells(shape, steps) <= SHATTERED * asked)


@given(tiled_shapes(min_side=1), item_sizes, st.sampled_from([64, 100, 1000]))
def test_chunks_are_not_much_smaller_than_asked(tiled, item, target):
    """Where no boundary binds: a free array's chunks are at least an eighth of the target."""
    shape, _ = tiled
    grid = choose(shape, item, [((0,) * len(shape), shape)], GridOptions(target))
    assert prod(grid.chunks[0].tolist()) * item * 8 > min(target, prod(shape) * item)


@pytest.mark.parametrize("parts", [2, 3, 7, 8, 64])
@pytest.mark.parametrize("size", [64, 65, 127, 1000])
def test_a_shard_of_torch_chunk_is_one_chunk(size, parts):
    """Ceil-division shards and even ones get a regular grid of one chunk a shard."""
    edges = sorted(set(chunk_edges(size, parts)))
    boxes = [((a, 0), (b - a, 5)) for a, b in itertools.pairwise(edges)]
    grid = choose((size, 5), 4, boxes, GridOptions())
    assert grid.is_regular((size, 5))
    assert grid.chunks.tolist() == [[edges[1], 5]]
    assert chunk_counts(grid) == [len(boxes)]


def test_boxes_of_unrelated_sizes_become_pieces():
    rows = [0, 7, 20, 101, 104]
    boxes = [((a, 0), (b - a, 64)) for a, b in itertools.pairwise(rows)]
    grid = choose((104, 64), 4, boxes, GridOptions())
    assert grid.arrays == Boxes.of(boxes)
    assert grid.chunks.tolist() == [[b - a, 64] for a, b in itertools.pairwise(rows)]


def test_a_shard_holds_several_chunks():
    halves = [((0, 0), (32, 64)), ((32, 0), (32, 64))]
    grid = choose((64, 64), 4, halves, GridOptions(1024, 8192))
    assert grid.shards is not None
    assert grid.shards.tolist() == [[32, 64]] and grid.chunks.tolist() == [[4, 64]]
    assert chunk_counts(grid) == [16]


def test_a_prime_number_of_rows_makes_a_chunk_above_the_target_rather_than_slivers():
    """g is 2 * 10007: chunks of 10007 rows are 2.4 times the target, of 2 rows 1/2000 of it."""
    boxes = [((0,), (20014,)), ((20014,), (20014,))]
    grid = choose((40028,), 1, boxes, GridOptions(4096))
    assert grid.chunks.tolist() == [[10007]]


def test_a_prime_number_of_rows_far_above_the_target_makes_pieces():
    boxes = [((0,), (200_006,)), ((200_006,), (200_006,))]
    grid = choose((400_012,), 1, boxes, GridOptions(4096))
    assert grid.arrays == Boxes.of(boxes)
    assert (grid.chunks <= 4096).all() and (grid.chunks > 2048).all()


@st.composite
def asked(draw: st.DrawFn) -> tuple[Shape, Shape, Shape, Shape]:
    """Sizes of an array, its chunks, and a non-empty box in it."""
    rank = draw(st.integers(0, 4))
    sizes = tuple(draw(st.integers(1, 9)) for _ in range(rank))
    chunk = tuple(draw(st.integers(1, 10)) for _ in range(rank))
    low = tuple(draw(st.integers(0, size - 1)) for size in sizes)
    high = tuple(draw(st.integers(a + 1, n)) for a, n in zip(low, sizes, strict=True))
    return sizes, chunk, low, high


@given(asked())
@example(((), (), (), ()))
def test_cells_are_those_that_a_box_meets(case):
    sizes, chunk, low, high = case
    numbers, boxes = cells(low, high, sizes, chunk)
    counts = [-(-n // c) for n, c in zip(sizes, chunk, strict=True)]
    expected = {}
    for number, at in enumerate(np.ndindex(*counts)):
        start = tuple(a * c for a, c in zip(at, chunk, strict=True))
        stop = tuple(min(a + c, n) for a, c, n in zip(start, chunk, sizes, strict=True))
        if all(a < h and b > lo for a, b, lo, h in zip(start, stop, low, high, strict=True)):
            expected[number] = (start, tuple(b - a for a, b in zip(start, stop, strict=True)))
    found = {n: (box.offsets, box.sizes) for n, box in zip(numbers.tolist(), boxes, strict=True)}
    assert found == expected and list(found) == sorted(expected)
    assert count_cells(sizes, chunk) == prod(counts)


@given(st.integers(1, 200), st.integers(1, 100), st.integers(1, 300))
@examples(200)
def test_a_free_step_pads_little(size, item, target):
    grid = choose_grid((size,), item, Boxes.whole((size,)), GridOptions(target))
    step = int(grid.chunks[0, 0])
    most = max(1, target // item)
    assert step <= most or step == size <= most
    assert 2 * step > min(most, size) or size % step == 0
    dividing = max(n for n in range(1, most + 1) if size % n == 0)
    fewest = -(-size // most)
    assert step == (dividing if 2 * dividing > most else -(-size // fewest))


@pytest.mark.parametrize(
    "edges, target, chunk",
    [
        ((0, 42, 84, 98), 21, 14),  # divides the shape too, and is above half of the target
        ((0, 42, 84, 126), 29, 21),  # the largest that divides both
        ((0, 30, 60, 90, 100), 20, 15),  # 10 divides the shape, and is not above half of the target
        ((0, 30, 60, 90, 100), 25, 15),
        ((0, 12, 24), 7, 6),  # below the target, though 12 is within `OVERSIZE` of it
        ((0, 11, 22), 9, 11),  # one element would be less than a part in `OVERSIZE`
        ((0, 1, 8), 100, 1),  # `SHATTERED` times as many chunks as the boxes ask for
    ],
)
def test_a_boundary_binds_the_chunk(edges, target, chunk):
    grid = choose_grid((edges[-1],), 1, rows(edges), GridOptions(target))
    assert grid.is_regular((edges[-1],)) and grid.chunks.tolist() == [[chunk]]


@pytest.mark.parametrize(
    "edges, target",
    [
        ((0, 11, 22), 8),  # chunks of one element are not too small for 8, and too many
        ((0, 1, 9), 100),  # one chunk more than `SHATTERED` times as many
    ],
)
def test_a_grid_that_would_shatter_becomes_pieces(edges, target):
    grid = choose_grid((edges[-1],), 1, rows(edges), GridOptions(target))
    assert grid.arrays == rows(edges)


def rows(edges: tuple[int, ...]) -> Boxes:
    return Boxes.of([((a,), (b - a,)) for a, b in itertools.pairwise(edges)])


def test_arrays_without_elements_have_the_smallest_chunks():
    for shape, chunk in (((), []), ((3, 0), [3, 1]), ((0,), [1])):
        assert choose_grid(shape, 4, Boxes.whole(shape)).chunks.tolist() == [chunk]


def test_a_grid_is_regular_only_as_one_array_that_is_the_whole():
    half = Boxes.of([((0,), (2,))])
    assert Grid(Boxes.whole((4,)), np.array([[2]])).is_regular((4,))
    assert not Grid(half, np.array([[2]])).is_regular((4,))
    assert not Grid(Boxes.of([((0,), (2,)), ((2,), (2,))]), np.array([[2], [2]])).is_regular((2,))


def test_chunks_are_8_mebibytes_unless_asked():
    assert GridOptions() == GridOptions(8 << 20, 0)


def test_cells_that_are_remembered_cannot_be_changed():
    numbers, boxes = cells((0,), (4,), (4,), (2,))
    for column in (numbers, boxes.offsets, boxes.sizes):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1


def test_absurd_targets_are_refused():
    for chunk_bytes, shard_bytes in ((0, 0), (-1, 0), (1, -1)):
        with pytest.raises(ValueError, match="chunk_bytes must be at least 1"):
            GridOptions(chunk_bytes, shard_bytes)


def test_grids_are_equal_by_what_they_say():
    one = Grid(Boxes.whole((4,)), np.array([[2]]))
    assert one == Grid(Boxes.whole((4,)), np.array([[2]]), np.array([[2]]))
    assert one != Grid(Boxes.whole((4,)), np.array([[1]]))
    assert one != Grid(Boxes.whole((4,)), np.array([[2]]), np.array([[4]]))
    assert one != 4


LARGEST_PUT = 5 << 30
"""Bytes that S3 takes in one request; TensorStore writes an object in one."""


byte_targets = st.sampled_from([1 << 23, (1 << 29) - 1, MOST_CHUNK_BYTES])


@examples(50)
@given(
    rows=st.integers(1, 1 << 34),
    columns=st.integers(1, 1 << 34),
    cuts=st.lists(st.integers(1, 1 << 34), max_size=5),
    item=item_sizes,
    sizes=st.builds(GridOptions, byte_targets, byte_targets),
)
@example(
    rows=6442450939, columns=1, cuts=[], item=1, sizes=GridOptions(MOST_CHUNK_BYTES)
)  # a prime
def test_no_object_is_larger_than_one_request_may_write(
    rows: int, columns: int, cuts: list[int], item: int, sizes: GridOptions
) -> None:
    """However large a shard is, and wherever it is cut: at most 4 GiB, an index left aside."""
    edges = [0, *sorted({cut for cut in cuts if cut < rows}), rows]
    boxes = Boxes.of([((low, 0), (high - low, columns)) for low, high in itertools.pairwise(edges)])
    grid = choose_grid((rows, columns), item, boxes, sizes)
    for units in (grid.chunks, grid.units):
        assert max(prod(unit) for unit in units.tolist()) * item <= MAX_CHUNK_BYTES < LARGEST_PUT
