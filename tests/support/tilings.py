"""Strategies for shapes and for the ways in which frameworks cut tensors, with a painting oracle.

A tiling is a list of (offsets, sizes) that covers a shape exactly once; some boxes may be empty.

1. `mesh_tilings`: every dimension is cut on its own, evenly or not.
2. `chunk_tilings`: every dimension is cut as `torch.chunk` does, by ceiling division; the last
   parts may be short or empty.
3. `guillotine_tilings`: a box is cut in two again and again, anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from math import prod

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
Tiling = list[Box]

RANKS = (2, 3, 1, 2, 4, 3, 0)

SIDES = (6, 8, 5, 12, 13, 4, 7, 16, 3, 2, 11, 1, 0)
"""Primes, powers of two, a zero."""

MOST_ELEMENTS = 2000


def region(box: Box, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
    """A box as a NumPy index, counted from ``origin``."""
    offsets, sizes = box
    base = origin or (0,) * len(offsets)
    return tuple(slice(o - b, o - b + n) for o, n, b in zip(offsets, sizes, base, strict=True))


def paint(shape: Shape, boxes: Sequence[Box]) -> NDArray[np.int64]:
    """How many boxes hold each element of a shape."""
    counts = np.zeros(shape, np.int64)
    for box in boxes:
        counts[region(box)] += 1
    return counts


@st.composite
def shapes(draw: st.DrawFn, *, max_rank: int = 4, min_side: int = 0) -> Shape:
    rank = draw(st.sampled_from([rank for rank in RANKS if rank <= max_rank]))
    sides = [side for side in SIDES if side >= min_side]
    shape: list[int] = []
    for _ in range(rank):
        room = MOST_ELEMENTS // max(1, prod(side for side in shape if side))
        shape.append(draw(st.sampled_from([side for side in sides if side <= max(1, room)])))
    return tuple(shape)


def _product(cuts: Sequence[Sequence[tuple[int, int]]]) -> Tiling:
    """The boxes of a grid, from (offset, size) pairs for each dimension."""
    return [(tuple(o for o, _ in box), tuple(n for _, n in box)) for box in product(*cuts)]


def _pairs(edges: Sequence[int]) -> list[tuple[int, int]]:
    return [(a, b - a) for a, b in pairwise(edges)]


def chunk_edges(size: int, parts: int) -> list[int]:
    """Where `torch.chunk` cuts a dimension, filled up with empty parts."""
    step = max(1, -(-size // parts))
    return [min(size, step * part) for part in range(parts + 1)]


@st.composite
def mesh_tilings(draw: st.DrawFn, shape: Shape) -> Tiling:
    inner = [draw(st.lists(st.integers(0, size), max_size=2)) for size in shape]
    edges = [[0, *sorted(cuts), size] for cuts, size in zip(inner, shape, strict=True)]
    return _product([_pairs(cut) for cut in edges])


@st.composite
def chunk_tilings(draw: st.DrawFn, shape: Shape) -> Tiling:
    parts = [draw(st.sampled_from([1, 1, 2, 3, 4])) for _ in shape]
    return _product([_pairs(chunk_edges(n, p)) for n, p in zip(shape, parts, strict=True)])


@st.composite
def guillotine_tilings(draw: st.DrawFn, shape: Shape) -> Tiling:
    boxes: Tiling = [((0,) * len(shape), shape)]
    for _ in range(draw(st.sampled_from((3, 1, 6, 2, 4, 0))) if shape else 0):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, sizes[axis]))
        ahead = tuple(cut if d == axis else n for d, n in enumerate(sizes))
        behind = tuple(n - cut if d == axis else n for d, n in enumerate(sizes))
        start = tuple(o + cut if d == axis else o for d, o in enumerate(offsets))
        boxes += [(offsets, ahead), (start, behind)]
    return boxes


def tilings(shape: Shape) -> st.SearchStrategy[Tiling]:
    """Any of the three kinds."""
    return st.one_of(guillotine_tilings(shape), mesh_tilings(shape), chunk_tilings(shape))


@st.composite
def tiled_shapes(draw: st.DrawFn, *, max_rank: int = 4, min_side: int = 0) -> tuple[Shape, Tiling]:
    shape = draw(shapes(max_rank=max_rank, min_side=min_side))
    return shape, draw(tilings(shape))


@st.composite
def holders(draw: st.DrawFn, boxes: int, ranks: int) -> list[list[int]]:
    """For each of several boxes the ranks that hold it, at least one, ascending."""
    all_ranks = list(range(ranks))
    if draw(st.booleans()):
        return [all_ranks for _ in range(boxes)]
    some = st.lists(st.sampled_from(all_ranks), min_size=1, max_size=ranks, unique=True)
    return [sorted(draw(some)) for _ in range(boxes)]
