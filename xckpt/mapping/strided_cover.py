"""Exact cover by strided copies: is each element of a tensor written by exactly one of them?

A copy's axes move along one dimension each, so it writes a product of index sets, one for each
dimension. Two kinds of axes are taken apart, value by value: one that moves along several
dimensions, and one that moves nowhere, which writes every element again.

1. In each dimension, the indices that the same sets hold are one class, so a set is a few runs of
   classes. Where all sets are intervals the classes are what lies between their ends.
2. With classes for indices a product is a few boxes, and `cover_fault` proves that they cover the
   tensor. Its witness is a box of classes; the first indices of those are the answer.

It knows nothing of the operations that made the copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, groupby, pairwise, product
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Box, Boxes
from xckpt.core.geometry.cover import CoverFault, cover_fault
from xckpt.mapping.strided_copy import Ints, StridedCopy

IndexSet = tuple[int, tuple[tuple[int, int], ...]]
"""First index, and the (step, size) of the axes that move from it, ascending."""
Run = tuple[int, int]
"""First index and length."""


def copies_fault(shape: Ints, copies: Sequence[StridedCopy]) -> CoverFault | None:
    """A witness that the copies do not write every element exactly once; None if they do.

    Holders are ordinals of copies; the same one twice, if it writes an element twice.

    Example:
        >>> def every(step, start, count):
        ...     return StridedCopy("", "t", (count,), (), ((),), (start,), ((step,),))
        >>> even, odd = every(2, 0, 3), every(2, 1, 3)
        >>> copies_fault((6,), [even, odd]) is None
        True
        >>> copies_fault((6,), [even])
        CoverFault(kind='gap', box=Box(offsets=(1,), sizes=(1,)), holders=())
        >>> copies_fault((6,), [even, odd, every(1, 3, 2)])
        CoverFault(kind='overlap', box=Box(offsets=(3,), sizes=(1,)), holders=(1, 2))
    """
    whole = Box.whole(shape)
    if 0 in shape or (len(copies) == 1 and _is_whole(whole, copies[0])):
        return None
    if not copies:
        return CoverFault("gap", whole, ())
    for number, copy in enumerate(copies):
        if not whole.holds(copy.target_box):
            return CoverFault("outside", copy.target_box, (number,))
    products = [(n, sets) for n, copy in enumerate(copies) for sets in _products(copy)]
    dimensions = [_classes(size, [sets[d] for _, sets in products]) for d, size in enumerate(shape)]
    pieces = [
        (number, runs)
        for number, sets in products
        for runs in product(*(of[each] for (_, of), each in zip(dimensions, sets, strict=True)))
    ]
    boxes = Boxes.of([_sides(runs) for _, runs in pieces])
    fault = cover_fault([len(classes) for classes, _ in dimensions], boxes)
    if fault is None:
        return None
    firsts = [classes[i] for (classes, _), i in zip(dimensions, fault.box.offsets, strict=True)]
    return CoverFault(fault.kind, Box(*_sides(firsts)), tuple(pieces[i][0] for i in fault.holders))


def _sides(runs: Sequence[Run]) -> tuple[Ints, Ints]:
    """Offsets and sizes of the box that has a run in each dimension."""
    return tuple(low for low, _ in runs), tuple(size for _, size in runs)


def _is_whole(whole: Box, copy: StridedCopy) -> bool:
    """Whether each axis of a copy steps through a dimension of its own; the usual case."""
    steps_by_one = all(sum(row) == 1 and min(row) >= 0 for row in copy.target_strides)
    return steps_by_one and copy.elements == whole.elements and copy.target_box == whole


def _products(copy: StridedCopy) -> Iterator[tuple[IndexSet, ...]]:
    """What a copy writes, as products of a set for each dimension."""
    axes: list[list[tuple[int, int]]] = [[] for _ in copy.target_offsets]
    for axis, (size, row) in enumerate(zip(copy.sizes, copy.target_strides, strict=True)):
        moving = [d for d, step in enumerate(row) if step]
        if size > 1 and len(moving) != 1:
            for value in range(size if moving else 2):
                yield from _products(copy.cut(axis, value, value + 1))
            return
        if size > 1:
            axes[moving[0]].append((row[moving[0]], size))
    yield tuple(
        (offset, tuple(sorted(each)))
        for offset, each in zip(copy.target_offsets, axes, strict=True)
    )


def _classes(size: int, sets: Sequence[IndexSet]) -> tuple[list[Run], dict[IndexSet, list[Run]]]:
    """The classes of a dimension's indices.

    Returns:
        The first indices of each class, and for each set its runs of classes. A run of indices that
        the set has twice is there twice.
    """
    lengths = {each: _interval(each) for each in sets}
    if None not in lengths.values():
        ends = {each: (each[0], each[0] + (length or 0)) for each, length in lengths.items()}
        cuts = sorted({0, size, *chain.from_iterable(ends.values())})
        place = {cut: number for number, cut in enumerate(cuts)}
        runs = {each: [(place[a], place[b] - place[a])] for each, (a, b) in ends.items()}
        return [(a, b - a) for a, b in pairwise(cuts)], runs
    counts = np.stack([_counts(size, each) for each in lengths])
    _, firsts = np.unique(counts, axis=1, return_index=True)
    firsts.sort()
    cuts = np.flatnonzero((counts[:, 1:] != counts[:, :-1]).any(axis=0)) + 1
    ends = np.append(cuts, size)[np.searchsorted(cuts, firsts, side="right")]
    runs = map(_runs, counts[:, firsts].tolist())
    classes = zip(firsts.tolist(), (ends - firsts).tolist(), strict=True)
    return list(classes), dict(zip(lengths, runs, strict=True))


def _interval(indices: IndexSet) -> int | None:
    """The length of a set that has every index between its ends once; None of any other."""
    length = 1
    for step, size in indices[1]:
        if step != length:
            return None
        length *= size
    return length


def _counts(size: int, indices: IndexSet) -> NDArray[np.int32]:
    """How often a set has each index of a dimension."""
    offset, axes = indices
    index = np.array([offset])
    for step, length in axes:
        index = np.add.outer(index, step * np.arange(length)).ravel()
    return np.bincount(index, minlength=size).astype(np.int32)


def _runs(counts: list[int]) -> list[Run]:
    """The runs of classes that a set has, from how often it has each class."""
    runs: list[Run] = []
    for count, group in groupby(enumerate(counts), key=itemgetter(1)):
        classes = [number for number, _ in group]
        runs += [(classes[0], len(classes))] * count
    return runs
