"""The arithmetic of placements against torch's own cutting of real tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.cover import cover_fault
from xckpt.core.geometry.placements import (
    Cut,
    Interval,
    StridedRows,
    chunk,
    combined,
    cut_order,
    length,
    literal,
    nested,
    readings,
    striped,
)

SIZES = st.integers(0, 40)
PARTS = st.lists(st.integers(1, 5), min_size=1, max_size=3)


def rows_of(intervals: tuple[Interval, ...]) -> list[int]:
    return [row for lo, hi in intervals for row in range(lo, hi)]


def torch_chunk(rows: torch.Tensor, parts: int) -> list[torch.Tensor]:
    pieces = list(torch.chunk(rows, parts))
    return pieces + [rows[:0]] * (parts - len(pieces))


def pieces_of(rows: list[int], parts: int) -> list[list[int]]:
    return [piece.tolist() for piece in torch_chunk(torch.tensor(rows, dtype=torch.int64), parts)]


def part_of_each_piece(rows: list[int], cut: Cut) -> list[int]:
    pieces = pieces_of(rows, cut.factor)
    return [row for piece in pieces for row in pieces_of(piece, cut.parts)[cut.part]]


def every_other_piece(rows: list[int], cut: Cut) -> list[int]:
    pieces = pieces_of(rows, cut.factor * cut.parts)
    return [row for piece in pieces[cut.part :: cut.parts] for row in piece]


LISTS: dict[StridedRows, Callable[[list[int], Cut], list[int]]] = {
    literal: part_of_each_piece,
    striped: every_other_piece,
}


def coordinates(parts: list[int]) -> list[tuple[int, ...]]:
    return list(product(*map(range, parts)))


def factors_of(parts: list[int], order: list[int]) -> list[int]:
    """The split factors by which torch writes down that the cuts were made in ``order``."""
    return [
        math.prod(parts[other] for other in order[: order.index(index)] if other > index)
        for index in range(len(parts))
    ]


@given(SIZES, st.integers(1, 9))
def test_chunk_is_torch_chunk(size: int, parts: int) -> None:
    expected = [piece.tolist() for piece in torch_chunk(torch.arange(size), parts)]
    assert [rows_of((chunk((0, size), parts, part),)) for part in range(parts)] == expected


@given(SIZES, PARTS)
def test_nested_cuts_as_torch_does(size: int, parts: list[int]) -> None:
    for coordinate in coordinates(parts):
        rows = torch.arange(size)
        for n, part in zip(parts, coordinate, strict=True):
            rows = torch_chunk(rows, n)[part]
        cuts = [Cut(n, part) for n, part in zip(parts, coordinate, strict=True)]
        assert rows_of(nested(size, cuts)) == rows.tolist()
        assert literal(size, cuts) == nested(size, cuts)


@pytest.mark.parametrize("strided", [literal, striped])
@given(size=SIZES, parts=PARTS, factors=st.lists(st.integers(1, 5), min_size=3, max_size=3))
def test_strided_cuts_take_pieces_of_lists(
    strided: StridedRows, size: int, parts: list[int], factors: list[int]
) -> None:
    for coordinate in coordinates(parts):
        rows = list(range(size))
        cuts = [Cut(*cut) for cut in zip(parts, coordinate, factors, strict=False)]
        for cut in cuts:
            rows = LISTS[strided](rows, cut)
        intervals = strided(size, cuts)
        assert rows_of(intervals) == rows
        # As few intervals as there can be: none is empty and none touches the next.
        assert all(lo < hi for lo, hi in intervals)
        assert all(a[1] < b[0] for a, b in pairwise(intervals))


@given(st.data(), SIZES, PARTS)
def test_the_order_of_the_cuts_is_recovered(
    data: st.DataObject, size: int, parts: list[int]
) -> None:
    order = data.draw(st.permutations(range(len(parts))))
    factors = factors_of(parts, order)
    for coordinate in coordinates(parts):
        cuts = [Cut(*cut) for cut in zip(parts, coordinate, factors, strict=True)]
        found = cut_order(cuts)
        assert found is not None
        expected = nested(size, [cuts[index] for index in order])
        assert nested(size, [cuts[index] for index in found]) == expected
        assert readings(size, cuts)[0] == expected


@given(SIZES, st.integers(1, 5), st.integers(2, 5))
def test_the_local_size_chooses_the_reading(size: int, data_parallel: int, tensor: int) -> None:
    """Whichever way the rows were cut, the reading that fits is right or it breaks the cover."""
    rows = {
        coordinate: readings(
            size,
            [Cut(data_parallel, coordinate[0], factor=tensor), Cut(tensor, coordinate[1])],
        )
        for coordinate in coordinates([data_parallel, tensor])
    }
    for actual in (0, -1):  # as FSDP2 cuts, as _StridedShard says on its own
        chosen = [
            next(each for each in read if length(each) == length(read[actual]))
            for read in rows.values()
        ]
        boxes = Boxes.of([((lo,), (hi - lo,)) for each in chosen for lo, hi in each], rank=1)
        right = chosen == [read[actual] for read in rows.values()]
        assert right == (cover_fault((size,), boxes) is None)
        assert right or actual == -1


def test_the_readings_of_the_known_uneven_cases() -> None:
    """FSDP2 over tensor parallelism, 7 rows on 3 x 2 and 9 on 4 x 2."""
    held = {
        (dp, tp): readings(7, [Cut(3, dp, factor=2), Cut(2, tp)])[0]
        for dp, tp in coordinates([3, 2])
    }
    assert held == {
        (0, 0): ((0, 2),),
        (0, 1): ((4, 5),),
        (1, 0): ((2, 4),),
        (1, 1): ((5, 6),),
        (2, 0): (),
        (2, 1): ((6, 7),),
    }
    assert readings(9, [Cut(4, 3, factor=2), Cut(2, 0)]) == [(), ((8, 9),)]


INTERVALS = st.lists(st.integers(1, 4), max_size=6).map(
    lambda steps: [(sum(steps[:i]), sum(steps[: i + 1])) for i in range(0, len(steps), 2)]
)


@given(st.lists(INTERVALS, max_size=3))
def test_boxes_and_views_agree(held: list[list[Interval]]) -> None:
    shape = [max((hi for _, hi in rows), default=0) for rows in held]
    full = np.arange(math.prod(shape)).reshape(shape)
    local = full[np.ix_(*(rows_of(tuple(rows)) for rows in held))] if held else full
    boxes, views = combined(held)
    seen = np.zeros(local.shape, int)
    for box, view in zip(boxes, views, strict=True):
        region = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        np.testing.assert_array_equal(full[region], local[view])
        seen[view] += 1
    assert (seen == 1).all()
    assert len(boxes) == math.prod(len(rows) for rows in held)


def test_a_scalar_is_one_box() -> None:
    boxes, views = combined([])
    assert list(boxes) == list(Boxes.whole(()))
    assert views == [()]
