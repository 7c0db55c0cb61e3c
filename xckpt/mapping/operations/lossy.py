"""Operations that round: cast, scale, add. Their bounds are stated, and callers must allow them."""

from __future__ import annotations

from math import frexp
from typing import Any, ClassVar, cast

import ml_dtypes
import numpy as np

from xckpt.core.dtypes import DTYPES, numpy_dtype
from xckpt.mapping.operations.base import Exactness, TensorOperation
from xckpt.mapping.strided_copy import Arithmetic
from xckpt.mapping.traced import Trace, Traced, aliased, computed

ONE_ZERO = ("fnu", "fnuz")
"""How the names of floating-point types end that have no negative zero."""


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
        """The factor is a number that one can divide by."""
        if not np.isfinite(self.by) or self.by == 0:
            raise ValueError(f"nothing comes back from a scale by {self.by}")

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
        """The number is one."""
        if not np.isfinite(self.number):
            raise ValueError(f"nothing comes back from adding {self.number}")

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


def is_floating(dtype: str) -> bool:
    """Whether elements of this type are floating-point numbers, real or complex.

    Example:
        >>> is_floating("float8_e4m3fn"), is_floating("int4")
        (True, False)
    """
    return dtype.startswith(("float", "bfloat", "complex"))


def is_exact_cast(before: str, after: str) -> bool:
    """Whether every value of a type, NaN apart, is a value of another type.

    Example:
        >>> is_exact_cast("bfloat16", "float32"), is_exact_cast("float16", "bfloat16")
        (True, False)
        >>> is_exact_cast("int8", "float16"), is_exact_cast("int32", "float32")
        (True, False)
    """
    if before == after:
        return True
    if before == "bool":
        return after != "float8_e8m0fnu"
    if after == "bool" or (before.startswith("complex") and not after.startswith("complex")):
        return False
    if is_floating(before) and after.endswith(ONE_ZERO) and not before.endswith(ONE_ZERO):
        return False
    low, high, digits, smallest = _reach(before)
    to_low, to_high, to_digits, to_smallest = _reach(after)
    return low >= to_low and high <= to_high and digits <= to_digits and smallest >= to_smallest


def _reach(dtype: str) -> tuple[float, float, int, float]:
    """Least and greatest value, significant binary digits, least positive value of a type."""
    real = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    kind = numpy_dtype(real)
    if is_floating(dtype):
        floats = cast("Any", ml_dtypes.finfo(kind))  # of a class of NumPy's or of ml_dtypes
        least = float(floats.smallest_subnormal)
        return float(floats.min), float(floats.max), int(floats.nmant) + 1, least
    ints = ml_dtypes.iinfo(kind)
    return ints.min, ints.max, max(-ints.min, ints.max).bit_length() - (ints.min < 0), 1.0


def cast_bound(after: str) -> str:
    """How near a value stays that is cast to a type and back."""
    if is_floating(after):
        return f"{roundings(after, 1)}, where it is in range"
    return "the whole number toward zero, where it is in range"


def roundings(dtype: str, count: int) -> str:
    """The relative error of ``count`` roundings to a type."""
    digits = _reach(dtype)[2]
    return f"a relative {count} x 2^-{digits}"
