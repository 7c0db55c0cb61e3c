"""Shape and element type of a tensor: all that a mapping needs before data are read."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from xckpt.core.dtypes import DTYPES, item_size


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and element type of a tensor.

    Raises:
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
        object.__setattr__(self, "shape", tuple(self.shape))  # Lists are never equal to tuples.
        if any(size < 0 for size in self.shape):
            raise ValueError(f"a shape has no negative sizes, got {list(self.shape)}")
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
