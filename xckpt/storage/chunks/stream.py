"""A chunk read a few rows at a time, each handled while the processor's cache still holds it.

A chunk whose elements go elsewhere one by one, as in a transpose, need not lie in memory as a
whole; it would go through memory three times more: written, digested and read.

1. `ChunkStream` opens the file of a chunk that holds just the elements, in C order
   (`ChunkSource.plain_file`), and has the system fetch all of it.
2. `ChunkStream.slabs` reads it slab by slab into memory that is used again for each, takes the
   slab into the digest, and hands it out.
3. After the last slab the digest is compared: until then what came out is unverified.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from xckpt.core.geometry.box import Box, Shape
from xckpt.errors import CorruptCheckpointError
from xckpt.storage.chunks.chunk import Chunk, ChunkSource, allocate
from xckpt.storage.foreign.files import OpenFile
from xckpt.storage.location import storage_errors

SLAB_BYTES = 1 << 20
"""Bytes of a slab, where rows are not longer: a usual second-level cache. Half of it and twice as
much were slower."""


class ChunkStream:
    """A chunk's elements in C order, slab by slab; its file is open until `close`.

    Args:
        source: the checkpoint's chunks; the digests of the chunk's array are fetched already.
        chunk: which one.
        path: its file, see `ChunkSource.plain_file`.

    Raises:
        CorruptCheckpointError: the chunk is missing, or can be none.
        StorageError: the file cannot be opened.
    """

    def __init__(self, source: ChunkSource, chunk: Chunk, path: str) -> None:
        self._source = source
        self._chunk = chunk
        with storage_errors(path):
            try:
                self._file = OpenFile(Path(path))
            except FileNotFoundError as error:
                raise source.damage(chunk, "the chunk is missing") from error
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.descriptor, 0, 0, os.POSIX_FADV_WILLNEED)

    def slabs(self) -> Iterator[tuple[Box, NDArray[np.generic]]]:
        """Each slab's box, counted from the chunk's first element, and its elements.

        The elements stay until the next slab.

        Raises:
            CorruptCheckpointError: the chunk is truncated, or not what was saved. The second is
                known only after the last slab.
            StorageError: the file cannot be read.
        """
        chunk, sizes = self._chunk, self._chunk.box.sizes
        axis, rows = _cut(sizes, SLAB_BYTES // chunk.dtype.itemsize)
        before, after = sizes[:axis], sizes[axis + 1 :]
        memory = allocate((*before, rows, *after), chunk.dtype, chunk.array.leaf)
        digest = xxhash.xxh3_128()
        position = 0
        for low in range(0, sizes[axis], rows):
            box = Box(
                (0,) * axis + (low,) + (0,) * len(after),
                (*before, min(rows, sizes[axis] - low), *after),
            )
            # Each axis before this one has one element: the slab is contiguous.
            slab = memory[Box.whole(box.sizes).slices()]
            content = slab.reshape(-1).view(np.uint8)
            self._read(content, position)
            position += len(content)
            digest.update(content.data)
            yield box, slab
        self._source.verify(chunk, digest.digest())

    def _read(self, content: NDArray[np.uint8], position: int) -> None:
        """Fill memory with the bytes of the file from a position on."""
        try:
            with storage_errors(self._file.path):
                self._file.read_into(position, content)
        except CorruptCheckpointError as error:
            raise self._source.damage(self._chunk, "the chunk is truncated") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def give_up(self) -> None:
        """Leave the rest: nothing is read or written any more."""
        self.close()


def _cut(sizes: Shape, most: int) -> tuple[int, int]:
    """The first axis of several elements, and how many rows along it are about ``most`` elements.

    Example:
        >>> _cut((1, 6, 4), 9), _cut((6, 4), 3), _cut((1, 1), 9)
        ((1, 2), (0, 1), (1, 1))
    """
    axis = next((axis for axis, size in enumerate(sizes) if size > 1), len(sizes) - 1)
    return axis, min(sizes[axis], max(1, most // prod(sizes[axis + 1 :])))
