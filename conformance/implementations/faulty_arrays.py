"""Wrong on purpose: what goes wrong with shards, elements and who writes them.

Each is `Simple` with one step changed, and says which law catches it (`Faulty.caught_by`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from conformance.implementation import Array, Box, Held, Shard, Wanted
from conformance.implementations.simple import Simple, Stored

__all__ = ["Faulty"]

Data = NDArray[np.generic]
Ranks = Sequence[Mapping[str, Held]]


class Faulty(Simple):
    """What the wrong ones have in common: memory that is not read is zero, and never right."""

    caught_by: ClassVar[str]
    """The law that catches it."""

    @property
    def name(self) -> str:  # type: ignore[override]
        """What is wrong."""
        return (self.__doc__ or "").splitlines()[0].rstrip(".")

    def empty(self, sizes: Sequence[int], dtype: np.dtype[np.generic]) -> Data:
        return np.zeros(sizes, dtype)


class MissesLastRow(Faulty):
    """The last index of a box that meets another one is left out."""

    caught_by = "reshard"

    def overlap(self, stored: Stored, box: Box) -> tuple[list[int], list[int]]:
        low, high = super().overlap(stored, box)
        ends = [o + n for o, n in zip(stored["offsets"], stored["sizes"], strict=True)]
        shared = zip(low, high, ends, strict=True)
        return low, [h - (h == end and h - a > 1) for a, h, end in shared]


class BeginsOneLate(Faulty):
    """The first index of a part is left out."""

    caught_by = "parts"

    def overlap(self, stored: Stored, box: Box) -> tuple[list[int], list[int]]:
        low, high = super().overlap(stored, box)
        inside = zip(low, high, stored["offsets"], strict=True)
        return [a + (a > o and h - a > 1) for a, h, o in inside], high


class LastWriterWins(Faulty):
    """Boxes that overlap are written over each other."""

    caught_by = "overlaps"

    def check_cover(self, name: str, array: Array, boxes: Sequence[Box]) -> None:
        times = np.zeros(array.shape, np.int64)
        for box in boxes:
            times[(*box.region, ...)] += 1
        if (times == 0).any():
            raise ValueError(f"{name}: an element is held by no rank")


class FillsGaps(Faulty):
    """Elements that no rank holds are zeros."""

    caught_by = "gaps"

    def check_cover(self, name: str, array: Array, boxes: Sequence[Box]) -> None:
        times = np.zeros(array.shape, np.int64)
        for box in boxes:
            times[(*box.region, ...)] += 1
        if (times > 1).any():
            raise ValueError(f"{name}: an element is in two boxes")


class FirstShapeCounts(Faulty):
    """Ranks that contradict each other about a dtype are not heard."""

    caught_by = "contradictions"

    def agree(self, ranks: Ranks) -> dict[str, Array]:
        last_first = reversed(ranks)
        return {name: held.array for rank in last_first for name, held in rank.items()}


class SavesSinglePrecision(Faulty):
    """Doubles are kept as floats."""

    caught_by = "reshard"

    def encode(self, data: Data) -> bytes:
        if data.dtype == np.float64:
            with np.errstate(all="ignore"):
                data = data.astype(np.float32).astype(np.float64)
        return super().encode(data)


class IntegersThroughDoubles(Faulty):
    """Long integers take their way through doubles."""

    caught_by = "reshard"

    def encode(self, data: Data) -> bytes:
        if data.dtype in (np.dtype("int64"), np.dtype("uint64")):
            with np.errstate(all="ignore"):
                data = data.astype(np.float64).astype(data.dtype)
        return super().encode(data)


class LoadsAnotherDtype(Faulty):
    """Brain floats are given back as floats."""

    caught_by = "reshard"

    def load_box(self, path: Path, leaves: dict[str, Any], name: str, box: Box) -> Data:
        data = super().load_box(path, leaves, name, box)
        with np.errstate(all="ignore"):
            return data.astype(np.float32) if data.dtype.name == "bfloat16" else data


class LosesNegativeZero(Faulty):
    """-0.0 becomes 0.0."""

    caught_by = "reshard"

    def encode(self, data: Data) -> bytes:
        if data.dtype in (np.dtype("float32"), np.dtype("float64")):
            data = np.where(data == 0, np.zeros((), data.dtype), data)
        return super().encode(data)


class OneNotANumber(Faulty):
    """All not-a-numbers become the same."""

    caught_by = "reshard"

    def encode(self, data: Data) -> bytes:
        if data.dtype in (np.dtype("float32"), np.dtype("float64")):
            data = np.where(np.isnan(data), np.array(np.nan, data.dtype), data)  # type: ignore[arg-type]
        return super().encode(data)


class SwapsAxes(Faulty):
    """Elements are written in Fortran's order and read in C's."""

    caught_by = "reshard"

    def encode(self, data: Data) -> bytes:
        return data.tobytes("F")


class ForgetsStrides(Faulty):
    """A view is taken for the beginning of the memory that it is a view of."""

    caught_by = "reshard"

    def encode(self, data: Data) -> bytes:
        base = data
        while isinstance(base.base, np.ndarray):
            base = base.base
        whole = base.tobytes()
        return whole[: data.nbytes] if len(whole) >= data.nbytes else super().encode(data)


class DropsPartialReplicas(Faulty):
    """A box that some ranks hold, but not all, is lost."""

    caught_by = "reshard"

    def choose(self, name: str, array: Array, ranks: Ranks) -> list[tuple[int, Shard]]:
        def holders(box: Box) -> int:
            return sum(
                any(shard.box == box for shard in rank[name].shards)
                for rank in ranks
                if name in rank
            )

        found = super().choose(name, array, ranks)
        return [each for each in found if holders(each[1].box) in (1, len(ranks))]


class WritesReplicasTwice(Faulty):
    """Everybody who holds a box writes it."""

    caught_by = "written-once"

    def choose(self, name: str, array: Array, ranks: Ranks) -> list[tuple[int, Shard]]:
        super().choose(name, array, ranks)
        return [
            (rank, shard)
            for rank, leaves in enumerate(ranks)
            for shard in (leaves[name].shards if name in leaves else ())
            if 0 not in shard.box.sizes
        ]


class ChargesAnother(Faulty):
    """The last rank is to write what the first one holds."""

    caught_by = "written-once"

    def choose(self, name: str, array: Array, ranks: Ranks) -> list[tuple[int, Shard]]:
        return [(len(ranks) - 1, shard) for _, shard in super().choose(name, array, ranks)]


class BelievesRanksInOrder(Faulty):
    """Rank r is taken to hold the r-th box, counted from the origin."""

    caught_by = "ranks-permuted"

    def choose(self, name: str, array: Array, ranks: Ranks) -> list[tuple[int, Shard]]:
        found = super().choose(name, array, ranks)
        boxes = sorted((shard.box for _, shard in found), key=lambda box: box.offsets)
        if [box.sizes for box in boxes] != [shard.box.sizes for _, shard in found]:
            return found
        return [
            (rank, replace(shard, box=box)) for (rank, shard), box in zip(found, boxes, strict=True)
        ]


class OneBoxEach(Faulty):
    """Only the first box of a rank is loaded; the others are taken to be the same."""

    caught_by = "reshard"

    def load(
        self, path: Path, ranks: Sequence[Mapping[str, Wanted]]
    ) -> list[dict[str, list[Data]]]:
        loaded = super().load(path, ranks)
        for rank in loaded:
            for name, boxes in rank.items():
                rank[name] = [boxes[0] if b.shape == boxes[0].shape else b for b in boxes]
        return loaded


class OneSourceOnly(Faulty):
    """A wanted box is filled from the first stored box that it meets."""

    caught_by = "reshard"

    def load_box(self, path: Path, leaves: dict[str, Any], name: str, box: Box) -> Data:
        for stored in leaves.get(name, {"boxes": ()})["boxes"]:
            low, high = self.overlap(stored, box)
            if all(a < b for a, b in zip(low, high, strict=True)):
                leaf = {**leaves[name], "boxes": [stored]}
                return super().load_box(path, {name: leaf}, name, box)
        return super().load_box(path, leaves, name, box)


class ReusesMemory(Faulty):
    """Every box is loaded into the same memory."""

    caught_by = "reshard"

    def __init__(self) -> None:
        self._memory = bytearray(1 << 20)

    def empty(self, sizes: Sequence[int], dtype: np.dtype[np.generic]) -> Data:
        count = int(np.prod(sizes))
        return np.frombuffer(self._memory, dtype, count).reshape(sizes)


class ScalarsAreVectors(Faulty):
    """An array without dimensions comes back with one."""

    caught_by = "reshard"

    def load_box(self, path: Path, leaves: dict[str, Any], name: str, box: Box) -> Data:
        return np.atleast_1d(super().load_box(path, leaves, name, box))


class NeedsEveryLeaf(Faulty):
    """A rank that leaves a leaf out is taken for the end of the ranks."""

    caught_by = "ranks-without"

    def choose(self, name: str, array: Array, ranks: Ranks) -> list[tuple[int, Shard]]:
        until = next((r for r, leaves in enumerate(ranks) if name not in leaves), len(ranks))
        return super().choose(name, array, ranks[:until])
