"""What the coordinator of a save sends to ranks that write, what they report, and its check.

1. `WriteOrders` go with each rank's plan, `Written` comes back.
2. `merge_values`: every value has exactly one writer.
3. `merge_digests`: so has every chunk of every array; where that is not so, the chunks are named
   with their boxes and ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.grid import cells
from xckpt.core.manifest.entries import BytesEntry, Manifest, ValueEntry, ZarrArray, arrays
from xckpt.core.metadata import BytesStorageMetadata, Metadata
from xckpt.core.struct_types import prepare_structs
from xckpt.errors import PlanError
from xckpt.storage.integrity import DIGEST_BYTES
from xckpt.storage.location import Location

SHOWN = 3
"""Most chunks of an array that are named."""


class WriteOrders(msgspec.Struct, array_like=True, frozen=True):
    """What the coordinator sends to a rank: where to write, and the arrays of its leaves."""

    location: Location
    """Where the root group is staged."""
    codecs: tuple[str, ...]
    """Those behind ``bytes``; the coordinator's for all ranks."""
    arrays: tuple[ZarrArray, ...]
    """Every array that the rank writes parts of, leaf by leaf."""


class WrittenArray(msgspec.Struct, array_like=True, gc=False):
    """The chunks of one array that a rank has written."""

    leaf: str
    number: int
    cells: bytes
    """Numbers of the chunks, int64."""
    digests: bytes
    """A digest for each, in the same order."""


class Written(msgspec.Struct, array_like=True):
    """What a rank reports."""

    arrays: list[WrittenArray]
    values: dict[str, ValueEntry | BytesEntry]


prepare_structs(WriteOrders, Written)


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


def merge_digests(manifest: Manifest, written: Sequence[Written]) -> bytes:
    """All digests in the manifest's order.

    Raises:
        PlanError: a chunk was written by no rank, or twice; all such arrays are listed.
    """
    placed = {(array.leaf, array.number): array for array in arrays(manifest)}
    count = sum(array.count for array in placed.values())
    digests = np.zeros((count, DIGEST_BYTES), np.uint8)
    times = np.zeros(count, np.int32)
    for report in written:
        firsts = [placed[part.leaf, part.number].first for part in report.arrays]
        chunks = [len(part.digests) // DIGEST_BYTES for part in report.arrays]
        cells = np.frombuffer(b"".join(part.cells for part in report.arrays), np.int64)
        numbers = np.repeat(np.array(firsts, np.int64), chunks) + cells
        taken = np.frombuffer(b"".join(part.digests for part in report.arrays), np.uint8)
        digests[numbers] = taken.reshape(-1, DIGEST_BYTES)
        np.add.at(times, numbers, 1)
    if not (times == 1).all():
        raise PlanError.listing(
            "the planner's items do not write every chunk exactly once",
            _miswritten(manifest, written),
        )
    return digests.tobytes()


def _miswritten(manifest: Manifest, written: Sequence[Written]) -> Iterator[str]:
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
