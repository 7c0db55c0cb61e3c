"""A stored tensor part by part, each verified, within a budget of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size, numpy_dtype
from xckpt.core.geometry.box import Box
from xckpt.core.geometry.slabs import blocks, runs
from xckpt.storage.chunks.chunk import allocate
from xckpt.storage.stored_array import StoredArray

Slab = tuple[Box, NDArray[np.generic]]
"""Which elements of the tensor, and their values; these stay until the next slab."""

SHARE = 4
"""The part of the budget that a slab may take: chunks are in flight beside it."""


def any_order(stored: StoredArray, memory_bytes: int) -> Iterator[Slab]:
    """All of a tensor in boxes of whole chunks: each chunk is read once.

    Raises:
        CorruptCheckpointError: a chunk is not what was saved.
        StorageError: the storage refused.
    """
    most = _most(stored, memory_bytes)
    parts = (
        (part.shifted(piece.offset) for part in blocks(Box.whole(piece.shape), piece.chunk, most))
        for piece in stored.pieces
    )
    return _read(stored, chain.from_iterable(parts))


def in_order(stored: StoredArray, box: Box, memory_bytes: int) -> Iterator[Slab]:
    """A box of a tensor in parts that follow each other in C order.

    Raises:
        CorruptCheckpointError: a chunk is not what was saved.
        StorageError: the storage refused.
    """
    chunk = stored.chunks or (1,) * len(stored.shape)
    return _read(stored, runs(box, chunk, _most(stored, memory_bytes)))


def _most(stored: StoredArray, memory_bytes: int) -> int:
    """Elements of a slab."""
    item_bytes = max((item_size(piece.dtype) for piece in stored.pieces), default=1)
    return max(1, memory_bytes // SHARE // item_bytes)


def _read(stored: StoredArray, parts: Iterator[Box]) -> Iterator[Slab]:
    """The elements of each part, in memory that is used again for the next."""
    memory: NDArray[np.generic] | None = None
    for part in parts:
        if memory is None or memory.size < part.elements:
            dtype = numpy_dtype(stored.pieces[0].dtype)
            memory = allocate((part.elements,), dtype, stored.name)
        slab = memory[: part.elements].reshape(part.sizes)
        stored.read(part, slab)
        yield part, slab
