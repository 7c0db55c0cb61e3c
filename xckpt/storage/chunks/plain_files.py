"""Local files that hold a chunk's elements and nothing else, read and written a slab at a time.

Such a chunk is *plain*: no codec, C order, little-endian; behind an edge chunk's elements its file
is padded. A slab is hashed while the processor's cache still holds it, so that a digest costs a
save next to nothing and a load about a tenth. Nothing is mapped: a file that is cut off while it is
read is an error, not a signal that ends the process.

1. `PlainFile` opens the file and looks at what it has opened: a pipe or a file of another length is
   refused.
2. `PlainFile.fill` reads straight into the memory where the elements go. `PlainFile.slabs` hands
   them out slab by slab, in memory that is used again, to be put where they go one by one, as in a
   transpose: they would go through memory three times more as a whole chunk.
3. `PlainFile.digest` is that of what was read; until it has been compared the elements are
   unverified.
4. `write_plain` writes a file from the caller's memory, in the steps that TensorStore takes for a
   key: fill ``KEY.__lock``, sync it, rename it to ``KEY``, sync the folder.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Box, Shape
from xckpt.core.geometry.transpose import copy_bits
from xckpt.core.manifest.entries import ZarrArray
from xckpt.errors import CorruptCheckpointError
from xckpt.storage.array import plain_bools
from xckpt.storage.chunks.file_checks import status_problem
from xckpt.storage.commit.folder import sync_folder
from xckpt.storage.foreign.files import OpenFile

SLAB_BYTES = 1 << 19
"""Bytes of a slab, where rows are not longer: half of a usual second-level cache."""


def is_plain(array: ZarrArray, codecs: Sequence[str]) -> bool:
    """Whether the objects of an array hold just elements as they are in memory."""
    return not codecs and array.shard is None and sys.byteorder == "little"


def is_leading(sizes: Shape, chunk: Shape) -> bool:
    """Whether the first elements along each axis of a chunk are also its first in C order.

    Example:
        >>> is_leading((4, 8), (4, 8)), is_leading((1, 3, 8), (1, 4, 8)), is_leading((4, 7), (4, 8))
        (True, True, False)
    """
    axis = next((axis for axis, size in enumerate(sizes) if size > 1), len(sizes))
    return sizes[axis + 1 :] == chunk[axis + 1 :]


def stored_bytes(array: ZarrArray) -> int:
    """How long the file of a plain chunk is, padding included."""
    return prod(array.chunk) * item_size(array.dtype)


class PlainFile:
    """A plain chunk's file, open for one reading until `close`.

    Args:
        path: the file.
        nbytes: how long it has to be.

    Raises:
        CorruptCheckpointError: it is missing, no plain file, or of another length.
        OSError: it cannot be opened.
    """

    def __init__(self, path: str, nbytes: int) -> None:
        try:
            self._file = OpenFile(Path(path))
        except FileNotFoundError as error:
            raise CorruptCheckpointError("the chunk is missing") from error
        status = os.fstat(self._file.descriptor)
        problem = status_problem(status, nbytes)
        if not problem and status.st_size < nbytes:
            problem = f"truncated: {status.st_size:,} bytes long instead of {nbytes:,}"
        if problem:
            self.close()
            raise CorruptCheckpointError(f"the file is {problem}")
        self._position = 0
        self._hash = xxhash.xxh3_128()

    def fill(self, into: NDArray[np.generic]) -> None:
        """Read the next elements into C-contiguous memory.

        Raises:
            CorruptCheckpointError: the file ends before.
            OSError: it cannot be read.
        """
        content = into.reshape(-1).view(np.uint8)
        for start in range(0, len(content), SLAB_BYTES):
            slab = content[start : start + SLAB_BYTES]
            self._file.read_into(self._position, slab)
            self._position += len(slab)
            self._hash.update(slab.data)

    def slabs(
        self, sizes: Shape, memory: NDArray[np.generic]
    ) -> Iterator[tuple[Box, NDArray[np.generic]]]:
        """The box of each slab, counted from the chunk's first element, and its elements.

        The elements stay until the next slab.

        Args:
            sizes: how many elements along each axis are read.
            memory: that of a slab; see `slab_elements`.

        Raises:
            CorruptCheckpointError: the file ends before.
            OSError: it cannot be read.
        """
        for box in slab_boxes(sizes, memory.itemsize):
            slab = memory[: box.elements].reshape(box.sizes)
            self.fill(slab)
            yield box, slab

    def digest(self) -> bytes:
        """The digest of what was read."""
        return self._hash.digest()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def write_plain(path: str, data: NDArray[np.generic], nbytes: int, *, synced: bool = True) -> bytes:
    """Write a chunk's elements to its file; folders above it are made, and not synced.

    Args:
        path: the file.
        data: the elements, of any strides.
        nbytes: how long the file is; zeros pad it.
        synced: whether it is durable then; else the caller syncs it with others.

    Returns:
        The digest of the elements.

    Raises:
        OSError: the file cannot be written.
    """
    staged = f"{path}.__lock"
    digest = xxhash.xxh3_128()
    position = 0
    try:
        with contextlib.closing(_new_file(staged)) as file:
            for slab in _contents(data):
                digest.update(slab.data)
                file.write_from(position, slab)
                position += len(slab)
            if position < nbytes:
                os.ftruncate(file.descriptor, nbytes)
            if synced:
                sync(file)
        os.rename(staged, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(staged)
        raise
    if synced:
        sync_folder(os.path.dirname(path))
    return digest.digest()


def sync(file: OpenFile) -> None:
    """Make a file's content durable."""
    os.fsync(file.descriptor)


def _new_file(path: str) -> OpenFile:
    try:
        return OpenFile(Path(path), create=True)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return OpenFile(Path(path), create=True)


def _contents(data: NDArray[np.generic]) -> Iterator[NDArray[np.uint8]]:
    """The bytes of elements in C order, slab by slab; each stays until the next."""
    if data.flags.c_contiguous:
        content = data.reshape(-1)
        step = max(1, SLAB_BYTES // data.itemsize)
        slabs = (content[start : start + step] for start in range(0, len(content), step))
    else:
        memory = np.empty(slab_elements(data.shape, data.itemsize), data.dtype)
        slabs = _in_c_order(data, memory)
    for slab in slabs:
        yield plain_bools(slab).view(np.uint8)


def _in_c_order(
    data: NDArray[np.generic], memory: NDArray[np.generic]
) -> Iterator[NDArray[np.generic]]:
    for box in slab_boxes(data.shape, data.itemsize):
        slab = memory[: box.elements]
        copy_bits(slab.reshape(box.sizes), data[box.slices()])
        yield slab


def slab_boxes(sizes: Shape, itemsize: int) -> Iterator[Box]:
    """Boxes of whole rows that follow each other in C order, of about `SLAB_BYTES` each.

    Example:
        >>> [str(box) for box in slab_boxes((1, 3, 1 << 17), 2)]
        ['[0, 1) x [0, 2) x [0, 131072)', '[0, 1) x [2, 3) x [0, 131072)']
    """
    axis = next((axis for axis, size in enumerate(sizes) if size > 1), len(sizes) - 1)
    if axis < 0:
        yield Box((), ())
        return
    before, after = sizes[:axis], sizes[axis + 1 :]
    rows = max(1, SLAB_BYTES // (prod(after) * itemsize))
    for low in range(0, sizes[axis], rows):
        offsets = (0,) * axis + (low,) + (0,) * len(after)
        # Each axis before this one has one element: the slab is contiguous.
        yield Box(offsets, (*before, min(rows, sizes[axis] - low), *after))


def slab_elements(sizes: Shape, itemsize: int) -> int:
    """How many elements a slab has at most.

    Example:
        >>> slab_elements((1, 3, 1 << 17), 2), slab_elements((), 8)
        (262144, 1)
    """
    return next(slab_boxes(sizes, itemsize)).elements
