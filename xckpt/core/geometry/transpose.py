"""Copies between two orders of the same elements, at a good part of the speed of a plain copy.

NumPy walks in the target's order, so that a transposed source is read one element a cache line.
`copy_bits`:

1. The elements are taken as unsigned integers of their size: bits move, whatever they mean. Where
   both sides have long rows that are contiguous, NumPy copies row by row, each as one element,
   and that is all.
2. Axes are put in the target's order. Axes of one element go; neighbours that are one run in both
   become one; a last axis that is contiguous in both is taken as fewer, wider elements.
3. If the source moves by less than a cache line along the last axis, NumPy's copy is as good as
   any.
4. Else the elements go by tiles that fit a processor's cache: a tile is read in the source's order
   into scratch memory whose rows do not fall on each other in the cache, and written from there in
   the target's order.
5. Where the target's last axis is short, each of its positions is copied apart: NumPy's inner loop
   costs as much for four elements as for forty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

Array = NDArray[np.generic]

TILE_ACROSS = 128
"""Elements of a tile along the axis that is the target's fastest, where there are enough others."""
TILE_BYTES = 1 << 19
"""Bytes of a tile: half of a usual second-level cache."""
SHORT = 12
"""Up to this many positions of a target's last axis are copied one by one."""
SMALL_BYTES = 1 << 18
"""Up to this many bytes are left to NumPy: both sides fit the cache."""
LINE_BYTES = 64
"""A cache line."""
LONG_BYTES = 512
"""Rows of this many bytes are copied at the speed of memory, in whatever order."""
LONGEST_BYTES = 1 << 30
"""Rows of more bytes are no elements: NumPy has none of 2 GiB."""

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_WIDE = (np.complex128, np.uint64, np.uint32, np.uint16)
"""What is copied as one element, the widest first; NumPy copies complex numbers as bytes too."""


def copy_bits(target: Array, source: Array) -> None:
    """Copy the elements of one array into another of the same shape and item size, bit for bit.

    The two may be any views, but of different memory.

    Raises:
        ValueError: they are of different shapes or item sizes.

    Example:
        >>> source = np.arange(6, dtype=np.float16).reshape(2, 3)
        >>> target = np.empty((3, 2), np.float16)
        >>> copy_bits(target, source.T)
        >>> target.tolist()
        [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    """
    if target.shape != source.shape or target.dtype.itemsize != source.dtype.itemsize:
        raise ValueError(
            f"{source.dtype} of shape {source.shape} does not match {target.dtype} of "
            f"shape {target.shape}"
        )
    if _has_long_rows(target, source):
        row = np.dtype((np.void, target.shape[-1] * target.itemsize))
        np.copyto(target.view(row), source.view(row))
    elif target.size:
        _copy(*_simplified(bits_of(target), bits_of(source)))


def _has_long_rows(target: Array, source: Array) -> bool:
    """Whether the last axis is a long row in both."""
    item = target.itemsize
    return (
        target.ndim > 0
        and target.strides[-1] == source.strides[-1] == item
        and LONG_BYTES <= target.shape[-1] * item <= LONGEST_BYTES
    )


def bits_of(array: Array) -> Array:
    """The same memory as unsigned integers; 16-byte elements stay what they are."""
    unsigned = _UNSIGNED.get(array.dtype.itemsize)
    return array if unsigned is None else array.view(unsigned)


def _simplified(target: Array, source: Array) -> tuple[Array, Array]:
    """Both with fewer and longer axes, the target's fastest last."""
    order = sorted(
        (axis for axis, size in enumerate(target.shape) if size > 1),
        key=lambda axis: (-abs(target.strides[axis]), -abs(source.strides[axis])),
    )
    sizes: list[int] = []
    into: list[int] = []
    out: list[int] = []
    for axis in order:
        size, a, b = target.shape[axis], target.strides[axis], source.strides[axis]
        if sizes and into[-1] == a * size and out[-1] == b * size:
            sizes[-1] *= size
            into[-1], out[-1] = a, b
        else:
            sizes.append(size)
            into.append(a)
            out.append(b)
    target, source = as_strided(target, sizes, into), as_strided(source, sizes, out)
    return _widened(target, source)


def _widened(target: Array, source: Array) -> tuple[Array, Array]:
    """Both with a contiguous last axis as fewer elements, where there is a type that fits."""
    item = target.itemsize
    if target.ndim < 2 or target.strides[-1] != item or source.strides[-1] != item:
        return target, source
    places = [array.__array_interface__["data"][0] for array in (target, source)]
    steps = [target.shape[-1] * item, *places, *target.strides[:-1], *source.strides[:-1]]
    for wide in _WIDE:
        width = np.dtype(wide).itemsize
        if width > item and not any(step % width for step in steps):
            target, source = target.view(wide), source.view(wide)
            break
    return (target[..., 0], source[..., 0]) if target.shape[-1] == 1 else (target, source)


def _copy(target: Array, source: Array) -> None:
    strides = [abs(step) for step in source.strides]
    in_lines = not strides or (strides[-1] <= LINE_BYTES and target.shape[-1] > SHORT)
    if in_lines or target.nbytes <= SMALL_BYTES:
        np.copyto(target, source)
        return
    fastest = sorted(range(source.ndim), key=lambda axis: strides[axis])
    sizes = _tile(target.shape, fastest, max(1, TILE_BYTES // target.itemsize))
    scratch = _scratch(sizes, fastest, target.dtype)
    for tile in _tiles(target.shape, sizes):
        part = source[tile]
        piece = scratch[tuple(slice(0, n) for n in part.shape)]
        np.copyto(piece, part)
        _write(target[tile], piece)


def _tile(shape: Sequence[int], fastest: Sequence[int], elements: int) -> list[int]:
    """The sizes of a tile: some of the target's last axis, and of others as the source has them."""
    last = len(shape) - 1
    others = prod(shape[:-1])
    sizes = [1] * len(shape)
    sizes[last] = min(shape[last], max(TILE_ACROSS, elements // others))
    left = elements // sizes[last]
    for axis in fastest:
        if axis != last:
            sizes[axis] = min(shape[axis], max(1, left))
            left //= sizes[axis]
    return sizes


def _scratch(sizes: Sequence[int], fastest: Sequence[int], dtype: np.dtype[np.generic]) -> Array:
    """Memory for a tile in the source's order, with gaps along the axis that the target takes."""
    backwards = range(len(sizes) - 1, -1, -1)
    first_other = next((a for a, b in zip(backwards, fastest, strict=True) if a != b), -1)
    steps = [0] * len(sizes)
    step = dtype.itemsize
    for axis in fastest:
        if axis == first_other:
            step += max(LINE_BYTES // dtype.itemsize, 1) * dtype.itemsize
        steps[axis] = step
        step *= sizes[axis]
    return as_strided(np.empty(step // dtype.itemsize, dtype), sizes, steps)


def _tiles(shape: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    starts = (range(0, n, step) for n, step in zip(shape, sizes, strict=True))
    for low in product(*starts):
        yield tuple(slice(a, a + n) for a, n in zip(low, sizes, strict=True))


def _write(target: Array, piece: Array) -> None:
    """Copy a tile from scratch memory to its place."""
    if target.ndim < 2 or target.shape[-1] > SHORT:
        np.copyto(target, piece)
        return
    for position in range(target.shape[-1]):
        np.copyto(target[..., position], piece[..., position])
