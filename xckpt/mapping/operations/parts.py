"""Operations that make one tensor of several, or several of one, along an axis that they have.

They come in pairs. What a pair shares, its arguments and how the parts lie in the whole, is one
base: `_Row`, `_Turns` and `_GroupedTurns`. Which way an operation goes is the other: `_Join` or
`_Separate`.
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import accumulate
from typing import ClassVar

from xckpt.mapping.bundle import Bundle, Slot, Trace, one_for_each
from xckpt.mapping.operations.base import Operation, axis_of
from xckpt.mapping.traced import Traced, concatenated, part, reshaped


class _PartsOperation(Operation, frozen=True):
    """A way in which the parts of a tensor lie in it."""

    @abstractmethod
    def count(self) -> int:
        """How many parts."""

    @abstractmethod
    def joined(self, tensors: tuple[Traced, ...]) -> Traced:
        """One tensor of its parts."""

    @abstractmethod
    def separated(self, tensor: Traced) -> tuple[Traced, ...]:
        """The parts of one tensor."""


class _Join(_PartsOperation, frozen=True):
    """Base of what makes one tensor of several."""

    def arity(self) -> tuple[int, int]:
        """All parts in, one out."""
        return self.count(), 1

    def apply(self, bundle: Bundle, trace: Trace) -> Bundle:
        """One slot, of the tensors joined for each value of the indices."""
        joined = {key: self.joined(tensors) for key, tensors in one_for_each(bundle)}
        return (Slot(bundle[0].indices, joined),)


class _Separate(_PartsOperation, frozen=True):
    """Base of what makes several tensors of one."""

    def arity(self) -> tuple[int, int]:
        """One in, all parts out."""
        return 1, self.count()

    def apply(self, bundle: Bundle, trace: Trace) -> Bundle:
        """A slot for each part."""
        (slot,) = bundle
        parts = {key: self.separated(tensor) for key, tensor in slot.tensors.items()}
        return tuple(
            Slot(slot.indices, {key: of_key[number] for key, of_key in parts.items()})
            for number in range(self.count())
        )


def _some(count: int, words: str) -> None:
    if count < 1:
        raise ValueError(f"there are no {count} {words}")


def _positive(sizes: tuple[int, ...]) -> None:
    if not sizes or min(sizes) < 0:
        raise ValueError(f"{list(sizes)} are no sizes of parts")


class _Row(_PartsOperation, frozen=True):
    """One part after the other along an axis."""

    sizes: tuple[int, ...]
    """Size of each part along the axis."""
    axis: int = 0
    """The axis along which they lie."""

    def validate(self) -> None:
        """There are sizes."""
        _positive(self.sizes)

    def count(self) -> int:
        """As many as sizes."""
        return len(self.sizes)

    def joined(self, tensors: tuple[Traced, ...]) -> Traced:
        """The tensors in a row."""
        return join(tensors, self.axis, self.sizes)

    def separated(self, tensor: Traced) -> tuple[Traced, ...]:
        """The tensor cut where one part ends."""
        return separate(tensor, self.axis, self.sizes)


class Concatenate(_Join, _Row, frozen=True):
    """One tensor after the other along an axis.

    Example:
        >>> Concatenate((768, 768, 768), axis=1).inverse()
        Split(sizes=(768, 768, 768), axis=1)
    """

    name: ClassVar[str] = "concatenate"

    def inverse(self) -> Split:
        """Cut at the same places."""
        return Split(self.sizes, self.axis)


class Split(_Separate, _Row, frozen=True):
    """Cut a tensor along an axis into parts of stated sizes.

    Example:
        >>> Split((32, 8, 8)).inverse()
        Concatenate(sizes=(32, 8, 8), axis=0)
    """

    name: ClassVar[str] = "split"

    def inverse(self) -> Concatenate:
        """Join them again."""
        return Concatenate(self.sizes, self.axis)


def join(tensors: tuple[Traced, ...], axis: int, sizes: tuple[int, ...]) -> Traced:
    """Tensors in a row, if they fit.

    Raises:
        ValueError: a dtype, a rank, or a size differs from what it has to be.
    """
    first = tensors[0]
    axis = axis_of(axis, len(first.shape))
    for i, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        if tensor.dtype != first.dtype:
            raise ValueError(f"part {i} is {tensor.dtype}, the first is {first.dtype}")
        wanted = (*first.shape[:axis], size, *first.shape[axis + 1 :])
        if tensor.shape != wanted:
            raise ValueError(f"part {i} has shape {list(tensor.shape)}, not {list(wanted)}")
    return concatenated(tensors, axis)


def separate(tensor: Traced, axis: int, sizes: tuple[int, ...]) -> tuple[Traced, ...]:
    """The parts of a tensor, of these sizes.

    Raises:
        ValueError: the sizes do not add up to the axis.
    """
    axis = axis_of(axis, len(tensor.shape))
    if sum(sizes) != tensor.shape[axis]:
        raise ValueError(
            f"{' + '.join(map(str, sizes))} = {sum(sizes)}, axis {axis} has {tensor.shape[axis]}"
        )
    ends = list(accumulate(sizes))
    return tuple(part(tensor, axis, end - n, end) for end, n in zip(ends, sizes, strict=True))


class _Turns(_PartsOperation, frozen=True):
    """One slice of each part in turn along an axis; all parts have the same shape."""

    parts: int
    """How many parts."""
    axis: int = 0
    """The axis along which they alternate."""

    def validate(self) -> None:
        """There are parts."""
        _some(self.parts, "parts")

    def count(self) -> int:
        """`parts`."""
        return self.parts

    def joined(self, tensors: tuple[Traced, ...]) -> Traced:
        """The tensors interleaved."""
        axis = axis_of(self.axis, len(tensors[0].shape))
        return _interleaved(tensors, axis, tensors[0].shape[axis], (1,) * self.parts)

    def separated(self, tensor: Traced) -> tuple[Traced, ...]:
        """Every n-th slice."""
        axis = axis_of(self.axis, len(tensor.shape))
        groups, rest = divmod(tensor.shape[axis], self.parts)
        if rest:
            raise ValueError(f"axis {axis} of {tensor.shape[axis]} is not {self.parts} equal parts")
        return _deinterleaved(tensor, axis, groups, (1,) * self.parts)


def _interleaved(
    tensors: tuple[Traced, ...], axis: int, groups: int, sizes: tuple[int, ...]
) -> Traced:
    """One tensor whose every group along an axis has ``sizes[i]`` slices of tensor i."""
    grouped: list[Traced] = []
    for i, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        shape = tensor.shape
        if axis >= len(shape) or shape[axis] != size * groups:
            raise ValueError(f"part {i} has shape {list(shape)}, not {groups} groups of {size}")
        grouped.append(reshaped(tensor, (*shape[:axis], groups, size, *shape[axis + 1 :])))
    whole = join(tuple(grouped), axis + 1, sizes)
    merged = groups * sum(sizes)
    return reshaped(whole, (*whole.shape[:axis], merged, *whole.shape[axis + 2 :]))


def _deinterleaved(
    tensor: Traced, axis: int, groups: int, sizes: tuple[int, ...]
) -> tuple[Traced, ...]:
    """The inverse of `_interleaved`: tensor i from ``sizes[i]`` slices of every group."""
    before, after = tensor.shape[:axis], tensor.shape[axis + 1 :]
    grouped = reshaped(tensor, (*before, groups, sum(sizes), *after))
    return tuple(
        reshaped(piece, (*before, groups * size, *after))
        for piece, size in zip(separate(grouped, axis + 1, sizes), sizes, strict=True)
    )


class Interleave(_Join, _Turns, frozen=True):
    """Take one slice of each tensor in turn along an axis; all have the same shape.

    Example:
        >>> Interleave(2, axis=-1).inverse()
        Deinterleave(parts=2, axis=-1)
    """

    name: ClassVar[str] = "interleave"

    def inverse(self) -> Deinterleave:
        """Take them apart."""
        return Deinterleave(self.parts, self.axis)


class Deinterleave(_Separate, _Turns, frozen=True):
    """Every n-th slice along an axis goes into the same part.

    Example:
        >>> Deinterleave(2).inverse()
        Interleave(parts=2, axis=0)
    """

    name: ClassVar[str] = "deinterleave"

    def inverse(self) -> Interleave:
        """Interleave them again."""
        return Interleave(self.parts, self.axis)


class _GroupedTurns(_PartsOperation, frozen=True):
    """Of every group some slices of each part in turn along an axis."""

    sizes: tuple[int, ...]
    """How many slices of each part are in one group."""
    groups: int
    """How many groups."""
    axis: int = 0
    """The axis along which they alternate."""

    def validate(self) -> None:
        """There are sizes."""
        _positive(self.sizes)
        _some(self.groups, "groups")

    def count(self) -> int:
        """As many as sizes."""
        return len(self.sizes)

    def joined(self, tensors: tuple[Traced, ...]) -> Traced:
        """The tensors interleaved by groups."""
        axis = axis_of(self.axis, len(tensors[0].shape))
        return _interleaved(tensors, axis, self.groups, self.sizes)

    def separated(self, tensor: Traced) -> tuple[Traced, ...]:
        """The slices of each part, of all groups."""
        axis = axis_of(self.axis, len(tensor.shape))
        size, wanted = tensor.shape[axis], self.groups * sum(self.sizes)
        if size != wanted:
            raise ValueError(
                f"axis {axis} has {size}, not {self.groups} groups of {sum(self.sizes)}"
            )
        return _deinterleaved(tensor, axis, self.groups, self.sizes)


class GroupedInterleave(_Join, _GroupedTurns, frozen=True):
    """Interleave by groups: of every group the slices of each tensor in turn.

    Megatron's qkv: ``GroupedInterleave((queries, width, width), groups=kv_heads)``, where
    the first tensor has ``kv_heads * queries`` slices.

    Example:
        >>> GroupedInterleave((4, 1, 1), groups=8).inverse()
        GroupedDeinterleave(sizes=(4, 1, 1), groups=8, axis=0)
    """

    name: ClassVar[str] = "grouped_interleave"

    def inverse(self) -> GroupedDeinterleave:
        """Take them apart."""
        return GroupedDeinterleave(self.sizes, self.groups, self.axis)


class GroupedDeinterleave(_Separate, _GroupedTurns, frozen=True):
    """The inverse of `GroupedInterleave`: of every group some slices go into each part.

    Example:
        >>> GroupedDeinterleave((4, 1, 1), groups=8).inverse()
        GroupedInterleave(sizes=(4, 1, 1), groups=8, axis=0)
    """

    name: ClassVar[str] = "grouped_deinterleave"

    def inverse(self) -> GroupedInterleave:
        """Interleave them again."""
        return GroupedInterleave(self.sizes, self.groups, self.axis)
