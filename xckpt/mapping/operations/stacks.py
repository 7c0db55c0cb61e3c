"""Operations between many tensors of one rule and one tensor with a dimension for them."""

from __future__ import annotations

from typing import ClassVar

from xckpt.mapping.bundle import Bundle, Slot, Trace
from xckpt.mapping.operations.base import Operation, axis_of
from xckpt.mapping.operations.parts import join, separate
from xckpt.mapping.traced import Traced, reshaped


class _OfIndex(Operation, frozen=True):
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
        return join(thin, axis, (1,) * len(thin))

    def inverse(self) -> Unstack:
        """One tensor for each value again."""
        return Unstack(self.index, self.axis)


class Unstack(_OfIndex, frozen=True):
    """Make one tensor for each value of an index of a dimension, which goes.

    The index stands in the target's names and not in the source's.

    Example:
        >>> Unstack("expert", axis=1).inverse()
        Stack(index='expert', axis=1)
    """

    name: ClassVar[str] = "unstack"

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
                    f"axis {axis} has {size}, and {self.index} has {len(values)} values"
                )
            shape = (*tensor.shape[:axis], *tensor.shape[axis + 1 :])
            for value, thin in zip(values, separate(tensor, axis, (1,) * size), strict=True):
                tensors[(*key, value)] = reshaped(thin, shape)
        return Slot((*slot.indices, self.index), tensors)

    def inverse(self) -> Stack:
        """One tensor of them again."""
        return Stack(self.index, self.axis)
