"""Whether a checkpoint holds what was saved: digests of chunks, and its zarr.json documents.

1. `Integrity.prepare` fetches the digests of the arrays that are about to be read.
2. `Integrity.request_documents` starts reading zarr.json files and `check` compares them, byte for
   byte, with what the manifest implies. No data depends on them, so reads need not wait.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import tensorstore as ts

from xckpt.core.manifest.codec import parse
from xckpt.core.manifest.entries import Manifest, ZarrArray, array_document, arrays, documents
from xckpt.core.manifest.own_keys import DIGESTS, MANIFEST
from xckpt.core.problem import Problem
from xckpt.errors import (
    CheckpointReplacedError,
    CorruptCheckpointError,
    ManifestError,
    StorageError,
)
from xckpt.storage.array import DIGEST_BYTES, digest_bytes
from xckpt.storage.location import Location, answer, open_store, storage_errors

FEW_DIGEST_BYTES = 1 << 20
"""A digest file up to this size (bytes) is read and checked as a whole."""


@dataclass(frozen=True, slots=True)
class RequestedDocument:
    """A zarr.json document that is being read."""

    key: str
    expected: bytes
    """What the manifest implies."""
    answer: ts.Future[ts.KvStore.ReadResult] | None
    """None for a file that cannot be it, and is not read."""


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
            CheckpointReplacedError: another checkpoint is there now, or none.
        """
        try:
            yield
        except (CorruptCheckpointError, StorageError) as error:
            with storage_errors(self.home):
                present = answer(open_store(self.home).read(MANIFEST), self.home)
            with contextlib.suppress(ManifestError):
                if present.state != "value" or parse(present.value, digest_bytes) != self.manifest:
                    raise CheckpointReplacedError(
                        f"{self.home} was replaced or removed while it was read; "
                        f"open it again to read what is there now"
                    ) from error
            raise

    @property
    def _few_digests(self) -> bool:
        return self.total_digests * DIGEST_BYTES <= FEW_DIGEST_BYTES

    def require_digests(self) -> None:
        """Refuse a manifest that has many more chunks than digests, before they are enumerated.

        Raises:
            CorruptCheckpointError: the digest file is missing or too short.
        """
        if not self._few_digests:
            last = _byte_range(self.total_digests - 1, 1)
            asked = open_store(self.root).read(DIGESTS, byte_range=last)
            self._digests_in(asked, 1, f"{self.total_digests:,} chunks")

    def _digests_in(self, asked: ts.Future[ts.KvStore.ReadResult], count: int, what: str) -> bytes:
        """A range of the digest file, which must have ``count`` digests in it."""
        with storage_errors(self.root.child(DIGESTS)):
            try:
                digests = answer(asked, self.root).value
            except ValueError as error:
                if not str(error).startswith("OUT_OF_RANGE"):
                    raise
                digests = b""
        if len(digests) != count * DIGEST_BYTES:
            raise CorruptCheckpointError(
                f"{self.root}: {DIGESTS} is missing or too short for {what}"
            )
        return digests

    def prepare(self, wanted: Iterable[ZarrArray]) -> None:
        """Fetch the digests of arrays, once: all at a time if they are few, else by range.

        Raises:
            CorruptCheckpointError: the digest file was altered.
        """
        new = {array.path: array for array in wanted if array.path not in self._digests}
        ranges = {path: _byte_range(array.first, array.count) for path, array in new.items()}
        if self._few_digests:
            if new and not self._all_digests:
                self.check_digest_file()
            self._digests |= {path: self._all_digests[where] for path, where in ranges.items()}
            return
        store = open_store(self.root)
        requested = {
            path: store.read(DIGESTS, byte_range=where)
            for path, where in ranges.items()
            if new[path].count
        }
        for path, asked in requested.items():
            self._digests[path] = self._digests_in(asked, new[path].count, new[path].leaf)

    def digest(self, array: ZarrArray, number: int) -> bytes:
        """The saved digest of chunk ``number`` of a prepared array."""
        start = number * DIGEST_BYTES
        return self._digests[array.path][start : start + DIGEST_BYTES]

    def digests(self, array: ZarrArray) -> bytes:
        """The saved digests of a prepared array's chunks, one after the other."""
        return self._digests[array.path]

    def digest_file_problem(self) -> str:
        """What is wrong with the digest file as a whole; empty if nothing.

        Raises:
            StorageError: it cannot be read.
        """
        if file_problem(self.root, DIGESTS, self.total_digests * DIGEST_BYTES):
            return f"{DIGESTS}: altered"
        with storage_errors(self.root.child(DIGESTS)):
            content = answer(open_store(self.root).read(DIGESTS), self.root)
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
        if self._few_digests:
            problem = self.digest_file_problem()
            if problem:
                raise CorruptCheckpointError(f"{self.root}: {problem}")

    def request_documents(self, wanted: Iterable[ZarrArray]) -> list[RequestedDocument]:
        """Start reading the zarr.json of some arrays, to `check` them later; each is read once."""
        codecs, edition = self.manifest.codecs, self.manifest.zarr_json
        new = {f"{array.path}/zarr.json": array for array in wanted}
        return self._request(
            (key, array_document(array, codecs, edition))
            for key, array in new.items()
            if key not in self._checked
        )

    def check(self, requested: Sequence[RequestedDocument]) -> None:
        """Compare requested documents with what the manifest implies.

        Raises:
            CorruptCheckpointError: some were altered; all are listed.
            StorageError: one cannot be read.
        """
        problems = [
            f"{each.key}: {problem}" for each in requested if (problem := self._problem(each))
        ]
        if problems:
            raise CorruptCheckpointError.listing(f"{self.root}: altered zarr metadata", problems)
        self._checked.update(each.key for each in requested)

    def altered_documents(self) -> list[Problem]:
        """A problem for each zarr.json of the checkpoint that is not what the manifest implies."""
        problems: list[Problem] = []
        leaves = {array.path: array.leaf for array in arrays(self.manifest)}
        for document in self._request(documents(self.manifest)):
            try:
                problem = self._problem(document)
            except StorageError as error:
                problem = str(error)
            if problem:
                leaf, line = (
                    leaves.get(document.key.removesuffix("/zarr.json")),
                    f"{document.key}: {problem}",
                )
                problems.append(Problem(leaf, kind="document", text=problem, line=line))
        return problems

    def _request(self, expected: Iterable[tuple[str, bytes]]) -> list[RequestedDocument]:
        requested: list[RequestedDocument] = []
        store = open_store(self.root)
        for key, content in expected:
            altered = file_problem(self.root, key, len(content))
            requested.append(RequestedDocument(key, content, None if altered else store.read(key)))
        return requested

    def _problem(self, document: RequestedDocument) -> str:
        """How a document is not, byte for byte, what is expected; empty if it is.

        Raises:
            StorageError: it cannot be read.
        """
        if document.answer is not None:
            with storage_errors(self.root.child(document.key)):
                content = answer(document.answer, self.root)
            if content.state != "value":
                return "missing"
            if content.value == document.expected:
                return ""
        return "edited; it is not the one that was saved"


def file_problem(location: Location, key: str, most: int) -> str:
    """Why a local file must not be read: it is no plain file, or longer than ``most`` bytes.

    TensorStore reads a file as a whole: a huge one would end the process, a pipe would hang it.
    Empty if nothing is wrong, if the file is missing, and for other stores.
    """
    if location.driver != "file":
        return ""
    try:
        status = os.stat(f"{location.path}/{key}")
    except OSError:
        return ""
    return status_problem(status, most)


def status_problem(status: os.stat_result, most: int) -> str:
    """Why a file of this status must not be read; as of `file_problem`."""
    if not stat.S_ISREG(status.st_mode):
        return "no plain file"
    if status.st_size > most:
        return f"{status.st_size:,} bytes long, where at most {most:,} are expected"
    return ""


def _byte_range(first: int, count: int) -> slice:
    """Where ``count`` digests are in the digest file."""
    return slice(first * DIGEST_BYTES, (first + count) * DIGEST_BYTES)
