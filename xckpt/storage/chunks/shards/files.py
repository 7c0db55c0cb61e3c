"""Local files that are zarr shards of plain chunks: written chunk by chunk, read at a chunk.

The chunks lie back to back, and behind them lies the index (`xckpt.core.geometry.shards.index`). A
shard is written as a plain file is (`write_file`), each slab digested while the processor's cache
holds it: the digest of each chunk costs next to nothing, only rows that are not contiguous in
memory are copied first. A reader opens the file, reads the index, and seeks to the chunk it wants.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from math import prod

import google_crc32c
import numpy as np
import xxhash
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Box, Shape
from xckpt.core.geometry.cell_blocks import cell_blocks
from xckpt.core.geometry.grid import ZarrArray, cells, count_cells
from xckpt.core.geometry.shards.index import (
    CHECKSUM_BYTES,
    chunk_start,
    index_bytes,
    shard_entries,
)
from xckpt.core.geometry.transpose import copy_bits
from xckpt.errors import CorruptCheckpointError
from xckpt.storage.array import digest_array, digest_bytes, plain_bools
from xckpt.storage.chunks import plain_files
from xckpt.storage.chunks.file_checks import most_bytes
from xckpt.storage.chunks.plain_files import (
    PlainFile,
    contents,
    is_leading,
    slab_elements,
    stored_bytes,
    write_file,
)


def unit_length(array: ZarrArray, sizes: Shape) -> int:
    """Bytes of the file of a chunk, or of a shard whose part in the array has these sizes."""
    if array.shard is None:
        return stored_bytes(array)
    chunks = count_cells(sizes, array.chunk) * prod(array.chunk) * item_size(array.dtype)
    return chunks + index_bytes(array.shard, array.chunk)


def write_shard(
    path: str, data: NDArray[np.generic], array: ZarrArray, *, within: str, synced: bool
) -> list[bytes]:
    """Write a shard's elements to its file; see `xckpt.storage.chunks.plain_files.write_file`.

    Args:
        path: the file.
        data: the elements of the shard that lie in the array, of any strides.
        array: what it is a shard of.
        within: see `write_file`.
        synced: whether it is durable then; else the caller syncs it with others.

    Returns:
        The digest of each chunk, in C order.

    Raises:
        OSError: the file cannot be written.
    """
    digests: list[bytes] = []
    parts = shard_parts(data, array, digests)
    write_file(path, parts, within=within, synced=synced)
    return digests


def shard_parts(
    data: NDArray[np.generic], array: ZarrArray, digests: list[bytes]
) -> Iterator[bytes | memoryview]:
    """The bytes of a shard, some at a time; each chunk's digest is appended once it is known.

    Each part stays until the next.
    """
    assert array.shard is not None
    item, chunk = data.itemsize, array.chunk
    whole = not any(size % step for size, step in zip(data.shape, chunk, strict=True))
    if whole and prod(chunk) * item <= plain_files.SLAB_BYTES:
        yield from _small_chunks(data, chunk, digests)
    else:
        yield from _one_by_one(data, chunk, digests)
    yield sealed(shard_entries(data.shape, array.shard, chunk, item))


def _small_chunks(
    data: NDArray[np.generic], chunk: Shape, digests: list[bytes]
) -> Iterator[memoryview]:
    """The bytes of unpadded chunks, as many at a time as fit a slab."""
    counts = tuple(size // step for size, step in zip(data.shape, chunk, strict=True))
    # The axes of the chunk's number, then those within a chunk; such a view copies nothing.
    cut = data.reshape([size for pair in zip(counts, chunk, strict=True) for size in pair])
    by_chunk = cut.transpose([*range(0, cut.ndim, 2), *range(1, cut.ndim, 2)])
    nbytes = prod(chunk) * data.itemsize
    together = max(1, plain_files.SLAB_BYTES // nbytes)
    memory = np.empty(min(together, prod(counts)) * prod(chunk), data.dtype)
    for block in _blocks(counts, together):
        part = by_chunk[block]
        if part.flags.c_contiguous:
            slab = part.reshape(-1)
        else:
            slab = memory[: part.size]
            copy_bits(slab.reshape(part.shape), part)
        content = plain_bools(slab).view(np.uint8).data
        starts = range(0, len(content), nbytes)
        digests += [digest_bytes(content[low : low + nbytes]) for low in starts]
        yield content


@functools.lru_cache(maxsize=256)
def _blocks(counts: Shape, together: int) -> tuple[tuple[slice, ...], ...]:
    """Regions of a shard of ``counts`` chunks, in C order, each of at most ``together`` chunks."""
    blocks = cell_blocks(Box.whole(counts), (1,) * len(counts), together)
    return tuple(block.slices() for block in blocks)


def _one_by_one(
    data: NDArray[np.generic], chunk: Shape, digests: list[bytes]
) -> Iterator[bytes | memoryview]:
    """The bytes of chunks, which may be long, or padded."""
    memory = np.empty(slab_elements(chunk, data.itemsize), data.dtype)
    _, boxes = cells((0,) * data.ndim, data.shape, data.shape, chunk)
    for box in boxes:
        elements = data[box.slices()]
        if is_leading(box.sizes, chunk):
            digest = xxhash.xxh3_128()
            for slab in contents(elements, memory):
                digest.update(slab)
                yield slab
            digests.append(digest.digest())
            padding = (prod(chunk) - box.elements) * data.itemsize
            if padding:
                yield bytes(padding)
        else:
            elements = plain_bools(np.asarray(elements, order="C"))
            digests.append(digest_array(elements))
            padded = np.zeros(chunk, data.dtype)
            padded[Box.whole(box.sizes).slices()] = elements
            yield padded.reshape(-1).view(np.uint8).data


def sealed(entries: bytes) -> bytes:
    """The index of a shard: its entries, and their checksum."""
    return entries + google_crc32c.value(entries).to_bytes(CHECKSUM_BYTES, "little")


def shard_box(array: ZarrArray, box: Box) -> Box:
    """The part of an array that lies in the shard which holds the chunk at ``box``."""
    assert array.shard is not None
    origin = tuple(low // size * size for low, size in zip(box.offsets, array.shard, strict=True))
    rest = zip(array.shard, array.shape, origin, strict=True)
    return Box(origin, tuple(min(size, whole - low) for size, whole, low in rest))


def start_in_shard(entries: bytes, array: ZarrArray, box: Box, part: Box, end: int) -> int:
    """Where the chunk at ``box`` begins in its shard.

    Args:
        entries: those of the shard's index.
        array: what it is a shard of.
        box: the chunk's in the array.
        part: the shard's in the array.
        end: where the index begins.

    Raises:
        CorruptCheckpointError: the index has no such chunk.
    """
    shard, chunk, item = array.shard, array.chunk, item_size(array.dtype)
    assert shard is not None
    within = zip(box.offsets, part.offsets, chunk, strict=True)
    cell = [(at - low) // step for at, low, step in within]
    start = chunk_start(entries, cell, part.sizes, shard, chunk, item, end)
    if isinstance(start, str):
        raise CorruptCheckpointError(start)
    return start


class ShardFile(PlainFile):
    """A shard's file, open for one reading of some of its chunks until `close`.

    Args:
        path: the file.
        array: what it is a shard of.
        box: that of any chunk in it.

    Raises:
        CorruptCheckpointError: it is missing, of another length, or its index is damaged.
        OSError: it cannot be opened.
    """

    def __init__(self, path: str, array: ZarrArray, box: Box) -> None:
        self._array, self._part = array, shard_box(array, box)
        assert array.shard is not None
        super().__init__(path, unit_length(array, self._part.sizes), most=most_bytes(array, ()))
        try:
            index = self.tail(index_bytes(array.shard, array.chunk))
            self._entries, self._end = index[:-CHECKSUM_BYTES], self.nbytes - len(index)
            if sealed(self._entries) != index:
                raise CorruptCheckpointError("the shard's index is damaged")
        except BaseException:
            self.close()
            raise

    def go_to_chunk(self, box: Box) -> None:
        """Continue at the chunk that is the array's box ``box``.

        Raises:
            CorruptCheckpointError: the index has no such chunk.
        """
        self.go_to(start_in_shard(self._entries, self._array, box, self._part, self._end))


def open_in_shard(path: str, array: ZarrArray, box: Box) -> ShardFile:
    """A shard's file, open at the chunk that is the array's box ``box``; raises as `ShardFile`."""
    file = ShardFile(path, array, box)
    try:
        file.go_to_chunk(box)
    except BaseException:
        file.close()
        raise
    return file
