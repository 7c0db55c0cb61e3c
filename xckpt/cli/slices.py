"""A slice of a tensor, and what reading it takes.

1. `parse_box` turns ``"0:100, 64:128"`` into a range for each dimension, as NumPy would.
2. `touched` is the box of whole chunks around the part of a slice that one zarr array holds.
3. `reading` adds up chunks and bytes over all arrays: a chunk is read whole, padding included.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from xckpt.cli.report import ArrayReport, LeafReport, Reading

__all__ = ["Window", "parse_box", "reading", "touched"]

Window = tuple[range, ...]
"""Elements ``[start, stop)`` of each dimension."""


def parse_box(text: str, shape: Sequence[int]) -> Window:
    """The box that a slice is.

    Args:
        text: ``start:stop`` or a position for each dimension, separated by commas; either end may
            be left out or count from the end, and dimensions not given are whole.
        shape: the tensor's, elements.

    Raises:
        ValueError: the text is no such slice, or doesn't fit the shape.

    Example:
        >>> parse_box("0:100, -64:", (50257, 768))
        (range(0, 100), range(704, 768))
        >>> parse_box("7", (10, 4))
        (range(7, 8), range(0, 4))
    """
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if len(parts) > len(shape):
        raise ValueError(f"{text!r} has {len(parts)} dimensions, and the tensor {len(shape)}")
    given = [_range(part, d, shape[d]) for d, part in enumerate(parts)]
    return (*given, *(range(size) for size in shape[len(parts) :]))


def _range(text: str, dimension: int, size: int) -> range:
    start, colon, stop = text.partition(":")
    try:
        low = int(start) if start.strip() or not colon else None
        high = int(stop) if stop.strip() else None
    except ValueError:
        message = f"{text!r} is no slice of dimension {dimension}; write it as 0:100, 5 or :"
        raise ValueError(message) from None
    if colon:
        a, b, _ = slice(low, high).indices(size)
        return range(a, max(a, b))
    assert low is not None
    if not -size <= low < size:
        raise ValueError(f"{low} is outside dimension {dimension}, which has {size} elements")
    return range(low % size, low % size + 1)


def touched(array: ArrayReport, box: Window) -> Window | None:
    """The whole chunks of an array that a box meets, in the tensor's elements; None if none.

    Example:
        >>> touched(ArrayReport("w", (10,), (20,), (8,), None, 3), (range(0, 19),))
        (range(10, 26),)
    """
    around: list[range] = []
    for want, offset, size, step in zip(box, array.offset, array.shape, array.chunk, strict=True):
        low = max(want.start - offset, 0)
        high = min(want.stop - offset, size)
        if low >= high:
            return None
        end = min(-(-high // step) * step, size)
        around.append(range(offset + low // step * step, offset + end))
    return tuple(around)


def reading(leaf: LeafReport, box: Window) -> Reading:
    """What reading a box of a tensor takes."""
    assert leaf.shape is not None
    elements = prod(leaf.shape)
    item_bytes = leaf.bytes // elements if elements else 0
    chunks = stored = 0
    for array in leaf.arrays:
        around = touched(array, box)
        if around is None:
            continue
        steps = zip(around, array.chunk, strict=True)
        count = prod(-(-len(part) // step) for part, step in steps)
        chunks += count
        stored += count * prod(array.chunk)
    wanted = prod(len(part) for part in box)
    return Reading(
        tuple(part.start for part in box),
        tuple(len(part) for part in box),
        wanted * item_bytes,
        stored * item_bytes,
        chunks,
        leaf.chunks,
    )
