"""Whether a checkpoint holds what was saved: digests of chunks, and its zarr.json documents.

1. `Integrity.prepare` asks for the digests of the arrays that are about to be read.
2. `Integrity.request_documents` starts reading zarr.json files and `check` compares them, byte for
   byte, with what the manifest implies. No data depends on them, so reads do not wait.
3. In a bucket each of these would cost a request, so only `Integrity.altered_documents` reads them.
   Arrays are opened with what the manifest implies, whatever their zarr.json says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from xckpt.core.geometry.box import Int64s
from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.manifest.codec import MAX_BYTES, parse
from xckpt.core.manifest.entries import Manifest, array_document, arrays, documents
from xckpt.core.manifest.own_keys import MANIFEST
from xckpt.core.problem import Problem
from xckpt.errors import (
    RESTORE,
    CorruptCheckpointError,
    ManifestError,
    StorageError,
    XckptError,
)
from xckpt.storage.array import digest_bytes
from xckpt.storage.chunks.digests import Digests, RowFile
from xckpt.storage.chunks.file_checks import file_content, stored_content
from xckpt.storage.location import Location, Reading, answer, open_store, storage_errors
from xckpt.storage.packs.places import Places
from xckpt.storage.refusals import UNREADABLE, replaced

DOCUMENTS_IN_FLIGHT = 1024
"""Documents that are read at a time."""


@dataclass(frozen=True, slots=True)
class RequestedDocument:
    """A zarr.json document that is being read."""

    key: str
    expected: bytes
    """What the manifest implies."""
    answer: Reading | None
    """None for a local file, which is read when it is compared."""


def _present(home: Location, length: int) -> bytes | None:
    """The manifest that is stored now; None if there is none.

    Any file may have taken its place, so at most ``length`` + 1 bytes of a local one are read.
    """
    with storage_errors(home):
        return stored_content(home, MANIFEST, length)


def ask_whole(*files: RowFile) -> None:
    """Begin to read files of a bucket that are read as a whole."""
    first, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    for each in files:
        if each.root.bucket and each.few and each.total:
            each.prepare_ranges(first, one)


@dataclass(slots=True)
class Integrity:
    """The digests and documents of one checkpoint, fetched as they are needed."""

    home: Location
    """The checkpoint's place, where its manifest is."""
    root: Location
    """The root group's place."""
    manifest: Manifest
    digests: Digests
    """The digests of the checkpoint's chunks."""
    places: Places
    """The places of its packed chunks."""
    stored: tuple[int, bytes] = (MAX_BYTES, b"")
    """Length and digest of the manifest as it is stored."""
    _checked: set[str] = field(default_factory=set)
    """Keys of the documents that were compared already."""

    @contextlib.contextmanager
    def noticing_replacement(self) -> Iterator[None]:
        """Tell damage from the overwriting of a checkpoint while it is read.

        Raises:
            CheckpointReplacedError: another checkpoint is there now, or none.
        """
        try:
            yield
        except (CorruptCheckpointError, StorageError) as error:
            self.refuse_replaced(error)
            raise

    def refuse_replaced(self, cause: XckptError | None = None) -> None:
        """Do nothing if the checkpoint is still there, or if that cannot be found out.

        Raises:
            CheckpointReplacedError: another checkpoint is there now, or none.
        """
        try:
            present = _present(self.home, self.stored[0])
            if not self._is_another(present):
                return
        except (ManifestError, StorageError):
            return
        when = "or removed while it was read"
        if present is None and self.home.folder is not None:
            when += ", or this host does not see the folder that another has opened"
        raise replaced(self.home, when) from cause

    def _is_another(self, present: bytes | None) -> bool:
        """Whether the manifest that is stored now is another one than this checkpoint's."""
        if present is None or len(present) > self.stored[0]:
            return True
        if digest_bytes(present) == self.stored[1]:  # usually it is the same
            return False
        return parse(present, digest_bytes) != self.manifest

    def prepare(self, wanted: Sequence[ZarrArray]) -> None:
        """Ask for the digests and places of arrays, once.

        Raises:
            CorruptCheckpointError: a local file of digests or places was altered.
        """
        self.digests.prepare(wanted)
        packed = [array for array in wanted if array.place is not None and array.count]
        if packed:
            self.places.prepare(packed)

    def prepare_ranges(self, firsts: Int64s, counts: Int64s, places: Int64s) -> None:
        """Ask for the digests and places of arrays, in columns; see `ChunkRequests.ranges`.

        Raises:
            CorruptCheckpointError: a local file of digests or places was altered.
        """
        self.digests.prepare_ranges(firsts, counts)
        packed = places >= 0
        if packed.any():
            self.places.prepare_ranges(places[packed], counts[packed])

    def ask_side_files(self) -> None:
        """Begin to read what a bucket has of digests and places, if it is read as a whole."""
        ask_whole(self.digests, self.places)

    def side_file_problem(self) -> str:
        """What is wrong with the files of digests and of places; empty if nothing.

        Raises:
            StorageError: one cannot be read.
            CorruptCheckpointError: a place lies beyond what the format allows.
        """
        problem = self.digests.problem()
        if problem or not self.manifest.packs:
            return problem
        return self.places.problem() or self.places.overlap_problem(self.manifest)

    def request_documents(self, wanted: Iterable[ZarrArray]) -> list[RequestedDocument]:
        """Start reading the zarr.json of some arrays, to `check` them later; each is read once.

        None of a bucket.
        """
        if self.root.bucket:
            return []
        codecs, edition = self.manifest.codecs, self.manifest.zarr_json
        new = {f"{array.path}/zarr.json": array for array in wanted if array.place is None}
        return self._request(
            (key, array_document(array, codecs, edition))
            for key, array in new.items()
            if key not in self._checked
        )

    def check_documents(self, wanted: Iterable[ZarrArray]) -> None:
        """Read and compare the zarr.json of arrays, a limited number at a time.

        Raises:
            CorruptCheckpointError: some were altered; those that were read at a time are listed.
            StorageError: one cannot be read.
        """
        rest = iter(wanted)
        while some := list(islice(rest, DOCUMENTS_IN_FLIGHT)):
            self.check(self.request_documents(some))

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
            raise CorruptCheckpointError.listing(
                f"{self.root}: altered zarr metadata; {RESTORE}", problems
            )
        self._checked.update(each.key for each in requested)

    def altered_documents(self, most: int) -> list[Problem]:
        """A problem for each zarr.json of the checkpoint that is not what the manifest implies.

        Of kind ``"document"``, or `UNREADABLE`. After ``most`` of them no more are read.

        Raises:
            StorageError: the storage gave no answer in time.
        """
        found: dict[str, tuple[str, str]] = {}
        for document in self._in_turn(documents(self.manifest)):
            kind = "document"
            try:
                problem = self._problem(document)
            except StorageError as error:
                if self.root.access.is_over:
                    raise
                kind, problem = UNREADABLE, str(error)
            if problem:
                found[document.key] = kind, problem
            if len(found) >= most:
                break
        return self._of_documents(found)

    def _of_documents(self, found: Mapping[str, tuple[str, str]]) -> list[Problem]:
        """Problems of documents, kind and text by key: of leaves in order, then of folders."""
        every = arrays(self.manifest) if found else ()
        keys = ((f"{array.path}/zarr.json", array.leaf) for array in every)
        leaves = {key: leaf for key, leaf in keys if key in found}
        return [
            Problem(leaves.get(key), kind=kind, text=text, line=f"{key}: {text}")
            for key in dict.fromkeys((*leaves, *found))
            for kind, text in [found[key]]
        ]

    def _in_turn(self, expected: Iterable[tuple[str, bytes]]) -> Iterator[RequestedDocument]:
        """Documents that are being read, a limited number at a time."""
        rest = iter(expected)
        while some := list(islice(rest, DOCUMENTS_IN_FLIGHT)):
            yield from self._request(some)

    def _request(self, expected: Iterable[tuple[str, bytes]]) -> list[RequestedDocument]:
        if self.root.driver == "file":
            return [RequestedDocument(key, content, None) for key, content in expected]
        store = open_store(self.root)
        return [RequestedDocument(key, content, store.read(key)) for key, content in expected]

    def _problem(self, document: RequestedDocument) -> str:
        """How a document differs from the expected bytes; empty if it does not.

        Raises:
            StorageError: it cannot be read.
        """
        expected, place = document.expected, self.root.child(document.key)
        with storage_errors(place):
            if document.answer is None:
                content = file_content(place, len(expected))
            else:
                read = answer(document.answer, self.root)
                content = read.value if read.state == "value" else None
        if content is None:
            return "missing"
        return "" if content == expected else "edited; it is not the one that was saved"
