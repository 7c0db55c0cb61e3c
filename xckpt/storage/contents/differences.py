"""Whether two open checkpoints hold the same elements and values.

1. Where a tensor is cut into the same chunks in both, the digests of the chunks tell, and no data
   is read: they are of the elements as they were saved, so equal digests are equal elements.
2. Otherwise both are read, slab by slab, and their bytes compared: -0.0 is not 0.0, and a NaN is
   the same NaN.
3. Python values are compared by what spells them, so NaN equals NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from xckpt.core.geometry.box import Shape
from xckpt.core.geometry.cell_blocks import cell_at
from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.manifest.differences import Difference, structural_differences
from xckpt.core.values import encode_value, shown_value
from xckpt.storage.array import DIGEST_BYTES
from xckpt.storage.budget import ProgressCounter, Watcher
from xckpt.storage.checkpoint import Checkpoint
from xckpt.storage.chunks.chunk import allocate
from xckpt.storage.chunks.digests import BLOCK
from xckpt.storage.contents.slabs import any_order
from xckpt.storage.stored_array import StoredArray

OURS = "xckpt"


def differences(
    first: Checkpoint, second: Checkpoint, *, values: bool, progress: Watcher = None
) -> list[Difference]:
    """All that differs, structure first.

    Args:
        first: one checkpoint; its options say how much memory a comparison may take.
        second: another.
        values: also compare elements, Python values and user metadata.
        progress: called with the bytes of the first that are compared.

    Raises:
        CorruptCheckpointError: what had to be read is not what was saved.
        StorageError: the storage refused.
    """
    found = structural_differences(first.metadata, second.metadata)
    if not values:
        return found
    users = repr(first.user_metadata), repr(second.user_metadata)
    if first.user_metadata != second.user_metadata:
        found.append(Difference("", "metadata", *users))
    others = {each.name for each in found if each.kind != "container"}
    names = [name for name in first if name in second and name not in others]
    return [*found, *_contents(first, second, names, progress)]


def _contents(
    first: Checkpoint, second: Checkpoint, names: Sequence[str], watcher: Watcher
) -> Iterator[Difference]:
    """How leaves differ that have the same type, dtype and shape."""
    _prepare(first, names)
    _prepare(second, names)
    pairs = [(name, first[name], second[name]) for name in names]
    total = sum(ours.nbytes for _, ours, _ in pairs if isinstance(ours, StoredArray))
    progress = ProgressCounter(total, watcher)
    for name, ours, theirs in pairs:
        if isinstance(ours, StoredArray) and isinstance(theirs, StoredArray):
            where = _by_digests(first, second, name)
            if where is None:
                where = _by_reading(ours, theirs, first.options.memory_bytes // 2, progress)
            else:
                progress.add(ours.nbytes)
            if where:
                yield Difference(name, "content", where, where)
        elif encode_value(ours) != encode_value(theirs):
            yield Difference(name, "content", shown_value(ours), shown_value(theirs))


def _prepare(checkpoint: Checkpoint, names: Sequence[str]) -> None:
    """Fetch the digests of all tensors at once; other libraries' formats have none."""
    if checkpoint.format != OURS:
        return
    source = checkpoint.chunk_source
    with source.integrity.noticing_replacement():
        source.integrity.digests.prepare(_arrays(checkpoint, names))


def _arrays(checkpoint: Checkpoint, names: Iterable[str]) -> list[ZarrArray]:
    stored = checkpoint.chunk_source.arrays
    return [array for name in names for array in stored.get(name, ())]


def _by_digests(first: Checkpoint, second: Checkpoint, name: str) -> str | None:
    """Where a tensor differs (empty if nowhere); None if digests cannot tell.

    They can where the chunks of both are the same boxes; other libraries' formats have none.
    """
    if not first.format == second.format == OURS:
        return None
    ours, theirs = _arrays(first, [name]), _arrays(second, [name])
    if [_grid(array) for array in ours] != [_grid(array) for array in theirs]:
        return None
    found, where = 0, None
    for one, other in zip(ours, theirs, strict=True):
        numbers = _differing(first, one, second, other)
        if where is None and numbers.many:
            where = cell_at(numbers.first, one.shape, one.chunk).shifted(one.offset)
        found += numbers.many
    if where is None:
        return ""
    count = sum(array.count for array in ours)
    if not where.sizes:
        return "in its one element"
    return f"in {found:,} of {count:,} chunks, first in {where}"


class _Numbers(NamedTuple):
    """Chunks of an array."""

    many: int
    first: int
    """The number of the first of them."""


def _differing(first: Checkpoint, one: ZarrArray, second: Checkpoint, other: ZarrArray) -> _Numbers:
    """The chunks of two arrays of one grid that have other digests."""
    ours = first.chunk_source.integrity.digests.blocks(one)
    theirs = second.chunk_source.integrity.digests.blocks(other)
    count, least = 0, -1
    for number, digests in enumerate(zip(ours, theirs, strict=True)):
        rows = [np.frombuffer(each, np.uint8).reshape(-1, DIGEST_BYTES) for each in digests]
        at = np.flatnonzero((rows[0] != rows[1]).any(axis=1))
        if at.size:
            least = number * BLOCK + int(at[0]) if least < 0 else least
            count += at.size
    return _Numbers(count, least)


def _grid(array: ZarrArray) -> tuple[Shape, Shape, Shape]:
    return array.offset, array.shape, array.chunk


def _by_reading(
    first: StoredArray, second: StoredArray, memory_bytes: int, progress: ProgressCounter
) -> str:
    """Where two tensors differ first, as they are read; empty if nowhere."""
    left = first.nbytes
    for box, elements in any_order(first, memory_bytes):
        other = allocate(box.sizes, elements.dtype, second.name)
        second.read(box, other)
        bytes_of = (each.reshape(-1).view(np.uint8) for each in (elements, other))
        differing = np.not_equal(*bytes_of)
        if differing.any():
            progress.add(left)
            at = np.unravel_index(differing.argmax() // elements.dtype.itemsize, box.sizes)
            place = (int(low + step) for low, step in zip(box.offsets, at, strict=True))
            return f"from [{', '.join(map(str, place))}] on" if box.sizes else "in its one element"
        progress.add(elements.nbytes)
        left -= elements.nbytes
    return ""
