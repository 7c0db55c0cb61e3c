"""Where packed chunks lie, as the table of places says.

A short table stands in the manifest, and nothing is read. A longer one is a file, which is read as
that of the digests is (`xckpt.storage.chunks.digests`): as a whole, or of a very long one what is
needed. The names of the packs stand before the places.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.grid import ZarrArray, cells
from xckpt.core.manifest.entries import Manifest, arrays
from xckpt.core.manifest.packs import (
    NAME_BYTES,
    PACK_BYTES,
    PACKS,
    PLACE,
    PLACES,
    ChunkPlace,
    overlap,
    pack_key,
)
from xckpt.core.manifest.rules import MAX_PACK_BYTES, count_packed
from xckpt.errors import RESTORE, CorruptCheckpointError
from xckpt.storage.chunks.digests import BLOCK, RowFile
from xckpt.storage.chunks.file_checks import file_bytes
from xckpt.storage.location import Location

INLINE = "places in xckpt.json"
"""What errors call a table of places in the manifest."""
MOST_OFFSET = 1 << 62
"""Beyond the length of any file or object."""
LONGEST_PACK = PACK_BYTES + MAX_PACK_BYTES
"""Bytes of the longest pack that xckpt writes."""

_PLACE = struct.Struct("<QQ")


@dataclass(slots=True)
class Places(RowFile):
    """The places of one checkpoint's packed chunks; make one by `places_of`."""

    key: str = PLACES
    """The file's; of a table in the manifest what errors call it."""
    packs: int = 0
    """How many packs there are."""
    _names: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """Names of packs, `BLOCK` at a time."""
    _keys: dict[int, str] = field(default_factory=dict[int, str])
    """Of the packs that were asked for."""

    @property
    def before(self) -> int:
        """Bytes before the first place."""
        return self.packs * NAME_BYTES

    def problem(self) -> str:
        """What is wrong with the file of places; empty if nothing, or if there is none.

        Raises:
            StorageError: it cannot be read.
        """
        return "" if self.key == INLINE else RowFile.problem(self)

    def first(self, array: ZarrArray) -> int:
        """The number of an array's first place."""
        assert array.place is not None
        return array.place

    def place(self, array: ZarrArray, number: int) -> ChunkPlace:
        """Where chunk ``number`` of a prepared array lies.

        Raises:
            CorruptCheckpointError: the file of places is too short, or names no such pack.
        """
        pack, offset = self.of_chunk(array, number)
        return ChunkPlace(self.pack(pack), offset)

    def of_chunk(self, array: ZarrArray, number: int) -> tuple[int, int]:
        """The pack and the offset of chunk ``number`` of a prepared array; see `place`."""
        pack, offset = _PLACE.unpack(self.of(array, number))
        if pack >= self.packs or offset > MOST_OFFSET:
            raise CorruptCheckpointError(
                f"{self.root}: {self.key}: there is no byte {offset:,} of a pack {pack:,}"
            )
        return pack, offset

    def columns(
        self,
        numbers: NDArray[np.int64],
        lengths: NDArray[np.int64],
        leaf: Callable[[int], str],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Pack and offset of many places, by their numbers, and which of them are there.

        `of_chunk` looks for the others one by one.

        Args:
            numbers: of the places, (n,).
            lengths: bytes of their chunks, (n,).
            leaf: gives the leaf of one, by its position among these.

        Raises:
            CorruptCheckpointError: a chunk shares some bytes, but not all, with another.
        """
        rows, found = self.rows(numbers)
        given = rows.reshape(-1).view(PLACE)
        found &= (given["pack"] < self.packs) & (given["offset"] <= MOST_OFFSET)
        there = np.flatnonzero(found)
        shared = overlap(given[there], lengths[there])
        if shared is not None:
            problem = self._sharing(leaf(int(there[shared])))
            raise CorruptCheckpointError(f"{self.root}: {problem}; {RESTORE}")
        pack, offset = np.where(found, given["pack"], 0), np.where(found, given["offset"], 0)
        return pack.astype(np.int64), offset.astype(np.int64), found

    def pack(self, pack: int) -> str:
        """The key of a pack, one text for all of its chunks."""
        key = self._keys.get(pack)
        return key or self._keys.setdefault(pack, pack_key(self._name(pack)))

    def names(self) -> list[str]:
        """The keys of all packs.

        Raises:
            CorruptCheckpointError: the file of places is too short.
        """
        return [pack_key(self._name(pack)) for pack in range(self.packs)]

    def overlap_problem(self, manifest: Manifest) -> str:
        """The chunk that shares some bytes, but not all, with another; empty if there is none.

        Raises:
            CorruptCheckpointError: the file of places is too short.
        """
        packed, places, lengths = self._chunks(manifest)
        number = overlap(places, lengths)
        if number is None:
            return ""
        leaf = next(array.leaf for array in packed if number < self.first(array) + array.count)
        return self._sharing(leaf)

    def _sharing(self, leaf: str) -> str:
        return f"{self.key}: a chunk of {leaf} shares bytes with another"

    def longer_packs(self, manifest: Manifest) -> list[str]:
        """The packs of a local folder that are longer than what lies in them, and were altered."""
        folder = self.root.folder
        if folder is None or not self.packs:
            return []
        _, places, lengths = self._chunks(manifest)
        real = places["pack"] < self.packs  # the read of a chunk in another one is refused
        ends, reach = np.zeros(self.packs, np.uint64), places["offset"] + lengths.astype(np.uint64)
        np.maximum.at(ends, places["pack"][real], reach[real])
        return [
            key
            for key, end in zip(self.names(), ends.tolist(), strict=True)
            if _is_longer(folder / key, end)
        ]

    def _chunks(
        self, manifest: Manifest
    ) -> tuple[list[ZarrArray], NDArray[np.void], NDArray[np.int64]]:
        """All packed arrays; the place of each of their chunks, and its length in bytes."""
        packed = [array for array in arrays(manifest) if array.place is not None and array.count]
        self.prepare(packed)
        places = b"".join(block for array in packed for block in self.blocks(array))
        lengths = np.concatenate([chunk_bytes(array) for array in packed])
        return packed, np.frombuffer(places, PLACE), lengths

    def _name(self, pack: int) -> bytes:
        if self.few:
            return self.whole()[pack * NAME_BYTES : (pack + 1) * NAME_BYTES]
        block, within = divmod(pack, BLOCK)
        if block not in self._names:
            low, high = block * BLOCK, min((block + 1) * BLOCK, self.packs)
            # A name is as long as a place: the first name is that many places before the first.
            asked = self._ask(low - self.packs, high - low)
            self._names[block] = self._answered(asked, high - low, "its packs")
        return self._names[block][within * NAME_BYTES : (within + 1) * NAME_BYTES]


def _is_longer(pack: Path, end: int) -> bool:
    """Whether a pack is longer than its chunks, and not as it was written, or far longer.

    One that is far longer is not read: it may have holes without end. A save may share a pack for
    its first chunk alone, so that a whole pack's length may follow.
    """
    length = file_bytes(pack)
    if length <= end:
        return False
    return length > end + LONGEST_PACK or pack_key(_digest_of(pack)) != f"{PACKS}/{pack.name}"


def _digest_of(path: Path) -> bytes:
    """The digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).digest()


def chunk_bytes(array: ZarrArray) -> NDArray[np.int64]:
    """Bytes of the elements of each chunk of an array that has some, in C order."""
    _, boxes = cells((0,) * len(array.shape), array.shape, array.shape, array.chunk)
    return boxes.sizes.prod(axis=1, dtype=np.int64) * item_size(array.dtype)


def places_of(root: Location, manifest: Manifest) -> Places:
    """The places of a checkpoint's packed chunks, from its manifest or from their file."""
    inline = manifest.inline_places
    key = INLINE if inline else PLACES
    about = root, count_packed(manifest), manifest.places, key, inline
    return Places(*about, packs=manifest.packs)
