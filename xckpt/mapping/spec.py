"""Shape and element type of a tensor: all that a mapping needs before data are read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from operator import index
from typing import SupportsIndex, cast

from xckpt.core.dtypes import DTYPES, item_size
from xckpt.core.text.arguments import wrong_argument


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and element type of a tensor.

    Raises:
        TypeError: the shape is no sequence of ints, or the dtype no text.
        ValueError: a size is negative, or the format has no such dtype.

    Example:
        >>> spec = TensorSpec((3, 4), "bfloat16")
        >>> spec.elements, spec.nbytes, str(spec)
        (12, 24, 'bfloat16[3, 4]')
    """

    shape: tuple[int, ...]
    """Elements per dimension."""
    dtype: str
    """The format's name of the element type; see `xckpt.core.dtypes`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _shape(self.shape))
        if any(size < 0 for size in self.shape):
            raise ValueError(f"a shape has no negative sizes, got {list(self.shape)}")
        _check_dtype(self.dtype)
        if self.dtype not in DTYPES:
            raise ValueError(f"no dtype is called {self.dtype!r}; there are {', '.join(DTYPES)}")

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.elements * item_size(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def _shape(given: object) -> tuple[int, ...]:
    """A shape as a tuple of Python's ints; lists are never equal to tuples."""
    try:
        return tuple(map(index, cast("Iterable[SupportsIndex]", given)))
    except TypeError:
        raise wrong_argument("TensorSpec", "shape", "a tuple of ints", given) from None


def _check_dtype(given: object) -> None:
    """Refuse a dtype that is no text, such as NumPy's or torch's own: TypeError."""
    if not isinstance(given, str):
        raise wrong_argument("TensorSpec", "dtype", "the format's name of a dtype", given)
