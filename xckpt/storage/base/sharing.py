"""One rank's writes with a base: a chunk that is equal there is shared, and any other is written.

1. The digest of a chunk is taken from the caller's memory, before anything is written.
2. If the base's chunk of the same array and place has the same digest, what holds it is shared: its
   file gets a second name (`xckpt.storage.base.linking`), or its object is copied by the bucket
   (`xckpt.storage.base.copying`). The digest is reported as if it had been written.
3. Else, or where that fails, it is written (`xckpt.storage.chunks.write_chunks`).
4. A packed chunk that is equal waits until all are compared; then its pack is shared as a whole, or
   the chunk is packed again (`xckpt.storage.base.packs`).

With ``verify_base`` what is shared is read before: a damaged one is written again.
"""

from __future__ import annotations

import contextlib
import logging
import posixpath
import threading
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Final, Generic, Protocol, TypeVar

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.geometry.shards.index import CHECKSUM_BYTES
from xckpt.core.manifest.packs import ChunkPlace
from xckpt.core.plan.save import SavePlanner
from xckpt.core.text.printable import printable
from xckpt.core.text.shown import readable_bytes
from xckpt.errors import StorageError
from xckpt.storage.array import digest_array, plain_bools
from xckpt.storage.base.packs import (
    BasePacks,
    EqualChunk,
    EqualChunks,
    EqualPack,
    by_item,
    is_sound,
)
from xckpt.storage.budget import ProgressCounter
from xckpt.storage.chunks.orders import BaseOrders, WriteOrders, Written
from xckpt.storage.chunks.plain_files import contents
from xckpt.storage.chunks.units import Unit, digests
from xckpt.storage.chunks.write_chunks import ChunkWrites, item_units
from xckpt.storage.location import Location, storage_errors

logger: Final = logging.getLogger("xckpt")


class BaseContents(BasePacks, Protocol):
    """The chunks of a base, as one rank finds them."""

    def digest(self, array: ZarrArray, number: int) -> bytes:
        """The digest of a chunk of an array of the base; empty if it cannot be read."""
        ...

    def place(self, array: ZarrArray, number: int) -> ChunkPlace | None:
        """The place of a chunk of an array of the base; None if it has none, or cannot be read."""
        ...

    def close(self) -> None:
        """Release it; a second call does nothing."""
        ...


Contents = TypeVar("Contents", bound=BaseContents)


class SharingWrites(ChunkWrites, Generic[Contents]):
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
        self._verify = orders.base.verify
        self._added = CHECKSUM_BYTES * len(orders.codecs)
        self._there = _arrays_there(orders.arrays, orders.base)
        self._equal = EqualChunks()
        self._base: Contents | None = None
        try:
            with storage_errors(where):
                self._base = self._open_base(orders.base, orders.location)
        except StorageError as error:
            self._problem = str(error)

    @abstractmethod
    def _open_base(self, base: BaseOrders, target: Location) -> Contents:
        """The base's chunks, to be shared with a save to ``target``.

        Raises:
            OSError, StorageError: they cannot be reached.
        """

    @abstractmethod
    def _elements(self, unit: Unit) -> object:
        """The elements of a unit as the base has them.

        Raises:
            OSError, ValueError, RuntimeError, StorageError: the storage refused.
        """

    @abstractmethod
    def _share_each(self, packs: Sequence[EqualPack]) -> Iterable[str]:
        """Share packs; why each was not, or nothing."""

    def _pack(self, unit: Unit) -> None:
        """Append a unit to this rank's packs, unless it is equal in a pack of the base."""
        array, known = unit.array, self._known(unit)
        if known and _digest(unit.data) == known:
            assert self._base is not None and unit.item is not None
            there = self._there[array.leaf, array.number]
            place = self._base.place(there, unit.number)
            if place is not None:
                size = unit.data.nbytes
                chunk = EqualChunk(unit.item, array, unit.number, size, known, place.offset)
                self._equal.note(place.pack, chunk)
                return
        super()._pack(unit)

    def _share_packs(self) -> None:
        """Share the packs that are worth it, and pack the other equal chunks again."""
        base = self._base
        if base is None:
            return
        with storage_errors(self.where):
            worth, rest = self._equal.packs(base)
            sound: list[EqualPack] = []
            for pack in worth:
                if self._verify and not is_sound(pack, base):
                    self._refuse(f"{pack.leaf}: the base's pack is damaged")
                    rest += pack.chunks
                else:
                    sound.append(pack)
            problems = list(self._share_each(sound))
        for pack, problem in zip(sound, problems, strict=True):
            if problem:
                self._refuse(problem)
                rest += pack.chunks
            else:
                self._adopt(pack)
        self._repack(rest)

    def _adopt(self, shared: EqualPack) -> None:
        """Count a pack of the base as one of this rank's."""
        assert self._packs is not None
        pack = self._packs.adopt(bytes.fromhex(posixpath.basename(shared.key)))
        for chunk in shared.chunks:
            self._report.note(chunk.array, [(chunk.number, chunk.digest)], (pack, chunk.offset))
            self._shared_bytes += chunk.nbytes
            self.progress.add(chunk.nbytes)

    def _repack(self, chunks: Iterable[EqualChunk]) -> None:
        for item, array, numbers in by_item(chunk[:3] for chunk in chunks):
            for unit in item_units(item, array, self.planner):
                if unit.number in numbers:
                    super()._pack(unit)

    def _refuse(self, problem: str) -> None:
        """Note why what is equal is not shared, and warn."""
        self._note_problem(problem)
        logger.warning("%s: %s; it is written anew", self.where, printable(problem))

    def _is_sound(self, unit: Unit, digest: bytes) -> bool:
        """Whether the base holds the elements that it should; else that is warned of."""
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            stored = np.asarray(self._elements(unit))
            if joined(digests(unit, stored)) == digest:
                return True
        self._refuse(f"{unit.array.leaf}: the base's chunk {unit.box} is damaged")
        return False

    def _note_problem(self, problem: str) -> None:
        with self._lock:
            self._problem = self._problem or printable(problem)

    def _note_shared(self, nbytes: int) -> None:
        with self._lock:
            self._shared_bytes += nbytes

    def _known(self, unit: Unit) -> bytes:
        """The digests of the unit's chunks in the base; empty if it has no such chunks."""
        there = self._there.get((unit.array.leaf, unit.array.number))
        if there is None or unit.item is None or self._base is None:
            return b""
        if unit.array.shard is not None and self.codecs:
            return b""
        return b"".join(self._base.digest(there, number) for number in unit.numbers)

    def finish(self) -> Written:
        """Wait for every write, and report."""
        written = super().finish()
        written.shared, written.unshared = self._shared_bytes, self._problem
        logger.debug("%s: %s shared", self.where, readable_bytes(self._shared_bytes))
        return written

    def close(self) -> None:
        """Release the base, and after a failure the writes under way."""
        super().close()
        if self._base is not None:
            self._base.close()


def sharing_writes(
    orders: WriteOrders,
    planner: SavePlanner,
    progress: ProgressCounter,
    where: Location,
    memory_bytes: int,
) -> ChunkWrites:
    """The writes of one rank that share what is equal in a base, in a folder or in a bucket."""
    if where.bucket:
        from xckpt.storage.base.copying import CopyingWrites as kind
    else:
        from xckpt.storage.base.linking import LinkingWrites as kind
    return kind(orders, planner, progress, where, memory_bytes)


def _arrays_there(
    arrays: Iterable[ZarrArray], base: BaseOrders
) -> dict[tuple[str, int], ZarrArray]:
    """The arrays that the base has as well, numbered and placed as they are there."""
    given = zip(arrays, base.firsts, base.places, strict=True)
    return {
        (array.leaf, array.number): msgspec.structs.replace(
            array, first=first, place=place if place >= 0 else None
        )
        for array, first, place in given
        if first >= 0
    }


def unit_digests(unit: Unit) -> list[tuple[int, bytes]]:
    """(number, digest) of each chunk of a unit, whose elements may have any strides."""
    if unit.array.shard is None:
        return [(unit.number, _digest(unit.data))]
    return digests(unit, plain_bools(unit.data))


def joined(taken: Iterable[tuple[int, bytes]]) -> bytes:
    """The digests of a unit's chunks, one behind another."""
    return b"".join(digest for _, digest in taken)


def _digest(data: NDArray[np.generic]) -> bytes:
    """The digest of elements of any strides, taken in C order."""
    if data.flags.c_contiguous and data.dtype != np.bool_:
        return digest_array(data)
    digest = xxhash.xxh3_128()
    for slab in contents(data):
        digest.update(slab)
    return digest.digest()
