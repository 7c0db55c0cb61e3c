"""Whether a checkpoint holds what was saved: digests of chunks, and its zarr.json documents.

1. Each chunk has a 16-byte XXH3-128 digest over the elements that lie inside the array. It is taken
   of the caller's memory before a write and of the destination after a read, in the thread that
   moves the chunk; the hash runs at memory speed and releases the interpreter.
2. `Integrity.prepare` fetches the digests of the arrays that are about to be read.
3. `Integrity.request_documents` starts reading zarr.json files and `check` compares them, byte for
   byte, with what the manifest implies. No data depends on them, so reads need not wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorstore as ts
import xxhash
from numpy.typing import NDArray

from xckpt.core.manifest.codec import parse
from xckpt.core.manifest.entries import Manifest, ZarrArray, array_document, documents
from xckpt.errors import CorruptCheckpointError, ManifestError, StorageError
from xckpt.storage.location import (
    DIGESTS,
    MANIFEST,
    Location,
    file_problem,
    open_store,
    storage_errors,
)

DIGEST_BYTES = 16

FEW_DIGEST_BYTES = 1 << 20
"""A digest file up to this size (bytes) is read and checked as a whole."""


def digest_bytes(data: bytes) -> bytes:
    """The digest of some bytes."""
    return xxhash.xxh3_128_digest(data)


def digest_array(array: NDArray[np.generic]) -> bytes:
    """The digest of an array's elements in C order; the array must be C-contiguous.

    Example:
        >>> digest_array(np.arange(3, dtype=np.uint8)) == digest_bytes(bytes([0, 1, 2]))
        True
    """
    return xxhash.xxh3_128_digest(array.reshape(-1).view(np.uint8).data)


@dataclass(frozen=True, slots=True)
class RequestedDocuments:
    """zarr.json documents that are being read."""

    expected: Mapping[str, bytes]
    """Key -> what the manifest implies."""
    futures: dict[str, ts.Future[ts.KvStore.ReadResult]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """What is already known to be wrong, one line each."""


@dataclass(slots=True)
class Integrity:
    """The digests and documents of one checkpoint, fetched as they are needed."""

    home: Location
    """The checkpoint's place, where its manifest is."""
    root: Location
    """The root group's place."""
    manifest: Manifest
    total_digests: int
    """Number of chunks in the whole checkpoint."""
    _digests: dict[str, bytes] = field(default_factory=dict)
    """Path of an array -> the digests of its chunks."""
    _all_digests: bytes = b""
    _checked: set[str] = field(default_factory=set)
    """Keys of the documents that are known to be right."""

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
                present = open_store(self.home).read(MANIFEST).result()
            with contextlib.suppress(ManifestError):
                if present.state != "value" or parse(present.value, digest_bytes) != self.manifest:
                    raise StorageError(
                        f"{self.home} was replaced or removed while it was read; "
                        f"open it again to read what is there now"
                    ) from error
            raise

    def require_digests(self) -> None:
        """Refuse a manifest that has many more chunks than digests, before they are enumerated.

        Raises:
            CorruptCheckpointError: the digest file is missing or too short.
        """
        size = self.total_digests * DIGEST_BYTES
        if size <= FEW_DIGEST_BYTES:
            return
        if len(self._read_range(slice(size - DIGEST_BYTES, size))) != DIGEST_BYTES:
            raise CorruptCheckpointError(
                f"{self.root}: {DIGESTS} is missing or too short for {self.total_digests:,} chunks"
            )

    def _read_range(self, where: slice) -> bytes:
        try:
            return open_store(self.root).read(DIGESTS, byte_range=where).result().value
        except ValueError:
            return b""

    def prepare(self, wanted: Iterable[ZarrArray]) -> None:
        """Fetch the digests of arrays, once: all at a time if they are few, else by range.

        Raises:
            CorruptCheckpointError: the digest file was altered.
        """
        new = {array.path: array for array in wanted if array.path not in self._digests}
        if not new:
            return
        if self.total_digests * DIGEST_BYTES <= FEW_DIGEST_BYTES:
            if not self._all_digests:
                self.check_digest_file()
            for path, array in new.items():
                self._digests[path] = self._all_digests[_digest_range(array)]
        else:
            self._digests.update(self._fetch(list(new.values())))

    def _fetch(self, wanted: Sequence[ZarrArray]) -> dict[str, bytes]:
        store = open_store(self.root)
        futures = {
            array.path: store.read(DIGESTS, byte_range=_digest_range(array))
            for array in wanted
            if array.count
        }
        fetched: dict[str, bytes] = {}
        for array in wanted:
            try:
                part = futures[array.path].result().value if array.count else b""
            except ValueError:
                part = b""
            if len(part) != array.count * DIGEST_BYTES:
                raise CorruptCheckpointError(
                    f"{self.root}: {DIGESTS} is missing or too short for {array.leaf}"
                )
            fetched[array.path] = part
        return fetched

    def digest(self, array: ZarrArray, number: int) -> bytes:
        """The saved digest of chunk ``number`` of a prepared array."""
        start = number * DIGEST_BYTES
        return self._digests[array.path][start : start + DIGEST_BYTES]

    def digest_file_problem(self) -> str:
        """What is wrong with the digest file as a whole; empty if nothing.

        Raises:
            StorageError: it cannot be read.
        """
        if file_problem(self.root, DIGESTS, self.total_digests * DIGEST_BYTES):
            return f"{DIGESTS}: altered"
        with storage_errors(self.root.child(DIGESTS)):
            content = open_store(self.root).read(DIGESTS).result()
        if content.state != "value":
            return f"{DIGESTS}: missing"
        whole = len(content.value) == self.total_digests * DIGEST_BYTES
        if not whole or digest_bytes(content.value).hex() != self.manifest.digests:
            return f"{DIGESTS}: altered"
        self._all_digests = content.value
        return ""

    def check_digest_file(self) -> None:
        """Refuse a manifest that lies among files of another checkpoint.

        Reading any chunk checks this; call it when none is read. A long digest file is not read.

        Raises:
            CorruptCheckpointError: the digest file is not the manifest's.
        """
        if self.total_digests * DIGEST_BYTES <= FEW_DIGEST_BYTES:
            problem = self.digest_file_problem()
            if problem:
                raise CorruptCheckpointError(f"{self.root}: {problem}")

    def request_documents(self, wanted: Iterable[ZarrArray]) -> RequestedDocuments:
        """Start reading the zarr.json of some arrays, to `check` them later; each is read once."""
        codecs = self.manifest.codecs
        new = {f"{array.path}/zarr.json": array for array in wanted}
        return self._request(
            {
                key: array_document(array, codecs)
                for key, array in new.items()
                if key not in self._checked
            }
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
        self._checked.update(requested.expected)

    def altered_documents(self) -> list[str]:
        """A line for each zarr.json of the checkpoint that is not what the manifest implies."""
        return self._altered(self._request(dict(documents(self.manifest))), list_all=True)

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
                    content = future.result()
            except StorageError as error:
                if not list_all:
                    raise
                problems.append(f"{key}: {error}")
                continue
            if content.state != "value":
                problems.append(f"{key}: missing")
            elif content.value != requested.expected[key]:
                problems.append(f"{key}: edited; it is not the one that was saved")
        return problems


def _digest_range(array: ZarrArray) -> slice:
    """Where the digests of an array are in the digest file, bytes."""
    return slice(array.first * DIGEST_BYTES, (array.first + array.count) * DIGEST_BYTES)
