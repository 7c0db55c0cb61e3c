"""The element types of the format: one table of names, sizes and NumPy spellings.

A name is what zarr.json and the manifest carry, what NumPy (with ml_dtypes) calls the type, and
what torch and jax call it where they have it. Adapters look types up by name:
``getattr(torch, name)``, ``jnp.dtype(name)``.
"""

from __future__ import annotations

from typing import Final

import ml_dtypes
import numpy as np

# fmt: off
_STANDARD = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)
EXTENDED: Final = (
    "bfloat16", "float8_e3m4", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz",
    "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "int2", "int4", "float4_e2m1fn",
)
"""The types that NumPy and zarr-python lack."""
# fmt: on

DTYPES: Final[dict[str, np.dtype[np.generic]]] = {
    **{name: np.dtype(name) for name in _STANDARD},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in EXTENDED},
}
"""Format name -> NumPy dtype. Types below 8 bits take one byte per element, as in NumPy."""

SHORT_NAMES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
"""What people call a type -> its format name, where they name one to be cast to."""

_NAMES: Final[dict[np.dtype[np.generic], str]] = {dtype: name for name, dtype in DTYPES.items()}


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """The NumPy dtype for a format name.

    Raises:
        KeyError: the format has no such type.

    Example:
        >>> numpy_dtype("bfloat16").itemsize
        2
    """
    return DTYPES[name]


def item_size(name: str) -> int:
    """Bytes per element.

    Raises:
        KeyError: the format has no such type.
    """
    return DTYPES[name].itemsize


def dtype_name(dtype: np.dtype[np.generic]) -> str | None:
    """The format's name of a NumPy dtype, whatever its byte order; None if it has none.

    Example:
        >>> dtype_name(np.dtype(">f4")), dtype_name(np.dtype("datetime64[s]"))
        ('float32', None)
    """
    # Some types that NumPy adds, such as text of any length, refuse to be asked for another order.
    return _NAMES.get(dtype if dtype.isnative else dtype.newbyteorder("="))


def fill_value(name: str) -> object:
    """Zero as zarr.json spells it, and 1 for the type that has no zero.

    Example:
        >>> fill_value("complex64"), fill_value("float8_e8m0fnu")
        ([0.0, 0.0], 1.0)
    """
    if name == "bool":
        return False
    if name.startswith("complex"):
        return [0.0, 0.0]
    if name == "float8_e8m0fnu":
        return 1.0
    return 0.0 if "float" in name else 0
