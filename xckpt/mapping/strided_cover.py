"""Exact cover by strided pieces: does each element of a tensor belong to exactly one of them?

A piece is one side of a strided copy. Its axes move along one dimension each, so it is a product of
index sets, one for each dimension. The proof goes dimension by dimension:

1. A dimension is cut into classes: indices that the same pieces hold. Where all sets are intervals
   the cuts are their ends; else membership is counted index by index.
2. An index that a piece has twice is an overlap, one that no piece has a gap.
3. Each class goes on to the next dimension with the pieces that hold it. Where one piece is left
   that has all of the other dimensions, there is nothing more to prove.

It knows nothing of the operations that made the copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from xckpt.core.geometry.box import Box
from xckpt.mapping.strided_copy import Ints

Axes = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class StridedPiece:
    """Index ``offsets + a @ strides`` for every ``a`` in ``[0, sizes)``."""

    sizes: Ints
    offsets: Ints
    strides: tuple[Ints, ...]


@dataclass(frozen=True, slots=True)
class PieceFault:
    """One box of elements that no piece holds, that two hold, or that lies outside."""

    kind: Literal["gap", "overlap", "outside"]
    box: Box
    holders: Ints
    """Ordinals of pieces that hold the box: none, two (equal ones, if one holds it twice), or one
    that reaches outside."""


def piece_fault(shape: Ints, pieces: Sequence[StridedPiece]) -> PieceFault | None:
    """A witness that the pieces do not hold every element exactly once; None if they do.

    Example:
        >>> even, odd = StridedPiece((3,), (0,), ((2,),)), StridedPiece((3,), (1,), ((2,),))
        >>> piece_fault((6,), [even, odd]) is None
        True
        >>> piece_fault((6,), [even])
        PieceFault(kind='gap', box=Box(offsets=(1,), sizes=(1,)), holders=())
        >>> piece_fault((6,), [even, odd, StridedPiece((2,), (3,), ((1,),))])
        PieceFault(kind='overlap', box=Box(offsets=(3,), sizes=(1,)), holders=(1, 2))
    """
    if 0 in shape:
        return None
    if len(pieces) == 1 and _is_whole(shape, pieces[0]):
        return None
    products = [product for i, piece in enumerate(pieces) for product in _products(i, piece)]
    for product in products:
        fault = _outside(shape, product)
        if fault is not None:
            return fault
        if product.repeats:
            element = Box(product.offsets, (1,) * len(product.offsets))
            return PieceFault("overlap", element, (product.holder,) * 2)
    return _fault_from(shape, 0, products, ())


def _is_whole(shape: Ints, piece: StridedPiece) -> bool:
    """Whether one piece is all of the shape, each of its axes a dimension; the usual case."""
    rank = len(shape)
    if any(piece.offsets) or len(piece.sizes) > rank:
        return False
    seen = [1] * rank
    for size, row in zip(piece.sizes, piece.strides, strict=True):
        if sum(row) != 1 or min(row) < 0:
            return False
        seen[row.index(1)] *= size
    return tuple(seen) == shape and len(piece.sizes) == sum(n > 1 for n in shape)


@dataclass(frozen=True, slots=True)
class _Product:
    """A piece as one set of indices for each dimension."""

    holder: int
    offsets: Ints
    axes: tuple[Axes, ...]
    """For each dimension the strides and sizes of the axes that move along it, ascending."""
    repeats: bool
    """Whether an axis moves nowhere, so that every element comes again."""


def _products(holder: int, piece: StridedPiece) -> Iterator[_Product]:
    """A piece as a product; several where an axis moves along two dimensions at once."""
    axes: list[list[tuple[int, int]]] = [[] for _ in piece.offsets]
    repeats = False
    for k, (size, row) in enumerate(zip(piece.sizes, piece.strides, strict=True)):
        if size == 1:
            continue
        moving = [d for d, step in enumerate(row) if step]
        if len(moving) > 1:
            rest = StridedPiece(
                (*piece.sizes[:k], *piece.sizes[k + 1 :]),
                piece.offsets,
                (*piece.strides[:k], *piece.strides[k + 1 :]),
            )
            for a in range(size):
                moved = tuple(o + a * s for o, s in zip(piece.offsets, row, strict=True))
                yield from _products(holder, StridedPiece(rest.sizes, moved, rest.strides))
            return
        if moving:
            axes[moving[0]].append((row[moving[0]], size))
        else:
            repeats = True
    yield _Product(holder, piece.offsets, tuple(tuple(sorted(each)) for each in axes), repeats)


def _ends(offset: int, axes: Axes) -> tuple[int, int]:
    """First and last index of a set."""
    low = offset + sum(step * (size - 1) for step, size in axes if step < 0)
    return low, offset + sum(step * (size - 1) for step, size in axes if step > 0)


def _outside(shape: Ints, product: _Product) -> PieceFault | None:
    ends = [_ends(o, axes) for o, axes in zip(product.offsets, product.axes, strict=True)]
    if all(low >= 0 and high < n for (low, high), n in zip(ends, shape, strict=True)):
        return None
    offsets = tuple(low for low, _ in ends)
    sizes = tuple(high - low + 1 for low, high in ends)
    return PieceFault("outside", Box(offsets, sizes), (product.holder,))


def _is_interval(axes: Axes) -> bool:
    """Whether a set has every index between its ends once."""
    length = 1
    for step, size in axes:
        if step != length:
            return False
        length *= size
    return True


def _fault_from(
    shape: Ints, d: int, products: list[_Product], found: tuple[tuple[int, int], ...]
) -> PieceFault | None:
    """The fault in dimensions d and on, among products that hold all of the box found so far."""
    if d == len(shape):
        if len(products) == 1:
            return None
        holders = tuple(product.holder for product in products[:2])
        return _fault("overlap" if holders else "gap", shape, found, holders)
    if not products:
        return _fault("gap", shape, found, ())
    if len(products) == 1 and _is_all(products[0], shape, d):
        return None
    for low, size, members, twice in _classes(shape[d], d, products):
        here = (*found, (low, size))
        if twice is not None:
            at = tuple((o, 1) for o in products[twice].offsets[d + 1 :])
            holder = products[twice].holder
            return _fault("overlap", shape, (*here, *at), (holder, holder))
        fault = _fault_from(shape, d + 1, [products[i] for i in members], here)
        if fault is not None:
            return fault
    return None


def _is_all(product: _Product, shape: Ints, d: int) -> bool:
    """Whether a product holds everything in dimensions d and on, once."""
    return all(
        _is_interval(axes) and _ends(offset, axes) == (0, size - 1)
        for offset, axes, size in zip(product.offsets[d:], product.axes[d:], shape[d:], strict=True)
    )


def _fault(
    kind: Literal["gap", "overlap"], shape: Ints, found: tuple[tuple[int, int], ...], holders: Ints
) -> PieceFault:
    """A fault in the box found, and in all of the dimensions after it."""
    ranges = (*found, *((0, size) for size in shape[len(found) :]))
    box = Box(tuple(low for low, _ in ranges), tuple(size for _, size in ranges))
    return PieceFault(kind, box, holders)


Class = tuple[int, int, list[int], int | None]
"""First run of a class of indices (start, length), the products that hold it, and one of them that
holds it more than once."""


def _classes(size: int, d: int, products: list[_Product]) -> Iterator[Class]:
    """The classes of a dimension's indices."""
    sets: dict[tuple[int, Axes], list[int]] = {}
    for i, product in enumerate(products):
        sets.setdefault((product.offsets[d], product.axes[d]), []).append(i)
    if all(_is_interval(axes) for _, axes in sets):
        yield from _interval_classes(size, sets)
        return
    counts = np.stack([_counts(size, offset, axes) for offset, axes in sets])
    _, firsts = np.unique(counts, axis=1, return_index=True)
    members = list(sets.values())
    for first in sorted(firsts.tolist()):
        column = counts[:, first]
        differs = np.flatnonzero((counts[:, first:] != column[:, None]).any(axis=0))
        length = int(differs[0]) if len(differs) else size - first
        held = np.flatnonzero(column)
        twice = next((members[i][0] for i in held if column[i] > 1), None)
        yield first, length, sorted(m for i in held for m in members[i]), twice


def _counts(size: int, offset: int, axes: Axes) -> np.ndarray:
    """How often a set has each index."""
    index = np.array([offset])
    for step, length in axes:
        index = np.add.outer(index, step * np.arange(length)).ravel()
    return np.bincount(index, minlength=size).astype(np.int32)


def _interval_classes(size: int, sets: dict[tuple[int, Axes], list[int]]) -> Iterator[Class]:
    """`_classes`, where all sets are intervals: a sweep over their ends."""
    starts: dict[int, list[int]] = {0: [], size: []}
    stops: dict[int, list[int]] = {}
    for (offset, axes), members in sets.items():
        low, high = _ends(offset, axes)
        starts.setdefault(low, []).extend(members)
        stops.setdefault(high + 1, []).extend(members)
    open_: set[int] = set()
    cuts = sorted({*starts, *stops})
    for cut, following in pairwise(cuts):
        open_.difference_update(stops.get(cut, ()))
        open_.update(starts.get(cut, ()))
        yield cut, following - cut, sorted(open_), None
