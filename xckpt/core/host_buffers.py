"""Host memory for the boxes of a target whose elements end up elsewhere, such as on a device."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import numpy_dtype
from xckpt.core.geometry.box import Boxes

ALIGNMENT = 64
"""Bytes; XLA's CPU backend adopts host memory at multiples of this, where others copy it."""


@dataclass(slots=True)
class HostBuffers:
    """The half of a `TargetLeaf` that is the same for all such targets."""

    shape: tuple[int, ...]
    """The global shape, elements."""
    dtype: str
    """The format's name of the element type."""
    boxes: Boxes
    """The boxes wanted."""
    _buffers: dict[int, NDArray[np.generic]] = field(
        default_factory=dict[int, NDArray[np.generic]], init=False, repr=False
    )
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def buffer(self, index: int) -> NDArray[np.generic]:
        """Host memory of the box's sizes, allocated at the first call."""
        with self._lock:
            if index not in self._buffers:
                self._buffers[index] = aligned_empty(self.boxes[index].sizes, self.dtype)
            return self._buffers[index]

    def release(self, index: int) -> None:
        """Release a buffer whose elements have been delivered."""
        with self._lock:
            del self._buffers[index]


def aligned_empty(shape: tuple[int, ...], dtype: str) -> NDArray[np.generic]:
    """An uninitialised array whose memory XLA's CPU backend can adopt.

    Example:
        >>> aligned_empty((3, 5), "bfloat16").ctypes.data % 64
        0
    """
    kind = numpy_dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(kind).reshape(shape)
