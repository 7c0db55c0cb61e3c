"""A load with another mesh, as numbers: which rank reads which chunks for whom.

1. Leaves of one kind under one spec are examined once (`_Wish`): each rank's boxes, and the chunks
   that they meet.
2. All ranks' chunks go to `xckpt.core.plan.host_reads.share_reads`, as a load sends them: a chunk
   that several ranks of a host want is read by one of them.
3. A chunk is read whole, padding included; what is wanted are the elements alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Boxes, Int64s
from xckpt.core.geometry.box_lookup import intersect
from xckpt.core.geometry.cover import unique
from xckpt.core.geometry.grid import ZarrArray, cells
from xckpt.core.geometry.shard_cuts import device_boxes, held_by
from xckpt.core.manifest.entries import Manifest, TensorEntry, arrays, leaf_arrays
from xckpt.core.plan.host_reads import Announcement, packed, share_reads
from xckpt.core.text.printable import printable
from xckpt.viewer.plan.mesh_text import ReaderMesh
from xckpt.viewer.plan.save import saved_grids
from xckpt.viewer.plan.shown import HostShown, PlanShown, RankShown, TargetShown
from xckpt.viewer.shown import CutsOfDimension, Numbered

MOST_WANTED: Final = 4_000_000
"""Chunks that all ranks together want; a larger plan is refused."""
FEW: Final = 20_000
"""Up to this many wanted chunks, the page shows who reads each."""


@dataclass(frozen=True, slots=True, eq=False)
class _Wish:
    """The chunks and bytes that each rank wants of a leaf."""

    chunks: tuple[Int64s, ...]
    """For each rank the chunks of the leaf, ascending."""
    bytes: Int64s
    """For each rank the bytes of its elements."""
    host_bytes: Int64s
    """For each host the bytes of its ranks' elements, each once."""


def plan_shown(manifest: Manifest, mesh: ReaderMesh, text: str) -> PlanShown:
    """The plan of loading a checkpoint with a mesh, and of saving it with that mesh.

    Args:
        manifest: the checkpoint's.
        mesh: who loads.
        text: what was asked for.

    Raises:
        ValueError: a spec does not fit, or the plan is too large to be shown.

    Example:
        >>> import xckpt
        >>> from xckpt.viewer.plan.mesh_text import reader_mesh
        >>> options = xckpt.SaveOptions(chunk_bytes=32)
        >>> _ = xckpt.save("memory://plan", {"w": np.zeros((4, 8), np.float32)}, options=options)
        >>> manifest = xckpt.open("memory://plan").manifest
        >>> plan = plan_shown(manifest, reader_mesh("-, tp on tp=2"), "")
        >>> plan.hosts[0], [(rank.wanted, rank.read, rank.taken) for rank in plan.ranks]
        (HostShown(wanted=128, read=128), [(64, 64, 64), (64, 64, 64)])
    """
    tensors = {n: leaf for n, leaf in enumerate(manifest.leaves) if isinstance(leaf, TensorEntry)}
    specs = {n: mesh.spec(leaf.name) for n, leaf in tensors.items()}
    kinds: Numbered[tuple[object, ...]] = Numbered()
    of_leaf = {n: kinds.of((*_alike(leaf), specs[n])) for n, leaf in tensors.items()}
    first_leaf = {kind: n for n, kind in reversed(of_leaf.items())}
    cuts: Numbered[CutsOfDimension] = Numbered()
    targets, wishes = list[TargetShown](), list[_Wish]()
    for kind in range(len(kinds)):
        leaf = tensors[first_leaf[kind]]
        made = mesh.cuts(specs[first_leaf[kind]], leaf.shape)
        boxes = device_boxes(made, [size for _, size in mesh.axes])
        wishes.append(_wish(leaf, boxes, mesh.hosts))
        numbers = tuple(cuts.of(CutsOfDimension(each.axes, each.intervals)) for each in made)
        targets.append(TargetShown(printable(specs[first_leaf[kind]]) or "whole", numbers))
    reads = _Reads(manifest, of_leaf, wishes, mesh)
    grids, written = saved_grids(tensors, of_leaf, first_leaf, mesh)
    return PlanShown(
        printable(text),
        tuple((printable(name), size) for name, size in mesh.axes),
        tuple(map(reads.rank, range(mesh.ranks))),
        tuple(map(reads.host, range(mesh.hosts))),
        written,
        tuple(
            TargetShown(each.spec, each.cuts, grid)
            for each, grid in zip(targets, grids, strict=True)
        ),
        tuple(of_leaf.get(n, -1) for n in range(len(manifest.leaves))),
        tuple(cuts),
        *reads.leaves(len(manifest.leaves)),
        reads.readers(),
    )


def _alike(leaf: TensorEntry) -> tuple[object, ...]:
    return leaf.dtype, leaf.shape, leaf.chunk, leaf.shard, leaf.pieces


def _wish(leaf: TensorEntry, boxes: Sequence[Boxes], hosts: int) -> _Wish:
    """What ranks that hold these boxes want of a leaf."""
    stored = list(leaf_arrays(leaf))
    item = item_size(leaf.dtype)
    known: dict[bytes, Int64s] = {}
    chunks = list[Int64s]()
    for each in boxes:
        key = each.offsets.tobytes() + each.sizes.tobytes()
        if key not in known:
            known[key] = _met(each, stored)
        chunks.append(known[key])
    per_rank = np.array([int(each.elements.sum()) for each in boxes], np.int64) * item
    share = len(boxes) // hosts
    held = (held_by(boxes[h * share : (h + 1) * share], len(leaf.shape))[0] for h in range(hosts))
    per_host = [int(unique(each)[0].elements.sum()) * item for each in held]
    return _Wish(tuple(chunks), per_rank, np.array(per_host, np.int64))


def _met(boxes: Boxes, stored: Sequence[ZarrArray]) -> Int64s:
    """The numbers of the chunks of a leaf that boxes meet, ascending."""
    whole = Boxes.of([(array.offset, array.shape) for array in stored], rank=boxes.rank)
    _, which, shared = intersect(boxes, whole)
    found = [np.zeros(0, np.int64)]
    for number, box in zip(which.tolist(), shared, strict=True):
        array = stored[number]
        part = box.relative_to(array.offset)
        found.append(cells(part.offsets, part.ends, array.shape, array.chunk)[0] + array.first)
    return np.unique(np.concatenate(found))


class _Reads:
    """All ranks' reads of all leaves."""

    def __init__(
        self,
        manifest: Manifest,
        of_leaf: Mapping[int, int],
        wishes: Sequence[_Wish],
        mesh: ReaderMesh,
    ) -> None:
        self._of_leaf, self._wishes, self._mesh = of_leaf, wishes, mesh
        stored = list(arrays(manifest))
        counts = np.array([array.count for array in stored], np.int64)
        sizes = [prod(array.chunk) * item_size(array.dtype) for array in stored]
        self._chunk_bytes: Int64s = np.repeat(np.array(sizes, np.int64), counts)
        starts = {array.leaf: array.first for array in reversed(stored)}
        names = [leaf.name for leaf in manifest.leaves]
        self._first = {n: starts.get(names[n], 0) for n in of_leaf}
        total = sum(sum(map(len, wishes[kind].chunks)) for kind in of_leaf.values())
        if total > MOST_WANTED:
            raise ValueError(f"{total:,} chunks are wanted in all; {MOST_WANTED:,} can be shown")
        self._few = total <= FEW
        self._wanted = [self._of_rank(rank) for rank in range(mesh.ranks)]
        share = mesh.ranks // mesh.hosts
        shares = share_reads(
            [
                Announcement(str(rank // share), str(rank), packed(wanted))
                for rank, wanted in enumerate(self._wanted)
            ]
        )
        self._shares = [each.reads() for each in shares]
        self._taken = [_numbers(each.sources.values()) for each in self._shares]
        self._own = [
            np.setdiff1d(wanted, taken, assume_unique=True)
            for wanted, taken in zip(self._wanted, self._taken, strict=True)
        ]

    def _of_rank(self, rank: int) -> Int64s:
        parts = [
            self._wishes[kind].chunks[rank] + self._first[leaf]
            for leaf, kind in self._of_leaf.items()
        ]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def _bytes(self, chunks: Int64s) -> int:
        return int(self._chunk_bytes[chunks].sum())

    def rank(self, rank: int) -> RankShown:
        """What a rank does."""
        wanted = sum(int(self._wishes[kind].bytes[rank]) for kind in self._of_leaf.values())
        own, publish = self._own[rank], self._shares[rank].publish
        given = sum(int(self._chunk_bytes[chunk]) * len(to) for chunk, to in publish.items())
        return RankShown(wanted, self._bytes(own), len(own), given, self._bytes(self._taken[rank]))

    def host(self, host: int) -> HostShown:
        """What the ranks of a host do."""
        wanted = sum(int(self._wishes[kind].host_bytes[host]) for kind in self._of_leaf.values())
        share = self._mesh.ranks // self._mesh.hosts
        return HostShown(
            wanted, sum(map(self._bytes, self._own[host * share : (host + 1) * share]))
        )

    def leaves(self, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """For each leaf the bytes wanted and those read."""
        wanted, read = [0] * count, [0] * count
        chunks = np.concatenate([np.zeros(0, np.int64), *self._own])
        sums = np.bincount(self._place(chunks), self._chunk_bytes[chunks], len(self._first))
        for (leaf, kind), size in zip(self._of_leaf.items(), sums.tolist(), strict=True):
            wanted[leaf], read[leaf] = int(self._wishes[kind].host_bytes.sum()), int(size)
        return tuple(wanted), tuple(read)

    def _place(self, chunks: Int64s) -> Int64s:
        """The place of each chunk's leaf among the tensors, whose chunks follow each other."""
        firsts = np.array(list(self._first.values()), np.int64)
        return np.searchsorted(firsts, chunks, side="right") - 1

    def readers(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """For each leaf, who reads each chunk for whom, if there are few chunks in all."""
        if not self._few:
            return {}
        found: dict[int, list[tuple[int, ...]]] = {}
        leaves = list(self._first.items())
        for rank, own in enumerate(self._own):
            for place, chunk in zip(self._place(own).tolist(), own.tolist(), strict=True):
                (leaf, first), takers = leaves[place], self._shares[rank].publish.get(chunk, ())
                found.setdefault(leaf, []).append((chunk - first, rank, *takers))
        return {str(leaf): tuple(sorted(rows)) for leaf, rows in found.items()}


def _numbers(lists: Iterable[Sequence[int]]) -> Int64s:
    """Lists of numbers as one column, ascending."""
    parts = [np.array(each, np.int64) for each in lists]
    return np.sort(np.concatenate([np.zeros(0, np.int64), *parts]))
