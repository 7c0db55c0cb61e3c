"""The error about chunks that were not written exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.grid import ZarrArray, cells
from xckpt.errors import PlanError

SHOWN = 3
"""Most chunks of an array that an error names."""


def write_count_error(
    arrays: Iterable[ZarrArray], written_by: Sequence[NDArray[np.int64]]
) -> PlanError:
    """The error that has a line for each chunk not written exactly once; few lines an array.

    Args:
        arrays: all of the checkpoint.
        written_by: the numbers of the chunks that each rank wrote, (chunks of the rank,).
    """
    return PlanError.listing(
        "the planner's items do not write every chunk exactly once", _lines(arrays, written_by)
    )


def _lines(arrays: Iterable[ZarrArray], written_by: Sequence[NDArray[np.int64]]) -> Iterator[str]:
    listed = list(arrays)
    times = np.zeros(sum(array.count for array in listed), np.uint32)
    for numbers in written_by:
        np.add.at(times, numbers, 1)
    for array in listed:
        own = times[array.first : array.first + array.count]
        wrong = np.flatnonzero(own != 1)
        if len(wrong) == 0:
            continue
        if not own.any():
            yield f"{array.leaf}: {array.box} was written by no rank"
            continue
        _, boxes = cells((0,) * len(array.shape), array.shape, array.shape, array.chunk)
        shown: list[int] = wrong[:SHOWN].tolist()
        for number in shown:
            counts = [np.count_nonzero(numbers == array.first + number) for numbers in written_by]
            ranks = np.repeat(np.arange(len(counts)), counts).tolist()
            where = boxes[number].shifted(array.offset)
            yield f"{array.leaf}: {where} was written by {writers_in_words(ranks)}"
        if len(wrong) > SHOWN:
            yield f"{array.leaf}: and {len(wrong) - SHOWN} more of its chunks"


def writers_in_words(ranks: Sequence[int]) -> str:
    """The writers of a chunk or a value, in words.

    Example:
        >>> writers_in_words([]), writers_in_words([2, 2]), writers_in_words([0, 1, 3])
        ('no rank', 'rank 2 twice', 'ranks 0, 1 and 3')
    """
    if not ranks:
        return "no rank"
    if len(set(ranks)) == 1:
        return f"rank {ranks[0]} {'twice' if len(ranks) == 2 else f'{len(ranks)} times'}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
