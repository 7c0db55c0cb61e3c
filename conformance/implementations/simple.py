"""The smallest implementation that is correct: NumPy and files. It shows how one is written.

``PATH/leaves.json`` names the generation that counts, and says of each leaf its shape, its dtype
and its boxes: where each begins, how large it is, which file holds its elements, and their CRC-32.

1. A save writes the files of a generation, syncs them, and then puts ``leaves.json`` in place by a
   rename, which is atomic: a reader finds the old checkpoint or the new one.
2. A box that several ranks hold is written once, by the first. Boxes that overlap and elements that
   no rank holds are refused before anything is written.
3. A load copies what each stored box shares with each wanted one, and checks what it has read.

Every step is a method, so that `faulty` can get one of them wrong at a time.
"""

from __future__ import annotations

import json
import shutil
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.cases import numpy_dtype
from conformance.implementation import Array, Box, Held, Shard, Wanted
from conformance.implementations.durable import put, sync

__all__ = ["IMPLEMENTATION", "DamagedError", "Simple", "Stored"]

LEAVES = "leaves.json"

Data = NDArray[np.generic]
Stored = dict[str, Any]
"""A box in ``leaves.json``: ``offsets``, ``sizes``, ``rank``, ``file``, ``crc``."""


class DamagedError(Exception):
    """A checkpoint is not there, or not what was saved."""


class Simple:
    """NumPy arrays in files, a file a box."""

    name = "simple"
    limits: Sequence[str] = ()

    # Saving.

    def save(
        self, path: Path, ranks: Sequence[Mapping[str, Held]], *, overwrite: bool = False
    ) -> None:
        if self.exists(path) and not overwrite:
            raise FileExistsError(f"{path} holds a checkpoint")
        arrays = self.agree(ranks)
        chosen = {name: self.choose(name, array, ranks) for name, array in arrays.items()}
        generation = uuid.uuid4().hex
        (path / generation).mkdir(parents=True)
        leaves = [
            {
                "name": name,
                "shape": list(array.shape),
                "dtype": array.dtype,
                "boxes": self.write_leaf(path, f"{generation}/{number}", array, chosen[name]),
            }
            for number, (name, array) in enumerate(arrays.items())
        ]
        # The folder's name too must be safe before anything speaks of it.
        sync(path / generation)
        sync(path)
        self.commit(path, {"generation": generation, "leaves": leaves})
        for old in path.iterdir():
            if old.is_dir() and old.name != generation:
                shutil.rmtree(old)

    def agree(self, ranks: Sequence[Mapping[str, Held]]) -> dict[str, Array]:
        """What every leaf is.

        Raises:
            ValueError: the ranks contradict each other.
        """
        arrays: dict[str, Array] = {}
        for rank in ranks:
            for name, held in rank.items():
                if arrays.setdefault(name, held.array) != held.array:
                    raise ValueError(f"{name}: {held.array} on one rank, {arrays[name]} on another")
        return arrays

    def choose(
        self, name: str, array: Array, ranks: Sequence[Mapping[str, Held]]
    ) -> list[tuple[int, Shard]]:
        """The boxes to write, with the rank that writes each.

        Raises:
            ValueError: boxes overlap, or elements are missing.
        """
        found: dict[Box, tuple[int, Shard]] = {}
        for rank, leaves in enumerate(ranks):
            for shard in leaves[name].shards if name in leaves else ():
                if 0 not in shard.box.sizes:
                    found.setdefault(shard.box, (rank, shard))
        self.check_cover(name, array, [shard.box for _, shard in found.values()])
        return list(found.values())

    def check_cover(self, name: str, array: Array, boxes: Sequence[Box]) -> None:
        times = np.zeros(array.shape, np.int64)
        for box in boxes:
            times[(*box.region, ...)] += 1
        if (times != 1).any():
            raise ValueError(f"{name}: an element is held by no rank, or in two boxes")

    def write_leaf(
        self, path: Path, stem: str, array: Array, chosen: Sequence[tuple[int, Shard]]
    ) -> list[Stored]:
        stored: list[Stored] = []
        for number, (rank, shard) in enumerate(chosen):
            content = self.encode(shard.data)
            file = f"{stem}-{number}"
            put(path / file, content)
            box = {"offsets": list(shard.box.offsets), "sizes": list(shard.box.sizes)}
            stored.append({**box, "rank": rank, "file": file, "crc": zlib.crc32(content)})
        return stored

    def encode(self, data: Data) -> bytes:
        return np.ascontiguousarray(data).tobytes()

    def commit(self, path: Path, document: dict[str, Any]) -> None:
        """Make a generation the one that counts."""
        body = json.dumps(document)
        new = path / f"{LEAVES}.new"
        put(new, json.dumps({"crc": zlib.crc32(body.encode()), "body": body}).encode())
        new.rename(path / LEAVES)
        for folder in (path, *path.parents):
            sync(folder)

    # Loading.

    def load(
        self, path: Path, ranks: Sequence[Mapping[str, Wanted]]
    ) -> list[dict[str, list[Data]]]:
        leaves = self.leaves(path)
        return [
            {
                name: [self.load_box(path, leaves, name, box) for box in wanted.boxes]
                for name, wanted in rank.items()
            }
            for rank in ranks
        ]

    def leaves(self, path: Path) -> dict[str, dict[str, Any]]:
        """What ``leaves.json`` says, by name.

        Raises:
            DamagedError: it is missing or was altered.
        """
        try:
            document = json.loads((path / LEAVES).read_bytes())
            body, crc = document["body"], document["crc"]
        except (OSError, ValueError, KeyError) as error:
            raise DamagedError(f"{path} holds no checkpoint: {error}") from error
        if zlib.crc32(body.encode()) != crc:
            raise DamagedError(f"{path}: {LEAVES} was altered")
        return {leaf["name"]: leaf for leaf in json.loads(body)["leaves"]}

    def load_box(self, path: Path, leaves: dict[str, Any], name: str, box: Box) -> Data:
        if name not in leaves:
            raise DamagedError(f"{path}: no leaf {name!r}")
        leaf = leaves[name]
        into = self.empty(box.sizes, numpy_dtype(leaf["dtype"]))
        for stored in leaf["boxes"]:
            low, high = self.overlap(stored, box)
            if all(a < b for a, b in zip(low, high, strict=True)):
                data = self.read(path, stored, into.dtype)
                into[_region(low, high, box.offsets)] = data[_region(low, high, stored["offsets"])]
        return into

    def empty(self, sizes: Sequence[int], dtype: np.dtype[np.generic]) -> Data:
        return np.empty(sizes, dtype)

    def overlap(self, stored: Stored, box: Box) -> tuple[list[int], list[int]]:
        """The first element that two boxes share, and one past the last."""
        ends = [o + n for o, n in zip(stored["offsets"], stored["sizes"], strict=True)]
        wanted = [o + n for o, n in zip(box.offsets, box.sizes, strict=True)]
        low = [max(a, b) for a, b in zip(stored["offsets"], box.offsets, strict=True)]
        return low, [min(a, b) for a, b in zip(ends, wanted, strict=True)]

    def read(self, path: Path, stored: Stored, dtype: np.dtype[np.generic]) -> Data:
        """A stored box.

        Raises:
            DamagedError: its file is missing or was altered.
        """
        try:
            content = (path / stored["file"]).read_bytes()
        except OSError as error:
            raise DamagedError(f"{path}: {stored['file']} is missing") from error
        if zlib.crc32(content) != stored["crc"]:
            raise DamagedError(f"{path}: {stored['file']} was altered")
        return np.frombuffer(content, dtype).reshape(stored["sizes"])

    # The rest.

    def exists(self, path: Path) -> bool:
        return (path / LEAVES).exists()

    def list(self, path: Path) -> dict[str, Array]:
        return {
            name: Array(tuple(leaf["shape"]), leaf["dtype"])
            for name, leaf in self.leaves(path).items()
        }

    def delete(self, path: Path) -> None:
        """The file that counts goes first: what is left then is not a checkpoint."""
        (path / LEAVES).unlink()
        sync(path)
        shutil.rmtree(path)

    def verify(self, path: Path) -> Sequence[str]:
        return [*self._problems(path)]

    def _problems(self, path: Path) -> Iterator[str]:
        try:
            leaves = self.leaves(path)
        except DamagedError as error:
            yield str(error)
            return
        for leaf in leaves.values():
            for stored in leaf["boxes"]:
                try:
                    self.read(path, stored, numpy_dtype(leaf["dtype"]))
                except DamagedError as error:
                    yield str(error)

    def written(self, path: Path) -> Mapping[str, Sequence[tuple[int, Box]]]:
        return {
            name: [
                (stored["rank"], Box(tuple(stored["offsets"]), tuple(stored["sizes"])))
                for stored in leaf["boxes"]
            ]
            for name, leaf in self.leaves(path).items()
        }


def _region(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> Any:
    """The elements ``[low, high)`` of an array as slices of a box that begins at ``origin``."""
    slices = [slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True)]
    return (*slices, ...)


IMPLEMENTATION = Simple()
