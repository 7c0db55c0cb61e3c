"""Elements of a tensor as JSON has them."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from xckpt.cli.output import Failure

if TYPE_CHECKING:
    from xckpt.core.geometry.box import Box
    from xckpt.storage.stored_array import StoredArray

Nested: TypeAlias = "float | list[Nested]"

MOST: Final = 1_000_000
"""Elements that are printed as JSON."""


def elements_document(stored: StoredArray, box: Box) -> dict[str, Any]:
    """A part of a tensor, and what it is a part of.

    Raises:
        Failure: it has too many elements.

    Example:
        >>> import xckpt
        >>> from xckpt.core.geometry.box import Box
        >>> _ = xckpt.save("memory://json-numbers", {"w": np.arange(6).reshape(2, 3)})
        >>> elements_document(xckpt.open("memory://json-numbers").array("w"), Box((1, 0), (1, 2)))
        {'name': 'w', 'dtype': 'int64', 'shape': (2, 3), 'offset': (1, 0), 'values': [[3, 4]]}
    """
    if box.elements > MOST:
        text = f"{box.elements:,} elements are too many for JSON: name a part of {MOST:,} with"
        raise Failure(f"{text} --box, or take the bytes: xckpt cat without --json")
    about = {"name": stored.name, "dtype": str(stored.dtype), "shape": stored.shape}
    values = listed(np.asarray(stored[box.slices()]))
    return about | {"offset": box.offsets, "values": values}


def listed(array: NDArray[np.generic]) -> object:
    """Elements as nested lists: a complex one as [real, imaginary], what is not a number as a text.

    Example:
        >>> listed(np.array([[1.5, np.nan], [np.inf, 2]]))
        [[1.5, 'nan'], ['inf', 2.0]]
        >>> listed(np.array(1 - 2j))
        [1.0, -2.0]
    """
    if np.iscomplexobj(array):
        return listed(np.stack([array.real, array.imag], -1))
    if array.dtype.kind in "biu":
        return array.tolist()
    # Types of ml_dtypes are of kind V or f; the 4-bit integers among them are exact as float.
    if array.dtype.name.startswith(("int", "uint")):
        return array.astype(np.int64).tolist()
    with np.errstate(invalid="ignore"):  # the processor reports each signalling NaN
        return _spelled(array.astype(np.float64).tolist())


def _spelled(value: Nested) -> object:
    if isinstance(value, list):
        return [_spelled(each) for each in value]
    return value if isfinite(value) else str(value)
