"""xckpt, with ranks as threads, over arrays of arbitrary boxes in NumPy memory.

The options (sizes of chunks, threads, how files are read) follow from what is saved, so that the
cases come to every way of laying out a checkpoint, and the same case always to the same.
"""

from __future__ import annotations

import shutil
import uuid
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

import xckpt
from conformance.implementation import Array, Box, Held, Wanted
from conformance.implementations import sharded_arrays
from conformance.implementations.meshes import by_name
from conformance.implementations.sharded_arrays import Sharded
from conformance.implementations.threads import ThreadGroup, results
from xckpt.core.geometry.box import Boxes
from xckpt.core.manifest.codec import parse
from xckpt.core.manifest.own_keys import MANIFEST
from xckpt.core.manifest.packs import PACKS
from xckpt.core.names import join_keys
from xckpt.planner import DefaultSavePlanner, WriteItem
from xckpt.storage.array import digest_bytes

__all__ = ["IMPLEMENTATION", "Xckpt"]

Data = NDArray[np.generic]

CHUNK_BYTES = (64, 8 << 20, 16, 1000)
SHARD_BYTES = (0, 256, 0, 4096)
PACK_BYTES = (0, 100, 0, 4096)


class _Recorder(DefaultSavePlanner):
    """Notes every box whose data the storage asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[tuple[str, tuple[int, ...]], Box] = {}

    def resolve_data(self, write_item: WriteItem) -> object:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        key = (write_item.index.fqn, chunk.offsets)
        self.asked[key] = Box(chunk.offsets, chunk.sizes)
        return super().resolve_data(write_item)


class Xckpt:
    """Over NumPy memory. What another framework changes is in the methods that come first."""

    name = f"xckpt {xckpt.__version__}"
    limits: Sequence[str] = ()
    golden_readers = "conformance.implementations.xckpt_golden"

    def __init__(self) -> None:
        self._written: dict[str, list[tuple[int, Box]]] = {}

    def place(self, path: Path) -> Path | str:
        """Where a checkpoint is: the path, or a URL for it."""
        return path

    def base(self, path: Path) -> Path | str | None:
        """What a save to a path shares unchanged chunks with."""
        return None

    def leaf(self, rank: int, ranks: Sequence[Held]) -> object:
        """A rank's leaf for `xckpt.save`, from what every rank holds of the array."""
        array, shards = ranks[rank].array, ranks[rank].shards
        boxes = _boxes([shard.box for shard in shards], array)
        return Sharded(array.shape, array.dtype, boxes, [shard.data for shard in shards])

    def like(self, rank: int, ranks: Sequence[Wanted]) -> object:
        """A rank's target for `xckpt.load`, from what every rank wants of the array."""
        array = ranks[rank].array
        boxes = _boxes(ranks[rank].boxes, array)
        return sharded_arrays.Wanted(array.shape, array.dtype, boxes)

    def boxes(self, loaded: object, wanted: Wanted) -> list[Data]:
        """The wanted boxes, from what `xckpt.load` returned for `like`."""
        if not isinstance(loaded, Sharded):
            raise KeyError("the checkpoint has no such leaf")
        return loaded.parts

    def load_rank(
        self,
        path: Path | str,
        like: dict[str, object],
        group: ThreadGroup,
        options: xckpt.LoadOptions,
    ) -> Mapping[str, object]:
        """What one rank loads for ``like``, which may not name all leaves that there are."""
        return xckpt.load(path, like, strict=False, group=group, options=options)

    def save_options(self, arrays: Mapping[str, Array]) -> xckpt.SaveOptions:
        """Sizes and threads that follow from what is saved."""
        number = _number(arrays)
        return xckpt.SaveOptions(
            chunk_bytes=CHUNK_BYTES[number % 4],
            shard_bytes=SHARD_BYTES[number // 4 % 4],
            pack_bytes=PACK_BYTES[number // 512 % 4],
            crc32c=number // 16 % 4 == 0,
            threads=1 + number // 64 % 2,
            memory_bytes=(1 << 20, 100)[number // 128 % 2],
        )

    def load_options(self, arrays: Mapping[str, Array]) -> xckpt.LoadOptions:
        """Threads and ways of reading that follow from what is loaded."""
        number = _number(arrays) // 256
        return xckpt.LoadOptions(
            threads=1 + number % 2,
            memory_bytes=(1 << 20, 100)[number // 2 % 2],
            share_reads=number // 4 % 2 == 0,
        )

    def save(
        self, path: Path, ranks: Sequence[Mapping[str, Held]], *, overwrite: bool = False
    ) -> None:
        arrays = {name: held.array for rank in ranks for name, held in rank.items()}
        options = self.save_options(arrays)
        states = [
            {name: self.leaf(*_column(ranks, rank, name)) for name in held}
            for rank, held in enumerate(ranks)
        ]
        planners = [_Recorder() for _ in ranks]

        def save(group: ThreadGroup) -> None:
            xckpt.save(
                self.place(path),
                states[group.rank],
                overwrite=overwrite,
                base=self.base(path),
                planner=planners[group.rank],
                group=group,
                options=options,
            )

        results(len(ranks), save)
        self._written = {}
        for rank, planner in enumerate(planners):
            for (name, _), box in planner.asked.items():
                self._written.setdefault(name, []).append((rank, box))

    def load(
        self, path: Path, ranks: Sequence[Mapping[str, Wanted]]
    ) -> list[dict[str, list[Data]]]:
        arrays = {name: wanted.array for rank in ranks for name, wanted in rank.items()}
        options = self.load_options(arrays)
        likes = [
            {name: self.like(*_column(ranks, rank, name)) for name in wanted}
            for rank, wanted in enumerate(ranks)
        ]
        loaded = results(
            len(ranks),
            lambda group: self.load_rank(self.place(path), likes[group.rank], group, options),
        )
        return [
            {name: self.boxes(found[name], wish) for name, wish in wanted.items()}
            for wanted, found in zip(ranks, loaded, strict=True)
        ]

    def list(self, path: Path) -> dict[str, Array]:
        found = xckpt.open(self.place(path)).tree
        assert isinstance(found, dict)
        return {str(name): Array(leaf.shape, leaf.dtype.name) for name, leaf in found.items()}

    def delete(self, path: Path) -> None:
        # In one step: a delete that is killed leaves all of the checkpoint there, or nothing.
        aside = path.with_name(f".{path.name}.deleted-{uuid.uuid4().hex[:12]}")
        path.rename(aside)
        shutil.rmtree(aside)

    def verify(self, path: Path) -> Sequence[str]:
        return xckpt.open(self.place(path)).verify()

    def written(self, path: Path) -> dict[str, Sequence[tuple[int, Box]]]:
        names = {join_keys((name,)): name for name in self.list(path)}
        return {names[name]: boxes for name, boxes in self._written.items()}

    def fingerprint(self, path: Path) -> dict[str, bytes]:
        files = [file for file in path.rglob("*") if file.is_file()]
        found = {str(file.relative_to(path)): file.read_bytes() for file in files}
        packs = [name for name in found if name.startswith(f"{PACKS}/")]
        if packs:
            # Other ranks make other packs of the same chunks, whose digests are compared.
            manifest = parse(found[MANIFEST], digest_bytes)
            manifest = replace(manifest, packs=0, places="", inline_places=b"")
            found[MANIFEST] = msgspec.json.encode(manifest)
        return {name: content for name, content in found.items() if name not in packs}


Said = TypeVar("Said")


def _column(ranks: Sequence[Mapping[str, Said]], rank: int, name: str) -> tuple[int, list[Said]]:
    """The number of a rank among those that name a leaf, and what they all say of it."""
    number = sum(name in leaves for leaves in ranks[:rank])
    return number, by_name(ranks)[name]


def _boxes(boxes: Sequence[Box], array: Array) -> Boxes:
    return Boxes.of([(box.offsets, box.sizes) for box in boxes], rank=len(array.shape))


def _number(arrays: Mapping[str, Array]) -> int:
    return zlib.crc32(repr(sorted(arrays.items(), key=str)).encode())


IMPLEMENTATION = Xckpt()
