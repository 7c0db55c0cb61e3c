"""A box: the elements ``[offset, offset + size)`` of a tensor in each dimension.

A shard, a chunk, a piece and what a reader asks for are all boxes. `Box` is one of them,
`xckpt.core.geometry.boxes.Boxes` holds many in columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]
"""Elements per dimension."""


@dataclass(frozen=True, slots=True)
class Box:
    """A hyper-rectangle of a tensor's elements; publicly `xckpt.ChunkStorageMetadata`.

    Example:
        >>> box = Box(offsets=(0, 8), sizes=(4, 8))
        >>> box, str(box)
        (Box(offsets=(0, 8), sizes=(4, 8)), '[0, 4) x [8, 16)')
    """

    offsets: Shape
    """The first element in each dimension."""
    sizes: Shape
    """Elements in each dimension; 0 is allowed."""

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
        """The chunks that the box lies in, from an array's first element on, as far as it reaches.

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
