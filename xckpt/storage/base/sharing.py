"""One rank's writes with a base: a chunk that is equal there is shared, and any other is written.

1. The digest of a chunk is taken from the caller's memory, before anything is written.
2. If the base's chunk of the same array and place has the same digest, its file gets a second name
   (`xckpt.storage.base.chunks`), and the digest is reported as if it had been written.
3. Else, or where that fails, it is written (`xckpt.storage.chunks.write_chunks`), into a new file.
4. A packed chunk that is equal waits until all are compared; then its pack is shared as a whole, or
   the chunk is packed again (`xckpt.storage.base.packs`).
5. In the end the folders of the new names are synced; where there are many, with the zarr.json of
   all arrays, in one call.

With ``verify_base`` a file is read before it is shared: a damaged one is written again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import tensorstore as ts
import xxhash
from numpy.typing import NDArray

from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.geometry.shards.index import CHECKSUM_BYTES
from xckpt.core.plan.items import WriteItem
from xckpt.core.plan.save import SavePlanner
from xckpt.core.text.shown import readable_bytes
from xckpt.storage.array import digest_array, plain_bools
from xckpt.storage.base.chunks import BaseChunks
from xckpt.storage.base.packs import EqualChunk, EqualChunks
from xckpt.storage.budget import Pool, ProgressCounter
from xckpt.storage.chunks.orders import WriteOrders, Written
from xckpt.storage.chunks.plain_files import contents
from xckpt.storage.chunks.shards.files import unit_length
from xckpt.storage.chunks.units import Unit, digests
from xckpt.storage.chunks.write_chunks import ChunkWrites, item_units
from xckpt.storage.commit.batch import sync_all, syncs_at_once
from xckpt.storage.commit.folder import sync_folder
from xckpt.storage.location import Location, answer, storage_errors

logger = logging.getLogger("xckpt")

MANY = 16
"""From so many chunks on, their new names and the zarr.json are synced in one call, where there is
one."""

_Future: TypeAlias = "ts.WriteFutures | ts.Future[ts.KvStore.TimestampedStorageGeneration]"


class SharingWrites(ChunkWrites):
    """The writes of one rank of a save that has a base."""

    def __init__(
        self,
        orders: WriteOrders,
        planner: SavePlanner,
        progress: ProgressCounter,
        where: Location,
        memory_bytes: int,
    ) -> None:
        super().__init__(orders, planner, progress, where, memory_bytes)
        assert orders.base is not None
        self._shared_bytes = 0
        self._problem = ""
        """The first reason why an equal chunk was not shared."""
        self._lock = threading.Lock()
        self._folders: set[str] = set()
        """Folders with new names in them."""
        self._verify = orders.base.verify
        self._added = CHECKSUM_BYTES * len(orders.codecs)
        pairs = zip(orders.arrays, orders.base.firsts, strict=True)
        self._firsts = {(each.leaf, each.number): first for each, first in pairs if first >= 0}
        places = zip(orders.arrays, orders.base.places, strict=True)
        self._places = {(each.leaf, each.number): place for each, place in places}
        self._item: WriteItem | None = None
        """What is packed now."""
        self._base: BaseChunks | None = None
        self._together = -1
        """A descriptor of the folder, open since before it was written to, if one call syncs it."""
        try:
            with storage_errors(where):
                os.makedirs(orders.location.path, exist_ok=True)
                is_many = sum(array.count for array in orders.arrays) >= MANY
                if is_many and syncs_at_once(Path(orders.location.path)):
                    self._together = os.open(orders.location.path, os.O_RDONLY | os.O_CLOEXEC)
                    self._beside = replace(orders.location, unsynced=True)
            self._base = BaseChunks(orders.base, orders.location.path)
            self._equal = EqualChunks(self._base, orders.location.path)
        except OSError as error:
            self._problem = f"{error.filename}: {error.strerror}"

    def _submit(self, size: int, item: WriteItem, pool: Pool) -> None:
        self._item = item
        super()._submit(size, item, pool)

    def _pack(self, unit: Unit) -> None:
        """Append a unit to this rank's packs, unless it is equal in a pack of the base."""
        array, known = unit.array, self._known(unit)
        if known and _digest(unit.data) == known:
            assert self._base is not None and self._item is not None
            first = self._places[array.leaf, array.number]
            place = self._base.place(first, unit.number) if first >= 0 else None
            if place is not None:
                size = unit.data.nbytes
                chunk = EqualChunk(self._item, array, unit.number, size, known, place.offset)
                self._equal.note(place.pack, chunk)
                return
        super()._pack(unit)

    def _share_packs(self) -> None:
        """Share the packs that are worth it, and pack the other equal chunks again."""
        synced = not self._location.unsynced
        with storage_errors(self.where):
            found = list(self._equal.share(verify=self._verify, synced=synced, refuse=self._refuse))
        for key, chunks in found:
            if key:
                self._adopt(key, chunks)
            else:
                self._repack(chunks)

    def _adopt(self, key: str, chunks: Iterable[EqualChunk]) -> None:
        """Count a pack of the base as one of this rank's."""
        assert self._packs is not None
        pack = self._packs.adopt(bytes.fromhex(posixpath.basename(key)))
        for chunk in chunks:
            self._report.note(chunk.array, [(chunk.number, chunk.digest)], (pack, chunk.offset))
            self._shared_bytes += chunk.nbytes
            self.progress.add(chunk.nbytes)
        self._folders.add(os.path.dirname(f"{self._location.path}/{key}"))

    def _repack(self, chunks: Iterable[EqualChunk]) -> None:
        wanted: dict[int, tuple[WriteItem, ZarrArray, set[int]]] = {}
        for chunk in chunks:
            about = chunk.item, chunk.array, set[int]()
            wanted.setdefault(id(chunk.item), about)[2].add(chunk.number)
        for item, array, numbers in wanted.values():
            for unit in item_units(item, array, self.planner):
                if unit.number in numbers:
                    super()._pack(unit)

    def _refuse(self, problem: str) -> None:
        """Note why an equal pack is not shared."""
        self._problem = self._problem or problem
        logger.warning("%s: %s; it is written anew", self.where, problem)

    def _write_plain(self, unit: Unit) -> Iterable[tuple[int, bytes]]:
        """Share a unit's file, or write it."""
        known = self._known(unit)
        if not known:
            return super()._write_plain(unit)
        taken = unit_digests(unit)
        digest = b"".join(each for _, each in taken)
        is_shared = digest == known and self._share(unit, digest)
        return taken if is_shared else super()._write_plain(unit)

    def _write(self, unit: Unit, data: NDArray[np.generic]) -> _Future:
        """Share a unit's file, or begin to write it; a shared one is done."""
        known = self._known(unit)
        if not known or digest_array(data) != known or not self._share(unit, known):
            return super()._write(unit, data)
        promise, done = ts.Promise.new()
        promise.set_result(None)
        return done

    def _known(self, unit: Unit) -> bytes:
        """The digests of the unit's chunks in the base; empty if it has no such chunks."""
        first = self._firsts.get((unit.array.leaf, unit.array.number))
        if first is None or self._base is None:
            return b""
        if unit.array.shard is not None and self.codecs:
            return b""
        return b"".join(self._base.digest(first, number) for number in unit.numbers)

    def _share(self, unit: Unit, digest: bytes) -> bool:
        """Give the base's file of an equal chunk its new name, if that can be done."""
        assert self._base is not None
        array, key = unit.array, unit.array.key(unit.box.offsets)
        path, synced = f"{self._location.path}/{key}", not self._location.unsynced
        nbytes = unit_length(array, unit.box.sizes) + self._added
        with storage_errors(f"{self.where}: {array.leaf}"):
            problem = self._base.share(array.leaf, key, path, nbytes, synced=synced)
        if not problem and self._verify and not self._is_sound(unit, digest):
            problem = f"{array.leaf}: the base's chunk {unit.box} is damaged"
            logger.warning("%s: %s; it is written anew", self.where, problem)
            os.unlink(path)
        with self._lock:
            self._problem = self._problem or problem
            if not problem:
                self._folders.add(os.path.dirname(path))
                self._shared_bytes += unit.data.nbytes
        return not problem

    def _is_sound(self, unit: Unit, digest: bytes) -> bool:
        """Whether the file that is shared holds the elements that it should."""
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            read = self._open(unit.array)[unit.box.slices()].read(order="C")
            elements = np.asarray(answer(read, self.where))
            return b"".join(each for _, each in digests(unit, elements)) == digest
        return False

    def finish(self) -> Written:
        """Wait for every write, make the new names durable, and report."""
        if self._base is not None:
            self._share_packs()
        written = super().finish()
        if not self._location.unsynced:
            with storage_errors(self.where):
                self._sync()
        written.shared, written.unshared = self._shared_bytes, self._problem
        logger.debug("%s: %s shared", self.where, readable_bytes(self._shared_bytes))
        return written

    def _sync(self) -> None:
        if self._together >= 0:
            sync_all(self._together, ())
            return
        for folder in sorted(self._folders):
            sync_folder(folder)

    def close(self) -> None:
        """Release the base, and after a failure the writes under way."""
        super().close()
        if self._base is not None:
            self._base.close()
        if self._together >= 0:
            os.close(self._together)
            self._together = -1


def unit_digests(unit: Unit) -> list[tuple[int, bytes]]:
    """(number, digest) of each chunk of a unit, whose elements may have any strides."""
    if unit.array.shard is None:
        return [(unit.number, _digest(unit.data))]
    return digests(unit, plain_bools(unit.data))


def _digest(data: NDArray[np.generic]) -> bytes:
    """The digest of elements of any strides, taken in C order."""
    digest = xxhash.xxh3_128()
    for slab in contents(data):
        digest.update(slab)
    return digest.digest()
