"""The chunks of a checkpoint: read one by one, each verified against its digest.

Before the first chunk of an array is read (`ChunkSource.prepare`), the digests of its chunks are
fetched. Its zarr.json is compared with what the manifest implies, then or before the read is done
(`ChunkSource.request_documents`): nothing that is read depends on it. The digest of a chunk is
taken at its destination, so it also catches a chunk swapped with another, or of an earlier save.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Box
from xckpt.core.manifest.codec import Manifest, ZarrArray, arrays, parse
from xckpt.core.manifest.zarr_json import array_document, documents
from xckpt.errors import (
    CorruptCheckpointError,
    LeafTooLargeError,
    ManifestError,
    StorageError,
)
from xckpt.storage.array import open_array
from xckpt.storage.errors import chunk_damage, storage_errors
from xckpt.storage.integrity import DIGEST_BYTES, digest_array, digest_bytes
from xckpt.storage.location import DIGESTS, MANIFEST, Location, file_problem, open_store

__all__ = ["ArrayKey", "ChunkSource", "PendingRead", "RequestedDocuments", "allocate"]

Shape = tuple[int, ...]
ArrayKey = tuple[str, int]
"""(leaf name, number of the array among the leaf's)."""


SMALL_BYTES = 1 << 18
"""Chunks up to this size (bytes) are read as values: opening an array would cost more."""

FEW_DIGEST_BYTES = 1 << 20
"""A digest file up to this size (bytes) is read and checked as a whole."""


@dataclass(frozen=True, slots=True)
class PendingRead:
    """A read that was started and not yet verified."""

    key: ArrayKey
    number: int
    cell: tuple[Shape, Shape]
    into: NDArray[np.generic]
    future: ts.WriteFutures | ts.Future[ts.KvStore.ReadResult]
    """The second where the object's value is the chunk, and is copied by `ChunkSource.finish`."""


@dataclass(frozen=True, slots=True)
class RequestedDocuments:
    """zarr.json documents that are being read."""

    expected: Mapping[str, bytes]
    """Key -> what the manifest implies."""
    futures: dict[str, ts.Future[ts.KvStore.ReadResult]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """What is known already to be wrong, one line each."""


@dataclass(slots=True)
class ChunkSource:
    """Chunks of a checkpoint's arrays, opened lazily and verified when read."""

    home: Location
    """The checkpoint's place, where its manifest is."""
    root: Location
    """The root group's."""
    manifest: Manifest
    mapped: bool
    bytes_read: int = 0
    """Bytes of chunks read so far."""
    _arrays: dict[ArrayKey, ZarrArray] = field(default_factory=dict)
    _chunks: ts.KvStore | None = None
    _opened: dict[ArrayKey, ts.TensorStore] = field(default_factory=dict)
    _digests: dict[ArrayKey, bytes] = field(default_factory=dict)
    _all_digests: bytes = b""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._arrays = {(array.leaf, array.number): array for array in arrays(self.manifest)}

    @property
    def total_digests(self) -> int:
        """Number of chunks in the whole checkpoint."""
        last = next(reversed(self._arrays.values()), None)
        return last.first + last.count if last else 0

    def array(self, key: ArrayKey) -> ZarrArray:
        """The array ``(leaf name, number)``."""
        return self._arrays[key]

    @contextlib.contextmanager
    def noticing_replacement(self) -> Iterator[None]:
        """Tell damage from a checkpoint that was overwritten while it was read.

        Raises:
            StorageError: another checkpoint is there now, or none.
        """
        try:
            yield
        except CorruptCheckpointError as error:
            with storage_errors(self.home):
                found = open_store(self.home).read(MANIFEST).result()
            with contextlib.suppress(ManifestError):
                if found.state != "value" or parse(found.value, digest_bytes) != self.manifest:
                    raise StorageError(
                        f"{self.home} was replaced or removed while it was read; "
                        f"open it again to read what is there now"
                    ) from error
            raise

    def require_digests(self) -> None:
        """Refuse a manifest that has many more chunks than digests, before they are counted out.

        Raises:
            CorruptCheckpointError: the digest file is missing or too short.
        """
        size = self.total_digests * DIGEST_BYTES
        if size <= FEW_DIGEST_BYTES:
            return
        last = slice(size - DIGEST_BYTES, size)
        try:
            found = open_store(self.root).read(DIGESTS, byte_range=last).result().value
        except ValueError:
            found = b""
        if len(found) != DIGEST_BYTES:
            raise CorruptCheckpointError(
                f"{self.root}: {DIGESTS} is missing or too short for {self.total_digests:,} chunks"
            )

    def prepare(self, keys: Iterable[ArrayKey], *, check_documents: bool = True) -> None:
        """Fetch the digests of arrays, and check their zarr.json against the manifest.

        Raises:
            CorruptCheckpointError: some zarr.json or the digest file was altered; all are listed.
        """
        new = [key for key in dict.fromkeys(keys) if key not in self._digests]
        if not new:
            return
        if check_documents:
            self.check(self.request_documents(new))
        chosen = [self._arrays[key] for key in new]
        found = self._fetch_digests(open_store(self.root), chosen)
        self._digests.update(zip(new, found, strict=True))

    def request_documents(self, keys: Iterable[ArrayKey]) -> RequestedDocuments:
        """Start reading the zarr.json of some arrays, to `check` them later."""
        codecs = self.manifest.codecs
        chosen = [self._arrays[key] for key in keys]
        return self._request(
            {f"{array.path}/zarr.json": array_document(array, codecs) for array in chosen}
        )

    def check(self, requested: RequestedDocuments) -> None:
        """Compare requested documents with what the manifest implies.

        Raises:
            CorruptCheckpointError: some were altered; all are listed.
            StorageError: one cannot be read.
        """
        problems = self._altered(requested)
        if problems:
            raise CorruptCheckpointError.listing(f"{self.root}: altered zarr metadata", problems)

    def _fetch_digests(self, store: ts.KvStore, chosen: Sequence[ZarrArray]) -> list[bytes]:
        """The digests of some arrays: all digests at once if they are few, else by range."""
        ranges = [
            slice(array.first * DIGEST_BYTES, (array.first + array.count) * DIGEST_BYTES)
            for array in chosen
        ]
        if self.total_digests * DIGEST_BYTES <= FEW_DIGEST_BYTES:
            if not self._all_digests:
                self._check_digest_file()
            return [self._all_digests[where] for where in ranges]
        futures = [
            store.read(DIGESTS, byte_range=where) if where.stop > where.start else None
            for where in ranges
        ]
        found: list[bytes] = []
        for array, where, future in zip(chosen, ranges, futures, strict=True):
            try:
                part = future.result().value if future else b""
            except ValueError:
                part = b""
            if len(part) != where.stop - where.start:
                raise CorruptCheckpointError(
                    f"{self.root}: {DIGESTS} is missing or too short for {array.leaf}"
                )
            found.append(part)
        return found

    def altered_documents(self) -> list[str]:
        """A line for each zarr.json of the checkpoint that is not what the manifest implies."""
        expected = dict(documents(self.manifest))
        return self._altered(self._request(expected), list_all=True)

    def _request(self, expected: Mapping[str, bytes]) -> RequestedDocuments:
        store = open_store(self.root)
        requested = RequestedDocuments(expected)
        for key, content in expected.items():
            if file_problem(self.root, key, len(content)):
                problem = f"{key}: edited; it is not the one that was saved"
                requested.problems.append(problem)
            else:
                requested.futures[key] = store.read(key)
        return requested

    def _altered(self, requested: RequestedDocuments, *, list_all: bool = False) -> list[str]:
        """A line for each document that is not, byte for byte, what is expected.

        Raises:
            StorageError: one cannot be read, and ``list_all`` is False.
        """
        problems = list(requested.problems)
        for key, future in requested.futures.items():
            try:
                with storage_errors(self.root.child(key)):
                    found = future.result()
            except StorageError as error:
                if not list_all:
                    raise
                problems.append(f"{key}: {error}")
                continue
            if found.state != "value":
                problems.append(f"{key}: missing")
            elif found.value != requested.expected[key]:
                problems.append(f"{key}: edited; it is not the one that was saved")
        return problems

    def digest_file_problem(self) -> str:
        """What is wrong with the digest file as a whole; empty if nothing.

        Raises:
            StorageError: it cannot be read.
        """
        if file_problem(self.root, DIGESTS, self.total_digests * DIGEST_BYTES):
            return f"{DIGESTS}: altered"
        with storage_errors(self.root.child(DIGESTS)):
            found = open_store(self.root).read(DIGESTS).result()
        if found.state != "value":
            return f"{DIGESTS}: missing"
        whole = len(found.value) == self.total_digests * DIGEST_BYTES
        if not whole or digest_bytes(found.value).hex() != self.manifest.digests:
            return f"{DIGESTS}: altered"
        self._all_digests = found.value
        return ""

    def check_belonging(self) -> None:
        """Refuse a manifest that lies among files of another checkpoint.

        Whoever reads a chunk finds out; this is for those who read none.

        Raises:
            CorruptCheckpointError: the digest file is not the manifest's.
        """
        if self.total_digests * DIGEST_BYTES <= FEW_DIGEST_BYTES:
            self._check_digest_file()

    def _check_digest_file(self) -> None:
        problem = self.digest_file_problem()
        if problem:
            raise CorruptCheckpointError(f"{self.root}: {problem}")

    def read(
        self, key: ArrayKey, number: int, cell: tuple[Shape, Shape], into: NDArray[np.generic]
    ) -> None:
        """Read chunk ``number``, whose box is ``cell``, into C-contiguous memory and verify it.

        Raises:
            CorruptCheckpointError: the chunk is missing, truncated, or not what was saved.
        """
        self.finish(self.begin(key, number, cell, into))

    def begin(
        self, key: ArrayKey, number: int, cell: tuple[Shape, Shape], into: NDArray[np.generic]
    ) -> PendingRead:
        """Start a `read` whose memory must stay until `finish`.

        Raises:
            CorruptCheckpointError: what is there can be no chunk.
        """
        array = self._arrays[key]
        self._check_file(array, cell)
        if into.nbytes <= SMALL_BYTES and self._is_plain(array, cell):
            return PendingRead(key, number, cell, into, self._store.read(array.key(cell[0])))
        region = tuple(slice(o, o + n) for o, n in zip(*cell, strict=True))
        destination = ts.array(into, copy=False, write=True)
        with storage_errors(self.root):
            written = destination.write(self._open(key)[region])
        return PendingRead(key, number, cell, into, written)

    def _check_file(self, array: ZarrArray, cell: tuple[Shape, Shape]) -> None:
        most = _most_bytes(array, self.manifest.codecs)
        problem = file_problem(self.root, array.key(cell[0]), most)
        if problem:
            raise self._chunk_error(array, cell, f"the file is {problem}")

    def _is_plain(self, array: ZarrArray, cell: tuple[Shape, Shape]) -> bool:
        """Whether a chunk's object holds just its elements in C order."""
        return not self.manifest.codecs and array.shard is None and cell[1] == array.chunk

    def plain_file(self, key: ArrayKey, cell: tuple[Shape, Shape]) -> str:
        """The local file that holds just a chunk's elements in C order; empty if there is none.

        Chunks that are read as values have none.

        Raises:
            CorruptCheckpointError: what is there can be no chunk.
        """
        array = self._arrays[key]
        size = prod(cell[1]) * item_size(array.dtype)
        if self.root.driver != "file" or size <= SMALL_BYTES or not self._is_plain(array, cell):
            return ""
        self._check_file(array, cell)
        return f"{self.root.path}/{array.key(cell[0])}"

    @property
    def _store(self) -> ts.KvStore:
        if self._chunks is None:
            self._chunks = open_store(self.root, mapped=self.mapped)
        return self._chunks

    def _open(self, key: ArrayKey) -> ts.TensorStore:
        if key not in self._opened:
            self._opened[key] = open_array(self._store, self._arrays[key], self.manifest.codecs)
        return self._opened[key]

    def finish(self, pending: PendingRead) -> None:
        """Wait for a read and verify it.

        Raises:
            CorruptCheckpointError: the chunk is missing, truncated, or not what was saved.
            StorageError: the storage gave no answer.
        """
        array = self._arrays[pending.key]
        try:
            found = pending.future.result()
        except ValueError as error:
            reason = chunk_damage(error)
            if reason:
                raise self._chunk_error(array, pending.cell, reason) from error
            with storage_errors(self._place(array, pending.cell)):
                raise
        if found is not None and not _take(found, pending.into):
            reason = f"the chunk is {'missing' if found.state == 'missing' else 'truncated'}"
            raise self._chunk_error(array, pending.cell, reason)
        self.verify(pending.key, pending.number, pending.cell, digest_array(pending.into))

    def verify(self, key: ArrayKey, number: int, cell: tuple[Shape, Shape], digest: bytes) -> None:
        """Compare the digest of what was read with the one that was saved.

        Raises:
            CorruptCheckpointError: they differ.
        """
        start = number * DIGEST_BYTES
        if digest != self._digests[key][start : start + DIGEST_BYTES]:
            raise self.damage(key, cell, "its digest differs from the one saved")
        with self._lock:
            self.bytes_read += prod(cell[1]) * item_size(self._arrays[key].dtype)

    def damage(
        self, key: ArrayKey, cell: tuple[Shape, Shape], reason: str
    ) -> CorruptCheckpointError:
        """The error that says what is wrong with a chunk, and where it is."""
        return self._chunk_error(self._arrays[key], cell, reason)

    def _chunk_error(
        self, array: ZarrArray, cell: tuple[Shape, Shape], reason: str
    ) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._place(array, cell)}: {reason}; restore it from a copy of the checkpoint"
        )

    def _place(self, array: ZarrArray, cell: tuple[Shape, Shape]) -> str:
        box = Box(*cell).shifted(array.offset)
        return f"{array.leaf or 'the root'}: {box} in {self.root.child(array.path)}"


def allocate(sizes: Sequence[int], dtype: np.dtype[np.generic], leaf: str) -> NDArray[np.generic]:
    """New memory for elements of a leaf.

    Raises:
        LeafTooLargeError: there is none.
    """
    try:
        return np.empty(sizes, dtype)
    except MemoryError as error:
        raise LeafTooLargeError(
            f"{leaf or 'the root'}: no memory for {tuple(sizes)} elements of {dtype} ({error})"
        ) from error


def _take(found: ts.KvStore.ReadResult, into: NDArray[np.generic]) -> bool:
    """Copy an object's value into a chunk's memory; False if there is none of its size."""
    if found.state != "value" or len(found.value) != into.nbytes:
        return False
    into.reshape(-1).view(np.uint8)[:] = np.frombuffer(found.value, np.uint8)
    return True


def _most_bytes(array: ZarrArray, codecs: tuple[str, ...]) -> int:
    """The most bytes of an object of an array: chunks, checksums, a shard's index.

    TensorStore does not mind what follows a chunk with a checksum.
    """
    unit = array.shard or array.chunk
    chunks = prod(unit) // prod(array.chunk)
    index = 0 if array.shard is None else chunks * 16 + 4
    return prod(unit) * item_size(array.dtype) + chunks * 4 * len(codecs) + index
