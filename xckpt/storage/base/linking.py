"""Sharing files: an equal chunk's file gets a second name in the folder of the save.

1. The name is made where the chunk would be written (`xckpt.storage.base.chunks`); so is that of a
   zarr.json that is equal.
2. In the end the folders of the new names are synced; where there are many, one call syncs them
   with all else (`xckpt.storage.commit.batch`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from xckpt.storage.array import digest_array
from xckpt.storage.base.chunks import BaseChunks
from xckpt.storage.base.documents import unshared
from xckpt.storage.base.packs import EqualPack
from xckpt.storage.base.sharing import SharingWrites, joined, unit_digests
from xckpt.storage.chunks.orders import BaseOrders, Written
from xckpt.storage.chunks.shards.files import unit_length
from xckpt.storage.chunks.units import Unit
from xckpt.storage.chunks.write_chunks import UnitWriting
from xckpt.storage.commit.folder import sync_folder
from xckpt.storage.location import Location, answer, storage_errors


class LinkingWrites(SharingWrites[BaseChunks]):
    """The writes of one rank to a local folder, beside a base on the same file system."""

    def _open_base(self, base: BaseOrders, target: Location) -> BaseChunks:
        self._folders: set[str] = set()
        """Folders with new names in them."""
        os.makedirs(target.path, exist_ok=True)
        return BaseChunks(base, target.path)

    def _share_each(self, packs: Sequence[EqualPack]) -> Iterator[str]:
        assert self._base is not None
        synced = not self._location.unsynced
        for pack in packs:
            new = f"{self._location.path}/{pack.key}"
            problem = self._base.share(pack.leaf, pack.key, new, pack.nbytes, synced=synced)
            if not problem:
                self._folders.add(os.path.dirname(new))
            yield problem

    def _write_plain(self, unit: Unit) -> Iterable[tuple[int, bytes]]:
        """Share a unit's file, or write it."""
        known = self._known(unit)
        if not known:
            return super()._write_plain(unit)
        taken = unit_digests(unit)
        is_shared = joined(taken) == known and self._share(unit, known)
        return taken if is_shared else super()._write_plain(unit)

    def _write(self, unit: Unit, data: NDArray[np.generic]) -> UnitWriting:
        """Share a unit's file, or begin to write it; a shared one is done."""
        known = self._known(unit)
        if not known or digest_array(data) != known or not self._share(unit, known):
            return super()._write(unit, data)
        promise, done = ts.Promise.new()
        promise.set_result(None)
        return done

    def _documents(self, unit: Unit) -> Iterable[tuple[str, bytes]]:
        documents = super()._documents(unit)
        if self._base is None:
            return documents
        return unshared(documents, self._base, self._location, self._folders)

    def _share(self, unit: Unit, digest: bytes) -> bool:
        """Give the base's file of an equal chunk its new name, if that can be done."""
        assert self._base is not None
        array, key = unit.array, unit.array.key(unit.box.offsets)
        path, synced = f"{self._location.path}/{key}", not self._location.unsynced
        nbytes = unit_length(array, unit.box.sizes) + self._added
        with storage_errors(f"{self.where}: {array.leaf}"):
            problem = self._base.share(array.leaf, key, path, nbytes, synced=synced)
        if problem:
            self._note_problem(problem)
            return False
        if self._verify and not self._is_sound(unit, digest):
            os.unlink(path)
            return False
        self._folders.add(os.path.dirname(path))
        self._note_shared(unit.data.nbytes)
        return True

    def _elements(self, unit: Unit) -> object:
        # Under the new name: what lies there is what is shared.
        return answer(self._open(unit.array)[unit.box.slices()].read(order="C"), self.where)

    def finish(self) -> Written:
        """Wait for every write, make the new names durable, and report."""
        self._share_packs()
        written = super().finish()
        if not self._location.unsynced:
            with storage_errors(self.where):
                for folder in sorted(self._folders):
                    sync_folder(folder)
        return written
