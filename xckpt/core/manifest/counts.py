"""How many chunks and pieces a checkpoint has, counted by kinds of leaves.

A checkpoint may have a million leaves, most of which are one array of few kinds (`kinds`): of each
kind it is found once how many chunks a leaf has, and whether they lie in packs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Final, cast

from xckpt.core.geometry.box import Shape
from xckpt.core.geometry.grid import count_cells
from xckpt.core.manifest.entries import (
    BytesEntry,
    Manifest,
    TensorEntry,
    ValueEntry,
    is_packed,
    leaf_arrays,
    regular,
)

Entry = TensorEntry | ValueEntry | BytesEntry
Kind = tuple[str, Shape, Shape, Shape | None]
"""What leaves that are one array have in common: dtype, shape, chunk, zarr shard."""

TOGETHER: Final = 512
"""Leaves that are counted at a time."""


def kind_of(leaf: Entry) -> Kind | None:
    """The kind of a leaf that is one array; None for any other, and where dimensions have names."""
    if not isinstance(leaf, TensorEntry) or leaf.chunk is None:
        return None
    if leaf.pieces is not None or leaf.dimension_names is not None:
        return None
    return leaf.dtype, leaf.shape, leaf.chunk, leaf.shard


def kinds(manifest: Manifest) -> Iterator[tuple[Kind, int]]:
    """How many leaves there are of each kind, `TOGETHER` at a time: all may be different.

    Example:
        >>> entry = TensorEntry("w", "int8", (4,), (2,))
        >>> list(kinds(Manifest((entry, entry), "")))
        [(('int8', (4,), (2,), None), 2)]
    """
    rest = map(kind_of, manifest.leaves)
    while some := Counter(islice(rest, TOGETHER)):
        del some[None]
        yield from cast("Counter[Kind]", some).items()


def count_chunks(manifest: Manifest) -> int:
    """How many chunks a checkpoint has; each has a digest."""
    alike = sum(
        count_cells(shape, chunk) * count for (_, shape, chunk, _), count in kinds(manifest)
    )
    return alike + sum(chunks_of(leaf) for leaf in manifest.leaves if kind_of(leaf) is None)


def count_packed(manifest: Manifest) -> int:
    """How many chunks lie in packs."""
    most, total = manifest.pack_bytes, 0
    if not most:
        return 0
    for kind, count in kinds(manifest):
        _, chunks, packed = regular(*kind, most)
        total += chunks * count * packed
    others = (leaf for leaf in manifest.leaves if kind_of(leaf) is None)
    listed = (array for leaf in others for array in leaf_arrays(leaf))
    return total + sum(array.count for array in listed if is_packed(array, most))


def count_pieces(manifest: Manifest) -> int:
    """How many pieces the leaves of a checkpoint have together."""
    tensors = (leaf for leaf in manifest.leaves if isinstance(leaf, TensorEntry))
    return sum(len(leaf.pieces) for leaf in tensors if leaf.pieces is not None)


def chunks_of(leaf: Entry) -> int:
    """How many chunks a leaf has."""
    if isinstance(leaf, ValueEntry):
        return 0
    if isinstance(leaf, BytesEntry):
        return count_cells((leaf.size,), (leaf.chunk,))
    if leaf.chunk is not None:
        return count_cells(leaf.shape, leaf.chunk)
    return leaf.pieces.chunks if leaf.pieces is not None else 0
