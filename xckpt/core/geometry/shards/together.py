"""Which chunks of zarr shards one request brings, so that one rank is to read them for all others.

A writer of this package puts the chunks of a shard back to back in C order. Those that begin in the
same run of some bytes belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

import numpy as np

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Int64s
from xckpt.core.geometry.grid import ZarrArray


def together(arrays: Iterable[ZarrArray], most: int) -> Callable[[Int64s], Int64s]:
    """A function that gives each of many chunks the number of one with which it is read.

    Args:
        arrays: those of the checkpoint that have zarr shards.
        most: bytes of a run.

    Returns:
        Takes the numbers of chunks, each once, and gives one of them for each, equal for those of a
        run; a chunk of any other array is read alone.

    Example:
        >>> array = ZarrArray("w", 0, "int8", (0, 0), (4, 4), (2, 2), (4, 4), first=10)
        >>> together([array], most=8)(np.array([13, 9, 10, 11, 12])).tolist()
        [12, 9, 10, 10, 12]
    """
    listed = list(arrays)

    def first_of_run(chunks: Int64s) -> Int64s:
        order = np.argsort(chunks)
        ascending, firsts = chunks[order], chunks[order]
        for array in listed:
            low, high = np.searchsorted(ascending, [array.first, array.first + array.count])
            if low < high:
                own = ascending[low:high]
                _, first, run = np.unique(
                    _runs(array, own - array.first, most), return_index=True, return_inverse=True
                )
                firsts[low:high] = own[first[run]]
        found = np.empty_like(firsts)
        found[order] = firsts
        return found

    return first_of_run


def _runs(array: ZarrArray, chunks: Int64s, most: int) -> Int64s:
    """The run of each chunk of an array, by its shard and its place in that."""
    inner = [outer // chunk for outer, chunk in zip(array.unit, array.chunk, strict=True)]
    counts = [-(-size // chunk) for size, chunk in zip(array.shape, array.chunk, strict=True)]
    shards = [-(-count // each) for count, each in zip(counts, inner, strict=True)]
    cells = np.unravel_index(chunks, counts)
    outside = tuple(cell // each for cell, each in zip(cells, inner, strict=True))
    within = tuple(cell % each for cell, each in zip(cells, inner, strict=True))
    length = max(1, most // (prod(array.chunk) * item_size(array.dtype)))
    runs = -(-prod(inner) // length)
    shard, place = np.ravel_multi_index(outside, shards), np.ravel_multi_index(within, inner)
    return shard * runs + place // length
