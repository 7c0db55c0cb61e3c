"""XXH3-128 of chunks: one 16-byte digest for each, over the elements that lie inside the array.

A digest is taken of the caller's memory before a write and of the destination after a read, in the
thread that moves the chunk; the hash runs at memory speed and releases the interpreter.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

__all__ = ["DIGEST_BYTES", "digest_array", "digest_bytes"]

DIGEST_BYTES = 16


def digest_bytes(data: bytes) -> bytes:
    """The digest of some bytes."""
    return xxhash.xxh3_128_digest(data)


def digest_array(array: NDArray[np.generic]) -> bytes:
    """The digest of an array's elements in C order; the array must be C-contiguous.

    Example:
        >>> digest_array(np.arange(3, dtype=np.uint8)) == digest_bytes(bytes([0, 1, 2]))
        True
    """
    return xxhash.xxh3_128_digest(array.reshape(-1).view(np.uint8).data)
