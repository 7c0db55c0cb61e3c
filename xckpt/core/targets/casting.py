"""Casts of elements from one type to another, and what such a cast may not do.

1. `is_exact_cast`: whether each value of one type is a value of another.
2. `spoiled_elements`: which elements a cast has changed by more than rounding: a finite number that
   is infinite or NaN now, one that has wrapped around or been clamped, a number that the new type
   cannot express (NaN to an integer, an infinity where there is none, an imaginary part).
3. `Spoiled` has their count and the first of them; `CastingCopies` gathers those of a whole load.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from threading import Lock
from typing import Any, cast

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import numpy_dtype
from xckpt.core.problem import Problem
from xckpt.errors import TreeMismatchError

ONE_ZERO = ("fnu", "fnuz")
"""Suffix of the names of floating-point types without a negative zero."""

Index = tuple[int, ...]

FINITE_ONLY = ("float4_e2m1fn",)
"""Floating-point types that have neither infinities nor NaN: a cast clamps to the largest."""


def is_floating(dtype: str) -> bool:
    """Whether elements of this type are floating-point numbers, real or complex.

    Example:
        >>> is_floating("float8_e4m3fn"), is_floating("int4")
        (True, False)
    """
    return dtype.startswith(("float", "bfloat", "complex"))


@cache
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
    low, high, digits, smallest = reach(before)
    to_low, to_high, to_digits, to_smallest = reach(after)
    return low >= to_low and high <= to_high and digits <= to_digits and smallest >= to_smallest


def reach(dtype: str) -> tuple[float, float, int, float]:
    """Least and greatest value, significant binary digits, least positive value of a type."""
    real = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    kind = numpy_dtype(real)
    if is_floating(dtype):
        floats = cast("Any", ml_dtypes.finfo(kind))  # of a class of NumPy's or of ml_dtypes
        least = float(floats.smallest_subnormal)
        return float(floats.min), float(floats.max), int(floats.nmant) + 1, least
    ints = ml_dtypes.iinfo(kind)
    return ints.min, ints.max, max(-ints.min, ints.max).bit_length() - (ints.min < 0), 1.0


def holds(dtype: str, number: float) -> bool:
    """Whether a type has a number: a whole one in its range, or where it is a floating-point type
    one that rounding makes of it.

    Example:
        >>> holds("int8", -128), holds("int8", 300), holds("int8", 1.5), holds("float16", 0.1)
        (True, False, False, True)
        >>> holds("float16", 1e6), holds("float32", float("nan")), holds("bool", 2)
        (False, True, False)
    """
    if not is_floating(dtype):
        low, high = (0, 1) if dtype == "bool" else reach(dtype)[:2]
        return low <= number <= high and number % 1 == 0
    if isinstance(number, int) and abs(number) > reach(dtype)[1]:
        return False  # It may be beyond all floating-point numbers.
    wide, kind = np.array([number], np.float64), numpy_dtype(dtype)
    with np.errstate(all="ignore"):
        return spoiled_elements(wide, castable(wide, kind).astype(kind)) is None


def counts_to(dtype: str, last: float) -> bool:
    """Whether a type tells a number from the one before it; if so, all nearer to 0, too.

    Example:
        >>> counts_to("float16", 2048), counts_to("float16", 2049), counts_to("int8", 127)
        (True, False, True)
    """
    if not is_floating(dtype):
        return True
    kind = numpy_dtype(dtype)
    before, after = castable(np.array([last - 1, last], np.float64), kind).astype(kind)
    return float(after) - float(before) == 1


def castable(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Elements in a type that NumPy casts to another: as they are, mostly.

    ml_dtypes has no cast between some small types; float32 has all of their values.

    Example:
        >>> castable(np.array([1, -2], "int4"), np.dtype("int2")).dtype
        dtype('float32')
    """
    return values if np.can_cast(values.dtype, dtype, "unsafe") else values.astype(np.float32)


def spoiled_elements(
    before: NDArray[np.generic], after: NDArray[np.generic]
) -> NDArray[np.bool_] | None:
    """Which elements a cast or a computation has changed by more than rounding.

    Args:
        before: elements of one type.
        after: what became of them, in the same shape.

    Returns:
        A mask of the same shape; None where it would have no True in it.

    Example:
        >>> numbers = np.array([1.5, 1e6, np.inf], "float32")
        >>> with np.errstate(over="ignore"):
        ...     spoiled_elements(numbers, numbers.astype("float16"))
        array([False,  True, False])
        >>> spoiled_elements(np.array([255, 256]), np.array([255, 0], "uint8"))
        array([False,  True])
        >>> spoiled_elements(np.array([0, 1, 2]), np.array([False, True, True]))
        array([False, False,  True])
        >>> spoiled_elements(np.array([1, 2]), np.array([1, 2], "int8"))
    """
    name = after.dtype.name
    if before.dtype.kind == "c" and after.dtype.kind != "c":
        if (imaginary := np.imag(before) != 0).any():
            return imaginary
        before = np.real(before)
    if not before.size:
        return None
    # ml_dtypes widens what it looks at, and the processor reports each signalling NaN.
    with np.errstate(invalid="ignore"):
        if name == "bool":  # True for all but zero; only 1 is what it stands for
            spoiled = np.trunc(before.astype(np.float64)) != after
        else:
            bounded = _is_bounded(name)
            spoiled = _outside(before, name) if bounded else _turned_infinite(before, after)
    return spoiled if spoiled is not None and spoiled.any() else None


def _is_bounded(dtype: str) -> bool:
    """Whether a type has finite numbers only."""
    return not is_floating(dtype) or dtype in FINITE_ONLY


def _turned_infinite(
    before: NDArray[np.generic], after: NDArray[np.generic]
) -> NDArray[np.bool_] | None:
    finite = np.isfinite(after)
    return (
        None if finite.all() else ~finite & ~(np.isnan(before) | np.isinf(before) & np.isinf(after))
    )


def _outside(before: NDArray[Any], dtype: str) -> NDArray[np.bool_] | None:
    """Elements that no rounding brings to a value of a type without infinities."""
    low, high, *_ = reach(dtype)
    if is_floating(before.dtype.name):
        # A fraction is cut off; float64 has the borders of all integers, which are powers of 2.
        numbers = np.trunc(before.astype(np.float64))
        return ~((numbers >= float(low)) & (numbers < float(high + 1)))
    if before.dtype.kind not in "biu":
        before = before.astype(np.int8)  # int2 and int4
    least, most = int(before.min()), int(before.max())
    if least >= low and most <= high:
        return None
    # Borders beyond the type of the elements would not compare.
    below = before < low if least < low else np.zeros(before.shape, np.bool_)
    return below | (before > high) if most > high else below


@dataclass(frozen=True, slots=True)
class Spoiled:
    """The elements that a cast has changed by more than rounding."""

    count: int
    first: Index
    """Index of the first of them."""
    value: object
    """What it was, as a Python number."""
    dtype: str
    """The type that does not hold it."""

    @classmethod
    def of(cls, before: NDArray[np.generic], after: NDArray[np.generic]) -> Spoiled | None:
        """Those of one array; None if there are none.

        Args:
            before: elements of one type.
            after: what became of them.

        Example:
            >>> numbers = np.array([[1.0, 1e6], [-1e6, 0.0]], "float32")
            >>> with np.errstate(over="ignore"):
            ...     print(Spoiled.of(numbers, numbers.astype("float16")))
            2 elements do not fit into float16, the first at (0, 1): 1000000.0
        """
        spoiled = spoiled_elements(before, after)
        if spoiled is None:
            return None
        index = np.unravel_index(int(spoiled.argmax()), spoiled.shape)
        first = tuple(int(each) for each in index)
        count = int(np.count_nonzero(spoiled))
        return cls(count, first, before[first].item(), after.dtype.name)

    def moved(self, origin: Index) -> Spoiled:
        """The same, counted from another place."""
        return replace(self, first=tuple(a + b for a, b in zip(origin, self.first, strict=True)))

    def joined(self, other: Spoiled | None) -> Spoiled:
        """These and others of the same leaf."""
        if other is None:
            return self
        earlier = min(self, other, key=lambda each: each.first)
        return replace(earlier, count=self.count + other.count)

    def __str__(self) -> str:
        what = "1 element does" if self.count == 1 else f"{self.count:,} elements do"
        return f"{what} not fit into {self.dtype}, the first at {self.first}: {self.value}"


class CastingCopies:
    """Copies into targets of other types; what they spoil is one error at the end.

    Example:
        >>> copies = CastingCopies()
        >>> copies.copy("w", np.zeros(2, "int8"), np.array([1, 300]), (10,))
        >>> copies.check()
        Traceback (most recent call last):
            ...
        xckpt.errors.TreeMismatchError: a cast changes numbers by more than rounding
          - w: 1 element does not fit into int8, the first at (11,): 300; load it as it was saved...
    """

    def __init__(self) -> None:
        self._spoiled: dict[str, Spoiled] = {}
        self._lock = Lock()

    def copy(
        self, leaf: str, target: NDArray[np.generic], data: NDArray[np.generic], origin: Index
    ) -> None:
        """Cast elements into a target; called from several threads.

        Args:
            leaf: the leaf's name.
            target: where they go.
            data: the elements.
            origin: index of the first of them in the leaf.
        """
        with np.errstate(all="ignore"):
            np.copyto(target, castable(data, target.dtype), casting="unsafe")
        if is_exact_cast(data.dtype.name, target.dtype.name):
            return
        spoiled = Spoiled.of(data, target)
        if spoiled is not None:
            with self._lock:
                self._spoiled[leaf] = spoiled.moved(origin).joined(self._spoiled.get(leaf))

    def check(self) -> None:
        """Refuse what was spoiled.

        Raises:
            TreeMismatchError: names each leaf, the count and the first index.
        """
        advice = "load it as it was saved, or into a type that holds it"
        problems = [
            Problem(leaf, kind="value", text=f"{spoiled}; {advice}")
            for leaf, spoiled in sorted(self._spoiled.items())
        ]
        if problems:
            fault = "a cast changes numbers by more than rounding"
            raise TreeMismatchError.listing(fault, problems)
