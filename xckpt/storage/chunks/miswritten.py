"""What to say of chunks that were not written exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.grid import ZarrArray, cells

SHOWN = 3
"""Most chunks of an array that an error names."""


def miswritten(
    arrays: Iterable[ZarrArray],
    times: NDArray[np.integer],
    written_by: Sequence[NDArray[np.int64]],
) -> Iterator[str]:
    """A line for each chunk that was not written exactly once; few lines an array.

    Args:
        arrays: all of the checkpoint.
        times: how often each chunk was written, (chunks of all arrays,).
        written_by: the numbers of the chunks that each rank wrote, (chunks of the rank,).
    """
    for array in arrays:
        own = times[array.first : array.first + array.count]
        wrong = np.flatnonzero(own != 1)
        if len(wrong) == 0:
            continue
        if not own.any():
            yield f"{array.leaf}: {array.box} was written by no rank"
            continue
        _, boxes = cells((0,) * len(array.shape), array.shape, array.shape, array.chunk)
        for number in wrong[:SHOWN].tolist():
            counts = [np.count_nonzero(numbers == array.first + number) for numbers in written_by]
            ranks = np.repeat(np.arange(len(counts)), counts).tolist()
            where = boxes[number].shifted(array.offset)
            yield f"{array.leaf}: {where} was written by {spelled(ranks)}"
        if len(wrong) > SHOWN:
            yield f"{array.leaf}: and {len(wrong) - SHOWN} more of its chunks"


def spelled(ranks: Sequence[int]) -> str:
    """The writers of a chunk or a value, in words.

    Example:
        >>> spelled([]), spelled([2, 2]), spelled([0, 1, 3])
        ('no rank', 'rank 2 twice', 'ranks 0, 1 and 3')
    """
    if not ranks:
        return "no rank"
    if len(set(ranks)) == 1:
        return f"rank {ranks[0]} {'twice' if len(ranks) == 2 else f'{len(ranks)} times'}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
