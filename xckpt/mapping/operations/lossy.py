"""Operations that round: cast, scale, add. Their bounds are stated, and callers must allow them."""

from __future__ import annotations

from math import frexp
from typing import ClassVar

import numpy as np

from xckpt.core.dtypes import DTYPES
from xckpt.core.targets.casting import is_exact_cast, is_floating, reach
from xckpt.mapping.operations.base import Exactness, TensorOperation
from xckpt.mapping.strided_copy import Arithmetic
from xckpt.mapping.trace import Trace
from xckpt.mapping.traced import Traced, aliased, computed


class Cast(TensorOperation, frozen=True):
    """Convert elements to another type; exact where the new type has every value of the old one.

    Example:
        >>> Cast(("bfloat16", "float32")).inverse()
        Cast(dtypes=('float32', 'bfloat16'), exact=False)
    """

    name: ClassVar[str] = "cast"
    usual: ClassVar[Exactness] = "lossy"

    dtypes: tuple[str, str]
    """Element type before and after."""
    exact: bool = False
    """Whether every element must survive the way there and back, which is asserted."""

    @property
    def exactness(self) -> Exactness:
        """Exact if the new type has all values, with side data if that is asserted, else lossy."""
        if is_exact_cast(*self.dtypes):
            return "bijection"
        return "side data" if self.exact else "lossy"

    def validate(self) -> None:
        """The format has both types."""
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise ValueError(f"no dtype is called {dtype!r}")

    def on(self, tensor: Traced, trace: Trace) -> Traced:
        """The tensor of the new type."""
        before, after = self.dtypes
        if tensor.dtype != before:
            raise ValueError(f"it is {tensor.dtype}, not {before}")
        result = computed(tensor, Arithmetic("cast", before, after))
        if self.exactness == "side data":
            again = computed(result, Arithmetic("cast", after, before))
            words = f"each element must come back from {after} as the same {before}"
            trace.must_equal(aliased(tensor), again, words)
        elif self.exactness == "lossy":
            trace.loses(str(self), f"a value comes back to {cast_bound(after)}")
        return result

    def inverse(self) -> Cast:
        """The cast back."""
        return Cast((self.dtypes[1], self.dtypes[0]), self.exact)


class Scale(TensorOperation, frozen=True):
    """Multiply by a number, or divide by it.

    Example:
        >>> Scale(22.627417, divide=True).inverse()
        Scale(by=22.627417, divide=False)
    """

    name: ClassVar[str] = "scale"
    usual: ClassVar[Exactness] = "lossy"

    by: float
    """The factor."""
    divide: bool = False
    """Divide by it instead."""

    def validate(self) -> None:
        """The factor is finite and not 0: the inverse divides by it."""
        if not np.isfinite(self.by) or self.by == 0:
            raise ValueError(f"a scale by {self.by} cannot be undone")

    def on(self, tensor: Traced, trace: Trace) -> Traced:
        """The scaled tensor."""
        _floating(tensor)
        bound = f"a value comes back to {roundings(tensor.dtype, 2)}"
        if abs(frexp(self.by)[0]) == 0.5:
            bound = "exact, but for values that overflow or underflow"
        trace.loses(str(self), bound)
        step = "divide" if self.divide else "scale"
        return computed(tensor, Arithmetic(step, tensor.dtype, tensor.dtype, self.by))

    def inverse(self) -> Scale:
        """Divide where this multiplies, and the reverse."""
        return Scale(self.by, not self.divide)


class Add(TensorOperation, frozen=True):
    """Add a number.

    Example:
        >>> Add(1.0).inverse()
        Add(number=-1.0)
    """

    name: ClassVar[str] = "add"
    usual: ClassVar[Exactness] = "lossy"

    number: float
    """What is added."""

    def validate(self) -> None:
        """The number is finite."""
        if not np.isfinite(self.number):
            raise ValueError(f"adding {self.number} cannot be undone")

    def on(self, tensor: Traced, trace: Trace) -> Traced:
        """The tensor with the number added."""
        _floating(tensor)
        trace.loses(
            str(self),
            f"a value x comes back to {roundings(tensor.dtype, 1)} of |x + {self.number}|, "
            "and is rounded once more",
        )
        return computed(tensor, Arithmetic("add", tensor.dtype, tensor.dtype, self.number))

    def inverse(self) -> Add:
        """Subtract it."""
        return Add(-self.number)


def _floating(tensor: Traced) -> None:
    if not is_floating(tensor.dtype):
        raise ValueError(f"it is {tensor.dtype}: arithmetic is for floating-point tensors")


def cast_bound(after: str) -> str:
    """How near a value stays that is cast to a type and back, in words.

    Example:
        >>> cast_bound("bfloat16")
        'a relative 1 x 2^-8, where it is in range'
    """
    if is_floating(after):
        return f"{roundings(after, 1)}, where it is in range"
    return "the whole number toward zero, where it is in range"


def roundings(dtype: str, count: int) -> str:
    """The relative error of ``count`` roundings to a type.

    Example:
        >>> roundings("float16", 2)
        'a relative 2 x 2^-11'
    """
    digits = reach(dtype)[2]
    return f"a relative {count} x 2^-{digits}"
