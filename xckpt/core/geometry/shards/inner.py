"""Chunks inside a zarr shard, for readers that cut a tensor differently from its writer.

A reader takes whole chunks. One that cuts a dimension of n elements into p parts wants n / p of
them, so a chunk of c elements there makes it read c * p / n times as much, if that is above 1.
`inner_chunk` lowers the product of these over the dimensions: it halves (or divides by the smallest
prime that does) the dimension with the largest, until none is above 1 or chunks were too small.

The shard stays what it is without: one object and one writer, so a save has no more files.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt, prod

from xckpt.core.geometry.box import Shape

LEAST_SHARD = 1 << 18
"""An object up to this many bytes is one chunk: it is read as a whole, or lies in a pack."""

LEAST_CHUNK = 1 << 16
"""Bytes that an inner chunk has at least: reading fewer is hardly quicker."""

MOST_CHUNKS = 16
"""Inner chunks of a shard; each has a digest and an entry in the shard's index."""

LEAST_ROW = 1 << 10
"""Bytes of a chunk's row that lie side by side in the writer's memory, at least."""


def inner_chunk(
    shape: Sequence[int], shard: Shape, item_bytes: int, readers: int | Sequence[int]
) -> Shape:
    """The chunk shape within a zarr shard that suits readers who cut a tensor into parts.

    Args:
        shape: of the tensor, elements.
        shard: shape of what has one writer, elements.
        item_bytes: bytes an element.
        readers: into how many parts readers may cut any one dimension, or each one, counted from
            the first; dimensions beyond those that are given are whole.

    Returns:
        A shape whose sizes divide those of the shard; the shard's own where it stays one chunk.

    Example:
        >>> inner_chunk((4096, 4096), (64, 4096), 2, 64)
        (64, 512)
        >>> inner_chunk((4096, 4096), (64, 4096), 2, 2)
        (64, 2048)
        >>> inner_chunk((4096, 4096), (64, 4096), 2, (64, 2))
        (64, 2048)
        >>> inner_chunk((1 << 24,), (1 << 20,), 4, 64)
        (1048576,)
    """
    chunk, nbytes = list(shard), prod(shard) * item_bytes
    parts = [readers] * len(shape) if isinstance(readers, int) else [*readers, *[1] * len(shape)]
    if nbytes <= LEAST_SHARD or sum(size > 1 for size in shape) < 2:
        return shard
    least = max(LEAST_CHUNK, nbytes // MOST_CHUNKS)
    last = max(d for d, size in enumerate(shard) if size > 1)
    while True:
        costly: list[tuple[float, int, int]] = []
        for d, size in enumerate(chunk):
            times, divisor = size * parts[d] / max(shape[d], 1), _smallest_divisor(size)
            short = d == last and size // divisor * item_bytes < LEAST_ROW
            if size > 1 and times > 1 and nbytes // divisor >= least and not short:
                costly.append((times, -d, divisor))
        if not costly:
            return tuple(chunk)
        _, axis, divisor = max(costly)
        chunk[-axis] //= divisor
        nbytes //= divisor


def _smallest_divisor(number: int) -> int:
    """The smallest divisor above 1; 1 of 1."""
    return next((d for d in range(2, isqrt(number) + 1) if number % d == 0), number)
