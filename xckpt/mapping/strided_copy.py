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

A copy whose source is "" writes a constant: `value`, or, where its source side has one dimension,
`value` plus the index in that dimension (what ``arange`` gives).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from xckpt.core.geometry.box import Box
from xckpt.mapping.arithmetic import Arithmetic

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
        return bounds(self.sizes, self.source_offsets, self.source_strides)

    @property
    def target_box(self) -> Box:
        """The smallest box of the target that holds everything written."""
        return bounds(self.sizes, self.target_offsets, self.target_strides)

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


def bounds(sizes: Ints, offsets: Ints, strides: Strides) -> Box:
    """The smallest box that holds index ``offsets + a @ strides`` for every ``a`` in ``sizes``."""
    low, high = list(offsets), list(offsets)
    for size, steps in zip(sizes, strides, strict=True):
        for d, step in enumerate(steps):
            reach = step * (size - 1)
            low[d] += min(0, reach)
            high[d] += max(0, reach)
    return Box(tuple(low), tuple(h - lo + 1 for lo, h in zip(low, high, strict=True)))


def restrict(copies: Iterable[StridedCopy], box: Box) -> tuple[StridedCopy, ...]:
    """The copies of just those elements that go into a box of the target, exactly.

    Offsets stay relative to the whole target.

    Example:
        >>> copy = StridedCopy("a", "b", (4, 2), (0,), ((2,), (1,)), (0,), ((1,), (4,)))
        >>> [(c.sizes, c.source_offsets, c.target_offsets)
        ...  for c in restrict([copy], Box((3,), (3,)))]
        [((1, 1), (6,), (3,)), ((2, 1), (1,), (4,))]
    """
    return tuple(part for copy in copies for part in _restricted(copy, box))


def _restricted(copy: StridedCopy, box: Box) -> list[StridedCopy]:
    """The parts of one copy that go into a box of the target."""
    parts = [copy]
    for d, (low, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        parts = [part for whole in parts for part in _clamp(whole, d, low, low + size)]
    return parts


def _reach(copy: StridedCopy, dimension: int) -> tuple[int, int]:
    """First and last index of a target dimension that a copy writes."""
    first = last = copy.target_offsets[dimension]
    for size, steps in zip(copy.sizes, copy.target_strides, strict=True):
        reach = steps[dimension] * (size - 1)
        if reach > 0:
            last += reach
        else:
            first += reach
    return first, last


def _clamp(copy: StridedCopy, d: int, low: int, high: int) -> list[StridedCopy]:
    """The part of a copy that lies in ``[low, high)`` of target dimension d."""
    first, last = _reach(copy, d)
    if low <= first and last < high:
        return [copy]
    if last < low or first >= high:
        return []
    longest = _LongestAxis.of(copy, d, first, last)
    touching, inside = longest.touching(low, high), longest.inside(low, high)
    parts: list[StridedCopy] = []
    for a in range(touching.start, inside.start):
        parts += _clamp(copy.cut(longest.axis, a, a + 1), d, low, high)
    if inside:
        parts.append(copy.cut(longest.axis, inside.start, inside.stop))
    for a in range(inside.stop, touching.stop):
        parts += _clamp(copy.cut(longest.axis, a, a + 1), d, low, high)
    return parts


@dataclass(frozen=True, slots=True)
class _LongestAxis:
    """The loop axis of a copy that moves furthest along a target dimension.

    Value ``a`` of it writes to indices from ``first + step * a`` to ``first + step * a + others``.
    """

    axis: int
    step: int
    size: int
    first: int
    others: int
    """How far the other axes reach."""

    @classmethod
    def of(cls, copy: StridedCopy, d: int, first: int, last: int) -> _LongestAxis:
        """The longest axis along dimension d of a copy that writes from ``first`` to ``last``."""
        steps = [
            abs(row[d]) if size > 1 else 0
            for size, row in zip(copy.sizes, copy.target_strides, strict=True)
        ]
        axis = steps.index(max(steps))
        step, size = copy.target_strides[axis][d], copy.sizes[axis]
        return cls(axis, step, size, first, last - first - abs(step) * (size - 1))

    def touching(self, low: int, high: int) -> range:
        """The values that write into ``[low, high)``; of an axis that goes backwards all of them.

        A copy clamps such an axis value by value.
        """
        if self.step < 0:
            return range(self.size)
        start = -((self.first + self.others - low) // self.step)
        stop = (high - 1 - self.first) // self.step + 1
        return range(max(0, start), min(self.size, stop))

    def inside(self, low: int, high: int) -> range:
        """The values that write nowhere else; an empty range at the end of `touching` for none."""
        touching = self.touching(low, high)
        if self.step > 0:
            start = max(touching.start, -((self.first - low) // self.step))
            stop = min(touching.stop, (high - 1 - self.first - self.others) // self.step + 1)
            if start < stop:
                return range(start, stop)
        return range(touching.stop, touching.stop)
