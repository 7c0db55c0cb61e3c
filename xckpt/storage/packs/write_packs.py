"""Writing packs: small chunks appended in memory, each full pack written as one object.

1. `PackWrites.add` appends a chunk's elements in C order, and digests them.
2. A pack with `PACK_BYTES` is begun to be written under the digest of its content. One pack is
   under way while the next one fills, in a bucket up to `IN_BUCKETS`: all of them take memory.
3. `PackWrites.flush` begins the last one and gives the packs' names, `PackWrites.wait` waits for
   all. `PackWrites.places` are those of an array's chunks in the order in which they came, by this
   rank's numbers of packs.
4. `merged_places`, on the coordinator, numbers the packs of all ranks by their names, and puts the
   places in the order of the digests.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.manifest.entries import Manifest, arrays
from xckpt.core.manifest.packs import PACK_BYTES, PLACE, encode_places, pack_key
from xckpt.storage.array import digest_bytes, plain_bools
from xckpt.storage.chunks.orders import Written
from xckpt.storage.location import Location, answer, storage_errors

IN_BUCKETS: Final = 4
"""Packs under way at a time, in a bucket: each connection is slow."""


class PackWrites:
    """The packs of one rank.

    Args:
        root: the root group.
        where: the checkpoint's place, for errors.
    """

    def __init__(self, root: ts.KvStore, where: Location) -> None:
        self._root, self._where = root, where
        self._content = bytearray()
        """Of the pack that fills."""
        self._names: list[bytes] = []
        """Of those that are full."""
        self._writing: deque[ts.Future[ts.KvStore.TimestampedStorageGeneration]] = deque()
        self._places: dict[tuple[str, int], list[tuple[int, int]]] = {}

    def add(self, array: ZarrArray, data: NDArray[np.generic]) -> bytes:
        """Append a chunk; its digest.

        Raises:
            StorageError: a pack before cannot be written.
        """
        content = plain_bools(np.asarray(data, order="C")).tobytes()
        place = len(self._names), len(self._content)
        self._places.setdefault((array.leaf, array.number), []).append(place)
        self._content += content
        if len(self._content) >= PACK_BYTES:
            self._write()
        return digest_bytes(content)

    def adopt(self, name: bytes, chunks: Iterable[tuple[str, int, int]]) -> None:
        """Take a pack that is there, and chunks of it: leaf and number of the array, offset.

        Raises:
            StorageError: a pack before cannot be written.
        """
        if self._content:
            self._write()
        for leaf, number, offset in chunks:
            self._places.setdefault((leaf, number), []).append((len(self._names), offset))
        self._names.append(name)

    def flush(self) -> list[bytes]:
        """Begin to write what is left; the packs' names.

        Raises:
            StorageError: a pack before cannot be written.
        """
        if self._content:
            self._write()
        return self._names

    def wait(self) -> None:
        """Wait until all is durable.

        Raises:
            StorageError: a pack cannot be written.
        """
        self._wait_for_all_but(0)

    def places(self, leaf: str, number: int) -> bytes:
        """Those of an array's chunks that were added; empty for an array that is not packed."""
        return np.array(self._places.get((leaf, number), []), PLACE).tobytes()

    def close(self) -> None:
        """After a failure: wait for what is under way."""
        while self._writing:
            with contextlib.suppress(Exception):
                self.wait()

    def _write(self) -> None:
        content, self._content = bytes(self._content), bytearray()
        self._wait_for_all_but(IN_BUCKETS - 1 if self._where.bucket else 0)
        name = digest_bytes(content)
        self._names.append(name)
        with storage_errors(self._where):
            self._writing.append(self._root.write(pack_key(name), content))

    def _wait_for_all_but(self, count: int) -> None:
        while len(self._writing) > count:
            with storage_errors(self._where):
                answer(self._writing.popleft(), self._where)


def with_places(
    manifest: Manifest, written: Sequence[Written], numbers: Sequence[NDArray[np.int64]]
) -> tuple[Manifest, bytes]:
    """A manifest that knows its packs, and the file of places; see `merged_places`."""
    packs, places = merged_places(list(arrays(manifest)), written, numbers)
    digest = digest_bytes(places).hex()
    return msgspec.structs.replace(manifest, packs=packs, places=digest), places


def merged_places(
    arrays: Sequence[ZarrArray],
    written: Sequence[Written],
    numbers: Sequence[NDArray[np.int64]],
) -> tuple[int, bytes]:
    """How many packs all ranks have written, and the content of the file of places.

    Args:
        arrays: those of the manifest, in order.
        written: the ranks' reports. Each packed chunk has been written once.
        numbers: for each report the numbers of the digests of its chunks, in its order.
    """
    full = [array for array in arrays if array.count]
    firsts = np.array([array.first for array in full], np.int64)
    starts = np.array([-1 if array.place is None else array.place for array in full], np.int64)
    merged = np.zeros(sum(array.count for array in full if array.place is not None), PLACE)
    names = sorted({name for report in written for name in report.packs})
    packs = {name: number for number, name in enumerate(names)}
    for report, chunks in zip(written, numbers, strict=True):
        own = np.array([packs[name] for name in report.packs], np.uint64)
        of = np.searchsorted(firsts, chunks, side="right") - 1
        packed = starts[of] >= 0
        given = b"".join(part.places for part in report.arrays) + report.places
        places = np.frombuffer(given, PLACE).copy()
        places["pack"] = own[places["pack"].astype(np.int64)]
        merged[(starts[of] + chunks - firsts[of])[packed]] = places
    return len(packs), encode_places(names, merged)
