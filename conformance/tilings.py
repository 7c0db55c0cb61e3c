"""How arrays are cut, and which ranks hold what: strategies that shrink to one box on rank 0.

A tiling is a list of `Placed` boxes that cover a shape exactly once, each held by at least one
rank; boxes without elements may be among them.

1. `meshes`: ranks stand in a grid of axes; each axis cuts one dimension, or replicates. Even cuts
   are a JAX `PartitionSpec`, others torch's placements: ceiling division, short and empty tails.
2. `grids`: every dimension is cut anywhere on its own; any ranks hold each box.
3. `guillotines`: a box is cut in two again and again, anywhere; any ranks hold each box.

What a rank wants may be a tiling too, or `parts`: boxes that overlap, repeat and have gaps.

Strategies are made once for the same arguments: to make one costs more than to draw from it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

from hypothesis import strategies as st

from conformance.implementation import Box

__all__ = ["Placed", "chunks", "meshes", "parts", "shapes", "tilings"]

Shape = tuple[int, ...]
Range = tuple[int, int]
"""Offset and size along one dimension."""

DIMENSIONS = (1, 2, 0, 3, 4, 5)
SIDES = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 97, 0)
"""Small numbers, primes, powers of two, a zero."""

MOST_ELEMENTS = 2000
KEPT = 4096
"""How many strategies of a kind are kept."""
MOST_AXES = 3


@dataclass(frozen=True, slots=True)
class Placed:
    """A box and the ranks that hold it, ascending."""

    box: Box
    ranks: tuple[int, ...]


@functools.lru_cache(maxsize=KEPT)
@st.composite
def shapes(draw: st.DrawFn, most: int = MOST_ELEMENTS) -> Shape:
    """0 to 5 dimensions, zeros and primes included, of not too many elements."""
    shape: list[int] = []
    for _ in range(draw(st.sampled_from(DIMENSIONS))):
        room = most // prod(side for side in shape if side)
        shape.append(draw(st.sampled_from([side for side in SIDES if side <= max(1, room)])))
    return tuple(shape)


def chunks(size: int, count: int) -> list[Range]:
    """A dimension cut by ceiling division, as torch does; the last parts may be short or empty.

    Example:
        >>> chunks(5, 4)
        [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    step = -(-size // count)
    edges = [min(size, step * part) for part in range(count + 1)]
    return [(low, high - low) for low, high in pairwise(edges)]


@functools.lru_cache(maxsize=KEPT)
def tilings(shape: Shape, ranks: int) -> st.SearchStrategy[tuple[Placed, ...]]:
    """Any of the kinds of tilings."""
    return st.one_of(
        guillotines(shape, ranks),
        meshes(shape, ranks, even=False),
        meshes(shape, ranks, even=True),
        grids(shape, ranks),
    )


@functools.lru_cache(maxsize=KEPT)
def holders(ranks: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Some ranks, at least one."""
    some = st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks, unique=True)
    return some.map(lambda numbers: tuple(sorted(numbers)))


@functools.lru_cache(maxsize=KEPT)
@st.composite
def meshes(draw: st.DrawFn, shape: Shape, ranks: int, *, even: bool) -> tuple[Placed, ...]:
    """What a mesh of some of the ranks holds; ``even``: only cuts that divide a dimension."""
    axes: list[int] = []
    for _ in range(draw(st.integers(0, MOST_AXES))):
        axes.append(draw(st.integers(1, ranks // prod(axes))))
    cut_by = [draw(st.integers(-1, len(shape) - 1)) for _ in axes]
    members = draw(st.permutations(range(ranks)))
    held: dict[Box, list[int]] = {}
    for member, position in zip(members, product(*(range(size) for size in axes)), strict=False):
        ranges: list[Range] = [(0, size) for size in shape]
        for size, dim, place in zip(axes, cut_by, position, strict=True):
            if dim >= 0 and not (even and ranges[dim][1] % size):
                low, length = ranges[dim]
                offset, part = chunks(length, size)[place]
                ranges[dim] = (low + offset, part)
        held.setdefault(_box(ranges), []).append(member)
    return _placed(held)


@functools.lru_cache(maxsize=KEPT)
@st.composite
def grids(draw: st.DrawFn, shape: Shape, ranks: int) -> tuple[Placed, ...]:
    """Every dimension cut anywhere; some parts may be empty."""
    cuts: list[list[Range]] = []
    for size in shape:
        inner = draw(st.lists(st.integers(0, size), max_size=2))
        cuts.append([(low, high - low) for low, high in pairwise([0, *sorted(inner), size])])
    return _held(draw, [_box(ranges) for ranges in product(*cuts)], ranks)


@functools.lru_cache(maxsize=KEPT)
@st.composite
def guillotines(draw: st.DrawFn, shape: Shape, ranks: int) -> tuple[Placed, ...]:
    """A box cut in two again and again, anywhere."""
    boxes = [[(0, size) for size in shape]]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        ranges = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        low, size = ranges[dim]
        cut = draw(st.integers(0, size))
        for part in ((low, cut), (low + cut, size - cut)):
            boxes.append([*ranges[:dim], part, *ranges[dim + 1 :]])
    return _held(draw, [_box(ranges) for ranges in boxes], ranks)


@functools.lru_cache(maxsize=KEPT)
@st.composite
def parts(draw: st.DrawFn, shape: Shape, ranks: int) -> tuple[Placed, ...]:
    """Boxes within a shape; they may overlap, be empty, or be none at all."""
    boxes: list[Box] = []
    for _ in range(draw(st.integers(0, 4))):
        ranges: list[Range] = []
        for size in shape:
            low, high = sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
            ranges.append((low, high - low))
        boxes.append(_box(ranges))
    return _held(draw, boxes, ranks)


def _box(ranges: Sequence[Range]) -> Box:
    return Box(tuple(low for low, _ in ranges), tuple(size for _, size in ranges))


def _held(draw: st.DrawFn, boxes: Sequence[Box], ranks: int) -> tuple[Placed, ...]:
    """Each box with some ranks."""
    held: dict[Box, list[int]] = {}
    for box in boxes:
        held.setdefault(box, list(draw(holders(ranks))))
    return _placed(held)


def _placed(held: dict[Box, list[int]]) -> tuple[Placed, ...]:
    return tuple(Placed(box, tuple(sorted(ranks))) for box, ranks in held.items())
