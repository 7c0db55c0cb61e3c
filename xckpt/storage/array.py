"""One zarr array of a checkpoint: opening it, its bytes for bools, and digests.

1. `open_array` has TensorStore open it on metadata made here. No zarr.json is read
   (``assume_metadata``): the checkpoint's own zarr.json is compared elsewhere, never trusted.
   Missing chunks are errors and chunks of zeros are stored: absence never means data.
2. `digest_array` is the 16-byte XXH3-128 digest of a chunk's elements that lie inside the array. It
   is taken of the caller's memory before a write and of the destination after a read, in the thread
   that moves the chunk; the hash runs at memory speed and releases the interpreter.
"""

from __future__ import annotations

import functools
from math import prod
from typing import Final

import numpy as np
import tensorstore as ts
import xxhash
from numpy.typing import NDArray

from xckpt.core.geometry.box import Shape
from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.manifest.entries import array_metadata

DIGEST_BYTES: Final = 16

SMALL_BYTES: Final = 1 << 18
"""Objects up to this size (bytes) are read and written as values: opening an array would cost
more, and a thread of their own too."""


def open_array(root: ts.KvStore, array: ZarrArray, codecs: tuple[str, ...]) -> ts.TensorStore:
    """The array ``array`` of the checkpoint whose root group is at ``root``.

    Raises:
        ValueError: TensorStore refuses the metadata (a defect of xckpt).
    """
    spec = _spec(array.dtype, array.shape, array.chunk, array.shard, codecs)
    return ts.open(spec, kvstore=root / f"{array.path}/").result()


def open_chunk(root: ts.KvStore, array: ZarrArray, offsets: Shape) -> ts.TensorStore:
    """The chunk at ``offsets`` of an array without codecs, as one run of its elements.

    TensorStore copies an array with a dimension of size 1 before it writes it, and the chunks of
    stacked layers have one. Their content is the same in one dimension, and so is the key: an
    array of as many such runs, whose folder is all of the key but its last number.
    """
    folder, _, last = array.key(offsets).rpartition("/")
    length, number = prod(array.chunk), int(last)
    spec = _spec(array.dtype, ((number + 1) * length,), (length,), None, (), runs=True)
    opened = ts.open(spec, kvstore=root / f"{folder}/").result()
    return opened[number * length : (number + 1) * length]


@functools.lru_cache(maxsize=1024)
def _spec(
    dtype: str,
    shape: Shape,
    chunk: Shape,
    shard: Shape | None,
    codecs: tuple[str, ...],
    *,
    runs: bool = False,
) -> ts.Spec:
    """The spec that arrays of one dtype, shape and grid share; parsing it takes a while."""
    metadata = array_metadata(dtype, shape, chunk, shard, codecs)
    del metadata["attributes"], metadata["storage_transformers"]
    if runs:
        metadata["chunk_key_encoding"] = {"name": "v2", "configuration": {"separator": "/"}}
    return ts.Spec(
        {
            "driver": "zarr3",
            "metadata": metadata,
            "open": True,
            "assume_metadata": True,
            "fill_missing_data_reads": False,
            "store_data_equal_to_fill_value": True,
        }
    )


def plain_bools(data: NDArray[np.generic]) -> NDArray[np.generic]:
    """The same data with bools as the bytes 0 and 1: stored arrays contain no others.

    Example:
        >>> plain_bools(np.array([0, 7], np.uint8).view(np.bool_)).view(np.uint8)
        array([0, 1], dtype=uint8)
    """
    if data.dtype != np.bool_ or not data.size:
        return data
    raw = data.view(np.uint8)
    return np.asarray(raw != 0) if raw.max() > 1 else data


digest_bytes: Final = xxhash.xxh3_128_digest
"""The digest of some bytes."""


def digest_array(array: NDArray[np.generic]) -> bytes:
    """The digest of an array's elements in C order; the array must be C-contiguous.

    Example:
        >>> digest_array(np.arange(3, dtype=np.uint8)) == digest_bytes(bytes([0, 1, 2]))
        True
    """
    return xxhash.xxh3_128_digest(array.reshape(-1).view(np.uint8).data)
