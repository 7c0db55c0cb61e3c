"""The steps of a mapping that change values: cast, scale, divide, add.

Whatever the element type, a step computes in float32 (in float64 for float64, in the complex type
for a complex one) and rounds once to the type that it states. So a result never depends on where a
tensor was cut, nor on who computed it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import numpy_dtype

StepKind = Literal["cast", "scale", "divide", "add"]

_INVERSES: dict[StepKind, StepKind] = {
    "cast": "cast",
    "scale": "divide",
    "divide": "scale",
    "add": "add",
}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """One step from element type `source` to element type `target`.

    Example:
        >>> step = Arithmetic("scale", "float16", "float16", 3.0)
        >>> step(np.array([1.5, 2.0], "float16"))
        array([4.5, 6. ], dtype=float16)
        >>> step.inverse().operation
        'divide'
    """

    operation: StepKind
    source: str
    """Element type that comes in."""
    target: str
    """Element type that goes out."""
    number: float = 0.0
    """The factor, the divisor or what is added; not used by a cast."""

    def inverse(self) -> Arithmetic:
        """The step back: as near to it as rounding allows."""
        number = -self.number if self.operation == "add" else self.number
        return Arithmetic(_INVERSES[self.operation], self.target, self.source, number)

    def __call__(self, values: NDArray[Any]) -> NDArray[Any]:
        """The step taken on an array of `source` elements; the result is new or is `values`."""
        target = numpy_dtype(self.target)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            if self.operation == "cast":
                return _cast(values, target)
            wide = values.astype(_wide(self.source), copy=False)
            number = wide.dtype.type(self.number)
            if self.operation == "scale":
                return (wide * number).astype(target, copy=False)
            if self.operation == "divide":
                return (wide / number).astype(target, copy=False)
            return (wide + number).astype(target, copy=False)


def _cast(values: NDArray[Any], target: np.dtype[Any]) -> NDArray[Any]:
    if values.dtype.kind == "c" and target.kind != "c":
        values = np.real(values)
    try:
        return values.astype(target, copy=False)
    except TypeError:
        # ml_dtypes has no cast between some small types; float32 has all of their values.
        return values.astype(np.float32).astype(target)


def _wide(dtype: str) -> str:
    return dtype if dtype in ("float64", "complex64", "complex128") else "float32"
