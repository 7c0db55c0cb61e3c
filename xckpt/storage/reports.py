"""What all ranks wrote, compared with what had to be written.

Every chunk of every array and every value has exactly one writer. `merge_values` puts the values
together and `miswritten` names the chunks for which that does not hold, with their boxes and ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.grid import cells
from xckpt.core.manifest.entries import BytesEntry, Manifest, ValueEntry, ZarrArray, arrays
from xckpt.core.metadata import BytesStorageMetadata, Metadata
from xckpt.errors import PlanError
from xckpt.storage.orders import Written

__all__ = ["merge_values", "miswritten"]

SHOWN = 3
"""Most chunks of an array that are named."""


def merge_values(
    metadata: Metadata, written: Sequence[Written]
) -> dict[str, ValueEntry | BytesEntry]:
    """The entries of all values, from the ranks' reports in rank order.

    Raises:
        PlanError: a value was written by no rank or by several, or is not in the metadata.
    """
    writers: dict[str, list[int]] = {
        name: []
        for name, described in metadata.state_dict_metadata.items()
        if isinstance(described, BytesStorageMetadata)
    }
    problems: list[str] = []
    for rank, report in enumerate(written):
        for name in report.values:
            if name in writers:
                writers[name].append(rank)
            else:
                problems.append(f"{name}: rank {rank} wrote it, but the plan has no such value")
    problems += [
        f"{name}: the value was written by {_ranks(ranks)}"
        for name, ranks in writers.items()
        if len(ranks) != 1
    ]
    if problems:
        raise PlanError.listing("the planner's items do not write every value once", problems)
    return {name: written[rank].values[name] for name, [rank] in writers.items()}


def miswritten(manifest: Manifest, written: Sequence[Written]) -> Iterator[str]:
    """A line for each chunk that was not written exactly once; few lines an array."""
    reported: dict[tuple[str, int], list[tuple[int, NDArray[np.int64]]]] = {}
    for rank, report in enumerate(written):
        for part in report.arrays:
            numbers = np.frombuffer(part.cells, np.int64)
            reported.setdefault((part.leaf, part.number), []).append((rank, numbers))
    for array in arrays(manifest):
        yield from _miswritten_in(array, reported.get((array.leaf, array.number), []))


def _miswritten_in(
    array: ZarrArray, reported: Sequence[tuple[int, NDArray[np.int64]]]
) -> Iterator[str]:
    times = np.zeros(array.count, np.int64)
    for _, numbers in reported:
        np.add.at(times, numbers, 1)
    wrong = np.flatnonzero(times != 1)
    if len(wrong) == 0:
        return
    if len(wrong) == array.count and not times.any():
        yield f"{array.leaf}: {array.box} was written by no rank"
        return
    _, boxes = cells((0,) * len(array.shape), array.shape, array.shape, array.chunk)
    for number in wrong[:SHOWN].tolist():
        ranks = [rank for rank, numbers in reported for _ in range(int(np.sum(numbers == number)))]
        where = boxes[number].shifted(array.offset)
        yield f"{array.leaf}: {where} was written by {_ranks(ranks)}"
    if len(wrong) > SHOWN:
        yield f"{array.leaf}: and {len(wrong) - SHOWN} more of its chunks"


def _ranks(ranks: Sequence[int]) -> str:
    """The writers of a chunk or a value, in words.

    Example:
        >>> _ranks([]), _ranks([2, 2]), _ranks([0, 1, 3])
        ('no rank', 'rank 2 twice', 'ranks 0, 1 and 3')
    """
    if not ranks:
        return "no rank"
    if len(set(ranks)) == 1:
        return f"rank {ranks[0]} {'twice' if len(ranks) == 2 else f'{len(ranks)} times'}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
