"""Large numbers of chunks, some at a time: a shape of a few bytes can mean billions of chunks.

`cell_blocks` cuts a box into runs of whole chunks: along the first dimension behind which a row of
chunks is within the limit; along the dimensions before that one, row by row.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from math import prod

from xckpt.core.geometry.box import Box, Shape


def count_met(box: Box, chunk: Shape) -> int:
    """How many chunks a non-empty box of an array meets.

    Example:
        >>> count_met(Box((3,), (2,)), (4,)), count_met(Box((), ()), ())
        (2, 1)
    """
    ends = (-(-high // step) for high, step in zip(box.ends, chunk, strict=True))
    firsts = (low // step for low, step in zip(box.offsets, chunk, strict=True))
    return prod(end - first for end, first in zip(ends, firsts, strict=True))


def cell_blocks(box: Box, chunk: Shape, most: int) -> Iterator[Box]:
    """Boxes that make up a non-empty box, each of at most ``most`` chunks, in C order.

    Example:
        >>> print(*cell_blocks(Box((0, 0), (4, 6)), (2, 2), 3), sep=" ")
        [0, 2) x [0, 6) [2, 4) x [0, 6)
        >>> print(*cell_blocks(Box((1,), (8,)), (2,), 2), sep=" ")
        [1, 4) [4, 8) [8, 9)
    """
    return _below(box, chunk, most, 0)


def _below(box: Box, chunk: Shape, most: int, axis: int) -> Iterator[Box]:
    if count_met(box, chunk) <= most:
        yield box
        return
    behind = Box(box.offsets[axis + 1 :], box.sizes[axis + 1 :])
    rows = max(1, most // count_met(behind, chunk[axis + 1 :]))
    low, high, step = box.offsets[axis], box.ends[axis], chunk[axis]
    while low < high:
        end = min(high, (low // step + rows) * step)
        part = Box(
            (*box.offsets[:axis], low, *box.offsets[axis + 1 :]),
            (*box.sizes[:axis], end - low, *box.sizes[axis + 1 :]),
        )
        yield from _below(part, chunk, most, axis + 1)
        low = end


@functools.lru_cache(maxsize=1024)
def cell_at(number: int, shape: Shape, chunk: Shape) -> Box:
    """The box of an array's chunk with a number, in C order.

    Example:
        >>> print(cell_at(3, (3, 8), (2, 4)))
        [2, 3) x [4, 8)
    """
    offsets: list[int] = []
    for size, step in zip(reversed(shape), reversed(chunk), strict=True):
        number, at = divmod(number, -(-size // step))
        offsets.append(at * step)
    low = tuple(reversed(offsets))
    sides = zip(shape, low, chunk, strict=True)
    return Box(low, tuple(min(step, size - at) for size, at, step in sides))
