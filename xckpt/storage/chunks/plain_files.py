"""Local files that hold a chunk's elements and nothing else, read and written a slab at a time.

Such a chunk is *plain*: no codec, C order, little-endian; behind an edge chunk's elements its file
is padded. A slab is hashed while it is still in the processor's cache, so that a digest costs a
save next to nothing and a load about a tenth. Nothing is mapped: a file that is cut off while it is
read is an error, not a signal that ends the process.

1. `PlainFile` opens the file, and refuses a pipe or a file of another length.
2. `PlainFile.fill` reads straight into the memory where the elements go. `PlainFile.slabs` yields
   them slab by slab, in memory that is used again, where they are put in place one by one, as in a
   transpose. A chunk that is read as a whole goes through memory three times more.
3. `PlainFile.digest` is the digest of what was read. The elements are unverified until it has been
   compared.
4. `write_plain` writes a chunk from the caller's memory, and `write_file` any file, in the steps
   that TensorStore takes for a key: fill ``KEY.__lock``, sync it, rename it to ``KEY``, sync the
   folder.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Box, Shape
from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.geometry.transpose import copy_bits
from xckpt.engine.ranks.alive import WORK
from xckpt.errors import CorruptCheckpointError
from xckpt.storage.array import plain_bools
from xckpt.storage.chunks.file_checks import status_problem
from xckpt.storage.commit.folder import sync_folder
from xckpt.storage.foreign.files import OpenFile

SLAB_BYTES = 1 << 19
"""Bytes of a slab, where rows are not longer: half of a usual second-level cache."""


def is_plain(array: ZarrArray, codecs: Sequence[str]) -> bool:
    """Whether the objects of an array hold just elements as they are in memory."""
    return array.shard is None and are_plain(codecs)


def are_plain(codecs: Sequence[str]) -> bool:
    """Whether chunks hold just elements as they are in memory."""
    return not codecs and sys.byteorder == "little"


def is_leading(sizes: Shape, chunk: Shape) -> bool:
    """Whether the first elements along each axis of a chunk are also its first in C order.

    Example:
        >>> is_leading((4, 8), (4, 8)), is_leading((1, 3, 8), (1, 4, 8)), is_leading((4, 7), (4, 8))
        (True, True, False)
    """
    if sizes == chunk:  # as most are
        return True
    axis = next((axis for axis, size in enumerate(sizes) if size > 1), len(sizes))
    return sizes[axis + 1 :] == chunk[axis + 1 :]


def stored_bytes(array: ZarrArray) -> int:
    """How long the file of a plain chunk is, padding included."""
    return prod(array.chunk) * item_size(array.dtype)


class PlainFile:
    """A plain chunk's file, open for one reading until `close`.

    Args:
        path: the file.
        nbytes: how long it has to be at least.
        most: how long it may be; by default not longer.

    Raises:
        CorruptCheckpointError: it is missing, no plain file, or of another length.
        OSError: it cannot be opened.
    """

    def __init__(self, path: str, nbytes: int, most: int = 0) -> None:
        try:
            self._file = OpenFile(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CorruptCheckpointError("the chunk is missing") from error
        status = os.fstat(self._file.descriptor)
        problem = status_problem(status, max(nbytes, most))
        if not problem and status.st_size < nbytes:
            problem = f"truncated: {status.st_size:,} bytes long instead of {nbytes:,}"
        if problem:
            self.close()
            raise CorruptCheckpointError(f"the file is {problem}")
        self.nbytes: Final = status.st_size
        """How long it is."""
        self._position = 0
        self._hash = xxhash.xxh3_128()

    def tail(self, count: int) -> bytes:
        """Its last bytes."""
        return os.pread(self._file.descriptor, count, self.nbytes - count)

    def go_to(self, position: int) -> None:
        """Read on from here, and begin another digest."""
        self._position = position
        self._hash.reset()

    def fill(self, into: NDArray[np.generic]) -> None:
        """Read the next elements into C-contiguous memory.

        Raises:
            CorruptCheckpointError: the file ends before.
            OSError: it cannot be read.
        """
        content = into.reshape(-1).view(np.uint8).data
        for start in range(0, len(content), SLAB_BYTES):
            slab = content[start : start + SLAB_BYTES]
            self._file.read_into(self._position, slab)
            self._position += len(slab)
            self._hash.update(slab)

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


def write_plain(
    path: str, data: NDArray[np.generic], nbytes: int, *, within: str, synced: bool
) -> bytes:
    """Write a chunk's elements to its file; see `write_file`.

    Args:
        path: the file.
        data: the elements, of any strides.
        nbytes: how long the file is; zeros pad it.
        within: see `write_file`.
        synced: whether it is durable then; else the caller syncs it with others.

    Returns:
        The digest of the elements.

    Raises:
        OSError: the file cannot be written.
    """
    digest = xxhash.xxh3_128()

    def slabs() -> Iterator[memoryview]:
        for slab in contents(data):
            digest.update(slab)
            yield slab

    write_file(path, slabs(), nbytes, within=within, synced=synced)
    return digest.digest()


def write_file(
    path: str,
    parts: Iterable[bytes | memoryview],
    nbytes: int = 0,
    *,
    within: str,
    synced: bool,
) -> None:
    """Write a file; folders above it are made, and not synced.

    Args:
        path: the file.
        parts: its content; memory is of bytes.
        nbytes: how long the file is at least; zeros pad it.
        within: the staged folder, which must exist: if it was removed because another rank has
            failed, it is not made again.
        synced: whether it is durable then; else the caller syncs it with others.

    Raises:
        OSError: the file cannot be written.
    """
    staged = f"{path}.__lock"
    position = 0
    try:
        descriptor = new_file(staged, within)
        try:
            for part in parts:
                position = write_at(descriptor, part, position)
            if position < nbytes:
                os.ftruncate(descriptor, nbytes)
            if synced:
                sync(descriptor)
        finally:
            os.close(descriptor)
        try:
            os.rename(staged, path)
        except FileNotFoundError:
            # Two items of a faulty plan have one file; the count of the chunks will show that.
            if not os.path.exists(path):
                raise
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(staged)
        raise
    if synced:
        sync_folder(os.path.dirname(path))


def sync(descriptor: int) -> None:
    """Make a file's content durable."""
    if WORK.get().is_heard:
        from xckpt.storage.commit.batch import flush  # for saves that other ranks wait for

        flush(descriptor)
    os.fsync(descriptor)
    WORK.get().moved = time.monotonic()


def new_file(path: str, within: str) -> int:
    """Make or empty a file, and make the folders above it; see `write_file`.

    Returns:
        Its descriptor.

    Raises:
        OSError: it cannot be made.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        _make_folders(os.path.dirname(path), within)
        return os.open(path, flags, 0o666)


def _make_folders(folder: str, within: str) -> None:
    """Make a folder and those above it, but not ``within``; most often one to three are new."""
    try:
        os.mkdir(folder)
    except FileNotFoundError:
        above = os.path.dirname(folder)
        if len(above) <= len(within):
            raise
        _make_folders(above, within)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
    except FileExistsError:
        pass


def write_at(descriptor: int, part: bytes | memoryview, position: int) -> int:
    """Write bytes at a position.

    Returns:
        The position behind them.

    Raises:
        OSError: they cannot be written.
    """
    end = position + len(part)
    while position < end:  # the kernel moves at most 2 GiB a call
        position += os.pwrite(descriptor, part[position - end :], position)
        WORK.get().moved = time.monotonic()
    return position


def contents(
    data: NDArray[np.generic], memory: NDArray[np.generic] | None = None
) -> Iterator[memoryview]:
    """The bytes of elements in C order, slab by slab; each stays until the next.

    ``memory`` may be that of a slab, for elements of other orders; see `slab_elements`.
    """
    if data.flags.c_contiguous and data.dtype != np.bool_:
        content = data.reshape(-1).view(np.uint8).data
        for start in range(0, len(content), SLAB_BYTES):
            yield content[start : start + SLAB_BYTES]
        return
    if memory is None:
        memory = np.empty(slab_elements(data.shape, data.itemsize), data.dtype)
    for slab in _in_c_order(data, memory):
        yield plain_bools(slab).view(np.uint8).data


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
