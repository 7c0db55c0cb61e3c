"""zarr arrays in a folder of another library, as plain files or in OCDBT.

1. `ZarrFolder.open` reads an array's metadata itself and checks what could exhaust memory or kill
   the process (`xckpt.storage.foreign.zarr_limits`). Only then does TensorStore open the array.
2. `ZarrFolder.create` writes a zarr v3 array's metadata; chunks are uncompressed, each with a
   crc32c, so that TensorStore detects damage in every reader.
3. A `StoredZarr` reads any box, and writes boxes of whole chunks. Reads of all arrays in a folder
   share a budget of memory for the chunks that they decode.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import msgspec
import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from xckpt.core.dtypes import DTYPES, item_size
from xckpt.core.geometry.box import Box, Shape
from xckpt.core.manifest.entries import array_metadata
from xckpt.core.text.shown import readable_bytes
from xckpt.errors import (
    RESTORE,
    CorruptCheckpointError,
    UnsupportedLeafError,
    XckptError,
)
from xckpt.storage.budget import Budget
from xckpt.storage.foreign.documents import Allowance
from xckpt.storage.foreign.files import open_file
from xckpt.storage.foreign.paths import FilePath, location_of
from xckpt.storage.foreign.zarr_limits import (
    LONGEST_DOCUMENT,
    Limits,
    document_problem,
    read_chunk,
    stored_chunks,
    too_long,
)
from xckpt.storage.location import (
    Location,
    answer,
    check_process,
    context,
    open_store,
    storage_errors,
)

INDEX_BYTES: Final = 1 << 26
"""Cache for the index of an OCDBT database, bytes, so that it is not read for each array."""
MOST_ABSENT: Final = 1 << 36
"""Missing chunks are zeros, and a few bytes can claim any number of them: of an array of more bytes
than this, a part must be stored."""
MOST_TIMES: Final = 1024
"""How many times the bytes of its stored chunks such an array may have."""
USUAL_DOCUMENT: Final = 1 << 11
"""Bytes of an array's document that are part of what a leaf takes."""
DOCUMENT_TIMES: Final = 8
"""How many times the other bytes of a document are taken to keep it as objects."""
CODECS: Final = ("crc32c",)

_UNREAD: Final = (
    *("UNAVAILABLE", "ABORTED", "UNAUTHENTICATED", "DEADLINE_EXCEEDED", "CANCELLED"),
    *("PERMISSION_DENIED", "UNKNOWN"),
)
"""Statuses that say nothing of what is stored. UNKNOWN is an error of the system without a status
of its own, such as one of the disk (EIO)."""


@dataclass(frozen=True, slots=True)
class StoredZarr:
    """An open array."""

    where: str
    """Folder and name, for errors."""
    shape: Shape
    dtype: str
    """The format's name of the element type."""
    chunk: Shape
    """What is read and decoded as one, elements."""
    _store: ts.TensorStore
    _location: Location
    _memory: Budget
    """For chunks that are being decoded."""

    def read(self, offsets: Sequence[int], into: NDArray[np.generic]) -> None:
        """Fill ``into`` with the box of its shape at ``offsets``; thread-safe.

        Raises:
            CorruptCheckpointError: a chunk is missing or damaged.
            StorageError: the storage refused.
        """
        if not into.size:
            return
        box = Box(tuple(offsets), into.shape)
        # A chunk lies in memory as it is stored and decoded.
        size = 2 * self.chunks_met(box) * prod(self.chunk) * into.dtype.itemsize
        self._memory.reserve(size)
        try:
            with foreign_errors(f"{self.where}: {box}"):
                destination = ts.array(into, copy=False, write=True)
                answer(destination.write(self._region(offsets, into.shape)), self._location)
        finally:
            self._memory.release(size)

    def chunks_met(self, box: Box) -> int:
        """How many chunks a box meets, each of which is decoded as a whole."""
        bounds = zip(box.offsets, box.sizes, self.chunk, strict=True)
        return prod((offset + size - 1) // c - offset // c + 1 for offset, size, c in bounds)

    def write(self, offsets: Sequence[int], data: NDArray[np.generic]) -> None:
        """Write a box of whole chunks; thread-safe.

        Raises:
            StorageError: the storage refused.
        """
        if not data.size:
            return
        with storage_errors(self.where):
            answer(self._region(offsets, data.shape).write(data), self._location)

    def _region(self, offsets: Sequence[int], sizes: Sequence[int]) -> ts.TensorStore:
        return self._store[Box(tuple(offsets), tuple(sizes)).slices()]


class ZarrFolder:
    """A folder of zarr arrays.

    Args:
        folder: where.
        ocdbt: whether the arrays lie in TensorStore's OCDBT database there, and not in files.
        fill_missing: whether a missing chunk is one of zeros.
        memory: what the arrays' documents may take, and its ``memory_bytes`` what reads may take
            for the chunks that they decode.

    Example:
        >>> from pathlib import Path
        >>> folder = ZarrFolder(Path("arrays").absolute())
        >>> stored = folder.create("w", "float32", (4, 2), (2, 2))
        >>> stored.write((2, 0), np.ones((2, 2), np.float32))
        >>> into = np.zeros((1, 2), np.float32)
        >>> folder.open("w", version=3).read((3, 0), into)
        >>> into
        array([[1., 1.]], dtype=float32)
    """

    def __init__(
        self,
        folder: FilePath,
        *,
        ocdbt: bool = False,
        fill_missing: bool = False,
        memory: Allowance | None = None,
    ) -> None:
        self.folder = folder
        self.location: Final = location_of(folder)
        self.ocdbt = ocdbt
        self.fill_missing = fill_missing
        self._described = memory or Allowance()
        self._limits = Limits(folder, self.location, self._described.memory_bytes)
        self._memory = Budget(self._described.memory_bytes)
        self._root = open_store(self.location)
        # An index that was read since then is not read again.
        self._opened = time.time()
        if ocdbt:
            with storage_errors(folder):
                self._limits.check_database()
            spec = {
                "driver": "ocdbt",
                "base": self.location.store_spec(),
                "cache_pool": {"total_bytes_limit": INDEX_BYTES},
            }
            try:
                opened = ts.KvStore.open(spec, context=context(self.location.access))
                self._root = answer(opened, self.location)
            except ValueError as error:
                raise CorruptCheckpointError(f"{folder}: {error}") from error

    def open(self, name: str, *, version: int) -> StoredZarr:
        """The array ``name``, of zarr version 2 or 3.

        Raises:
            CorruptCheckpointError: it is missing, or its metadata cannot be trusted.
            LeafTooLargeError: one of its chunks does not fit ``memory_bytes``.
            UnsupportedLeafError: it has an element type that the format lacks.
            StorageError: the storage refused.
        """
        where = self.location.child(name)
        with foreign_errors(where):
            document = self._document(name, ".zarray" if version == 2 else "zarr.json")
        problem = document_problem(document, version)
        if problem:
            raise CorruptCheckpointError(f"{where}: its metadata cannot be trusted: {problem}")
        spec = {
            "driver": "zarr" if version == 2 else "zarr3",
            "open": True,
            "fill_missing_data_reads": self.fill_missing,
            "recheck_cached_metadata": self._opened,
            "recheck_cached_data": self._opened,
        }
        check_process()
        with foreign_errors(where):
            opened = ts.open(ts.Spec(spec), kvstore=self._root / f"{name}/")
            store = answer(opened, self.location)
            dtype = store.dtype.name
            if dtype not in DTYPES:
                raise UnsupportedLeafError(f"{where}: dtype {dtype}, which the format lacks")
            chunk = read_chunk(where, store.chunk_layout)
            if self.fill_missing:
                self._refuse_absent(name, tuple(store.shape), item_size(dtype), chunk)
            size = self._limits.check_chunk(where, chunk, item_size(dtype))
            self._limits.check_stored(self._root, name, chunk, size, document)
            return self._array(where, tuple(store.shape), dtype, chunk, store)

    def _array(
        self, where: str, shape: Shape, dtype: str, chunk: Shape, store: ts.TensorStore
    ) -> StoredZarr:
        return StoredZarr(where, shape, dtype, chunk, store, self.location, self._memory)

    def _refuse_absent(self, name: str, shape: Shape, item: int, chunk: Shape) -> None:
        """Refuse an array that is huge by its shape alone.

        Raises:
            CorruptCheckpointError: hardly any of it is stored.
        """
        size = prod(shape) * item
        if size <= MOST_ABSENT:
            return
        count = len(stored_chunks(self._root, name, self.location))
        stored = count * min(prod(chunk) * item, MOST_ABSENT)
        if size > stored * MOST_TIMES:
            raise CorruptCheckpointError(
                f"{self.location.child(name)}: its shape {shape} is {readable_bytes(size)}, of "
                f"which {count:,} chunks are stored, {readable_bytes(stored)} at most; of more "
                f"than {readable_bytes(MOST_ABSENT)} a part in {MOST_TIMES:,} has to be stored"
            )

    def _document(self, name: str, file: str) -> dict[str, object]:
        path = self.folder / name / file
        content: bytes | None = None
        if self.ocdbt:
            key = f"{name}/{file}"
            self._limits.check_document(self._root, key)
            read = answer(self._root.read(key, staleness_bound=self._opened), self.location)
            content = read.value if read.state == "value" else None
        elif path.is_file():
            content = open_file(path).whole(LONGEST_DOCUMENT)
            if content is None:
                raise too_long(path, LONGEST_DOCUMENT)
        if content is None:
            raise CorruptCheckpointError(
                f"{self.location.child(name)}: there is no {file}; {RESTORE}"
            )
        # TensorStore keeps the attributes of an open array.
        beyond = max(0, len(content) - USUAL_DOCUMENT)
        self._described.take(DOCUMENT_TIMES * beyond, f"{path} of {len(content):,} bytes")
        return msgspec.json.decode(content, type=dict[str, object])

    def create(self, name: str, dtype: str, shape: Shape, chunk: Shape) -> StoredZarr:
        """Make a zarr v3 array, or open an identical one that is there.

        Raises:
            StorageError: the storage refused, or another array is there.
        """
        metadata = array_metadata(dtype, shape, tuple(max(1, c) for c in chunk), None, CODECS)
        del metadata["storage_transformers"]
        spec = {
            "driver": "zarr3",
            "metadata": metadata,
            "open": True,
            "create": True,
            "store_data_equal_to_fill_value": True,
        }
        where = self.location.child(name)
        with storage_errors(where):
            opened = ts.open(ts.Spec(spec), kvstore=self._root / f"{name}/")
            store = answer(opened, self.location)
        return self._array(where, shape, dtype, chunk, store)


@contextlib.contextmanager
def foreign_errors(where: object) -> Iterator[None]:
    """As `storage_errors`; an array that TensorStore reads but does not understand is damaged.

    Example:
        >>> with foreign_errors("/data/model: w"):
        ...     raise ValueError("NOT_FOUND: there is no chunk 0.0")
        Traceback (most recent call last):
        xckpt.errors.CorruptCheckpointError: /data/model: w: NOT_FOUND: there is no chunk 0.0
    """
    with storage_errors(where):
        try:
            yield
        except XckptError:
            raise
        except ValueError as error:
            text = str(error)
            refused = "http_response_code" in text and not text.startswith("NOT_FOUND")
            if refused or text.startswith(_UNREAD):
                raise
            raise CorruptCheckpointError(f"{where}: {error}") from error
