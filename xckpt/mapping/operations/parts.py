"""Operations that make one tensor of several, or several of one.

They come in pairs of a `_Join` and a `_Separate`. What a pair shares, its arguments and how the
parts lie in the whole, is one base: `_Row`, `_Turns` and `_GroupedTurns` lay them along an axis
that they have, in groups with some slices of each part. `Stack` and `Unstack` do it for the tensors
of one rule, along an axis of their own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar

from xckpt.mapping.operations.base import Paired, axis_of
from xckpt.mapping.trace import Trace
from xckpt.mapping.traced import Bundle, Slot, Traced, concatenated, one_for_each, part, reshaped


class _Parts(Paired, frozen=True):
    """How the parts of a tensor lie in it."""

    @abstractmethod
    def layout(self) -> tuple[tuple[int, ...], int | None, int]:
        """Slices of each part in a group; how many groups, None for any number; the axis."""


class _Join(_Parts, frozen=True):
    """Base of what makes one tensor of several."""

    def arity(self) -> tuple[int, int]:
        """All parts in, one out."""
        return len(self.layout()[0]), 1

    def apply(self, bundle: Bundle, trace: Trace) -> Bundle:
        """One slot, of the tensors joined for each value of the indices."""
        joined = {key: _in_turn(tensors, *self.layout()) for key, tensors in one_for_each(bundle)}
        return (Slot(bundle[0].indices, joined),)


class _Separate(_Parts, frozen=True):
    """Base of what makes several tensors of one."""

    def arity(self) -> tuple[int, int]:
        """One in, all parts out."""
        return 1, len(self.layout()[0])

    def apply(self, bundle: Bundle, trace: Trace) -> Bundle:
        """A slot for each part."""
        (slot,) = bundle
        parts = {key: _apart(tensor, *self.layout()) for key, tensor in slot.tensors.items()}
        return tuple(
            Slot(slot.indices, {key: of_key[number] for key, of_key in parts.items()})
            for number in range(self.arity()[1])
        )


def _in_turn(
    tensors: tuple[Traced, ...], sizes: tuple[int, ...], groups: int | None, axis: int
) -> Traced:
    """One tensor whose every group along an axis has ``sizes[i]`` slices of tensor i."""
    axis = axis_of(axis, len(tensors[0].shape))
    if groups == 1:
        return _joined(tensors, sizes, axis)
    groups = tensors[0].shape[axis] // sizes[0] if groups is None else groups
    grouped: list[Traced] = []
    for i, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        shape = tensor.shape
        if axis >= len(shape) or shape[axis] != size * groups:
            raise ValueError(f"part {i} has shape {list(shape)}, not {groups} groups of {size}")
        grouped.append(reshaped(tensor, (*shape[:axis], groups, size, *shape[axis + 1 :])))
    whole = _joined(grouped, sizes, axis + 1)
    merged = groups * sum(sizes)
    return reshaped(whole, (*whole.shape[:axis], merged, *whole.shape[axis + 2 :]))


def _apart(
    tensor: Traced, sizes: tuple[int, ...], groups: int | None, axis: int
) -> tuple[Traced, ...]:
    """The inverse of `_in_turn`: tensor i from ``sizes[i]`` slices of every group."""
    axis = axis_of(axis, len(tensor.shape))
    if groups == 1:
        return _separated(tensor, sizes, axis)
    size, turn = tensor.shape[axis], sum(sizes)
    words = f"{turn} equal parts" if groups is None else f"{groups} groups of {turn}"
    groups = size // turn if groups is None else groups
    if size != groups * turn:
        raise ValueError(f"axis {axis} has size {size}, not {words}")
    before, after = tensor.shape[:axis], tensor.shape[axis + 1 :]
    grouped = reshaped(tensor, (*before, groups, turn, *after))
    return tuple(
        reshaped(piece, (*before, groups * size, *after))
        for piece, size in zip(_separated(grouped, sizes, axis + 1), sizes, strict=True)
    )


def _joined(tensors: Sequence[Traced], sizes: tuple[int, ...], axis: int) -> Traced:
    """Tensors in a row, if they fit."""
    first = tensors[0]
    for i, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        if tensor.dtype != first.dtype:
            raise ValueError(f"part {i} is {tensor.dtype}, but the first is {first.dtype}")
        wanted = (*first.shape[:axis], size, *first.shape[axis + 1 :])
        if tensor.shape != wanted:
            raise ValueError(f"part {i} has shape {list(tensor.shape)}, not {list(wanted)}")
    return concatenated(tensors, axis)


def _separated(tensor: Traced, sizes: tuple[int, ...], axis: int) -> tuple[Traced, ...]:
    """The parts of a tensor, of these sizes."""
    if sum(sizes) != tensor.shape[axis]:
        raise ValueError(
            f"axis {axis} has size {tensor.shape[axis]}, not {' + '.join(map(str, sizes))}"
        )
    ends = list(accumulate(sizes))
    return tuple(part(tensor, axis, end - n, end) for end, n in zip(ends, sizes, strict=True))


def _validate(sizes: tuple[int, ...], groups: int = 1) -> None:
    if not sizes or min(sizes) < 0:
        raise ValueError(f"{list(sizes)} are not sizes of parts")
    if groups < 1:
        raise ValueError(f"there are no {groups} groups")


class _Row(_Parts, frozen=True):
    """One part after the other along an axis."""

    sizes: tuple[int, ...]
    """Size of each part along the axis."""
    axis: int = 0
    """The axis along which they lie."""

    def validate(self) -> None:
        """There are sizes."""
        _validate(self.sizes)

    def layout(self) -> tuple[tuple[int, ...], int | None, int]:
        """One group."""
        return self.sizes, 1, self.axis


class Concatenate(_Join, _Row, frozen=True):
    """One tensor after the other along an axis.

    Example:
        >>> Concatenate((768, 768, 768), axis=1).inverse()
        Split(sizes=(768, 768, 768), axis=1)
    """

    name: ClassVar[str] = "concatenate"
    opposite: ClassVar[str] = "split"


class Split(_Separate, _Row, frozen=True):
    """Cut a tensor along an axis into parts of stated sizes.

    Example:
        >>> Split((32, 8, 8)).inverse()
        Concatenate(sizes=(32, 8, 8), axis=0)
    """

    name: ClassVar[str] = "split"
    opposite: ClassVar[str] = "concatenate"


class _Turns(_Parts, frozen=True):
    """One slice of each part in turn along an axis; all parts have the same shape."""

    parts: int
    """How many parts."""
    axis: int = 0
    """The axis along which they alternate."""

    def validate(self) -> None:
        """There are parts."""
        if self.parts < 1:
            raise ValueError(f"there are no {self.parts} parts")

    def layout(self) -> tuple[tuple[int, ...], int | None, int]:
        """Groups of one slice of each part."""
        return (1,) * self.parts, None, self.axis


class Interleave(_Join, _Turns, frozen=True):
    """Take one slice of each tensor in turn along an axis; all have the same shape.

    Example:
        >>> Interleave(2, axis=-1).inverse()
        Deinterleave(parts=2, axis=-1)
    """

    name: ClassVar[str] = "interleave"
    opposite: ClassVar[str] = "deinterleave"


class Deinterleave(_Separate, _Turns, frozen=True):
    """Every n-th slice along an axis goes into the same part.

    Example:
        >>> Deinterleave(2).inverse()
        Interleave(parts=2, axis=0)
    """

    name: ClassVar[str] = "deinterleave"
    opposite: ClassVar[str] = "interleave"


class _GroupedTurns(_Parts, frozen=True):
    """Groups along an axis, each with some slices of every part in turn."""

    sizes: tuple[int, ...]
    """How many slices of each part are in one group."""
    groups: int
    """How many groups."""
    axis: int = 0
    """The axis along which they alternate."""

    def validate(self) -> None:
        """There are sizes and groups."""
        _validate(self.sizes, self.groups)

    def layout(self) -> tuple[tuple[int, ...], int | None, int]:
        """As stated."""
        return self.sizes, self.groups, self.axis


class GroupedInterleave(_Join, _GroupedTurns, frozen=True):
    """Interleave by groups: of every group the slices of each tensor in turn.

    Megatron's qkv: ``GroupedInterleave((queries, width, width), groups=kv_heads)``, where
    the first tensor has ``kv_heads * queries`` slices.

    Example:
        >>> GroupedInterleave((4, 1, 1), groups=8).inverse()
        GroupedDeinterleave(sizes=(4, 1, 1), groups=8, axis=0)
    """

    name: ClassVar[str] = "grouped_interleave"
    opposite: ClassVar[str] = "grouped_deinterleave"


class GroupedDeinterleave(_Separate, _GroupedTurns, frozen=True):
    """The inverse of `GroupedInterleave`: of every group some slices go into each part.

    Example:
        >>> GroupedDeinterleave((4, 1, 1), groups=8).inverse()
        GroupedInterleave(sizes=(4, 1, 1), groups=8, axis=0)
    """

    name: ClassVar[str] = "grouped_deinterleave"
    opposite: ClassVar[str] = "grouped_interleave"


class _OfIndex(Paired, frozen=True):
    """Base of what has a dimension for an index, and tensors for its values."""

    index: str
    """An index that stands in the names of one side of the rule alone."""
    axis: int = 0
    """The dimension of the one tensor."""

    def arity(self) -> None:
        """None: it acts on any number of slots."""


class Stack(_OfIndex, frozen=True):
    """Make the tensors of all values of an index one, with a new dimension for the index.

    The index stands in the source's names and not in the target's.

    Example:
        >>> Stack("layer").inverse()
        Unstack(index='layer', axis=0)
    """

    name: ClassVar[str] = "stack"
    opposite: ClassVar[str] = "unstack"

    def apply(self, bundle: Bundle, trace: Trace) -> Bundle:
        """Each slot without the index."""
        return tuple(self._stacked(slot) for slot in bundle)

    def _stacked(self, slot: Slot) -> Slot:
        if self.index not in slot.indices:
            raise ValueError(f"there are no tensors for each {self.index!r}")
        place = slot.indices.index(self.index)
        rows: dict[tuple[int, ...], dict[int, Traced]] = {}
        for key, tensor in slot.tensors.items():
            rows.setdefault((*key[:place], *key[place + 1 :]), {})[key[place]] = tensor
        indices = (*slot.indices[:place], *slot.indices[place + 1 :])
        return Slot(indices, {key: self._one(row) for key, row in rows.items()})

    def _one(self, row: dict[int, Traced]) -> Traced:
        tensors = [row[value] for value in sorted(row)]
        for value, tensor in sorted(row.items()):
            if tensor.spec != tensors[0].spec:
                raise ValueError(
                    f"{self.index} {value} is {tensor.spec}, {self.index} {min(row)} is "
                    f"{tensors[0].spec}"
                )
        shape = tensors[0].shape
        axis = axis_of(self.axis, len(shape) + 1)
        thin = tuple(reshaped(t, (*shape[:axis], 1, *shape[axis:])) for t in tensors)
        return _joined(thin, (1,) * len(thin), axis)


class Unstack(_OfIndex, frozen=True):
    """Make one tensor for each value of an index of a dimension, which goes.

    The index stands in the target's names and not in the source's.

    Example:
        >>> Unstack("expert", axis=1).inverse()
        Stack(index='expert', axis=1)
    """

    name: ClassVar[str] = "unstack"
    opposite: ClassVar[str] = "stack"

    def apply(self, bundle: Bundle, trace: Trace) -> Bundle:
        """Each slot with the index."""
        return tuple(self._unstacked(slot, trace) for slot in bundle)

    def _unstacked(self, slot: Slot, trace: Trace) -> Slot:
        tensors: dict[tuple[int, ...], Traced] = {}
        for key, tensor in slot.tensors.items():
            axis = axis_of(self.axis, len(tensor.shape))
            size = tensor.shape[axis]
            values = trace.ranges.get(self.index, range(size))
            if len(values) != size:
                raise ValueError(
                    f"axis {axis} has size {size}, but {self.index} has {len(values)} values"
                )
            shape = (*tensor.shape[:axis], *tensor.shape[axis + 1 :])
            for value, thin in zip(values, _separated(tensor, (1,) * size, axis), strict=True):
                tensors[(*key, value)] = reshaped(thin, shape)
        return Slot((*slot.indices, self.index), tensors)
