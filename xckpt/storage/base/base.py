"""The base of a save: an earlier checkpoint, as the coordinator reads it.

1. The manifest is read once, when the first grid is asked for. If nothing is there, that is an
   error, unless the path is `OptionalBase`.
2. The digest file is compared with the manifest as a whole: the digest file of another checkpoint
   would stand for other contents.
3. `Base.grid` gives the planner the grids to keep, `Base.orders` tells a rank what it needs to find
   and share the chunks of its arrays (`xckpt.storage.base.chunks`, `xckpt.storage.base.objects`).

Nothing can be shared with a base that is not a checkpoint of this format and these codecs on the
same disk or in the same bucket, or is damaged: `Base.problem` says why, and the save writes
everything.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Final

import msgspec

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Shape
from xckpt.core.geometry.grid import Grid, ZarrArray
from xckpt.core.manifest.codec import parse, to_metadata
from xckpt.core.manifest.entries import Manifest, arrays, is_packed
from xckpt.core.manifest.rules import SMALL_CHUNK, count_packed
from xckpt.core.metadata import TensorStorageMetadata
from xckpt.core.run.names import OptionalBase
from xckpt.core.text.shown import readable_bytes
from xckpt.errors import (
    CorruptCheckpointError,
    ManifestError,
    NotACheckpointError,
    StorageError,
    VersionError,
    naming,
)
from xckpt.options import SaveOptions
from xckpt.storage.array import digest_bytes
from xckpt.storage.base.identity import file_identity, object_identity
from xckpt.storage.buckets.server_side import ServerSide
from xckpt.storage.chunks.digests import Digests
from xckpt.storage.chunks.orders import BaseOrders, WriteOrders, Written
from xckpt.storage.integrity import ask_whole
from xckpt.storage.location import Location
from xckpt.storage.packs.places import places_of
from xckpt.storage.read_checkpoint import read_manifest

logger: Final = logging.getLogger("xckpt")

LEAST_PLAIN: Final = 4096
"""A chunk of fewer bytes is packed even if its base has it as a file: its zarr.json takes as much
of a disk."""

SENT_BYTES: Final = 1 << 20
"""Digests that all ranks together receive at most; of more each rank reads its own."""

_Exact = tuple[str, Shape, Shape, Shape, Shape | None, Shape | None]


class Base:
    """The base of one save, on its coordinator.

    Args:
        path: where it is; if it is `OptionalBase`, it need not exist.
        target: where the save goes.
        options: of the save.
        codecs: of the save.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        target: Location,
        options: SaveOptions,
        codecs: tuple[str, ...],
    ) -> None:
        self.location: Final = replace(Location.parse(os.fspath(path)), access=target.access)
        self.problem: str = ""
        """Why nothing can be shared with the base; empty if something can."""
        self._may_lack = isinstance(path, OptionalBase)
        self._target, self._options, self._codecs = target, options, codecs
        self._opened = False
        self._grids: dict[str, TensorStorageMetadata] = {}
        self._arrays: dict[tuple[str, int], ZarrArray] = {}
        """Leaf and number -> each array that may be shared."""
        self._pack_bytes = 0
        self._orders: BaseOrders | None = None
        """What all ranks receive."""
        self._digests = b""
        """The file of digests of a base in a bucket, if it was read as a whole."""

    def grid(self, name: str, dtype: str, shape: Shape) -> Grid | None:
        """The grid of a leaf, if it has one there of the same dtype and shape, in plain chunks.

        Raises:
            NotACheckpointError: there is no base.
        """
        self._open()
        leaf = self._grids.get(name)
        if leaf is None or (leaf.properties.dtype, leaf.size) != (dtype, shape):
            return None
        return leaf.grid

    def planned(self, plan: Manifest) -> Manifest:
        """The plan of a save whose caller does not say what is packed: it follows the base.

        Otherwise small chunks could not be shared. The plan does not follow a base that lacks most
        of them, by bytes, nor one in which each would be a plain file hardly longer than its
        zarr.json.

        Raises:
            NotACheckpointError: there is no base.
        """
        self._open()
        if self._orders is None or self._pack_bytes == plan.pack_bytes:
            return plan
        small = [array for array in arrays(plan) if is_packed(array, SMALL_CHUNK)]
        there = [array for array in small if self._is_there(array)]
        total, found = sum(map(_elements_bytes, small)), sum(map(_elements_bytes, there))
        least = 0 if self._pack_bytes else LEAST_PLAIN * sum(array.count for array in there)
        keeps = 2 * found >= total and found >= least
        return msgspec.structs.replace(plan, pack_bytes=self._pack_bytes) if keeps else plan

    def orders(self, given: Sequence[WriteOrders]) -> list[WriteOrders]:
        """The orders of all ranks, with what they need to know about the base.

        Raises:
            NotACheckpointError: there is no base.
        """
        self._open()
        if self._orders is None:
            return list(given)
        made: dict[int, WriteOrders] = {}  # most ranks have the same
        digests = self._digests if len(self._digests) * len(given) <= SENT_BYTES else b""
        for orders in given:
            if id(orders) not in made:
                equal = [self._equal(array, orders.pack_bytes) for array in orders.arrays]
                firsts = tuple(-1 if array is None else array.first for array in equal)
                packed = (None if array is None else array.place for array in equal)
                places = tuple(-1 if place is None else place for place in packed)
                about = {"firsts": firsts, "places": places, "digests": digests}
                base = msgspec.structs.replace(self._orders, **about)
                made[id(orders)] = msgspec.structs.replace(orders, base=base)
        return [made[id(orders)] for orders in given]

    def in_folder(self) -> BaseOrders | None:
        """What finds the files of a base in a folder; None if nothing there can be shared.

        Raises:
            NotACheckpointError: there is no base.
        """
        self._open()
        return self._orders if self.location.folder is not None else None

    def _equal(self, array: ZarrArray, pack_bytes: int) -> ZarrArray | None:
        """The array of the base with the same chunks, elements aside."""
        if not self._is_there(array):
            return None
        stored = self._arrays[array.leaf, array.number]
        return stored if (stored.place is not None) == is_packed(array, pack_bytes) else None

    def _is_there(self, array: ZarrArray) -> bool:
        """Whether the base has an array with the same chunks, packed or not."""
        stored = self._arrays.get((array.leaf, array.number))
        return stored is not None and _exact(stored) == _exact(array)

    def log(self, written: Sequence[Written]) -> None:
        """Say how much was shared, and why not more."""
        shared = sum(report.shared for report in written)
        reasons = [self.problem, *(report.unshared for report in written)]
        reason = next(filter(None, reasons), "")
        logger.info(
            "%s: %s shared with %s%s",
            self._target,
            readable_bytes(shared),
            self.location,
            f"; equal chunks were written: {reason}" if reason else "",
        )

    def _open(self) -> None:
        if not self._opened:
            self._opened, access = True, self.location.access
            access.start()
            access.end = access.until  # the save's, which has begun
            try:
                self.problem = self._look() or self._read()
            except NotACheckpointError as error:
                if not self._may_lack:
                    raise NotACheckpointError(f"base: {error}") from error
                self.problem = str(error)
            except (ManifestError, VersionError, CorruptCheckpointError, StorageError) as error:
                self.problem = str(error)
            if self.problem:
                self._grids, self._arrays, self._orders = {}, {}, None

    def _look(self) -> str:
        """Why this kind of save shares nothing; empty if it may."""
        problem = self._apart()
        if problem:
            self._require()
            return problem
        if self._options.shard_bytes > self._options.chunk_bytes and self._codecs:
            self._require()
            return "zarr shards of chunks with checksums are not shared"
        return ""

    def _apart(self) -> str:
        """Why nothing that lies there can be shared with what lies here; empty if it can."""
        here, there = self._target, self.location
        if here.folder is not None and there.folder is not None:
            return ""
        if not here.is_in_bucket_of(there):
            return "only files of one disk, or objects of one bucket, can be shared"
        try:
            ServerSide(here)
        except StorageError as error:
            return f"the bucket is not asked to copy: {error}"
        return ""

    def _require(self) -> None:
        """Refuse a base that does not exist, if it cannot be used."""
        if not self._may_lack:
            read_manifest(self.location)

    def _read(self) -> str:
        """Take what the base's manifest says; returns why it cannot be used."""
        folder, seen = str(self.location), b""
        if self.location.folder is not None:
            folder = os.path.realpath(folder)
            seen = _identity(folder)
        data = read_manifest(self.location)
        with naming(self.location):
            manifest = parse(data, digest_bytes)
        stored = list(arrays(manifest))
        root = self.location.within(manifest.root)
        count = sum(array.count for array in stored)
        digests, places = Digests(root, count, manifest.digests), places_of(root, manifest)
        ask_whole(digests, places)
        if self.location.folder is None:
            seen = object_identity(self.location, manifest.root, data)
        elif _identity(folder) != seen:
            return f"{self.location} was replaced or deleted meanwhile"
        if manifest.codecs != self._codecs:
            return f"{self.location} has other codecs"
        problem = digests.problem()
        if manifest.packs and not problem:
            problem = places.problem()
        if problem:
            return f"{self.location}: {problem}"
        if self.location.folder is None and digests.few and count:
            self._digests = digests.whole()
        self._pack_bytes = manifest.pack_bytes
        self._take(stored, to_metadata(manifest).state_dict_metadata.items())
        verify = self._options.verify_base
        about = folder, manifest.root, seen
        packed = manifest.packs, manifest.inline_places
        tables = count, manifest.digests, count_packed(manifest), manifest.places
        self._orders = BaseOrders(*about, (), (), *packed, tables, verify)
        return ""

    def _take(self, stored: Sequence[ZarrArray], leaves: Iterable[tuple[str, object]]) -> None:
        self._grids = {
            name: leaf
            for name, leaf in leaves
            if isinstance(leaf, TensorStorageMetadata) and leaf.grid is not None
        }
        self._arrays = {(each.leaf, each.number): each for each in stored}


def _identity(folder: str) -> bytes:
    """The identity of the manifest; empty if there is none."""
    with contextlib.suppress(OSError):
        return file_identity(folder)
    return b""


def _elements_bytes(array: ZarrArray) -> int:
    """Bytes of an array's elements."""
    return prod(array.shape) * item_size(array.dtype)


def _exact(array: ZarrArray) -> _Exact:
    """Everything but the elements that the bytes of an array's chunks depend on."""
    return array.dtype, array.offset, array.shape, array.chunk, array.shard, array.piece_of
