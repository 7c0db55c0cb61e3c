"""The proof of exact cover, against painting every element."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.mapping.mappings import Case, cases
from xckpt.core.geometry.box import Box
from xckpt.core.geometry.cover import CoverFault
from xckpt.mapping.prove import copies_fault
from xckpt.mapping.strided_copy import CONSTANT, Ints, StridedCopy


def writes(sizes: Ints, offsets: Ints, strides: tuple[Ints, ...]) -> StridedCopy:
    """A copy that writes index ``offsets + a @ strides`` for every ``a`` in ``[0, sizes)``."""
    return StridedCopy(CONSTANT, "t", sizes, (), ((),) * len(sizes), offsets, strides)


@st.composite
def axes_in(draw: st.DrawFn, rank: int) -> tuple[int, tuple[int, ...]]:
    """An axis that mostly moves along one dimension."""
    row = [0] * rank
    if rank:
        row[draw(st.integers(0, rank - 1))] = draw(st.integers(-1, 3))
        if draw(st.integers(0, 9)) == 0:
            row[draw(st.integers(0, rank - 1))] = 1
    return draw(st.integers(1, 3)), tuple(row)


@st.composite
def pieces(draw: st.DrawFn, rank: int) -> StridedCopy:
    axes = draw(st.lists(axes_in(rank), max_size=3))
    offsets = tuple(draw(st.integers(0, 3)) for _ in range(rank))
    return writes(tuple(n for n, _ in axes), offsets, tuple(row for _, row in axes))


def painted(shape: tuple[int, ...], pieces: list[StridedCopy]) -> tuple[np.ndarray, bool]:
    """How many pieces hold each element, and whether all of them keep inside."""
    counts = np.zeros(shape, int)
    inside = True
    for piece in pieces:
        for index in product(*(range(n) for n in piece.sizes)):
            place = tuple(
                offset + sum(a * row[d] for a, row in zip(index, piece.target_strides, strict=True))
                for d, offset in enumerate(piece.target_offsets)
            )
            if all(0 <= at < n for at, n in zip(place, shape, strict=True)):
                counts[place] += 1
            else:
                inside = False
    return counts, inside


def judge(shape: tuple[int, ...], given_pieces: list[StridedCopy]) -> None:
    counts, inside = painted(shape, given_pieces)
    fault = copies_fault(shape, given_pieces)
    if fault is None:
        assert inside
        assert (counts == 1).all()
        return
    if fault.kind == "outside":
        assert not inside
        return
    box = fault.box.slices()
    assert counts[box].size
    if fault.kind == "gap":
        assert (counts[box] == 0).all()
        assert not fault.holders
    else:
        assert (counts[box] > 1).all()
        low = np.zeros(shape, int)
        for holder in set(fault.holders):
            low += painted(shape, [given_pieces[holder]])[0]
        assert (low[box] > 1).all()


@given(st.data(), st.integers(0, 3))
def test_any_pieces_are_judged_as_painting_judges_them(data: st.DataObject, rank: int) -> None:
    shape = tuple(data.draw(st.integers(1, 4)) for _ in range(rank))
    judge(shape, data.draw(st.lists(pieces(rank), max_size=4)))


@pytest.mark.parametrize(
    "shape, piece",
    [
        ((4,), writes((2, 3), (0,), ((1,), (1,)))),
        ((3, 2), writes((2, 2, 2), (0, 0), ((1, 0), (1, 0), (0, 1)))),
        ((3,), writes((3, 2), (0,), ((1,), (0,)))),
        ((2, 2), writes((2, 2, 2), (0, 0), ((1, 0), (0, 1), (0, 0)))),
    ],
)
def test_a_piece_that_holds_an_element_twice_overlaps(
    shape: tuple[int, ...], piece: StridedCopy
) -> None:
    fault = copies_fault(shape, [piece])
    assert fault is not None
    assert (fault.kind, fault.holders) == ("overlap", (0, 0))
    judge(shape, [piece])


def test_an_element_held_twice_is_the_witness_and_not_its_neighbour() -> None:
    twice = writes((2, 2), (0, 0), ((1, 0), (1, 0)))
    beside = writes((3,), (0, 1), ((1, 0),))
    assert copies_fault((3, 2), [twice, beside]) == CoverFault(
        "overlap", Box((1, 0), (1, 1)), (0, 0)
    )


@given(cases(most_rules=1), st.data())
def test_a_mapping_with_one_copy_changed_is_judged_as_painting_judges_it(
    case: Case, data: st.DataObject
) -> None:
    resolved = case.mapping.resolve(case.source_specs, case.target_specs)
    name = data.draw(st.sampled_from(sorted(resolved.targets)))
    shape = resolved.targets[name].shape
    found = list(resolved.copies[name])
    if 0 in shape or not found:
        return
    assert copies_fault(shape, found) is None
    at = data.draw(st.integers(0, len(found) - 1))
    kind = data.draw(st.sampled_from(["lose", "double", "move", "shorten"]))
    piece = found[at]
    if kind == "lose":
        del found[at]
    elif kind == "double":
        found.append(piece)
    elif kind == "move" and shape:
        d = data.draw(st.integers(0, len(shape) - 1))
        moved = tuple(o + (i == d) for i, o in enumerate(piece.target_offsets))
        found[at] = replace(piece, target_offsets=moved)
    elif kind == "shorten" and any(n > 1 for n in piece.sizes):
        k = next(k for k, n in enumerate(piece.sizes) if n > 1)
        sizes = tuple(n - (i == k) for i, n in enumerate(piece.sizes))
        found[at] = replace(piece, sizes=sizes)
    judge(shape, found)
