"""The chunks of a base in a bucket: their digests and places, and copies of their objects.

1. Digests and places of the arrays that a rank writes are read in ranges
   (`xckpt.storage.chunks.digests`), as a load reads them, unless the orders have all digests.
2. `BaseObjects.copy` has the bucket copy an object under the same key of the new checkpoint.
3. `BaseObjects.problem` looks, after the last copy, whether they are copies of what the coordinator
   has seen: whether the base is still the same, and whether this save finds what was copied.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.manifest.packs import PLACES, ChunkPlace
from xckpt.errors import XckptError
from xckpt.storage.array import open_array
from xckpt.storage.base.identity import object_identity
from xckpt.storage.buckets.server_side import ServerSide
from xckpt.storage.chunks.digests import Digests
from xckpt.storage.chunks.orders import BaseOrders
from xckpt.storage.chunks.units import Unit
from xckpt.storage.location import Location, answer, open_store, storage_errors
from xckpt.storage.packs.places import INLINE, Places


class BaseObjects:
    """The chunks of a base, as one rank has them copied.

    Args:
        orders: where the base is.
        arrays: those of it that this rank may share.
        target: where the save writes; a place in the same bucket.

    Raises:
        StorageError: the bucket cannot be asked to copy.
    """

    def __init__(self, orders: BaseOrders, arrays: Iterable[ZarrArray], target: Location) -> None:
        self._where = replace(Location.parse(orders.folder), access=target.access)
        self._root, self._target = self._where.within(orders.root), target
        self._seen, self._generation = orders.manifest, orders.root
        self._bucket = ServerSide(target)
        self._store = open_store(self._root)
        count, digests, placed, places = orders.tables
        table = INLINE if orders.inline_places else PLACES, orders.inline_places
        self._digests = Digests(self._root, count, digests, content=orders.digests)
        self._places = Places(self._root, placed, places, *table, packs=orders.packs)
        arrays = list(arrays)
        self._digests.prepare(arrays)
        self._places.prepare(each for each in arrays if each.place is not None)

    def digest(self, array: ZarrArray, number: int) -> bytes:
        """The digest of a chunk of an array of the base; empty if it cannot be read."""
        with contextlib.suppress(XckptError):
            return self._digests.of(array, number)
        return b""

    def place(self, array: ZarrArray, number: int) -> ChunkPlace | None:
        """The place of a chunk of an array of the base; None if it has none, or cannot be read."""
        if array.place is None:
            return None
        with contextlib.suppress(XckptError):
            return self._places.place(array, number)
        return None

    def sizes(self, keys: Sequence[str]) -> list[int]:
        """Bytes of packs; 0 of one that is not there."""
        asked = [self._bucket.size(posixpath.join(self._root.path, key)) for key in keys]
        sizes: list[int] = []
        for each in asked:
            sizes.append(0)
            with contextlib.suppress(OSError, XckptError):
                sizes[-1] = answer(each, self._root)
        return sizes

    def read(self, key: str, offset: int, nbytes: int) -> bytes:
        """A part of a pack; empty if it cannot be read."""
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            asked = self._store.read(key, byte_range=slice(offset, offset + nbytes))
            return answer(asked, self._root).value
        return b""

    def elements(self, unit: Unit, codecs: tuple[str, ...]) -> object:
        """The elements of a unit, as they are stored.

        Raises:
            OSError, ValueError, RuntimeError, StorageError: the storage refused.
        """
        array = open_array(self._store, unit.array, codecs)
        return answer(array[unit.box.slices()].read(order="C"), self._root)

    def copy(self, key: str) -> Future[None]:
        """Begin to copy an object to the new checkpoint; see `ServerSide.copy`."""
        source, target = (posixpath.join(place.path, key) for place in (self._root, self._target))
        return self._bucket.copy(source, target)

    def problem(self, key: str) -> str:
        """Why copies that were made since the coordinator looked are not what it has seen.

        Args:
            key: of one that was copied.

        Returns:
            Nothing if they are.

        Raises:
            StorageError: the storage refused.
        """
        with storage_errors(self._target):
            asked = open_store(self._target).read(key, byte_range=slice(0, 1))
            if object_identity(self._where, self._generation) != self._seen:
                return f"{self._where} was replaced or deleted meanwhile"
            if answer(asked, self._target).state != "value":
                return "what the bucket has copied is not there; the endpoints may differ"
        return ""

    def close(self) -> None:
        """Begin no more copies, and wait for those under way: their keys will be removed."""
        self._bucket.close()
