"""The zarr arrays of a manifest in columns: a load of very many leaves makes no object for each.

1. Leaves that are alike in type, shape and chunks are of one *kind*: what follows from that is
   found once.
2. Where a leaf's first digest is, and its first place in the packs, are columns over the leaves.
3. A `ZarrArray` is made when it is asked for.
"""

from __future__ import annotations

import functools
from array import array as array_of
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Box
from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.manifest.entries import (
    Entry,
    Manifest,
    TensorEntry,
    is_packed,
    leaf_arrays,
    regular,
)
from xckpt.core.manifest.rules import Kind, count_leaf_chunks, count_leaf_packed

KEPT = 1 << 16
"""About how many arrays are kept at most, once they are made."""


@dataclass(frozen=True, slots=True)
class _Counts:
    """What is known of all leaves of a kind."""

    chunks: int
    packed: int
    """How many of the chunks lie in packs."""
    nbytes: int = 0
    """Bytes of the elements of a leaf that is one chunk; 0 for any other."""


class StoredArrays(Mapping[str, Sequence[ZarrArray]]):
    """Leaf name -> its zarr arrays, in the order of their digests; made when they are asked for.

    Args:
        manifest: checked.

    Example:
        >>> tensors = tuple(TensorEntry(name, "int8", (4,), (4,)) for name in ("v", "w"))
        >>> stored = StoredArrays(Manifest(tensors, ""))
        >>> stored.first.tolist(), stored["w"][0].first
        ([0, 1], 1)
    """

    first: NDArray[np.int64]
    """The number of each leaf's first digest, (leaves,)."""
    place: NDArray[np.int64]
    """The number of the first place of each leaf that has some, (leaves,)."""
    is_packed: NDArray[np.bool_]
    """Which leaves have places, (leaves,)."""
    nbytes: NDArray[np.int64]
    """Bytes of the elements of each leaf that is one chunk, (leaves,); 0 of any other."""

    def __init__(self, manifest: Manifest) -> None:
        self._leaves, self._pack_bytes = manifest.leaves, manifest.pack_bytes
        kinds: dict[Kind | str, int] = {}
        counted: list[_Counts] = []
        column = np.empty(len(self._leaves), np.int32)
        for number, leaf in enumerate(self._leaves):
            if isinstance(leaf, TensorEntry) and leaf.chunk is not None:
                kind = leaf.dtype, leaf.shape, leaf.chunk, leaf.shard
            else:
                kind = leaf.name
            known = kinds.get(kind)
            if known is None:
                known = kinds[kind] = len(counted)
                counted.append(_counts(leaf, self._pack_bytes))
            column[number] = known
        chunks, packed, nbytes = (
            np.array([getattr(each, name) for each in counted], np.int64)[column]
            for name in ("chunks", "packed", "nbytes")
        )
        self.first, self.place = np.cumsum(chunks) - chunks, np.cumsum(packed) - packed
        self.is_packed, self.nbytes = packed > 0, nbytes
        self._pieces: dict[str, list[ZarrArray]] = {}
        self._kept = 0

    @functools.cached_property
    def numbers(self) -> Mapping[str, int]:
        """Leaf name -> its number in the manifest."""
        return {leaf.name: number for number, leaf in enumerate(self._leaves)}

    def numbers_of(self, names: Sequence[str]) -> Sequence[int]:
        """The numbers of leaves by their names, which mostly come in the manifest's order.

        Then no table of all names is made.

        Example:
            >>> tensors = tuple(TensorEntry(name, "int8", (4,), (4,)) for name in "abc")
            >>> stored = StoredArrays(Manifest(tensors, ""))
            >>> [*stored.numbers_of(["a", "c", "c"])], [*stored.numbers_of(["b", "a"])]
            ([0, 2, 2], [1, 0])
        """
        numbers, at = array_of("q"), 0
        for name in names:
            while at < len(self._leaves) and self._leaves[at].name != name:
                at += 1
            if at == len(self._leaves):
                return array_of("q", [self.numbers[name] for name in names])
            numbers.append(at)
        return numbers

    def dtype(self, number: int) -> str:
        """The element type of leaf ``number``."""
        leaf = self._leaves[number]
        return leaf.dtype if isinstance(leaf, TensorEntry) else "uint8"

    def at(self, number: int) -> Sequence[ZarrArray]:
        """The arrays of leaf ``number``."""
        leaf = self._leaves[number]
        made = self._pieces.get(leaf.name)
        if made is None:
            about = int(self.first[number]), int(self.place[number]), self._pack_bytes
            made = list(_placed(leaf, *about))
            if len(made) > int(self.is_packed[number]):  # a packed one is rarely asked for
                if self._kept > KEPT:
                    self._pieces.clear()
                    self._kept = 0
                self._pieces[leaf.name] = made
                self._kept += len(made)
        return made

    def __getitem__(self, name: str) -> Sequence[ZarrArray]:
        return self.at(self.numbers[name])

    def __iter__(self) -> Iterator[str]:
        """Of the leaves that have arrays."""
        return (leaf.name for number, leaf in enumerate(self._leaves) if self.at(number))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _counts(leaf: Entry, pack_bytes: int) -> _Counts:
    """What is known of the leaves that are like one."""
    if isinstance(leaf, TensorEntry) and leaf.chunk is not None:
        _, chunks, packed = regular(leaf.dtype, leaf.shape, leaf.chunk, leaf.shard, pack_bytes)
        one = chunks == 1
        size = Box.whole(leaf.shape).elements * item_size(leaf.dtype) if one else 0
        return _Counts(chunks, chunks * packed, size)
    return _Counts(count_leaf_chunks(leaf), count_leaf_packed(leaf, pack_bytes))


def _placed(leaf: Entry, first: int, place: int, pack_bytes: int) -> Iterator[ZarrArray]:
    """The zarr arrays of one leaf, whose first digest and first place have these numbers."""
    if isinstance(leaf, TensorEntry) and leaf.chunk is not None:  # as most are
        grid = leaf.shape, leaf.chunk, leaf.shard
        origin, _, packed = regular(leaf.dtype, *grid, pack_bytes)
        about = first, None, leaf.dimension_names, place if packed else None
        yield ZarrArray(leaf.name, 0, leaf.dtype, origin, *grid, *about)
        return
    for array in leaf_arrays(leaf, first):
        if is_packed(array, pack_bytes):
            yield msgspec.structs.replace(array, place=place)
            place += array.count
        else:
            yield array
