"""Writing packs: small chunks one behind another, each full pack one object.

1. `PackWrites.add` appends a chunk's elements in C order, and digests them. A pack grows in a local
   file, or in memory (`xckpt.storage.packs.pack_output`).
2. A pack with `PACK_BYTES` is finished under the digest of its content. In a bucket up to
   `IN_BUCKETS` are under way while the next one fills; `pack_memory` is their part of the budget;
   if that is small, packs are smaller.
3. `PackWrites.flush` begins the last one and gives the packs' names, `PackWrites.wait` waits for
   all. A place has the number of a pack among this rank's.
4. `merged_places`, on the coordinator, numbers the packs of all ranks by their names, and puts the
   places in the order of the digests.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
import tensorstore as ts
import xxhash
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Int64s
from xckpt.core.manifest.entries import Manifest, TensorEntry
from xckpt.core.manifest.packs import INLINE_BYTES, PACK_BYTES, PLACE, PLACES, encode_places
from xckpt.core.manifest.rules import count_chunks
from xckpt.core.manifest.stored_arrays import StoredArrays
from xckpt.storage.array import digest_bytes, plain_bools
from xckpt.storage.chunks.orders import WriteOrders, Written
from xckpt.storage.chunks.plain_files import SLAB_BYTES, contents
from xckpt.storage.location import Location, Writing, answer, storage_errors
from xckpt.storage.packs.pack_output import PackFile, PackObject

IN_BUCKETS: Final = 4
"""Packs under way at a time, in a bucket: each connection is slow."""

Numbers = Callable[[Sequence[Written], int], NDArray[np.int64]]

LEAST_PACK: Final = 1 << 18
"""Packs have at least this many bytes, however little memory there is."""


def pack_memory(where: Location, memory_bytes: int) -> int:
    """Bytes of a budget that a rank's packs may take: in a bucket at most half of it.

    Args:
        where: the checkpoint's place.
        memory_bytes: the whole budget.

    Example:
        >>> pack_memory(Location.parse("s3://bucket/model"), 256 << 20) >> 20
        80
        >>> pack_memory(Location.parse("/data/model"), 256 << 20)
        0
    """
    if where.driver == "file":
        return 0
    return min(memory_bytes // 2, (IN_BUCKETS + 1) * PACK_BYTES)


class PackWrites:
    """The packs of one rank.

    Args:
        root: the root group.
        orders: where that is, and what is packed.
        where: the checkpoint's place, for errors.
        memory_bytes: the whole budget; see `pack_memory`.
    """

    def __init__(
        self, root: ts.KvStore, orders: WriteOrders, where: Location, memory_bytes: int
    ) -> None:
        self._root, self._folder, self._where = root, orders.location, where
        self.memory_bytes: Final = pack_memory(where, memory_bytes)
        """What it takes of that."""
        self._full = PACK_BYTES
        if where.driver != "file":
            self._full = min(PACK_BYTES, max(LEAST_PACK, self.memory_bytes // (IN_BUCKETS + 1)))
        self._pack: PackFile | PackObject | None = None
        """That which fills."""
        self._names: list[bytes] = []
        """Of those that are full."""
        self._writing: deque[Writing] = deque()

    def add(self, data: NDArray[np.generic]) -> tuple[tuple[int, int], bytes]:
        """Append a chunk; its place (pack and offset), and its digest.

        Raises:
            StorageError: a pack cannot be written.
        """
        pack = self._pack = self._pack or self._new()
        place = len(self._names), pack.size
        if data.nbytes <= SLAB_BYTES:
            content = plain_bools(np.asarray(data, order="C")).tobytes()
            pack.append(content)
            digest = digest_bytes(content)
        else:
            hashed = xxhash.xxh3_128()
            for slab in contents(data):
                pack.append(slab)
                hashed.update(slab)
            digest = hashed.digest()
        if pack.size >= self._full:
            self._finish()
        return place, digest

    def adopt(self, name: bytes) -> int:
        """Count an existing pack as one of this rank's; returns its number.

        Raises:
            StorageError: a pack before cannot be written.
        """
        self._finish()
        self._names.append(name)
        return len(self._names) - 1

    def flush(self) -> list[bytes]:
        """Begin to write what is left; the packs' names.

        Raises:
            StorageError: a pack before cannot be written.
        """
        self._finish()
        return self._names

    def wait(self) -> None:
        """Wait until all is durable.

        Raises:
            StorageError: a pack cannot be written.
        """
        self._wait_for_all_but(0)

    def close(self) -> None:
        """After a failure: wait for what is under way."""
        if self._pack is not None:
            self._pack.discard()
            self._pack = None
        while self._writing:
            with contextlib.suppress(Exception):
                self.wait()

    def _new(self) -> PackFile | PackObject:
        if self._where.driver == "file":
            return PackFile(self._folder, self._where)
        return PackObject(self._root, self._where)

    def _finish(self) -> None:
        """Finish the pack that fills, if one does."""
        if self._pack is None:
            return
        # A pack that is sent is in memory twice for a moment: so one place less is free.
        self._wait_for_all_but(IN_BUCKETS - 1)
        name, writing = self._pack.finish()
        self._pack = None
        self._names.append(name)
        if writing is not None:
            self._writing.append(writing)

    def _wait_for_all_but(self, count: int) -> None:
        while len(self._writing) > count:
            with storage_errors(self._where):
                answer(self._writing.popleft(), self._where)


def joined(reports: Sequence[Written]) -> Written:
    """The first report, with the chunks and packs of the others, which have nothing else."""
    packs, placed = list[bytes](), list[bytes]()
    for report in reports:
        places = np.frombuffer(report.places, PLACE).copy()
        places["pack"] += len(packs)
        placed.append(places.tobytes())
        packs += report.packs
    return msgspec.structs.replace(
        reports[0],
        chunks=b"".join(report.chunks for report in reports),
        digests=b"".join(report.digests for report in reports),
        places=b"".join(placed),
        packs=packs,
    )


def with_places(
    manifest: Manifest, written: Sequence[Written], numbers: Numbers
) -> tuple[Manifest, list[tuple[str, bytes]]]:
    """A manifest that knows its packs and places, and the file of these if they are many.

    See `merged_places`; the file comes with its key.
    """
    packs, places = merged_places(manifest, written, numbers)
    if len(places) <= INLINE_BYTES:
        return msgspec.structs.replace(manifest, packs=packs, inline_places=places), []
    digest = digest_bytes(places).hex()
    return msgspec.structs.replace(manifest, packs=packs, places=digest), [(PLACES, places)]


def merged_places(
    manifest: Manifest,
    written: Sequence[Written],
    numbers: Numbers,
) -> tuple[int, bytes]:
    """How many packs all ranks have written, and the table of places.

    Args:
        manifest: names all leaves.
        written: the ranks' reports. Each packed chunk has been written once.
        numbers: gives those of the digests of some reports' chunks, and takes their first rank.
    """
    firsts, counts, starts = _columns(manifest)
    merged = np.zeros(int(counts[starts >= 0].sum()), PLACE)
    names = sorted({name for report in written for name in report.packs})
    packs = {name: number for number, name in enumerate(names)}
    for rank, report in enumerate(written):
        chunks = numbers([report], rank)
        own = np.array([packs[name] for name in report.packs], np.uint64)
        of = np.searchsorted(firsts, chunks, side="right") - 1
        packed = starts[of] >= 0
        given = b"".join([report.places, *(value.places for value in report.long_values)])
        places = np.frombuffer(given, PLACE).copy()
        places["pack"] = own[places["pack"].astype(np.int64)]
        merged[(starts[of] + chunks - firsts[of])[packed]] = places
    return len(packs), encode_places(names, merged)


def _columns(manifest: Manifest) -> Int64s:
    """First chunk, chunks and first place of each array that has chunks, (3, n), in order.

    The place is -1 if its chunks lie in no pack.
    """
    stored, leaves = StoredArrays(manifest), manifest.leaves
    counts = np.diff(stored.first, append=count_chunks(manifest))
    columns = [np.stack([stored.first, counts, np.where(stored.is_packed, stored.place, -1)])]
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, TensorEntry) and leaf.pieces is not None:
            columns[0][1, number] = 0  # its pieces are the arrays
            packed = leaf.pieces.are_packed(manifest.pack_bytes // item_size(leaf.dtype))
            firsts, counts = leaf.pieces.firsts[:-1], np.diff(leaf.pieces.firsts)
            before = np.cumsum(counts * packed) - counts * packed
            places = np.where(packed, stored.place[number] + before, -1)
            columns.append(np.stack([stored.first[number] + firsts, counts, places]))
    joined = np.concatenate(columns, axis=1)
    joined = joined[:, joined[1] > 0]
    return joined[:, np.argsort(joined[0])]
