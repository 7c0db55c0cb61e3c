"""torch tensors as NumPy arrays over the same memory, for every dtype that both can express.

1. A dtype of the format is torch's dtype of the same name (`format_dtype`, `torch_dtype`).
2. What NumPy has under the same name crosses by `Tensor.numpy`. What only ml_dtypes has (bfloat16,
   float8, ...) crosses as an integer of the same width: a view on torch's side, and another view
   on NumPy's (`to_numpy`, `writable_numpy`, `from_numpy`). No strides are lost and nothing is
   copied.
3. What the host cannot reach is copied: another device's memory, and tensors whose conjugation or
   negation torch has only noted down in a bit.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from xckpt.core.dtypes import DTYPES, dtype_name, numpy_dtype

_TORCH: Final[dict[str, torch.dtype]] = {
    name: dtype for name in DTYPES if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
_NAMES: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in _TORCH.items()}

_CARRIED: Final = frozenset(name for name in _TORCH if DTYPES[name].isbuiltin != 1)
"""The types that ml_dtypes has added to NumPy."""
_CARRIERS: Final = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.int16)}
"""Bytes an element -> the integers that carry a dtype which `Tensor.numpy` does not know."""


def format_dtype(dtype: torch.dtype) -> str | None:
    """The format's name of a torch dtype, or None if the format has no such type.

    Example:
        >>> format_dtype(torch.bfloat16), format_dtype(torch.complex32)
        ('bfloat16', None)
    """
    return _NAMES.get(dtype)


def torch_dtype(name: str) -> torch.dtype | None:
    """torch's dtype of a format name, or None if torch has no such type.

    Example:
        >>> torch_dtype("float8_e5m2"), torch_dtype("float8_e3m4")
        (torch.float8_e5m2, None)
    """
    return _TORCH.get(name)


def reachable(tensor: torch.Tensor) -> bool:
    """Whether NumPy can look at the tensor's memory and see the tensor's values."""
    return tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()


def to_numpy(tensor: torch.Tensor) -> NDArray[np.generic]:
    """The tensor as a NumPy array of its own dtype (ml_dtypes included) and strides.

    It shares the tensor's memory if that is `reachable`, else it is a copy on the host.

    Raises:
        KeyError: the format has no such dtype.

    Example:
        >>> tensor = torch.ones(2, 3, dtype=torch.bfloat16).T
        >>> array = to_numpy(tensor)
        >>> tensor[0, 1] = 5
        >>> array.dtype.name, array.shape, float(array[0, 1])
        ('bfloat16', (3, 2), 5.0)
    """
    if reachable(tensor):
        return writable_numpy(tensor)
    return writable_numpy(tensor.detach().resolve_conj().resolve_neg().cpu())


def writable_numpy(tensor: torch.Tensor) -> NDArray[np.generic]:
    """The tensor's own memory as a NumPy array; the tensor must be `reachable`.

    Raises:
        KeyError: the format has no such dtype.
    """
    name = _NAMES[tensor.dtype]
    plain = tensor.detach()
    if name not in _CARRIED:
        return plain.numpy()
    dtype = numpy_dtype(name)
    carrier, _ = _CARRIERS[dtype.itemsize]
    return plain.view(carrier).numpy().view(dtype)


def from_numpy(array: NDArray[np.generic]) -> torch.Tensor:
    """A NumPy array as a tensor over the same memory.

    A copy if torch cannot look at it: read-only memory, foreign byte order, negative strides.

    Raises:
        KeyError: torch has no such dtype.

    Example:
        >>> import ml_dtypes
        >>> from_numpy(np.ones(2, ml_dtypes.float8_e4m3fn))
        tensor([1., 1.], dtype=torch.float8_e4m3fn)
    """
    name = dtype_name(array.dtype) or str(array.dtype)
    dtype = _TORCH[name]
    native = array.dtype.newbyteorder("=")
    if not array.flags.writeable or array.dtype != native or min(array.strides, default=0) < 0:
        array = array.astype(native, order="C", copy=True)
    if name not in _CARRIED:
        return torch.from_numpy(array)
    _, carrier = _CARRIERS[native.itemsize]
    return torch.from_numpy(array.view(carrier)).view(dtype)
