"""Strided copies: the normal form to which a mapping resolves.

A `StridedCopy` moves the elements of a loop nest from one tensor to another: for every index ``a``
in ``[0, sizes)``

    target[target_offsets + a @ target_strides] = source[source_offsets + a @ source_strides]

Offsets and strides count elements per dimension. A transpose, a split, a RoPE permutation of a
whole tensor are each *one* such copy, and three things are easy:

1. `StridedCopy.inverse` swaps the two sides.
2. `restrict` gives the copies that go into a box of the target. Dimension by dimension, the loop
   axes that move along it are clamped from the longest stride to the shortest: the values of an
   axis whose inner axes stay inside the box stay together, and each value that straddles a border
   is fixed and its inner axes are clamped in turn. Where strides nest (as digits of a number do),
   at most one value straddles each border.
3. `xckpt.mapping.copy_elements` carries it out on arrays.

A copy whose source is `CONSTANT` writes a constant: `value`, or, where its source side has one
dimension, `value` plus the index in that dimension (what ``arange`` gives).

`Arithmetic` changes values on the way: cast, scale, divide, add. Whatever the element type,
a step computes in float32 (in float64 for float64, in the complex type for a complex one) and
rounds the result to the type that it states (float64 to bfloat16 or an 8-bit float twice, by way of
float32, as ml_dtypes does). So a result depends neither on where a tensor was cut nor on
who computed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, permutations
from math import prod
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import numpy_dtype
from xckpt.core.geometry.box import Box
from xckpt.core.targets.casting import castable

Ints = tuple[int, ...]
Strides = tuple[Ints, ...]

StepKind = Literal["cast", "scale", "divide", "add"]

_INVERSES: dict[StepKind, StepKind] = {"scale": "divide", "divide": "scale"}
"""Kind of a step -> the kind that undoes it; any other kind undoes itself."""
_FUNCTIONS = {"scale": np.multiply, "divide": np.divide, "add": np.add}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """One step from element type `source` to element type `target`.

    Example:
        >>> step = Arithmetic("scale", "float16", "float16", 3.0)
        >>> step(np.array([1.5, 2.0], "float16"))
        array([4.5, 6. ], dtype=float16)
        >>> step.inverse().operation
        'divide'
    """

    operation: StepKind
    source: str
    """Element type that comes in."""
    target: str
    """Element type that goes out."""
    number: float = 0.0
    """The factor, the divisor or the summand; not used by a cast."""

    def inverse(self) -> Arithmetic:
        """The inverse step, up to rounding."""
        kind = _INVERSES.get(self.operation, self.operation)
        number = -self.number if self.operation == "add" else self.number
        return Arithmetic(kind, self.target, self.source, number)

    def __call__(self, values: NDArray[Any]) -> NDArray[Any]:
        """The step taken on an array of `source` elements; the result is new or is `values`."""
        target = numpy_dtype(self.target)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            if self.operation == "cast":
                return _cast(values, target)
            kept = self.source in ("float64", "complex64", "complex128")
            wide = values.astype(self.source if kept else "float32", copy=False)
            number = wide.dtype.type(self.number)
            return _FUNCTIONS[self.operation](wide, number).astype(target, copy=False)


def _cast(values: NDArray[Any], target: np.dtype[Any]) -> NDArray[Any]:
    if values.dtype.kind == "c" and target.kind != "c":
        values = np.real(values)
    return castable(values, target).astype(target, copy=False)


CONSTANT: Final = "%"
"""The source of a constant. No leaf has this mapping name, for a key's ``%`` is escaped there; an
array that is the root, or stands under the key "", has the mapping name ""."""


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """Elements of `source` and where in `target` they go.

    Example:
        The transpose of a (2, 3) tensor:

        >>> copy = StridedCopy("w", "kernel", (2, 3), (0, 0), ((1, 0), (0, 1)),
        ...                    (0, 0), ((0, 1), (1, 0)))
        >>> copy.target_box
        Box(offsets=(0, 0), sizes=(3, 2))
        >>> copy.inverse().source
        'kernel'
        >>> copy.inverse().inverse() == copy
        True
    """

    source: str
    """Name of the leaf that is read; `CONSTANT` for a constant."""
    target: str
    """Name of the leaf that is written."""
    sizes: Ints
    """Length of each loop axis, k of them; every one at least 1."""
    source_offsets: Ints
    """Where index (0, ..., 0) lies in the source."""
    source_strides: Strides
    """(k, rank of the source): how far one step of an axis moves in each dimension."""
    target_offsets: Ints
    """Where index (0, ..., 0) lies in the target."""
    target_strides: Strides
    """(k, rank of the target), likewise."""
    arithmetic: tuple[Arithmetic, ...] = ()
    """Computations on the way, in order; empty if bits are copied unchanged."""
    value: complex = 0
    """The number that is written, where the copy is of a constant."""
    alias: bool = False
    """Whether another copy uses the same elements of the source: the first of tied names."""

    @property
    def is_constant(self) -> bool:
        """Whether no leaf is read."""
        return self.source == CONSTANT

    @property
    def elements(self) -> int:
        """Number of elements copied."""
        return prod(self.sizes)

    @property
    def source_box(self) -> Box:
        """The smallest box of the source that holds everything read."""
        return bounds(self.sizes, self.source_offsets, self.source_strides)

    @property
    def target_box(self) -> Box:
        """The smallest box of the target that holds everything written."""
        return bounds(self.sizes, self.target_offsets, self.target_strides)

    def turned(self) -> StridedCopy:
        """The copy with its sides exchanged; computations on the way are ignored."""
        return replace(
            self,
            source=self.target,
            target=self.source,
            source_offsets=self.target_offsets,
            source_strides=self.target_strides,
            target_offsets=self.source_offsets,
            target_strides=self.source_strides,
        )

    def inverse(self) -> StridedCopy:
        """The copy back. A constant has none; see `xckpt.mapping.operations.Drop`."""
        if self.is_constant:
            raise ValueError(f"a constant in {self.target!r} came from no leaf")
        steps = tuple(step.inverse() for step in reversed(self.arithmetic))
        return replace(self.turned(), arithmetic=steps, alias=False)

    def cut(self, axis: int, start: int, stop: int) -> StridedCopy:
        """The part for which ``start <= a[axis] < stop``.

        Example:
            >>> StridedCopy("a", "b", (4,), (0,), ((2,),), (0,), ((1,),)).cut(0, 1, 3)
            StridedCopy(source='a', target='b', sizes=(2,), source_offsets=(2,), ...)
        """
        if start == 0 and stop == self.sizes[axis]:
            return self
        sizes = (*self.sizes[:axis], stop - start, *self.sizes[axis + 1 :])
        return replace(
            self,
            sizes=sizes,
            source_offsets=_moved(self.source_offsets, self.source_strides[axis], start),
            target_offsets=_moved(self.target_offsets, self.target_strides[axis], start),
        )

    def with_target(self, place: Callable[[Ints], Ints]) -> StridedCopy:
        """The same elements at another place of the target.

        Args:
            place: takes an index of the old target to one of the new; linear, so that strides
                go through it as the offsets do.
        """
        strides = tuple(map(place, self.target_strides))
        return replace(self, target_offsets=place(self.target_offsets), target_strides=strides)

    def simplified(self) -> StridedCopy:
        """The same copy with as few axes as it takes, each as long as can be.

        Example:
            >>> copy = StridedCopy("a", "b", (2, 1, 3), (0,), ((3,), (0,), (1,)),
            ...                    (0,), ((3,), (7,), (1,)))
            >>> copy.simplified().sizes
            (6,)
        """
        rows = zip(self.sizes, self.source_strides, self.target_strides, strict=True)
        axes = [(size, (*source, *target)) for size, source, target in rows if size != 1]
        while _merge_one_pair(axes):
            pass
        if len(axes) == len(self.sizes):
            return self
        rank = len(self.source_offsets)
        return replace(
            self,
            sizes=tuple(size for size, _ in axes),
            source_strides=tuple(row[:rank] for _, row in axes),
            target_strides=tuple(row[rank:] for _, row in axes),
        )


def _merge_one_pair(axes: list[tuple[int, Ints]]) -> bool:
    """Make one axis of two that step through the tensors as one would; False if no two do."""
    for (i, (outer, steps)), (j, (size, inner)) in permutations(enumerate(axes), 2):
        if all(step == size * small for step, small in zip(steps, inner, strict=True)):
            axes[i] = (outer * size, inner)
            del axes[j]
            return True
    return False


def _moved(offsets: Ints, strides: Ints, steps: int) -> Ints:
    return tuple(o + s * steps for o, s in zip(offsets, strides, strict=True))


def bounds(sizes: Ints, offsets: Ints, strides: Strides) -> Box:
    """The smallest box that holds index ``offsets + a @ strides`` for every ``a`` in ``sizes``.

    Example:
        >>> bounds((3,), (1, 5), ((2, -1),))
        Box(offsets=(1, 3), sizes=(5, 3))
    """
    ends = [_ends(sizes, offset, [row[d] for row in strides]) for d, offset in enumerate(offsets)]
    return Box(tuple(first for first, _ in ends), tuple(last - first + 1 for first, last in ends))


def _ends(sizes: Ints, offset: int, steps: Sequence[int]) -> tuple[int, int]:
    """First and last index that axes reach in one dimension."""
    reach = [step * (size - 1) for size, step in zip(sizes, steps, strict=True)]
    return offset + sum(min(0, far) for far in reach), offset + sum(max(0, far) for far in reach)


def restrict(copies: Iterable[StridedCopy], box: Box) -> tuple[StridedCopy, ...]:
    """The copies restricted to exactly the elements that go into a box of the target.

    Offsets stay relative to the whole target.

    Example:
        >>> copy = StridedCopy("a", "b", (4, 2), (0,), ((2,), (1,)), (0,), ((1,), (4,)))
        >>> [(c.sizes, c.source_offsets, c.target_offsets)
        ...  for c in restrict([copy], Box((3,), (3,)))]
        [((1, 1), (6,), (3,)), ((2, 1), (1,), (4,))]
    """
    parts = list(copies)
    for d, (low, high) in enumerate(zip(box.offsets, box.ends, strict=True)):
        parts = [part for whole in parts for part in _clamp(whole, d, low, high)]
    return tuple(parts)


def _clamp(copy: StridedCopy, d: int, low: int, high: int) -> list[StridedCopy]:
    """The part of a copy that lies in ``[low, high)`` of target dimension d."""
    steps = [row[d] for row in copy.target_strides]
    first, last = _ends(copy.sizes, copy.target_offsets[d], steps)
    if low <= first and last < high:
        return [copy]
    if last < low or first >= high:
        return []
    moves = [abs(step) if size > 1 else 0 for step, size in zip(steps, copy.sizes, strict=True)]
    axis = moves.index(max(moves))
    touching, inside = _values(steps[axis], copy.sizes[axis], first, last, low, high)
    cuts = [(a, a + 1) for a in range(touching.start, inside.start)]
    cuts += [(inside.start, inside.stop)] if inside else []
    cuts += [(a, a + 1) for a in range(inside.stop, touching.stop)]
    parts = (_clamp(copy.cut(axis, start, stop), d, low, high) for start, stop in cuts)
    return list(chain.from_iterable(parts))


def _values(
    step: int, size: int, first: int, last: int, low: int, high: int
) -> tuple[range, range]:
    """The values of an axis that write into ``[low, high)``, and those that write nowhere else.

    All axes together write from ``first`` to ``last``, which meets the range. Where no value keeps
    inside, the second is empty and ends the first. An axis that goes backwards is clamped value by
    value.
    """
    if step < 0:
        return range(size), range(size, size)
    # Value a writes to indices from first + step * a on, as far as the other axes reach.
    others = last - first - step * (size - 1)
    begin = max(0, -((first + others - low) // step))
    end = min(size, (high - 1 - first) // step + 1)
    start = max(begin, -((first - low) // step))
    stop = min(end, (high - 1 - first - others) // step + 1)
    return range(begin, end), range(start, stop) if start < stop else range(end, end)
