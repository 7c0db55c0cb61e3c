"""Python values as targets: a number and a 0-d array are one leaf, whichever side has which.

Frameworks turn one into the other on the way (a step counter is a Python int until it has gone
through `jax.jit`), so a saved 0-d array loads into a Python number, and a saved number into a 0-d
array. The kinds are ``bool``, ``int``, ``float`` and ``complex``; the rules:

1. Of one kind, they are exchanged where no value changes. An int that the array's dtype cannot hold
   is refused. A float that it would round needs ``cast``, unless the array is weakly typed, as JAX
   makes it of a Python number.
2. A stored Python int becomes a float, and both a complex number, of the same value: a counter is
   an int to one release of an optimizer, a 0-d float tensor to another. An array has a dtype.
3. Any other kind needs ``cast``, and then also a value that survives it: 3.0 becomes 3, 3.5 is
   refused.
4. Only a finite float is rounded, to a finite one that is not 0.
5. Between two Python numbers there is nothing to convert: the stored one comes back as it was. So
   an optimizer that was made with ``weight_decay=0`` takes the stored 0.01.

`number_difference` applies the rules that need no value, before anything is read; `as_element` and
`as_number` apply the others.
"""

from __future__ import annotations

import cmath
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xckpt.core.adapter import Adapters
from xckpt.core.dtypes import numpy_dtype
from xckpt.core.geometry.box import Boxes
from xckpt.core.leaf import TargetLeaf
from xckpt.core.metadata import BytesStorageMetadata, TensorStorageMetadata
from xckpt.core.problem import Problem
from xckpt.core.values import KINDS, shown_value
from xckpt.errors import TreeMismatchError

Number = bool | int | float | complex

_TYPES: Final[dict[str, type[bool] | type[int] | type[float] | type[complex]]] = {
    "bool": bool,
    "int": int,
    "float": float,
    "complex": complex,
}
NUMBERS: Final = frozenset(_TYPES)
_WIDEST: Final = {"bool": "bool", "int": "int64", "float": "float64", "complex": "complex128"}
_WIDER: Final = {("int", "float"), ("int", "complex"), ("float", "complex")}
_KIND_BY_PREFIX: Final = {"b": "float", "u": "int", "i": "int", "f": "float", "c": "complex"}


def number_kind(dtype: str) -> str:
    """The kind of Python number that an element of a dtype is.

    Example:
        >>> number_kind("uint8"), number_kind("bfloat16"), number_kind("bool")
        ('int', 'float', 'bool')
    """
    return "bool" if dtype == "bool" else _KIND_BY_PREFIX[dtype[0]]


@dataclass(slots=True)
class NumberTarget:
    """A Python number to be loaded from a stored 0-d array."""

    name: str
    kind: str
    """The number's type: ``int``, say."""
    stored: str
    """The array's dtype."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    """Empty: the array is read as it is stored."""
    annotation: str = ""
    boxes: Boxes = field(default_factory=lambda: Boxes.whole(()))
    _element: NDArray[np.generic] | None = None
    _number: Number = 0

    def buffer(self, index: int) -> NDArray[np.generic]:
        """Memory for the one element."""
        if self._element is None:
            self._element = np.empty((), numpy_dtype(self.stored))
        return self._element

    def commit(self, index: int) -> None:
        """Make a number of the element.

        Raises:
            TreeMismatchError: the value would change.
        """
        self._number = as_number(self.buffer(index), self.stored, self.kind, self.name)

    def result(self) -> Number:
        """The number."""
        return self._number


def number_target(
    name: str, kind: str, stored: TensorStorageMetadata | BytesStorageMetadata | None
) -> NumberTarget | None:
    """A target for a Python number of this kind if a 0-d array is stored, else None."""
    if kind not in _TYPES or not isinstance(stored, TensorStorageMetadata) or stored.size:
        return None
    return NumberTarget(name, kind, stored.properties.dtype)


def number_difference(stored: str, wanted: str, *, cast: bool) -> str:
    """Why a number cannot be what is wanted, before its value is known; empty if it may.

    Args:
        stored: a kind of number, or the dtype of a 0-d array.
        wanted: the other one.
        cast: whether the kind may change.

    Example:
        >>> number_difference("float32", "float", cast=False)
        ''
        >>> number_difference("float32", "int", cast=False)
        'a 0-d float32 array in the checkpoint, a Python int wanted (cast=True converts)'
    """
    before, after = (name if name in _TYPES else number_kind(name) for name in (stored, wanted))
    if before == after or (stored in _TYPES and (before, after) in _WIDER):
        return ""
    if cast and "complex" not in (before, after):
        return ""
    advice = "" if cast or "complex" in (before, after) else " (cast=True converts)"
    return types_differ(stored, wanted) + advice


def types_differ(stored: str, wanted: str) -> str:
    """That one type is stored and another wanted; each the type of a value, or a 0-d dtype."""
    return f"{_described(stored)} in the checkpoint, {_described(wanted)} wanted"


def _described(name: str) -> str:
    if name == "bool":
        return "a bool"
    return f"a Python {name}" if name in KINDS else f"a 0-d {name} array"


def as_number(element: NDArray[np.generic], dtype: str, kind: str, name: str) -> Number:
    """A 0-d array of a dtype as a Python number of a kind.

    Raises:
        TreeMismatchError: the value would change.

    Example:
        >>> as_number(np.array(3, np.int32), "int32", "float", "lr")
        3.0
    """
    # A float8 scalar is not a float, but can be made one.
    return _converted(_TYPES[number_kind(dtype)](element[()]), kind, name)  # type: ignore[arg-type]


def _converted(value: Number, kind: str, name: str) -> Number:
    """A number as one of another kind, where its value stays."""
    try:
        number = _TYPES[kind](value)  # type: ignore[arg-type]  # complex: refused before
    except (OverflowError, ValueError):
        number = None
    if number is None or not _same(number, value):
        raise _changed(name, value, f"a Python {kind}")
    return number


def as_element(value: Number, dtype: str, name: str, *, rounds: bool) -> NDArray[np.generic]:
    """A Python number as a 0-d array of a dtype.

    Args:
        value: the number.
        dtype: the array's.
        name: the leaf's, for the error.
        rounds: whether a float, but no int, may become the nearest one of the dtype.

    Raises:
        TreeMismatchError: the value would change, or would not be finite any more.

    Example:
        >>> as_element(7, "int8", "step", rounds=False)
        array(7, dtype=int8)
    """
    try:
        with np.errstate(all="ignore"):
            element = _widest(value).astype(numpy_dtype(dtype))
            back = _TYPES[number_kind(dtype)](element[()])  # type: ignore[arg-type]
    except OverflowError:
        raise _changed(name, value, dtype) from None
    if not _same(back, value):
        is_float = isinstance(value, float | complex) and isinstance(back, float | complex)
        if not (is_float and back and cmath.isfinite(value) and cmath.isfinite(back)):
            raise _changed(name, value, dtype)
        if not rounds:
            raise _changed(name, value, dtype, " exactly; cast=True rounds it")
    return element


def fill(target: TargetLeaf, value: Number, name: str, adapters: Adapters, *, cast: bool) -> None:
    """Put a stored Python number into a 0-d target.

    Raises:
        TreeMismatchError: the target's dtype cannot hold it.
    """
    dtype = target.dtype or _WIDEST[type(value).__name__]
    rounds = cast or bool(getattr(target, "weak_type", False))
    element = as_element(value, dtype, name, rounds=rounds)
    for index in range(len(target.boxes)):
        buffer = target.buffer(index)
        memory = adapters.writable_numpy(buffer)
        if memory is None:
            adapters.copy_into(buffer, element)
        else:
            memory[...] = element
        target.commit(index)


def _widest(value: Number) -> NDArray[np.generic]:
    """The number as NumPy has it, or the nearest float64 of an int beyond 64 bits."""
    array = np.asarray(value)
    return array if array.dtype != object else np.asarray(float(value))  # type: ignore[arg-type]


def _same(number: Number, value: Number) -> bool:
    return number == value or (number != number and value != value)


def _changed(name: str, value: Number, what: str, how: str = "") -> TreeMismatchError:
    text = f"the checkpoint holds {shown_value(value):.80}, which {what} cannot hold{how}"
    problem = Problem(name, kind="value", text=text)
    return TreeMismatchError(problem, (problem,))
