"""A tensor in a checkpoint: its shape and chunks, and slices of it, read and verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from types import EllipsisType

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import numpy_dtype
from xckpt.core.geometry.box import Box
from xckpt.core.manifest.entries import ZarrArray
from xckpt.core.metadata import Sharding
from xckpt.storage.chunks.chunk import ChunkSource, allocate
from xckpt.storage.chunks.window import read_box

Index = int | slice | EllipsisType


@dataclass(frozen=True, slots=True)
class StoredArray:
    """A tensor in a checkpoint. Slicing it with ints, slices and ``...`` reads just that.

    Example:
        >>> import xckpt
        >>> _ = xckpt.save("memory://stored-array", {"w": np.arange(12).reshape(3, 4)})
        >>> stored = xckpt.open("memory://stored-array")["w"]
        >>> stored.shape, stored.dtype, stored[1:, ::2]
        ((3, 4), 'int64', array([[ 4,  6],
               [ 8, 10]]))
    """

    name: str
    """The leaf name."""
    shape: tuple[int, ...]
    """The global shape, elements."""
    dtype: str
    """The format's name of the element type."""
    pieces: Sequence[ZarrArray]
    """The zarr arrays that hold it."""
    sharding: Sharding | None
    """The sharding that wrote it."""
    annotation: str
    _source: ChunkSource

    @property
    def chunks(self) -> tuple[int, ...] | None:
        """The chunk shape; None for a leaf in pieces, which each have their own."""
        return self.pieces[0].chunk if self.regular else None

    @property
    def regular(self) -> bool:
        """Whether one zarr array is all of the tensor."""
        return len(self.pieces) == 1 and self.pieces[0].piece_of is None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * numpy_dtype(self.dtype).itemsize

    def __getitem__(self, index: Index | tuple[Index, ...]) -> NDArray[np.generic]:
        """The elements of a slice, as NumPy would give them, always as an array.

        Raises:
            IndexError: the index does not fit the shape.
            CorruptCheckpointError: a chunk is not what was saved.
            LeafTooLargeError: there is no memory for so many elements.
            StorageError: another save has replaced the checkpoint meanwhile.
        """
        keys = _expanded(index, self.shape, self.name)
        box = _touched(keys, self.shape)
        elements = allocate(box.sizes, numpy_dtype(self.dtype), self.name)
        self.read(box, elements)
        steps = (0 if isinstance(key, int) else slice(None, None, key.step) for key in keys)
        return np.asarray(elements[tuple(steps)])

    def read(self, box: Box, into: NDArray[np.generic]) -> None:
        """Read a box into memory, verified; in the calling thread, a few chunks at a time.

        Args:
            box: which elements, counted from the tensor's first.
            into: writable memory of the box's sizes and the tensor's dtype, of any strides.

        Raises:
            CorruptCheckpointError: a chunk is not what was saved.
            StorageError: the storage refused, or another save has replaced the checkpoint.
        """
        if box.elements:
            read_box(self._source, self.pieces, box, into)

    def __array__(
        self, dtype: np.dtype[np.generic] | None = None, copy: bool | None = None
    ) -> NDArray[np.generic]:
        whole = self[...]
        return whole if dtype is None else whole.astype(dtype)


def _expanded(
    index: Index | tuple[Index, ...], shape: tuple[int, ...], name: str
) -> list[int | slice]:
    """One int, counted from the front, or slice for each dimension."""
    keys = index if isinstance(index, tuple) else (index,)
    at = next((position for position, key in enumerate(keys) if key is Ellipsis), len(keys))
    before, after = keys[:at], keys[at + 1 :]
    if any(key is Ellipsis for key in after):
        raise IndexError("an index can have one ellipsis")
    given = len(before) + len(after)
    if given > len(shape):
        raise IndexError(f"too many indices: {given} for {len(shape)} dimensions")
    full = (*before, *[slice(None)] * (len(shape) - given), *after)
    return [_checked(key, d, shape[d], name) for d, key in enumerate(full)]


def _checked(key: Index, d: int, size: int, name: str) -> int | slice:
    """The key for dimension ``d``.

    Raises:
        IndexError: it is no int or slice, or outside the dimension.
    """
    if isinstance(key, slice):
        if key.step is not None and key.step < 1:
            raise IndexError("slices with a negative step are not supported")
        return key
    if not isinstance(key, int | np.integer):
        raise IndexError(f"index with ints, slices and ..., not {type(key).__name__}")
    if not -size <= key < size:
        raise IndexError(f"{name}: index {key} is outside dimension {d} with size {size}")
    return int(key) % size


def _touched(keys: list[int | slice], shape: tuple[int, ...]) -> Box:
    """The smallest box without steps that has all that the keys pick."""
    bounds = [
        key.indices(size)[:2] if isinstance(key, slice) else (key, key + 1)
        for key, size in zip(keys, shape, strict=True)
    ]
    return Box(tuple(low for low, _ in bounds), tuple(max(0, high - low) for low, high in bounds))
