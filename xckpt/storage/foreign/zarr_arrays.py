"""zarr arrays in a folder of another library, as plain files or in OCDBT.

1. `ZarrFolder.open` reads an array's metadata itself and checks what could exhaust memory or kill
   the process (shape, element type, chunks). Only then does TensorStore open the array.
2. `ZarrFolder.create` writes a zarr v3 array's metadata; chunks are uncompressed, each with a
   crc32c, so that TensorStore detects damage in every reader.
3. A `StoredZarr` reads any box, and writes boxes of whole chunks.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, TypeGuard

import msgspec
import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from xckpt.core.dtypes import DTYPES, item_size
from xckpt.core.geometry.box import Box, Shape
from xckpt.core.manifest.entries import array_metadata
from xckpt.core.text.shown import readable_bytes
from xckpt.errors import CorruptCheckpointError, UnsupportedLeafError, XckptError
from xckpt.storage.foreign.files import open_file
from xckpt.storage.foreign.paths import FilePath
from xckpt.storage.location import (
    Location,
    answer,
    check_process,
    context,
    open_store,
    storage_errors,
)

MAX_DOCUMENT_BYTES: Final = 1 << 20
INDEX_BYTES: Final = 1 << 26
"""Cache for the index of an OCDBT database, bytes, so that it is not read for each array."""
MOST_DIMENSIONS: Final = 32
MOST_ELEMENTS: Final = 1 << 56
MOST_ABSENT: Final = 1 << 36
"""Chunks that are missing are zeros, and a few bytes can claim any number of them: an array of more
bytes than this has to be stored in part."""
MOST_TIMES: Final = 1024
"""As many times the bytes of its stored chunks such an array may have."""
DOCUMENTS: Final = (b"/zarr.json", b"/.zarray", b"/.zattrs")
CODECS: Final = ("crc32c",)

_UNREAD: Final = ("UNAVAILABLE", "ABORTED", "UNAUTHENTICATED", "DEADLINE_EXCEEDED", "CANCELLED")
"""Statuses that say nothing of what is stored."""
_TYPE_STRING: Final = re.compile(r"[<>|][biufc][0-9]{1,2}")
"""zarr v2's spelling of NumPy's own types; TensorStore spells the others by name."""


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

    def read(self, offsets: Sequence[int], into: NDArray[np.generic]) -> None:
        """Fill ``into`` with the box of its shape at ``offsets``; thread-safe.

        Raises:
            CorruptCheckpointError: a chunk is missing or damaged.
            StorageError: the storage refused.
        """
        if not into.size:
            return
        with foreign_errors(f"{self.where}: {Box(tuple(offsets), into.shape)}"):
            destination = ts.array(into, copy=False, write=True)
            answer(destination.write(self._region(offsets, into.shape)), self._location)

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
        self, folder: FilePath, *, ocdbt: bool = False, fill_missing: bool = False
    ) -> None:
        self.folder = folder
        self.location = Location.parse(str(folder))
        self.ocdbt = ocdbt
        self.fill_missing = fill_missing
        self._root = open_store(self.location)
        # An index read since then need not be read again.
        self._opened = time.time()
        if ocdbt:
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
            UnsupportedLeafError: it has an element type that the format lacks.
            StorageError: the storage refused.
        """
        where = self.location.child(name)
        with foreign_errors(where):
            document = self._document(name, ".zarray" if version == 2 else "zarr.json")
        problem = _document_problem(document, version)
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
            layout = store.chunk_layout
            dtype = store.dtype.name
            if dtype not in DTYPES:
                raise UnsupportedLeafError(f"{where}: dtype {dtype}, which the format lacks")
            chunk = tuple(size or 1 for size in layout.read_chunk.shape or ())
            if self.fill_missing:
                self._refuse_absent(name, tuple(store.shape), item_size(dtype), chunk)
            return StoredZarr(where, tuple(store.shape), dtype, chunk, store, self.location)

    def _refuse_absent(self, name: str, shape: Shape, item: int, chunk: Shape) -> None:
        """Refuse an array that is huge by its shape alone.

        Raises:
            CorruptCheckpointError: hardly anything of it is stored.
        """
        size = prod(shape) * item
        if size <= MOST_ABSENT:
            return
        within = ts.KvStore.KeyRange(f"{name}/", f"{name}0")  # "0" follows "/"
        keys = [key for key in self._root.list(within).result() if not key.endswith(DOCUMENTS)]
        stored = len(keys) * min(prod(chunk) * item, MOST_ABSENT)
        if size > stored * MOST_TIMES:
            raise CorruptCheckpointError(
                f"{self.location.child(name)}: its shape {shape} is {readable_bytes(size)}, of "
                f"which {len(keys):,} chunks are stored, {readable_bytes(stored)} at most; of more "
                f"than {readable_bytes(MOST_ABSENT)} a part in {MOST_TIMES:,} has to be stored"
            )

    def _document(self, name: str, file: str) -> dict[str, object]:
        path = self.folder / name / file
        content: bytes | None = None
        if self.ocdbt:
            asked = self._root.read(f"{name}/{file}", staleness_bound=self._opened)
            read = answer(asked, self.location)
            content = read.value if read.state == "value" else None
        elif path.is_file():
            content = open_file(path).whole(MAX_DOCUMENT_BYTES)
            if content is None:
                raise CorruptCheckpointError(f"{path}: over {MAX_DOCUMENT_BYTES:,} bytes long")
        if content is None:
            raise CorruptCheckpointError(f"{self.location.child(name)}: there is no {file}")
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
        return StoredZarr(where, shape, dtype, chunk, store, self.location)


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


def _document_problem(document: dict[str, object], version: int) -> str:
    """What is wrong with an array's metadata; empty if it can be opened safely."""
    if document.get("zarr_format") != version:
        return f"it is not of zarr version {version}"
    shape = document.get("shape")
    if not _are_counts(shape, 0) or len(shape) > MOST_DIMENSIONS or prod(shape) > MOST_ELEMENTS:
        return "an absurd shape"
    dtype = document.get("dtype" if version == 2 else "data_type")
    known = isinstance(dtype, str) and (dtype in DTYPES or _TYPE_STRING.fullmatch(dtype))
    if not known:
        return f"the element type {str(dtype)[:40]!r}"
    chunk = document.get("chunks")
    if version == 3:
        chunk = _nested(document, "chunk_grid", "configuration", "chunk_shape")
    if not _are_counts(chunk, 1) or len(chunk) != len(shape):
        return "no chunks that fit its shape"
    if any(c > max(1, n) for c, n in zip(chunk, shape, strict=True)):
        return f"chunks of {chunk} for a shape of {shape}"
    return ""


def _nested(document: object, *keys: str) -> object:
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def _are_counts(values: object, least: int) -> TypeGuard[list[int]]:
    if not isinstance(values, list):
        return False
    return all(type(value) is int and least <= value < 1 << 62 for value in values)
