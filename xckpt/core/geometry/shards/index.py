"""The index at the end of a zarr shard: where each of its chunks lies.

For each chunk of the shard, in C order, the index has two unsigned 64-bit numbers, little-endian:
the chunk's first byte and its length, or twice `MISSING`. Behind these entries lie 4 bytes of their
CRC-32C, which the storage adds and checks.

A writer of this package puts the chunks back to back in C order and leaves out those outside the
array (`shard_entries`), so that two shards of one shape have the same entries. A reader takes any
order, but no chunk twice (`chunk_start`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Final

import numpy as np

from xckpt.core.geometry.box import Shape

ENTRY_BYTES: Final = 16
CHECKSUM_BYTES: Final = 4
MISSING: Final = (1 << 64) - 1
_KNOWN: Final = 256
"""Shapes whose entries are remembered."""


def index_bytes(shard: Sequence[int], chunk: Sequence[int]) -> int:
    """Bytes of a shard's index, its checksum included.

    Example:
        >>> index_bytes((4, 8), (2, 8))
        36
    """
    return prod(_counts(shard, chunk)) * ENTRY_BYTES + CHECKSUM_BYTES


def shard_entries(
    sizes: Sequence[int], shard: Sequence[int], chunk: Sequence[int], item: int
) -> bytes:
    """The entries of a shard whose chunks lie back to back.

    Args:
        sizes: the shard's part that lies in the array, elements.
        shard: its shape, elements.
        chunk: a chunk's shape, elements.
        item: bytes of an element.

    Example:
        >>> np.frombuffer(shard_entries((2, 5), (2, 8), (2, 4), 1), "<u8").tolist()
        [0, 8, 8, 8]
    """
    return _entries(_counts(sizes, chunk), _counts(shard, chunk), prod(chunk) * item)


@functools.lru_cache(maxsize=_KNOWN)
def _entries(present: Shape, all_: Shape, nbytes: int) -> bytes:
    entries = np.full((*all_, 2), MISSING, "<u8")
    offsets = np.arange(prod(present), dtype=np.uint64).reshape(present) * np.uint64(nbytes)
    here = tuple(slice(count) for count in present)
    entries[(*here, 0)], entries[(*here, 1)] = offsets, nbytes
    return entries.tobytes()


def chunk_start(
    given: bytes, cell: Sequence[int], sizes: Shape, shard: Shape, chunk: Shape, item: int, end: int
) -> int | str:
    """The first byte of a chunk of a shard, or what is wrong with the index.

    Args:
        given: the entries that the shard has, of the length that they have to be.
        cell: the chunk's indices in the shard.
        sizes: the shard's part that lies in the array, elements.
        shard: its shape, elements.
        chunk: a chunk's shape, elements.
        item: bytes of an element.
        end: where the index begins.

    Example:
        >>> about = (2, 8), (2, 8), (2, 4), 1
        >>> chunk_start(shard_entries(*about), (0, 1), *about, end=16)
        8
        >>> chunk_start(bytes(32), (0, 1), *about, end=16)
        "the shard's index names bytes that are not one of its chunks"
    """
    nbytes = prod(chunk) * item
    if given == shard_entries(sizes, shard, chunk, item):
        present = _counts(sizes, chunk)
        return int(np.ravel_multi_index(tuple(cell), present)) * nbytes
    entries = np.frombuffer(given, "<u8").reshape(*_counts(shard, chunk), 2)
    stored = entries.reshape(-1, 2)
    stored = stored[(stored != MISSING).any(axis=1)]
    ends = stored[:, 0] + stored[:, 1]
    if (stored[:, 1] != nbytes).any() or (stored[:, 0] > end).any() or (ends > end).any():
        return "the shard's index names bytes that are not one of its chunks"
    if len(stored) > 1 and (np.diff(np.sort(stored[:, 0])) < nbytes).any():
        return "the shard's index has chunks that overlap"
    start = int(entries[(*cell, 0)])
    return "the chunk is missing" if start == MISSING else start


def _counts(sizes: Sequence[int], chunk: Sequence[int]) -> Shape:
    return tuple(-(-size // step) for size, step in zip(sizes, chunk, strict=True))
