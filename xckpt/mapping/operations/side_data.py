"""Operations whose inverse needs data that the rule states: tie, pad, constant, and the inverses.

What they remove is asserted: tied tensors must be equal, a pad or a dropped tensor must have the
stated value, bit for bit. A state that passes is restored exactly by the inverse.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from xckpt.mapping.operations.base import Exactness, Paired, TensorOperation, axis_of
from xckpt.mapping.spec import TensorSpec
from xckpt.mapping.trace import Trace
from xckpt.mapping.traced import Bundle, Slot, Traced, aliased, concatenated, constant, part

Number = bool | int | float
UNCHECKED = "unchecked"


class _SharedNames(Paired, frozen=True):
    """Base of operations between one tensor and several names of it."""

    usual: ClassVar[Exactness] = "side data"

    count: int
    """How many names."""

    def validate(self) -> None:
        """There is a name."""
        if self.count < 1:
            raise ValueError(f"no tensor has {self.count} names")


class Tie(_SharedNames, frozen=True):
    """Give one tensor several names.

    Example:
        >>> Tie(2).inverse()
        Untie(count=2)
    """

    name: ClassVar[str] = "tie"
    opposite: ClassVar[str] = "untie"

    def arity(self) -> tuple[int, int]:
        """One in, `count` out."""
        return 1, self.count

    def apply(self, bundle: Bundle, trace: Trace) -> Bundle:
        """The slot, and aliases of it."""
        (slot,) = bundle
        return (slot, *[slot.map(aliased)] * (self.count - 1))


class Untie(_SharedNames, frozen=True):
    """Keep one of several tensors that must be equal; optional ones may be absent.

    Example:
        >>> Untie(3).inverse()
        Tie(count=3)
    """

    name: ClassVar[str] = "untie"
    opposite: ClassVar[str] = "tie"

    def arity(self) -> tuple[int, int]:
        """`count` in, one out."""
        return self.count, 1

    def apply(self, bundle: Bundle, trace: Trace) -> Bundle:
        """The first slot that is there; the others must equal it."""
        present = [slot for slot in bundle if slot.tensors]
        if not present:
            raise ValueError("none of the tied tensors is there")
        first, *others = present
        for slot in others:
            for key, tensor in slot.tensors.items():
                kept = first.tensors[key]
                if tensor.spec != kept.spec:
                    raise ValueError(f"tied tensors are {kept.spec} and {tensor.spec}")
                trace.must_equal(tensor, kept, "tied tensors must be equal")
        return (first,)


class _Padding(Paired, TensorOperation, frozen=True):
    """Base of operations that add or remove the last slices along an axis, all of one value."""

    usual: ClassVar[Exactness] = "side data"

    size: int
    """How many slices the pad has."""
    axis: int = 0
    """The axis that grows or shrinks."""
    value: Number = 0
    """The value of the pad."""

    def validate(self) -> None:
        """The pad has a size."""
        if self.size < 0:
            raise ValueError(f"a pad has no size {self.size}")


class Pad(_Padding, frozen=True):
    """Append slices of one value along an axis.

    Example:
        >>> Pad(128, axis=0).inverse()
        Strip(size=128, axis=0, value=0)
    """

    name: ClassVar[str] = "pad"
    opposite: ClassVar[str] = "strip"

    def on(self, tensor: Traced, trace: Trace) -> Traced:
        """The padded tensor."""
        axis = axis_of(self.axis, len(tensor.shape))
        shape = (*tensor.shape[:axis], self.size, *tensor.shape[axis + 1 :])
        pad = constant(TensorSpec(shape, tensor.dtype), self.value)
        return concatenated([tensor, pad], axis)


class Strip(_Padding, frozen=True):
    """Remove the last slices along an axis, which must have one value.

    Example:
        >>> Strip(128, axis=1).inverse()
        Pad(size=128, axis=1, value=0)
    """

    name: ClassVar[str] = "strip"
    opposite: ClassVar[str] = "pad"

    def on(self, tensor: Traced, trace: Trace) -> Traced:
        """The tensor without its pad."""
        axis = axis_of(self.axis, len(tensor.shape))
        kept = tensor.shape[axis] - self.size
        if kept < 0:
            raise ValueError(
                f"axis {axis} has size {tensor.shape[axis]}, less than a pad of {self.size}"
            )
        pad = part(tensor, axis, kept, tensor.shape[axis])
        trace.must_equal(pad, constant(pad.spec, self.value), f"the pad must be {self.value}")
        return part(tensor, axis, 0, kept)


class _Stated(Paired, frozen=True):
    """Base of operations on a tensor whose content the rule states."""

    usual: ClassVar[Exactness] = "side data"

    value: Number | Literal["unchecked"]
    """The value of its elements; "unchecked" to drop it without a check: it cannot be made."""
    shape: tuple[int, ...] | None = None
    """Its shape; if None, the target's, or any shape of the source."""
    dtype: str | None = None
    """Its element type; if None, likewise."""
    arange: int | None = None
    """An axis along which the value grows by one a step."""

    def counting_axis(self, rank: int) -> int | None:
        """`arange`, counted from 0, of a tensor of ``rank`` axes.

        Raises:
            ValueError: there is no such axis.
        """
        return None if self.arange is None else axis_of(self.arange, rank)


class Constant(_Stated, frozen=True):
    """Make a tensor that no source has.

    Shape and dtype may be left to the target, where the target is known.

    Example:
        >>> Constant(0, (1, 512), "int64", arange=1).inverse()
        Drop(value=0, shape=(1, 512), dtype='int64', arange=1)
    """

    name: ClassVar[str] = "constant"
    opposite: ClassVar[str] = "drop"

    def arity(self) -> tuple[int, int]:
        """Nothing in, one out."""
        return 0, 1

    def apply(self, bundle: Bundle, trace: Trace) -> Bundle:
        """A slot with the constant."""
        if self.value == UNCHECKED:
            raise ValueError("it was dropped unchecked: its value is not known")
        wanted = trace.wanted
        shape = self.shape if self.shape is not None or wanted is None else wanted.shape
        dtype = self.dtype if self.dtype is not None or wanted is None else wanted.dtype
        if shape is None or dtype is None:
            raise ValueError("state its shape and dtype, or the target that wants it")
        arange = self.counting_axis(len(shape))
        return (Slot.of(constant(TensorSpec(shape, dtype), self.value, arange)),)


class Drop(_Stated, frozen=True):
    """Leave a tensor out, which must have the stated value.

    Example:
        >>> Drop(0, arange=1).inverse()
        Constant(value=0, shape=None, dtype=None, arange=1)
        >>> Drop("unchecked").exactness
        'side data'
    """

    name: ClassVar[str] = "drop"
    opposite: ClassVar[str] = "constant"

    def arity(self) -> tuple[int, int]:
        """One in, nothing out."""
        return 1, 0

    def apply(self, bundle: Bundle, trace: Trace) -> Bundle:
        """No slots: what is dropped is checked, or noted as unchecked."""
        for tensor in bundle[0].tensors.values():
            if self.shape not in (None, tensor.shape) or self.dtype not in (None, tensor.dtype):
                raise ValueError(f"it is {tensor.spec}")
            if self.value == UNCHECKED:
                trace.dropped.append(tensor)
                continue
            arange = self.counting_axis(len(tensor.shape))
            words = f"{self.value}" if arange is None else f"{self.value}, and count up from there"
            expected = constant(tensor.spec, self.value, arange)
            trace.must_equal(tensor, expected, f"what is dropped must be {words}")
        return ()
