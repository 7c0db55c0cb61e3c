"""Boxes: methods are what slicing a NumPy array gives; the algebra against painted arrays."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.examples import examples
from tests.support.tilings import Box as Pair
from tests.support.tilings import Shape, Tiling, paint, region, tiled_shapes
from xckpt.core.geometry import box_lookup
from xckpt.core.geometry import cover as module
from xckpt.core.geometry.box import Box, Boxes
from xckpt.core.geometry.box_lookup import BoxLookup, intersect
from xckpt.core.geometry.cover import cover_fault, unique
from xckpt.core.metadata import ChunkStorageMetadata

SHAPES = st.lists(st.integers(1, 6), max_size=3).map(tuple)


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    """A shape and two boxes in it."""
    shape = draw(SHAPES)
    ends = [[draw(st.tuples(*[st.integers(0, n)] * 2)) for n in shape] for _ in range(2)]
    one, other = (
        Box(tuple(min(e) for e in box), tuple(max(e) - min(e) for e in box)) for box in ends
    )
    return shape, one, other


def numbers(shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Each element's number, in an array of the shape."""
    return np.arange(np.prod(shape, dtype=int)).reshape(shape)


@given(cases())
def test_the_elements_are_those_of_the_slices(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, box, other = case
    array = numbers(shape)
    here, there = set(array[box.slices()].flat), set(array[other.slices()].flat)
    assert box.elements == len(here)
    shared = box.meets(other)
    assert (set() if shared is None else set(array[shared.slices()].flat)) == here & there
    if there:
        assert box.holds(other) == (there <= here)


@given(cases())
def test_a_part_is_cut_out_of_what_was_cut_out(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, box, other = case
    array, shared = numbers(shape), box.meets(other)
    if shared is not None:
        part = array[box.slices()][shared.slices(origin=box.offsets)]
        np.testing.assert_array_equal(part, array[shared.slices()])


@given(cases(), st.data())
def test_whole_chunks_are_those_that_have_an_element_of_the_box(
    case: tuple[tuple[int, ...], Box, Box], data: st.DataObject
) -> None:
    shape, box, _ = case
    if box.elements:
        chunk = data.draw(st.tuples(*[st.integers(1, 1 + size) for size in shape]))
        chunk_of = np.zeros(shape, np.int64)
        for axis, step in enumerate(chunk):
            along = np.arange(shape[axis]) // step
            chunk_of = chunk_of * 100 + np.expand_dims(along, [*range(len(shape) - axis)][1:])
        touched = np.isin(chunk_of, chunk_of[box.slices()])
        found = np.zeros(shape, bool)
        found[box.whole_chunks(chunk, shape).slices()] = True
        np.testing.assert_array_equal(found, touched)


@given(cases())
def test_moving_a_box_there_and_back(case: tuple[tuple[int, ...], Box, Box]) -> None:
    _, box, other = case
    assert box.shifted(other.offsets).relative_to(other.offsets) == box
    assert box.relative_to(box.offsets) == Box.whole(box.sizes)


@pytest.mark.parametrize(
    "offsets, sizes, error, text",
    [
        ((0,), (4, 64), ValueError, r"as many offsets as sizes, got offsets \(0,\) and"),
        ((0, 0), (4, -64), ValueError, r"must be 0 or more, got sizes \(4, -64\)"),
        ((0.0,), (4,), TypeError, r"the offsets of a box must be integers.* got \(0.0,\)"),
        ((0,), ("4",), TypeError, r"the sizes of a box must be integers.* got \('4',\)"),
        ((0,), 4, TypeError, r"the sizes of a box must be integers, one a dimension, got 4"),
        (None, (4,), TypeError, "the offsets of a box must be integers"),
    ],
)
def test_what_is_no_box_is_refused(offsets: Any, sizes: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        ChunkStorageMetadata(offsets, sizes)


@pytest.mark.parametrize("kind", [list, np.array, torch.Size, tuple])
def test_a_box_has_tuples_of_ints(kind: Any) -> None:
    box = Box(kind([np.int64(0), 8]), kind([3, 8]))
    assert box == Box((0, 8), (3, 8)) and hash(box) == hash(Box((0, 8), (3, 8)))
    assert repr(box) == "Box(offsets=(0, 8), sizes=(3, 8))"


def test_a_box_as_people_read_it() -> None:
    assert str(Box((0, 8), (3, 8))) == "[0, 3) x [8, 16)"
    assert str(Box((), ())) == "the scalar"
    assert str(Box((3,), (0,))) == "[3, 3)"


@st.composite
def any_boxes(draw: st.DrawFn, rank: int, *, low: int = -2, most: int = 6) -> Tiling:
    """Boxes of one rank that need not have to do with each other; empty ones too."""
    box = st.tuples(
        st.tuples(*[st.integers(low, 6)] * rank), st.tuples(*[st.integers(0, 5)] * rank)
    )
    return draw(st.lists(box, max_size=most))


@st.composite
def two_sets(draw: st.DrawFn) -> tuple[int, Tiling, Tiling]:
    rank = draw(st.integers(0, 4))
    return rank, draw(any_boxes(rank)), draw(any_boxes(rank))


@st.composite
def imperfect_covers(draw: st.DrawFn) -> tuple[Shape, Tiling]:
    """A tiling, whole or damaged: boxes lost, doubled, moved, resized or added."""
    shape, boxes = draw(tiled_shapes())
    for _ in range(draw(st.integers(0, 2))):
        kind = draw(st.sampled_from(["lose", "double", "move", "grow", "add"]))
        if kind == "add":
            boxes += draw(any_boxes(len(shape), most=2))
        elif boxes:
            offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
            by = tuple(draw(st.integers(-1, 1)) for _ in shape)
            if kind == "double":
                boxes += [(offsets, sizes), (offsets, sizes)]
            elif kind == "move":
                boxes.append((tuple(o + b for o, b in zip(offsets, by, strict=True)), sizes))
            elif kind == "grow":
                boxes.append(
                    (offsets, tuple(max(0, n + b) for n, b in zip(sizes, by, strict=True)))
                )
    return shape, draw(st.permutations(boxes))


def elements(box: Pair) -> set[tuple[int, ...]]:
    offsets, sizes = box
    return {tuple(o + i for o, i in zip(offsets, at, strict=True)) for at in np.ndindex(*sizes)}


def pair(chunk: ChunkStorageMetadata) -> Pair:
    return chunk.offsets, chunk.sizes


@pytest.mark.parametrize("few, many", [(1 << 12, 1 << 20), (0, 1), (0, 5)])
@given(sets=two_sets())
@examples(50, 1000)
def test_intersect_finds_every_pair_that_shares_elements(few, many, sets):
    rank, a, b = sets
    with patch.multiple(box_lookup, FEW_PAIRS=few, MANY_PAIRS=many):
        i, j, shared = intersect(Boxes.of(a, rank=rank), Boxes.of(b, rank=rank))
    found = {
        (x, y): elements(pair(box))
        for x, y, box in zip(i.tolist(), j.tolist(), shared, strict=True)
    }
    expected = {
        (x, y): elements(p) & elements(q)
        for x, p in enumerate(a)
        for y, q in enumerate(b)
        if elements(p) & elements(q)
    }
    assert found == expected
    assert list(zip(i.tolist(), j.tolist(), strict=True)) == sorted(expected)


def test_intersect_looks_at_few_pairs_of_many_boxes():
    starts = np.arange(20_000, dtype=np.int64)[:, None] * 3
    rows = Boxes(starts, np.full_like(starts, 3))
    pairs = [len(i) for i, _ in box_lookup.near_pairs(rows, rows)]
    assert sum(pairs) == len(rows)  # of 400 million
    i, j, shared = intersect(rows, rows)
    assert np.array_equal(i, j) and shared == rows


@given(st.integers(0, 3).flatmap(lambda rank: st.tuples(st.just(rank), any_boxes(rank))))
@example((0, [((), ())] * 3))
@example((0, []))
@example((2, []))
def test_unique_sorts_and_says_where_each_went(given_boxes):
    rank, pairs = given_boxes
    boxes = Boxes.of(pairs + pairs[::2], rank=rank)
    distinct, inverse = unique(boxes)
    assert [pair(box) for box in distinct] == sorted(set(pairs))
    assert [distinct[i] for i in inverse.tolist()] == list(boxes)


def check_cover(shape: Shape, boxes: Tiling) -> None:
    """`cover_fault` says what a painted array says, and its witness is at fault."""
    fault = cover_fault(shape, Boxes.of(boxes, rank=len(shape)))
    outside = [
        number
        for number, (offsets, sizes) in enumerate(boxes)
        if 0 not in sizes
        and any(o < 0 or o + n > s for o, n, s in zip(offsets, sizes, shape, strict=True))
    ]
    if outside:
        assert fault is not None and fault.kind == "outside"
        assert fault.holders[0] in outside and len(fault.holders) == 1
        assert pair(fault.box) == boxes[fault.holders[0]]
        return
    counts = paint(shape, boxes)
    if fault is None:
        assert (counts == 1).all()
        return
    witness = counts[region(pair(fault.box))]
    assert witness.size > 0
    if fault.kind == "gap":
        assert (witness == 0).all() and fault.holders == ()
        return
    assert fault.kind == "overlap" and (witness >= 2).all()
    one, other = fault.holders
    assert one != other
    for holder in (one, other):
        assert elements(pair(fault.box)) <= elements(boxes[holder])


@given(imperfect_covers())
@example(((), []))
@example(((), [((), ())]))
@example(((), [((), ()), ((), ())]))
@example(((0, 3), []))
@example(((0, 3), [((0, 0), (0, 3)), ((7, 0), (0, 3))]))
def test_cover_fault_agrees_with_a_painted_array(cover):
    check_cover(*cover)


@given(imperfect_covers(), st.integers(1, 9))
def test_cover_fault_agrees_where_it_works_in_halves(cover, cells):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_CELLS", cells)
        check_cover(*cover)


@given(st.integers(5, 9), st.data())
@examples(30)
def test_cover_fault_of_many_dimensions(rank, data):
    """Halves of halves: what a mesh of many axes makes of a tensor of many small dimensions."""
    shape = (2,) * rank
    cut = data.draw(st.lists(st.booleans(), min_size=rank, max_size=rank))
    steps = [1 if c else 2 for c in cut]
    boxes = [
        (tuple(a * s for a, s in zip(at, steps, strict=True)), tuple(steps))
        for at in np.ndindex(*(2 // step for step in steps))
    ]
    check_cover(shape, boxes)
    lost = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
    fault = cover_fault(shape, Boxes.of(boxes, rank=rank))
    assert fault is not None and fault.kind == "gap"
    assert elements(pair(fault.box)) <= elements(lost)


@pytest.mark.parametrize("rank", [20, 32])
def test_cover_fault_of_the_most_dimensions_needs_little_memory(rank):
    """Each box halves what is left, along the next dimension: rank + 1 boxes, 2**rank cells."""
    boxes: Tiling = []
    offsets, sizes = [0] * rank, [2] * rank
    for axis in range(rank):
        sizes[axis] = 1
        boxes.append((tuple(offsets), tuple(sizes)))
        offsets[axis] = 1
    boxes.append((tuple(offsets), tuple(sizes)))
    tracemalloc.start()
    try:
        assert cover_fault((2,) * rank, Boxes.of(boxes)) is None
        fault = cover_fault((2,) * rank, Boxes.of(boxes[:-1]))
        assert fault is not None and fault.kind == "gap" and pair(fault.box) == boxes[-1]
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_cover_fault_with_unrelated_boundaries_in_every_dimension():
    """Rows of boxes, each cut elsewhere than its neighbours: far more cells than boxes."""
    side = 4096
    rng = np.random.default_rng(0)
    boxes: Tiling = []
    for row in range(0, side, 4):
        edges = [0, *sorted(rng.choice(np.arange(1, side), 40, replace=False).tolist()), side]
        boxes += [((row, a), (4, b - a)) for a, b in itertools.pairwise(edges)]
    assert cover_fault((side, side), Boxes.of(boxes)) is None
    offsets, sizes = boxes[777]
    boxes[777] = (offsets, (sizes[0], sizes[1] + 1))
    fault = cover_fault((side, side), Boxes.of(boxes))
    assert fault is not None and fault.kind == "overlap" and fault.holders == (777, 778)
    assert pair(fault.box) == (boxes[778][0], (4, 1))


def test_cover_fault_counts_in_more_than_64_bits():
    """2**80 elements, in two halves and in one: products must not wrap around."""
    shape = (1 << 40, 1 << 40)
    half = (1 << 39, 1 << 40)
    halves = [((0, 0), half), ((1 << 39, 0), half)]
    assert cover_fault(shape, Boxes.of(halves)) is None
    fault = cover_fault(shape, Boxes.of(halves[:1]))
    assert fault is not None and fault.kind == "gap" and pair(fault.box) == halves[1]
    assert cover_fault(shape, Boxes.whole(shape)) is None


def test_boxes_are_a_sequence():
    pairs: Tiling = [((0, 0), (2, 3)), ((2, 0), (0, 3)), ((2, 0), (1, 3))]
    boxes = Boxes.of(pairs)
    assert [pair(box) for box in boxes] == pairs
    assert boxes == [ChunkStorageMetadata(*p) for p in pairs] and boxes != boxes[:2]
    assert boxes[1:] == Boxes.of(pairs[1:]) and boxes[-1] == boxes[2]
    assert boxes.elements.tolist() == [6, 0, 3] and boxes.ends.tolist() == [[2, 3], [2, 3], [3, 3]]
    assert Counter(boxes)[boxes[0]] == 1 and boxes[1] in boxes
    assert boxes.take(np.array([True, False, True])) == Boxes.of([pairs[0], pairs[2]])
    assert Boxes.of([], rank=3).offsets.shape == (0, 3)
    assert repr(Boxes.of(pairs * 2)).endswith("... 2 more)")
    with pytest.raises(ValueError, match="must both be"):
        Boxes(np.zeros((1, 2), np.int64), np.zeros((2, 2), np.int64))


def test_boxes_are_equal_by_all_that_they_say():
    one = Boxes.of([((0,), (2,))])
    assert one == Boxes.of([((0,), (2,))]) == [ChunkStorageMetadata((0,), (2,))]
    assert one != Boxes.of([((1,), (2,))])
    assert one != Boxes.of([((0,), (3,))])
    assert one != 4


def test_no_boxes_have_no_dimensions_unless_given():
    assert Boxes.of([]).rank == 0
    assert Boxes.of([], rank=3).rank == 3


def test_the_first_four_boxes_are_shown():
    four = [((n,), (1,)) for n in range(4)]
    assert repr(Boxes.of(four)) == "Boxes([0, 1), [1, 2), [2, 3), [3, 4))"
    five = Boxes.of([*four, ((4,), (1,))])
    assert repr(five) == "Boxes([0, 1), [1, 2), [2, 3), [3, 4), ... 1 more)"


def test_a_whole_box_is_shared_and_cannot_be_changed():
    whole = Boxes.whole((2, 3))
    assert Boxes.whole((2, 3)) is whole
    for column in (whole.offsets, whole.sizes):
        with pytest.raises(ValueError, match="read-only"):
            column[0, 0] = 1


@given(st.data(), st.integers(1, 3))
@examples(50, 1000)
def test_a_lookup_finds_what_a_search_finds(data: st.DataObject, rank: int) -> None:
    """Also where boxes of several sizes stand side by side, and for boxes that none holds."""
    cuts = [sorted({0, 8, *data.draw(st.sets(st.integers(1, 7), max_size=3))}) for _ in range(rank)]
    cells = product(*[list(itertools.pairwise(c)) for c in cuts])
    tiles = [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in cells]
    tiles = data.draw(st.permutations(tiles))[: data.draw(st.integers(0, len(tiles)))]
    lookup = BoxLookup(Boxes.of([(tile.offsets, tile.sizes) for tile in tiles], rank=rank))
    spans = st.tuples(st.integers(0, 8), st.integers(1, 8))
    low = data.draw(st.tuples(*[spans] * rank))
    for box in [Box(tuple(o for o, _ in low), tuple(s for _, s in low)), *tiles]:
        inner = Box(box.offsets, tuple(data.draw(st.integers(1, size)) for size in box.sizes))
        for asked in (box, inner):
            found = [number for number, tile in enumerate(tiles) if tile.holds(asked)]
            assert [lookup.holder(asked)] == (found or [None])
