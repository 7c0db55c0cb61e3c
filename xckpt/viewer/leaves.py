"""A checkpoint's leaves as a page shows them, from its manifest alone: no data is read.

1. Leaves that differ only in their names are of one kind; a kind is described once (`_LeafKinds`).
2. For a kind's sharding the cuts of each dimension are kept (`xckpt.core.geometry.shard_cuts`); the
   page combines them to boxes. Equal cuts stand in the page once.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from math import prod

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.shard_cuts import DimensionCuts, dimension_cuts
from xckpt.core.manifest.entries import (
    BytesEntry,
    Entry,
    Manifest,
    ValueEntry,
    leaf_arrays,
)
from xckpt.core.text.printable import printable
from xckpt.core.values import decode_value, shown_value
from xckpt.viewer.model import CheckpointPage, LeafKind, StoredBox
from xckpt.viewer.shown import CutsOfDimension, Numbered

MOST_INTERVALS = 1 << 20
"""Intervals of all cuts on one page; of kinds beyond it, no shards are drawn."""


MOST_ARRAYS = 1 << 17
"""Zarr arrays of all kinds on one page; of kinds beyond it, no arrays are drawn."""


def checkpoint_page(manifest: Manifest, shared: Mapping[str, int] | None = None) -> CheckpointPage:
    """The page of a checkpoint.

    Args:
        manifest: its manifest.
        shared: leaf name -> bytes of its files that other checkpoints have too.

    Example:
        >>> import numpy as np, xckpt
        >>> state = {"a": np.zeros((4, 2)), "b": np.ones((4, 2)), "step": 3}
        >>> _ = xckpt.save("memory://leaves-page", state)
        >>> page = checkpoint_page(xckpt.open("memory://leaves-page").manifest)
        >>> page.names, page.kind, page.kinds[0].arrays[0].chunk, page.values
        (('a', 'b', 'step'), (0, 0, 1), (4, 2), {'2': '3'})
    """
    kinds = _LeafKinds()
    names = [leaf.name for leaf in manifest.leaves]
    numbers = [kinds.number(leaf) for leaf in manifest.leaves]
    values = {
        str(number): printable(shown_value(decode_value(leaf.type, leaf.value)))
        for number, leaf in enumerate(manifest.leaves)
        if isinstance(leaf, ValueEntry)
    }
    return CheckpointPage(
        tuple(map(printable, names)),
        tuple(numbers),
        tuple(kinds.described),
        tuple(kinds.meshes),
        tuple(kinds.cuts),
        values,
        {printable(name): printable(kind) for name, kind in manifest.containers.items()},
        {str(n): shared[name] for n, name in enumerate(names) if shared.get(name)}
        if shared
        else {},
        _metadata(manifest.user),
    )


class _LeafKinds:
    """The kinds of leaves, with the meshes and cuts that they share."""

    def __init__(self) -> None:
        self.described: list[LeafKind] = []
        self.meshes: Numbered[tuple[tuple[str, int], ...]] = Numbered()
        self.cuts: Numbered[CutsOfDimension] = Numbered()
        self._numbers: Numbered[Hashable] = Numbered()
        self._intervals = self._arrays = 0

    def number(self, leaf: Entry) -> int:
        """The number of a leaf's kind."""
        number = self._numbers.of(_key(leaf))
        if number == len(self.described):
            self.described.append(self._describe(leaf))
        return number

    def _describe(self, leaf: Entry) -> LeafKind:
        if isinstance(leaf, ValueEntry):
            return LeafKind("value", printable(leaf.type))
        arrays = tuple(leaf_arrays(leaf))
        chunks = sum(array.count for array in arrays)
        self._arrays += len(arrays)
        drawn = arrays if self._arrays <= MOST_ARRAYS else ()
        boxes = tuple(StoredBox(a.offset, a.shape, a.chunk, a.shard) for a in drawn)
        if isinstance(leaf, BytesEntry):
            return LeafKind(
                "value", printable(leaf.type), None, leaf.size, chunks, "regular", boxes
            )
        cuts = self._numbers_of(dimension_cuts(leaf.sharding, leaf.shape))
        known = leaf.sharding if cuts is not None else None
        axes = tuple((printable(name), size) for name, size in known.axes) if known else None
        return LeafKind(
            "tensor",
            leaf.dtype,
            leaf.shape,
            prod(leaf.shape) * item_size(leaf.dtype),
            chunks,
            "regular" if leaf.pieces is None else "pieces",
            boxes,
            printable(str(leaf.sharding)) if leaf.sharding else "",
            None if axes is None else self.meshes.of(axes),
            cuts,
            printable(leaf.annotation),
            leaf.dimension_names and tuple(map(printable, leaf.dimension_names)),
        )

    def _numbers_of(self, cuts: tuple[DimensionCuts, ...] | None) -> tuple[int, ...] | None:
        """The numbers of the cuts, unless the page would be too long."""
        if cuts is None:
            return None
        shown = [CutsOfDimension(each.axes, each.intervals) for each in cuts]
        new = sum(len(each.intervals) for each in shown if each not in self.cuts)
        if self._intervals + new > MOST_INTERVALS:
            return None
        self._intervals += new
        return tuple(map(self.cuts.of, shown))


def _key(leaf: Entry) -> Hashable:
    """Equal for leaves of one kind."""
    if isinstance(leaf, ValueEntry):
        return leaf.type
    if isinstance(leaf, BytesEntry):
        return leaf.type, leaf.size, leaf.chunk
    stored = leaf.dtype, leaf.shape, leaf.chunk, leaf.shard, leaf.pieces
    return *stored, leaf.sharding, leaf.annotation, leaf.dimension_names


def _metadata(user: object) -> str:
    if user is None:
        return ""
    return json.dumps(user, indent=2, ensure_ascii=True, default=repr)
