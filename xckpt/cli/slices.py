"""A slice of a tensor, and what reading it takes.

1. `parse_box` turns ``"0:100, 64:128"`` into a box, as NumPy would.
2. `touched` is the box of whole chunks around the part of a slice that one zarr array holds.
3. `reading` adds up chunks and bytes over all arrays: a chunk is read whole, padding included.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from xckpt.cli.report import ArrayReport, LeafReport, SliceReport
from xckpt.core.geometry.box import Box


def parse_box(text: str, shape: Sequence[int]) -> Box:
    """The box that a slice is.

    Args:
        text: ``start:stop`` or a position for each dimension, separated by commas; either end may
            be left out or count from the end, and dimensions not given are whole.
        shape: the tensor's, elements.

    Raises:
        ValueError: the text is no such slice, or does not fit the shape.

    Example:
        >>> parse_box("0:100, -64:", (50257, 768))
        Box(offsets=(0, 704), sizes=(100, 64))
        >>> parse_box("7", (10, 4))
        Box(offsets=(7, 0), sizes=(1, 4))
    """
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if len(parts) > len(shape):
        raise ValueError(f"{text!r} has {len(parts)} dimensions, and the tensor {len(shape)}")
    parts += [":"] * (len(shape) - len(parts))
    ranges = [
        _range(part, d, size) for d, (part, size) in enumerate(zip(parts, shape, strict=True))
    ]
    return Box(tuple(part.start for part in ranges), tuple(map(len, ranges)))


def _range(text: str, dimension: int, size: int) -> range:
    start, colon, stop = text.partition(":")
    try:
        low = int(start) if start.strip() or not colon else None
        high = int(stop) if stop.strip() else None
    except ValueError:
        message = f"{text!r} is no slice of dimension {dimension}; write it as 0:100, 5 or :"
        raise ValueError(message) from None
    if colon:
        return range(size)[low:high]
    assert low is not None
    if not -size <= low < size:
        raise ValueError(f"{low} is outside dimension {dimension}, which has {size} elements")
    return range(low % size, low % size + 1)


def touched(array: ArrayReport, box: Box) -> Box | None:
    """The whole chunks of an array that a box meets, in the tensor's elements; None if none.

    Example:
        >>> touched(ArrayReport("w", (10,), (20,), (8,), None, 3), Box((0,), (19,)))
        Box(offsets=(10,), sizes=(16,))
    """
    part = box.meets(array.box)
    if part is None:
        return None
    part = part.relative_to(array.offset)
    low = tuple(o // n * n for o, n in zip(part.offsets, array.chunk, strict=True))
    high = (-(-e // n) * n for e, n in zip(part.ends, array.chunk, strict=True))
    sizes = (min(e, size) - o for o, e, size in zip(low, high, array.shape, strict=True))
    return Box(low, tuple(sizes)).shifted(array.offset)


def reading(leaf: LeafReport, box: Box) -> SliceReport:
    """What reading a box of a tensor takes."""
    assert leaf.shape is not None
    elements = prod(leaf.shape)
    item_bytes = leaf.bytes // elements if elements else 0
    chunks = stored = 0
    for array in leaf.arrays:
        around = touched(array, box)
        if around is not None:
            count = prod(-(-n // step) for n, step in zip(around.sizes, array.chunk, strict=True))
            chunks += count
            stored += count * prod(array.chunk)
    return SliceReport(
        box.offsets,
        box.sizes,
        box.elements * item_bytes,
        stored * item_bytes,
        chunks,
        leaf.chunks,
    )
