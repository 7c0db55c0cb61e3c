"""Keeping the grid of an earlier checkpoint, so that chunks that did not change are equal.

A chunk can be shared with another checkpoint only where both cut the tensor alike. A grid still
fits (`still_fits`) if each chunk, or zarr shard, lies inside one of the boxes that are written now:
then each has one writer, as in a new grid.

1. One array for the whole tensor fits if no boundary between two boxes lies inside a chunk: per
   dimension, each interior boundary is a multiple of the chunk's size. That is also necessary:
   where a box ends inside a chunk, another box holds the rest of the chunk.
2. A chunk that is twice as long as the tensor along a dimension, or more, is mostly padding, and
   not of this library's making.
3. An array for each box fits the same boxes and no others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.grid import Grid


def still_fits(grid: Grid, shape: Sequence[int], boxes: Boxes) -> bool:
    """Whether each unit of a grid lies inside one of some boxes.

    Args:
        grid: what an earlier checkpoint of the tensor has.
        shape: global shape, elements.
        boxes: disjoint, not empty, together the whole tensor.

    Example:
        >>> grid = Grid.of(Boxes.whole((8, 4)), [(2, 4)], [None])
        >>> still_fits(grid, (8, 4), Boxes.of([((0, 0), (6, 4)), ((6, 0), (2, 4))]))
        True
        >>> still_fits(grid, (8, 4), Boxes.of([((0, 0), (3, 4)), ((3, 0), (5, 4))]))
        False
    """
    if not grid.is_regular(shape):
        return grid.arrays == boxes
    whole = np.array(shape, np.int64)
    bounds = np.concatenate([boxes.offsets, boxes.ends])
    if (grid.units[0] >= 2 * whole).any():
        return False
    return bool(((bounds % grid.units[0] == 0) | (bounds == whole)).all())
