"""Wrong on purpose: what goes wrong with files, listings, commits, overwrites and deletes."""

from __future__ import annotations

import contextlib
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from conformance.cases import numpy_dtype
from conformance.implementation import Array, Shard
from conformance.implementations.faulty_arrays import Data, Faulty, Ranks
from conformance.implementations.simple import DamagedError, Stored


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


class IgnoresEmptyArrays(Faulty):
    """An array without elements is not saved."""

    caught_by = "listing"

    def list(self, path: Path) -> dict[str, Array]:
        return {name: a for name, a in super().list(path).items() if 0 not in a.shape}


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
