"""NumPy arrays as torch tensors and back, bit for bit, of every dtype that torch has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from conformance.cases import numpy_dtype
from conformance.implementation import Array, Refused

__all__ = ["from_torch", "to_torch", "torch_dtype", "unloaded"]

Data = NDArray[np.generic]


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype.

    Raises:
        Refused: torch has none of that name with one element a byte or more.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or name in ("int4", "float4_e2m1fn"):
        raise Refused(f"torch has no {name}")
    return found


def to_torch(data: Data, dtype: str) -> torch.Tensor:
    """A copy of an array as a tensor.

    Raises:
        Refused: see `torch_dtype`.
    """
    kind = torch_dtype(dtype)
    whole = np.array(data, order="C", copy=True)
    raw = torch.from_numpy(whole.view(_carrier(whole.dtype)))
    return raw.view(kind)


def from_torch(tensor: torch.Tensor, dtype: str) -> Data:
    """A tensor on the CPU as an array of this dtype that shares its memory."""
    kind = numpy_dtype(dtype)
    if kind.kind in "cb":
        return tensor.numpy()
    return tensor.view(getattr(torch, f"int{8 * kind.itemsize}")).numpy().view(kind)


def unloaded(array: Array, sizes: Sequence[int]) -> torch.Tensor:
    """Memory in which whatever is not loaded shows."""
    kind = torch_dtype(array.dtype)
    filled = 1 if array.dtype == "bool" else 0x5A
    made = torch.full((*sizes, kind.itemsize), filled, dtype=torch.uint8)
    return made.view(kind).reshape(tuple(sizes))


def _carrier(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """A dtype of the same size that torch takes from NumPy."""
    return dtype if dtype.kind in "cb" else np.dtype(f"i{dtype.itemsize}")
