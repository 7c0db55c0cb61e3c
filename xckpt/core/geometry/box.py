"""Boxes: the elements ``[offset, offset + size)`` of a tensor in each dimension.

A shard, a chunk, a piece and what a reader asks for are all boxes. `Box` is one of them. `Boxes`
holds n boxes of one rank in columns, two (n, rank) int64 arrays; what works on many boxes is
vectorised over them and touches no data. `Block` has the boxes of many leaves, or of many kinds of
leaves, in columns (plans).

`xckpt.core.geometry.box_lookup` finds which boxes meet, and `xckpt.core.geometry.cover` proves that
boxes cover a shape exactly once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from operator import index
from typing import cast, overload

import numpy as np
from numpy.typing import NDArray

Shape = tuple[int, ...]
"""Elements per dimension."""


@dataclass(frozen=True, slots=True)
class Box:
    """A hyper-rectangle of a tensor's elements; publicly `xckpt.ChunkStorageMetadata`.

    Lists, a ``torch.Size`` and NumPy's integers become tuples of ints.

    Raises:
        TypeError: ``offsets`` or ``sizes`` are not integers.
        ValueError: they have different lengths, or a size is negative.

    Example:
        >>> box = Box(offsets=(0, 8), sizes=(4, 8))
        >>> box, str(box)
        (Box(offsets=(0, 8), sizes=(4, 8)), '[0, 4) x [8, 16)')
    """

    offsets: Shape
    """The first element in each dimension."""
    sizes: Shape
    """Elements in each dimension; 0 is allowed."""

    def __post_init__(self) -> None:
        # Boxes are very many, and nearly all are as they should be.
        offsets, sizes = self.offsets, self.sizes
        if type(offsets) is type(sizes) is tuple and len(offsets) == len(sizes):
            for offset, size in zip(offsets, sizes):  # noqa: B905  # slower with strict
                if type(offset) is not int or type(size) is not int or size < 0:
                    break
            else:
                return
        object.__setattr__(self, "offsets", _ints("offsets", offsets))
        object.__setattr__(self, "sizes", _ints("sizes", sizes))
        if len(self.offsets) != len(self.sizes):
            raise ValueError(
                f"a box needs as many offsets as sizes, got offsets {self.offsets} and sizes "
                f"{self.sizes}"
            )
        if min(self.sizes, default=0) < 0:
            raise ValueError(f"the sizes of a box must be 0 or more, got sizes {self.sizes}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that is all of a shape.

        Example:
            >>> Box.whole((3, 5))
            Box(offsets=(0, 0), sizes=(3, 5))
        """
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ends(self) -> Shape:
        """One past the last element in each dimension."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    @property
    def elements(self) -> int:
        """Number of elements; 1 of a box without dimensions."""
        return prod(self.sizes)

    def slices(self, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
        """The slices that cut the box out of an array whose first element is at ``origin``.

        Example:
            >>> Box((4, 8), (2, 3)).slices(origin=(4, 0))
            (slice(0, 2, None), slice(8, 11, None))
        """
        box = self if origin is None else self.relative_to(origin)
        return tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))

    def shifted(self, by: Sequence[int]) -> Box:
        """The box moved by as many elements in each dimension.

        Example:
            >>> Box((4, 8), (2, 3)).shifted((1, 0))
            Box(offsets=(5, 8), sizes=(2, 3))
        """
        return Box(tuple(o + b for o, b in zip(self.offsets, by, strict=True)), self.sizes)

    def relative_to(self, origin: Sequence[int]) -> Box:
        """The same elements, counted from ``origin``; the inverse of `shifted`.

        Example:
            >>> Box((4, 8), (2, 3)).relative_to((4, 0))
            Box(offsets=(0, 8), sizes=(2, 3))
        """
        return Box(tuple(o - b for o, b in zip(self.offsets, origin, strict=True)), self.sizes)

    def meets(self, other: Box) -> Box | None:
        """The elements that both boxes have; None if there are none.

        Two boxes without dimensions are the same one element.

        Example:
            >>> Box((0,), (4,)).meets(Box((3,), (4,)))
            Box(offsets=(3,), sizes=(1,))
            >>> Box((0,), (4,)).meets(Box((4,), (4,))) is None
            True
        """
        low = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(min(a, b) - o for a, b, o in zip(self.ends, other.ends, low, strict=True))
        return Box(low, sizes) if all(size > 0 for size in sizes) else None

    def whole_chunks(self, chunk: Sequence[int], shape: Sequence[int]) -> Box:
        """The range of chunks of an array that the box lies in, clipped to the array.

        Example:
            >>> Box((3,), (2,)).whole_chunks((4,), (10,)), Box((9,), (1,)).whole_chunks((4,), (10,))
            (Box(offsets=(0,), sizes=(8,)), Box(offsets=(8,), sizes=(2,)))
        """
        low = tuple(o // n * n for o, n in zip(self.offsets, chunk, strict=True))
        ends = (min(-(-e // n) * n, m) for e, n, m in zip(self.ends, chunk, shape, strict=True))
        return Box(low, tuple(e - o for e, o in zip(ends, low, strict=True)))

    def holds(self, other: Box) -> bool:
        """Whether every element of the other box is in this one.

        Example:
            >>> Box.whole((4, 4)).holds(Box((2, 0), (2, 4))), Box((1,), (2,)).holds(Box.whole((2,)))
            (True, False)
        """
        return all(
            a <= b and b + n <= a + m
            for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )

    def __str__(self) -> str:
        parts = (f"[{o}, {o + s})" for o, s in zip(self.offsets, self.sizes, strict=True))
        return " x ".join(parts) or "the scalar"


def _ints(argument: str, given: Iterable[int]) -> Shape:
    """An argument of a box as a tuple of ints."""
    try:
        return tuple(index(number) for number in given)
    except TypeError:
        raise TypeError(
            f"the {argument} of a box must be integers, one a dimension, got {given!r}"
        ) from None


Int64s = NDArray[np.int64]


def tuples(rows: Int64s) -> list[Shape]:
    """The rows of an array as tuples."""
    listed: list[list[int]] = rows.tolist()
    return [*map(tuple, listed)]


@dataclass(frozen=True, slots=True, eq=False)
class Boxes(Sequence[Box]):
    """n boxes of one rank, in the order given.

    Example:
        >>> boxes = Boxes.of([((0, 0), (2, 4)), ((2, 0), (1, 4))])
        >>> len(boxes), boxes.rank
        (2, 2)
        >>> boxes[1]
        Box(offsets=(2, 0), sizes=(1, 4))
        >>> boxes.elements
        array([8, 4])
    """

    offsets: Int64s
    """First element of each box, (n, rank)."""
    sizes: Int64s
    """Elements of each box per dimension, (n, rank); 0 is allowed."""

    def __post_init__(self) -> None:
        if self.offsets.ndim != 2 or self.offsets.shape != self.sizes.shape:
            raise ValueError(
                f"offsets and sizes must both be (n, rank) arrays, "
                f"got {self.offsets.shape} and {self.sizes.shape}"
            )

    @classmethod
    def of(
        cls, boxes: Iterable[tuple[Sequence[int], Sequence[int]]], *, rank: int | None = None
    ) -> Boxes:
        """Boxes from (offsets, sizes) pairs; ``rank`` is needed only where there may be none."""
        pairs = list(boxes)
        shape = (len(pairs), len(pairs[0][0]) if pairs else rank or 0)
        offsets = np.array([offset for offset, _ in pairs], dtype=np.int64).reshape(shape)
        sizes = np.array([size for _, size in pairs], dtype=np.int64).reshape(shape)
        return cls(offsets, sizes)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Boxes:
        """The one box that is all of a shape.

        Example:
            >>> list(Boxes.whole((3, 5)))
            [Box(offsets=(0, 0), sizes=(3, 5))]
        """
        return _whole(tuple(shape))

    @classmethod
    def concatenated(cls, parts: Sequence[Boxes], order: Int64s | None = None) -> Boxes:
        """The boxes of several (at least one) of the same rank, one after the other.

        Args:
            parts: the boxes.
            order: where each box of the result stands among those of all parts, (n,).
        """
        # A column is put in order before the next one is concatenated: many ranks' are large.
        columns = (
            np.concatenate(column) if order is None else np.concatenate(column)[order]
            for column in ([p.offsets for p in parts], [p.sizes for p in parts])
        )
        return cls(*columns)

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return self.offsets.shape[1]

    @property
    def ends(self) -> Int64s:
        """One past the last element of each box, (n, rank)."""
        return self.offsets + self.sizes

    @property
    def elements(self) -> Int64s:
        """Number of elements of each box, (n,)."""
        return np.prod(self.sizes, axis=1, dtype=np.int64)

    def take(self, indices: Int64s | NDArray[np.bool_]) -> Boxes:
        """The boxes at ``indices`` (or where a mask is true), in that order."""
        return Boxes(self.offsets[indices], self.sizes[indices])

    def __len__(self) -> int:
        return self.offsets.shape[0]

    @overload
    def __getitem__(self, index: int) -> Box: ...
    @overload
    def __getitem__(self, index: slice) -> Boxes: ...
    def __getitem__(self, index: int | slice) -> Box | Boxes:
        if isinstance(index, slice):
            return Boxes(self.offsets[index], self.sizes[index])
        return Box(tuple(self.offsets[index].tolist()), tuple(self.sizes[index].tolist()))

    def __iter__(self) -> Iterator[Box]:
        return map(Box, tuples(self.offsets), tuples(self.sizes))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, Boxes):
            return np.array_equal(self.offsets, other.offsets) and np.array_equal(
                self.sizes, other.sizes
            )
        if isinstance(other, Sequence):
            return list(self) == list(cast(Sequence[object], other))
        return NotImplemented

    def __repr__(self) -> str:
        shown = [str(box) for box in self[:4]]
        more = f", ... {len(self) - 4} more" if len(self) > 4 else ""
        return f"Boxes({', '.join(shown)}{more})"


@functools.lru_cache(maxsize=1024)
def _whole(shape: tuple[int, ...]) -> Boxes:
    """The box of a shape, made once: most tensors of a state have the shape of another."""
    boxes = Boxes.of([((0,) * len(shape), shape)])
    boxes.offsets.flags.writeable = boxes.sizes.flags.writeable = False
    return boxes


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """n items of one number of dimensions: item i is box ``boxes[i]`` of leaf ``leaf[i]``."""

    leaf: NDArray[np.int32]
    """Leaf numbers, (n,)."""
    boxes: Boxes

    @classmethod
    def of(
        cls, numbered: Iterable[tuple[int, Boxes]], order: NDArray[np.int64] | None = None
    ) -> Block:
        """The boxes of the leaf numbers given (at least one), in that order."""
        numbers, boxes = zip(*numbered, strict=True)
        leaf = np.repeat(np.array(numbers, np.int32), list(map(len, boxes)))
        return cls(leaf if order is None else leaf[order], Boxes.concatenated(boxes, order))

    def of_leaves(self, kinds: NDArray[np.int32]) -> Block:
        """The boxes of each leaf, where the block's numbers are of kinds.

        Example:
            >>> block = Block.of([(0, Boxes.whole((4,))), (1, Boxes.whole((2,)))])
            >>> block.of_leaves(np.array([1, 0, 1], np.int32)).leaf.tolist()
            [1, 0, 2]
        """
        rows, leaves = self.leaves(kinds)
        return Block(leaves.astype(np.int32), self.boxes.take(rows))

    def leaves(self, kinds: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each box of each leaf, as `of_leaves` orders them, its number here and the leaf's."""
        return expanded(self.leaf, np.argsort(kinds, kind="stable"), np.bincount(kinds))


def expanded(
    numbers: NDArray[np.integer], members: NDArray[np.int64], counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All members of the groups with these numbers: the position of the number, and the member.

    Args:
        numbers: of groups, (n,).
        members: those of all groups, one group after the other.
        counts: how many members each group has.

    Example:
        >>> where, who = expanded(np.array([1, 0]), np.array([7, 8, 9]), np.array([1, 2]))
        >>> where.tolist(), who.tolist()
        ([0, 0, 1], [8, 9, 7])
    """
    taken = counts[numbers]
    where = np.repeat(np.arange(len(numbers)), taken)
    within = np.arange(len(where)) - np.repeat(np.cumsum(taken) - taken, taken)
    return where, members[(np.cumsum(counts) - counts)[numbers][where] + within]
