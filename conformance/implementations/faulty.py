"""Implementations that are wrong on purpose, one fault each: a suite that passes one is no judge.

Each is `Simple` with one step changed, and says which law catches it (`caught_by`). `FAULTY` has
one of each.
"""

from __future__ import annotations

import contextlib
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from conformance.cases import numpy_dtype
from conformance.implementation import Array, Box, Held, Shard, Wanted
from conformance.implementations.simple import DamagedError, Simple, Stored

__all__ = ["FAULTY", "Faulty"]

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


class FillsMissingFiles(Faulty):
    """A file that is missing is taken for zeros."""

    caught_by = "missing-file"

    def read(self, path: Path, stored: Stored, dtype: np.dtype[np.generic]) -> Data:
        if not (path / stored["file"]).exists():
            return np.zeros(stored["sizes"], dtype)
        return super().read(path, stored, dtype)


class ChecksNothing(Faulty):
    """What is in a file is believed."""

    caught_by = "flipped-bit"

    def read(self, path: Path, stored: Stored, dtype: np.dtype[np.generic]) -> Data:
        try:
            return np.fromfile(path / stored["file"], dtype).reshape(stored["sizes"])
        except (OSError, ValueError) as error:
            raise DamagedError(str(error)) from error


class PadsShortFiles(Faulty):
    """A file that is too short is filled up with zeros."""

    caught_by = "short-file"

    def read(self, path: Path, stored: Stored, dtype: np.dtype[np.generic]) -> Data:
        size = int(np.prod(stored["sizes"])) * dtype.itemsize
        with contextlib.suppress(OSError):
            content = (path / stored["file"]).read_bytes()
            if len(content) < size:
                padded = content + bytes(size - len(content))
                return np.frombuffer(padded, dtype).reshape(stored["sizes"])
        return super().read(path, stored, dtype)


class TakesAnyFile(Faulty):
    """A file that is whole is taken for the one that was wanted."""

    caught_by = "swapped-files"

    def write_leaf(
        self, path: Path, stem: str, array: Array, chosen: Sequence[tuple[int, Shard]]
    ) -> list[Stored]:
        stored = super().write_leaf(path, stem, array, chosen)
        for box in stored:
            file = path / box["file"]
            file.write_bytes(box["crc"].to_bytes(4, "little") + file.read_bytes())
        return stored

    def read(self, path: Path, stored: Stored, dtype: np.dtype[np.generic]) -> Data:
        try:
            content = (path / stored["file"]).read_bytes()
            if zlib.crc32(content[4:]) != int.from_bytes(content[:4], "little"):
                raise DamagedError(f"{stored['file']} was altered")
            return np.frombuffer(content[4:], dtype).reshape(stored["sizes"])
        except (OSError, ValueError) as error:
            raise DamagedError(str(error)) from error


class NeverFindsDamage(Faulty):
    """Verification finds everything in order."""

    caught_by = "flipped-bit"

    def verify(self, path: Path) -> Sequence[str]:
        return []


class FindsDamageEverywhere(Faulty):
    """Verification takes an array without elements for damage."""

    caught_by = "sound"

    def verify(self, path: Path) -> Sequence[str]:
        empty = [leaf for leaf, array in self.list(path).items() if 0 in array.shape]
        return [*super().verify(path), *(f"{leaf}: no elements" for leaf in empty)]


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


class IgnoresEmptyArrays(Faulty):
    """An array without elements is not saved."""

    caught_by = "listing"

    def list(self, path: Path) -> dict[str, Array]:
        return {name: a for name, a in super().list(path).items() if 0 not in a.shape}


class NeedsEveryLeaf(Faulty):
    """A rank that leaves a leaf out is taken for the end of the ranks."""

    caught_by = "ranks-without"

    def choose(self, name: str, array: Array, ranks: Ranks) -> list[tuple[int, Shard]]:
        until = next((r for r, leaves in enumerate(ranks) if name not in leaves), len(ranks))
        return super().choose(name, array, ranks[:until])


class ListsFirstBox(Faulty):
    """The shape of the first box is listed as the array's."""

    caught_by = "listing"

    def list(self, path: Path) -> dict[str, Array]:
        found = super().list(path)
        for name, leaf in self.leaves(path).items():
            if leaf["boxes"]:
                found[name] = Array(tuple(leaf["boxes"][0]["sizes"]), leaf["dtype"])
        return found


class ListsDtypesByKind(Faulty):
    """Every float is listed as a float32."""

    caught_by = "listing"

    def list(self, path: Path) -> dict[str, Array]:
        return {
            name: replace(array, dtype="float32") if numpy_dtype(array.dtype).kind == "f" else array
            for name, array in super().list(path).items()
        }


class OverwritesUnasked(Faulty):
    """A checkpoint that is there is replaced without a word."""

    caught_by = "not-overwritten"

    def save(self, path: Path, ranks: Ranks, *, overwrite: bool = False) -> None:
        super().save(path, ranks, overwrite=True)


class KeepsStaleFiles(Faulty):
    """A file of the old checkpoint that has the right size is not written again."""

    caught_by = "not-overwritten"

    def write_leaf(
        self, path: Path, stem: str, array: Array, chosen: Sequence[tuple[int, Shard]]
    ) -> list[Stored]:
        before: list[Stored] = []
        if self.exists(path):
            before = [box for leaf in self.leaves(path).values() for box in leaf["boxes"]]
        stored = super().write_leaf(path, stem, array, chosen)
        for box in stored:
            for old in before:
                if (old["offsets"], old["sizes"]) == (box["offsets"], box["sizes"]):
                    shutil.copy(path / old["file"], path / box["file"])
                    box["crc"] = old["crc"]
        return stored


class DeletesData(Faulty):
    """A delete removes the data, and not what says that they are there."""

    caught_by = "deleted"

    def delete(self, path: Path) -> None:
        for folder in path.iterdir():
            if folder.is_dir():
                shutil.rmtree(folder)


class DeletesNothing(Faulty):
    """A delete leaves everything where it was."""

    caught_by = "deleted"

    def delete(self, path: Path) -> None:
        self.leaves(path)


class RemovesThenWrites(Faulty):
    """The old checkpoint is removed before the new one is written."""

    caught_by = "crash-overwrite"

    def save(self, path: Path, ranks: Ranks, *, overwrite: bool = False) -> None:
        if overwrite and self.exists(path):
            self.delete(path)
        super().save(path, ranks, overwrite=overwrite)


class CommitsFirst(Faulty):
    """What says that the data are there is written before them."""

    caught_by = "crash-save"

    def write_leaf(
        self, path: Path, stem: str, array: Array, chosen: Sequence[tuple[int, Shard]]
    ) -> list[Stored]:
        stored = super().write_leaf(path, stem, array, chosen)
        document = {"name": "w", "shape": list(array.shape), "dtype": array.dtype, "boxes": stored}
        self.commit(path, {"generation": stem.partition("/")[0], "leaves": [document]})
        return stored


FAULTY: Sequence[Faulty] = tuple(
    kind()
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Faulty) and kind is not Faulty
)
