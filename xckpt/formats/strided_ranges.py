"""Reading and writing a box of a tensor that lies in a file with any strides.

1. The dimensions are put in order of their strides, the longest first; the array in memory is
   transposed alike.
2. The inner dimensions whose elements follow each other without gaps make up a run. A run is one
   read straight into memory, or one write straight from it.
3. Where runs are short but near each other (a column range of a matrix), a read takes a stretch of
   the file that holds many of them, at most `SCRATCH_BYTES` long, if the gaps cost less than a call
   for each run, or at least a quarter is wanted.

Where each read is a request to a bucket, short stretches (`RangeFile.free_bytes`) are read however
little of them is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Shape
from xckpt.core.geometry.transpose import copy_bits
from xckpt.storage.foreign.files import OpenFile, RangeFile

SCRATCH_BYTES: Final = 1 << 22
"""Longest stretch of a file that is read for some of its elements."""
CALL_BYTES: Final = 1 << 15
"""One more call costs as much as this many bytes that are read and not wanted (measured: ten
microseconds, most of them for the elements that go one by one to their places)."""
LEAST_WANTED: Final = 4
"""Where gaps cost more than calls, a stretch is at most this many times as long as its wanted
part."""


def row_major(shape: Sequence[int]) -> Shape:
    """Strides, in elements, of a tensor stored in C order.

    Example:
        >>> row_major((2, 3, 4))
        (12, 4, 1)
    """
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def cheap_together(shape: Sequence[int], strides: Shape, item: int, free_bytes: int) -> Shape:
    """Elements of each dimension of a tensor in a file that cost no more to read than one.

    Args:
        shape: the tensor's, elements.
        strides: its strides in the file, elements.
        item: bytes of an element.
        free_bytes: see `RangeFile.free_bytes`; 0 where any part is as good as another.

    Example:
        >>> cheap_together((8, 100, 50), row_major((8, 100, 50)), 4, 4000)
        (1, 20, 50)
        >>> cheap_together((8, 100), row_major((8, 100)), 4, 0)
        (1, 1)
    """
    together = [1] * len(shape)
    left = free_bytes // item
    for d in sorted(range(len(shape)), key=lambda d: strides[d]):
        together[d] = max(1, min(shape[d], left))
        left //= max(1, shape[d])
    return tuple(together)


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file, element by element.

    Example:
        >>> from pathlib import Path
        >>> path = Path("numbers"); _ = path.write_bytes(bytes(range(12)))
        >>> tensor = FileTensor(OpenFile(path), 0, np.dtype("u1"), (3, 4), (4, 1))
        >>> into = np.zeros((2, 2), "u1")
        >>> tensor.read((1, 1), into)
        >>> into.tolist()
        [[5, 6], [9, 10]]
    """

    file: RangeFile
    position: int
    """Byte at which the first element is."""
    dtype: np.dtype[np.generic]
    """Little-endian, as memory here is."""
    shape: Shape
    strides: Shape
    """Elements between neighbours, per dimension; none is negative."""

    def read(self, offsets: Sequence[int], into: NDArray[np.generic]) -> None:
        """Fill ``into``, of any strides, with the box of its shape at ``offsets``.

        Raises:
            CorruptCheckpointError: the file is shorter than it was.
            OSError: it cannot be read.
        """
        if not into.size:
            return
        steps = [a * s for a, s in zip(offsets, self.strides, strict=True)]
        order = sorted(range(into.ndim), key=lambda d: -self.strides[d])
        item = self.dtype.itemsize
        strides = tuple(self.strides[d] * item for d in order)
        self._read(self.position + sum(steps) * item, strides, into.transpose(order))

    def _read(self, position: int, strides: Shape, into: NDArray[np.generic]) -> None:
        """Fill ``into``; ``strides`` are the file's, bytes, the longest first."""
        stretch = _span(into.shape, strides) + self.dtype.itemsize
        if stretch == into.nbytes and into.flags.c_contiguous and _dense(into, strides):
            self.file.read_into(position, into.reshape(-1).view(np.uint8).data)
            return
        runs = into.size // (into.shape[-1] if strides[-1] == self.dtype.itemsize else 1)
        saved = max(into.nbytes + (runs - 1) * CALL_BYTES, LEAST_WANTED * into.nbytes)
        worth_it = max(self.file.free_bytes, saved)
        if stretch <= min(SCRATCH_BYTES, worth_it) or into.size == 1:
            scratch = np.empty(stretch, np.uint8)
            self.file.read_into(position, scratch.data)
            copy_bits(into, np.ndarray(into.shape, self.dtype, scratch, 0, strides))
            return
        # Each half along the outermost dimension that can be cut.
        d = next(d for d, size in enumerate(into.shape) if size > 1)
        middle, before = into.shape[d] // 2, (slice(None),) * d
        self._read(position, strides, into[(*before, slice(0, middle))])
        self._read(position + middle * strides[d], strides, into[(*before, slice(middle, None))])


def _span(shape: Shape, strides: Shape) -> int:
    """Bytes from the first element of a box to its last."""
    return sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def _dense(array: NDArray[np.generic], strides: Shape) -> bool:
    """Whether elements follow each other in the file as they do in a C-contiguous array."""
    sides = zip(array.shape, array.strides, strides, strict=True)
    return all(size == 1 or here == there for size, here, there in sides)


def write_box(
    file: OpenFile,
    position: int,
    shape: Sequence[int],
    offsets: Sequence[int],
    data: NDArray[np.generic],
) -> None:
    """Write a box into a tensor that lies in C order at ``position`` of a file.

    Raises:
        OSError: the file cannot be written.

    Example:
        >>> from pathlib import Path
        >>> path = Path("twelve"); _ = path.write_bytes(bytes(12))
        >>> file = OpenFile(path, write=True)
        >>> write_box(file, 0, (3, 4), (1, 1), np.full((2, 2), 7, "u1"))
        >>> file.close()
        >>> np.fromfile(path, "u1").reshape(3, 4).tolist()
        [[0, 0, 0, 0], [0, 7, 7, 0], [0, 7, 7, 0]]
    """
    if not data.size:
        return
    item, steps = data.itemsize, row_major(shape)
    # Dimensions from `whole` on are whole, so that a step of the one before them is one run.
    whole = data.ndim
    while whole and data.shape[whole - 1] == shape[whole - 1]:
        whole -= 1
    outer = max(0, whole - 1)
    for index in np.ndindex(*data.shape[:outer]):
        place = [a + i for a, i in zip(offsets, index, strict=False)] + list(offsets[outer:])
        first = sum(a * step for a, step in zip(place, steps, strict=True))
        run = np.ascontiguousarray(data[index]).reshape(-1).view(np.uint8)
        file.write_from(position + first * item, run)
