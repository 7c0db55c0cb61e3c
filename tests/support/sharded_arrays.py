"""Arrays cut by hand for the smallest framework with sharded arrays, and what to compare them with.

`Sharded` is saved, `Wanted` is loaded (`conformance.implementations.sharded_arrays`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from conformance.implementations.sharded_arrays import Sharded, Target, Wanted
from tests.support.tilings import Box, region
from xckpt.core.dtypes import dtype_name
from xckpt.core.geometry.box import Boxes
from xckpt.core.metadata import Sharding

__all__ = ["Sharded", "Target", "Wanted", "cut", "holds", "rows", "same_bits", "wish"]

Array = NDArray[np.generic]


def cut(array: Array, boxes: Sequence[Box], sharding: Sharding | None = None) -> Sharded:
    """What a rank holds that has these boxes of an array: views of it."""
    name = dtype_name(array.dtype)
    assert name is not None
    held = list(dict.fromkeys(boxes))
    parts = [array[region(box)] if array.ndim else array for box in held]
    boxes_held = Boxes.of(held, rank=array.ndim)
    return Sharded(array.shape, name, boxes_held, parts, sharding, array=array)


def rows(array: Array, *cuts: int) -> Sharded:
    """An array cut into rows at the given numbers."""
    below = array.shape[1:]
    zeros = (0,) * len(below)
    bounds = pairwise([0, *cuts, len(array)])
    return cut(array, [((a, *zeros), (b - a, *below)) for a, b in bounds])


def wish(array: Array, boxes: Sequence[Box]) -> Wanted:
    """A target for these boxes of an array."""
    source = cut(array, boxes)
    return Wanted(source.shape, source.dtype, source.boxes)


def same_bits(one: Array, other: Array) -> bool:
    """Equal in shape, dtype and every bit (NaN payloads and signs of zero too)."""
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes()


def holds(loaded: object, array: Array) -> bool:
    """Whether every part of a loaded leaf is what the whole array has there."""
    assert isinstance(loaded, Sharded)
    whole = np.asarray(array)
    return loaded.shape == whole.shape and all(
        same_bits(part, np.asarray(whole[region((box.offsets, box.sizes))]))
        for part, box in zip(loaded.parts, loaded.boxes, strict=True)
    )
