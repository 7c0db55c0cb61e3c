"""Strided copies: the normal form to which a mapping resolves.

A `StridedCopy` moves the elements of a loop nest from one tensor to another: for every index ``a``
in ``[0, sizes)``

    target[target_offsets + a @ target_strides] = source[source_offsets + a @ source_strides]

Offsets and strides count elements per dimension. A transpose, a split, a RoPE permutation of a
whole tensor are each *one* such copy, and three things are easy to say of it:

1. `StridedCopy.inverse` swaps the two sides.
2. `restrict` gives the copies that go into a box of the target. Dimension by dimension, the loop
   axes that move along it are clamped from the longest stride to the shortest: the values of an
   axis whose inner axes stay inside the box stay together, and each value that straddles a border
   is fixed and its inner axes are clamped in turn. Where strides nest (as digits of a number do),
   at most one value straddles each border.
3. `view` is what one side of it touches, as a NumPy array that copies nothing.

A copy whose source is "" writes a constant: `value`, or, where its source side has one dimension,
`value` plus the index in that dimension (what ``arange`` gives).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import numpy_dtype
from xckpt.core.geometry.box import Box
from xckpt.core.geometry.transpose import copy_bits
from xckpt.mapping.arithmetic import Arithmetic

__all__ = ["StridedCopy", "copy_elements", "restrict", "view"]

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}

Ints = tuple[int, ...]
Strides = tuple[Ints, ...]


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
    """Name of the leaf that is read; "" for a constant."""
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
    """What is computed on the way, in order; empty where bits are copied as they are."""
    value: complex = 0
    """The number that is written, where `source` is ""."""
    alias: bool = False
    """Whether another copy uses the same elements of the source: the first of tied names."""

    @property
    def elements(self) -> int:
        """Number of elements copied."""
        return prod(self.sizes)

    @property
    def source_box(self) -> Box:
        """The smallest box of the source that holds everything read."""
        return _bounds(self.sizes, self.source_offsets, self.source_strides)

    @property
    def target_box(self) -> Box:
        """The smallest box of the target that holds everything written."""
        return _bounds(self.sizes, self.target_offsets, self.target_strides)

    def inverse(self) -> StridedCopy:
        """The copy back. A constant has none; see `xckpt.convert.Drop`."""
        if not self.source:
            raise ValueError(f"a constant in {self.target!r} came from no leaf")
        steps = tuple(step.inverse() for step in reversed(self.arithmetic))
        return StridedCopy(
            self.target,
            self.source,
            self.sizes,
            self.target_offsets,
            self.target_strides,
            self.source_offsets,
            self.source_strides,
            steps,
        )

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

    def with_target(self, offsets: Ints, strides: Strides) -> StridedCopy:
        """The same elements, at another place of the target."""
        return replace(self, target_offsets=offsets, target_strides=strides)

    def simplified(self) -> StridedCopy:
        """The same copy with as few axes as it takes, each as long as can be.

        Example:
            >>> copy = StridedCopy("a", "b", (2, 1, 3), (0,), ((3,), (0,), (1,)),
            ...                    (0,), ((3,), (7,), (1,)))
            >>> copy.simplified().sizes
            (6,)
        """
        axes = [
            (size, source, target)
            for size, source, target in zip(
                self.sizes, self.source_strides, self.target_strides, strict=True
            )
            if size != 1
        ]
        while len(axes) > 1 and _merge_one_pair(axes):
            pass
        if len(axes) == len(self.sizes):
            return self
        return replace(
            self,
            sizes=tuple(size for size, _, _ in axes),
            source_strides=tuple(source for _, source, _ in axes),
            target_strides=tuple(target for _, _, target in axes),
        )


def _merge_one_pair(axes: list[tuple[int, Ints, Ints]]) -> bool:
    """Make one axis of two that step through the tensors as one would; False if no two do."""
    for i, (outer, outer_source, outer_target) in enumerate(axes):
        for j, (inner, inner_source, inner_target) in enumerate(axes):
            if (
                i != j
                and all(o == inner * n for o, n in zip(outer_source, inner_source, strict=True))
                and all(o == inner * n for o, n in zip(outer_target, inner_target, strict=True))
            ):
                axes[i] = (outer * inner, inner_source, inner_target)
                del axes[j]
                return True
    return False


def _moved(offsets: Ints, strides: Ints, steps: int) -> Ints:
    return tuple(o + s * steps for o, s in zip(offsets, strides, strict=True))


def _bounds(sizes: Ints, offsets: Ints, strides: Strides) -> Box:
    low, high = list(offsets), list(offsets)
    for size, steps in zip(sizes, strides, strict=True):
        for d, step in enumerate(steps):
            if step > 0:
                high[d] += step * (size - 1)
            elif step < 0:
                low[d] += step * (size - 1)
    extents = tuple(h - lo + 1 for lo, h in zip(low, high, strict=True))
    return Box(tuple(low), extents)


def restrict(copies: Iterable[StridedCopy], box: Box) -> tuple[StridedCopy, ...]:
    """The copies of just those elements that go into a box of the target, exactly.

    Offsets stay relative to the whole target.

    Example:
        >>> copy = StridedCopy("a", "b", (4, 2), (0,), ((2,), (1,)), (0,), ((1,), (4,)))
        >>> [(c.sizes, c.source_offsets, c.target_offsets)
        ...  for c in restrict([copy], Box((3,), (3,)))]
        [((1, 1), (6,), (3,)), ((2, 1), (1,), (4,))]
    """
    found: list[StridedCopy] = []
    for copy in copies:
        parts = [copy]
        for d, (low, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            high = low + size
            if len(parts) == 1:
                first, last = _reach(parts[0], d)
                if low <= first and last < high:
                    continue
                if last < low or first >= high:
                    parts = []
                    break
            parts = [part for whole in parts for part in _clamp(whole, d, low, high)]
        found += parts
    return tuple(found)


def _reach(copy: StridedCopy, dimension: int) -> tuple[int, int]:
    """First and last index of a target dimension that a copy writes."""
    first = last = copy.target_offsets[dimension]
    for size, steps in zip(copy.sizes, copy.target_strides, strict=True):
        step = steps[dimension]
        if step > 0:
            last += step * (size - 1)
        elif step < 0:
            first += step * (size - 1)
    return first, last


def _clamp(copy: StridedCopy, d: int, low: int, high: int) -> list[StridedCopy]:
    """The part of a copy that lies in ``[low, high)`` of target dimension d."""
    first, last = _reach(copy, d)
    if low <= first and last < high:
        return [copy]
    if last < low or first >= high:
        return []
    # Now some axis of more than one step moves along d: its longest one is cut.
    steps = [
        abs(s[d]) if n > 1 else 0 for n, s in zip(copy.sizes, copy.target_strides, strict=True)
    ]
    axis = steps.index(max(steps))
    step, size = copy.target_strides[axis][d], copy.sizes[axis]
    if step < 0:
        return [
            part for a in range(size) for part in _clamp(copy.cut(axis, a, a + 1), d, low, high)
        ]
    touched, whole = _values_in(first, last, step, size, low, high)
    parts: list[StridedCopy] = []
    for a in range(touched.start, whole.start):
        parts += _clamp(copy.cut(axis, a, a + 1), d, low, high)
    if whole:
        parts.append(copy.cut(axis, whole.start, whole.stop))
    for a in range(whole.stop, touched.stop):
        parts += _clamp(copy.cut(axis, a, a + 1), d, low, high)
    return parts


def _values_in(
    first: int, last: int, step: int, size: int, low: int, high: int
) -> tuple[range, range]:
    """Which values of an axis write into ``[low, high)`` at all, and which nowhere else.

    All of them write from ``first`` to ``last``. Where none is wholly inside, the second range is
    empty and ends where the first does.
    """
    # Value a of the axis writes from first + step * a to inner_last + step * a.
    inner_last = last - step * (size - 1)
    touched = range(
        max(0, -((inner_last - low) // step)), min(size, (high - 1 - first) // step + 1)
    )
    whole_from = max(touched.start, -((first - low) // step))
    whole_to = min(touched.stop, (high - 1 - inner_last) // step + 1)
    if whole_from >= whole_to:
        return touched, range(touched.stop, touched.stop)
    return touched, range(whole_from, whole_to)


def view(array: NDArray[Any], offsets: Ints, strides: Strides, sizes: Ints) -> NDArray[Any]:
    """What one side of a copy touches, as a view of shape ``sizes``; nothing is copied.

    ``array`` may be a box of the leaf: pass offsets relative to the box.

    Raises:
        IndexError: the copy reaches outside ``array``.

    Example:
        >>> view(np.arange(6).reshape(2, 3), (0, 1), ((0, 1), (1, 0)), (2, 2))
        array([[1, 4],
               [2, 5]])
    """
    bounds = _bounds(sizes, offsets, strides)
    for low, size, length in zip(bounds.offsets, bounds.sizes, array.shape, strict=True):
        if low < 0 or low + size > length:
            raise IndexError(
                f"a copy touches offsets {bounds.offsets}, sizes {bounds.sizes} of {array.shape}"
            )
    steps = [
        sum(step * width for step, width in zip(row, array.strides, strict=True)) for row in strides
    ]
    # With an ellipsis even an array without dimensions gives a view, not a scalar.
    start = array[(*(slice(offset, None) for offset in offsets), ...)]
    # NumPy does not stride over all types of ml_dtypes; it does over their bits.
    bits = start.view(_BITS[array.dtype.itemsize])
    return np.lib.stride_tricks.as_strided(bits, shape=sizes, strides=steps).view(array.dtype)


def copy_elements(
    copy: StridedCopy,
    source: NDArray[Any] | None,
    target: NDArray[Any],
    *,
    source_origin: Sequence[int] | None = None,
    target_origin: Sequence[int] | None = None,
) -> None:
    """Carry out one copy between arrays that hold the leaves, or boxes of them from an origin on.

    ``source`` is None for a constant.

    Example:
        >>> target = np.zeros(2, "int32")
        >>> copy = StridedCopy("a", "b", (2,), (10,), ((3,),), (4,), ((1,),))
        >>> copy_elements(copy, np.arange(10, 14, dtype="int32"), target, source_origin=(10,),
        ...               target_origin=(4,))
        >>> target
        array([10, 13], dtype=int32)
    """
    into = view(target, _less(copy.target_offsets, target_origin), copy.target_strides, copy.sizes)
    if source is None:
        values = _constants(copy, target.dtype)
    else:
        offsets = _less(copy.source_offsets, source_origin)
        values = view(source, offsets, copy.source_strides, copy.sizes)
    for step in copy.arithmetic:
        values = step(values)
    if values.dtype != into.dtype:
        raise TypeError(f"{copy.target!r}: {values.dtype} elements do not go into {into.dtype}")
    copy_bits(into, values)


def _less(offsets: Ints, origin: Sequence[int] | None) -> Ints:
    if origin is None:
        return offsets
    return tuple(o - start for o, start in zip(offsets, origin, strict=True))


def _constants(copy: StridedCopy, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The values that a copy from "" writes."""
    if copy.arithmetic:
        dtype = numpy_dtype(copy.arithmetic[0].source)
    if not copy.source_offsets:
        value = (
            copy.value.real if dtype.kind != "c" and isinstance(copy.value, complex) else copy.value
        )
        return np.broadcast_to(np.asarray(value).astype(dtype), copy.sizes)
    index = np.full((), copy.source_offsets[0], np.int64)
    for axis, ((step,), size) in enumerate(zip(copy.source_strides, copy.sizes, strict=True)):
        shape = [1] * len(copy.sizes)
        shape[axis] = size
        index = index + (step * np.arange(size)).reshape(shape)
    return (np.asarray(copy.value) + index).real.astype(dtype)
