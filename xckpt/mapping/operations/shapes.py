"""Operations that give one tensor another shape or order: transpose, reshape, rearrange, rope."""

from __future__ import annotations

import functools
import re
from itertools import chain
from math import prod
from typing import ClassVar, Literal

import msgspec

from xckpt.mapping.operations.base import TensorOperation, axis_of
from xckpt.mapping.trace import Trace
from xckpt.mapping.traced import Traced, concatenated, part, reshaped, transposed


class Transpose(TensorOperation, frozen=True):
    """Put the dimensions in another order, as `numpy.transpose` does.

    Example:
        >>> Transpose((2, 0, 1)).inverse()
        Transpose(axes=(1, 2, 0))
    """

    name: ClassVar[str] = "transpose"

    axes: tuple[int, ...]
    """For each dimension of the result the dimension that it was."""

    def validate(self) -> None:
        """The axes are a permutation."""
        if sorted(self.axes) != list(range(len(self.axes))):
            raise ValueError(f"{list(self.axes)} is not an order of {len(self.axes)} axes")

    def on(self, tensor: Traced, trace: Trace) -> Traced:
        """The transposed tensor."""
        if len(tensor.shape) != len(self.axes):
            raise ValueError(f"it has {len(tensor.shape)} dimensions, not {len(self.axes)}")
        return transposed(tensor, self.axes)

    def inverse(self) -> Transpose:
        """The permutation back."""
        return Transpose(tuple(self.axes.index(d) for d in range(len(self.axes))))


class Reshape(TensorOperation, frozen=True):
    """The same elements in row-major order under another shape; both shapes are stated.

    Each shape may leave one size open with -1.

    Example:
        >>> Reshape(((-1, 64), (-1, 4, 16))).inverse()
        Reshape(shapes=((-1, 4, 16), (-1, 64)))
    """

    name: ClassVar[str] = "reshape"

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    """The shape that comes in and the shape that goes out."""

    def validate(self) -> None:
        """No more than one open size on either side; else as many elements on both."""
        for shape in self.shapes:
            if any(size < -1 for size in shape) or shape.count(-1) > 1:
                raise ValueError(
                    f"{list(shape)} is not a shape with at most one size left open (-1)"
                )
        before, after = self.shapes
        if -1 not in before and -1 not in after and prod(before) != prod(after):
            raise ValueError(f"{list(before)} and {list(after)} differ in their number of elements")

    def on(self, tensor: Traced, trace: Trace) -> Traced:
        """The reshaped tensor."""
        before, after = self.shapes
        fits = len(before) == len(tensor.shape) and all(
            stated in (-1, size) for stated, size in zip(before, tensor.shape, strict=True)
        )
        if not fits:
            raise ValueError(f"its shape is {list(tensor.shape)}, not {list(before)}")
        return reshaped(tensor, _closed(after, prod(tensor.shape)))

    def inverse(self) -> Reshape:
        """The shapes the other way round."""
        return Reshape((self.shapes[1], self.shapes[0]))


def _closed(shape: tuple[int, ...], elements: int) -> tuple[int, ...]:
    """A shape with its open size filled in."""
    given = prod(size for size in shape if size != -1)
    if -1 in shape and given and elements % given == 0:
        shape = tuple(elements // given if size == -1 else size for size in shape)
    if -1 in shape or prod(shape) != elements:
        raise ValueError(f"{elements} elements do not make {list(shape)}")
    return shape


_AXES = re.compile(r"\s*(?:\(([^()]*)\)|(\S+?))(?=[\s()]|$)")
_NAME = re.compile(r"[A-Za-z_]\w*|1")

Groups = tuple[tuple[str, ...], ...]


class Rearrange(TensorOperation, frozen=True):
    """Split, reorder and merge dimensions, in the notation of einops.

    Each side lists the dimensions; ``(a b)`` is one that is made of a and b, b the faster; ``1`` is
    one of size 1. `sizes` states all sizes but one of a dimension that is made of several.

    Example:
        >>> merge = Rearrange("(heads half two) width -> (heads two half) width",
        ...                   {"heads": 4, "two": 2})
        >>> str(merge.inverse())
        "rearrange (heads two half) width -> (heads half two) width, sizes {'heads': 4, 'two': 2}"
    """

    name: ClassVar[str] = "rearrange"

    expression: str
    """``"before -> after"``."""
    sizes: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Sizes of named dimensions."""

    def validate(self) -> None:
        """Both sides name the same dimensions, and the sizes suffice for either direction."""
        before, after = self._sides()
        names = [list(chain.from_iterable(side)) for side in (before, after)]
        for side in names:
            if twice := {n for n in side if side.count(n) > 1}:
                raise ValueError(f"{', '.join(sorted(twice))} is twice on one side")
        if odd := set(names[0]) ^ set(names[1]):
            raise ValueError(f"{', '.join(sorted(odd))} is on one side only")
        if strange := set(self.sizes) - set(names[0]):
            raise ValueError(f"a size is stated for {', '.join(sorted(strange))}, which it lacks")
        if wrong := {n: size for n, size in self.sizes.items() if size < 1}:
            raise ValueError(f"sizes are at least 1, got {wrong}")
        for group in (*before, *after):
            unknown = [n for n in group if n not in self.sizes]
            if len(unknown) > 1:
                raise ValueError(
                    f"state the sizes of all but one of {', '.join(unknown)}; "
                    "the way there or back needs them"
                )

    def _sides(self) -> tuple[Groups, Groups]:
        before, arrow, after = self.expression.partition("->")
        if not arrow or "->" in after:
            raise ValueError("it is written 'before -> after'")
        return _groups(before), _groups(after)

    def on(self, tensor: Traced, trace: Trace) -> Traced:
        """The rearranged tensor."""
        before, after = self._sides()
        sizes = self._solved(before, tensor.shape)
        flat, wanted = (list(chain.from_iterable(side)) for side in (before, after))
        split = reshaped(tensor, tuple(sizes[n] for n in flat))
        ordered = transposed(split, [flat.index(n) for n in wanted])
        return reshaped(ordered, tuple(prod(sizes[n] for n in group) for group in after))

    def _solved(self, before: Groups, shape: tuple[int, ...]) -> dict[str, int]:
        """The size of every named dimension."""
        if len(before) != len(shape):
            raise ValueError(f"it has {len(shape)} dimensions, not {len(before)}")
        sizes = dict(self.sizes)
        for group, size in zip(before, shape, strict=True):
            open_names = [n for n in group if n not in sizes]
            known = prod(sizes[n] for n in group if n in sizes)
            if open_names and size % known == 0:
                sizes[open_names[0]] = size // known
            elif known != size:
                stated = ", ".join(f"{n} = {sizes[n]}" for n in group if n in sizes)
                raise ValueError(
                    f"a dimension of {size} is not ({' '.join(group) or 1}) with {stated}"
                )
        return sizes

    def inverse(self) -> Rearrange:
        """The two sides exchanged."""
        before, _, after = self.expression.partition("->")
        return Rearrange(f"{after.strip()} -> {before.strip()}", self.sizes)

    def __hash__(self) -> int:
        return hash((self.expression, *sorted(self.sizes.items())))


@functools.lru_cache(maxsize=1024)
def _groups(side: str) -> Groups:
    """One side of an expression as groups of names; a dimension of size 1 has none."""
    groups: list[tuple[str, ...]] = []
    end = 0
    text = side.rstrip()
    while end < len(text):
        match = _AXES.match(text, end)
        names = tuple((match[1] if match[1] is not None else match[2]).split()) if match else ()
        if match is None or not all(_NAME.fullmatch(n) for n in names):
            raise ValueError(f"{side.strip()!r} is not a list of names and (groups of names)")
        groups.append(tuple(n for n in names if n != "1"))
        end = match.end()
    return tuple(groups)


class Rope(TensorOperation, frozen=True):
    """Reorder the rotated channels of each head between the two ways to write rotary embeddings.

    ``"pairs"`` rotates channels (0, 1), (2, 3), ...; ``"halves"`` rotates (0, n/2), (1, n/2 + 1),
    ...: Meta's Llama and Hugging Face's.

    Example:
        >>> Rope("halves", heads=8).inverse()
        Rope(to='pairs', heads=8, axis=0, rotary=None)
    """

    name: ClassVar[str] = "rope"

    to: Literal["halves", "pairs"]
    """The layout of the result; the input has the other one."""
    heads: int
    """Heads along the axis: for keys the number of key-value heads."""
    axis: int = 0
    """The axis of heads times channels."""
    rotary: int | None = None
    """How many channels of each head are rotated, from the first on; all, where None."""

    def validate(self) -> None:
        """There are heads, and an even number of rotated channels."""
        if self.heads < 1:
            raise ValueError(f"there is no tensor of {self.heads} heads")
        if self.rotary is not None and (self.rotary < 2 or self.rotary % 2):
            raise ValueError(f"{self.rotary} rotated channels are not pairs")

    def on(self, tensor: Traced, trace: Trace) -> Traced:
        """The tensor with the channels of each head reordered."""
        axis = axis_of(self.axis, len(tensor.shape))
        size = tensor.shape[axis]
        channels, rest = divmod(size, self.heads)
        rotary = channels if self.rotary is None else self.rotary
        if rest or rotary % 2 or rotary > channels:
            raise ValueError(
                f"{size} channels are not {self.heads} heads with {rotary} rotated channels each"
            )
        trace.rotates(tensor, rotary)
        before, after = tensor.shape[:axis], tensor.shape[axis + 1 :]
        heads = reshaped(tensor, (*before, self.heads, channels, *after))
        rotated = part(heads, axis + 1, 0, rotary)
        pair = (rotary // 2, 2) if self.to == "halves" else (2, rotary // 2)
        split = reshaped(rotated, (*before, self.heads, *pair, *after))
        order = list(range(len(split.shape)))
        order[axis + 1], order[axis + 2] = axis + 2, axis + 1
        swapped = reshaped(transposed(split, order), rotated.shape)
        kept = part(heads, axis + 1, rotary, channels)
        return reshaped(concatenated([swapped, kept], axis + 1), tensor.shape)

    def inverse(self) -> Rope:
        """To the other layout."""
        return msgspec.structs.replace(self, to="pairs" if self.to == "halves" else "halves")
