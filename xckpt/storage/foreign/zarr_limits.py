"""What a zarr array of another library may claim, and what a read of it may take.

What exceeds a limit is refused before memory is taken for it:

1. `document_problem` checks an array's metadata, by which TensorStore allocates.
2. A chunk is decoded as a whole; of a zarr shard, each inner chunk. `Limits.check_chunk` refuses
   one that fits neither ``memory_bytes`` nor what the folder holds: others save whole arrays as one
   chunk, and a folder whose files are as large as its chunks claims nothing absurd.
3. TensorStore also reads as a whole what is stored of a chunk: a file, a value in an OCDBT
   database, or the part of a zarr shard that its index names. `Limits.check_stored` asks for one
   byte behind the longest that fits, which brings no data where there is none. Nothing is longer
   than the longest file, so that most checkpoints are not looked through.
4. Of an OCDBT database, `Limits.check_database` measures what TensorStore reads as a whole.

In a bucket nothing stored is measured, which would take a request for each chunk: there are no
sparse objects.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Final, TypeGuard

import numpy as np
import tensorstore as ts

from xckpt.core.dtypes import DTYPES
from xckpt.core.geometry.box import Shape
from xckpt.core.geometry.grid import count_cells
from xckpt.core.geometry.shards.index import CHECKSUM_BYTES, MISSING, index_bytes
from xckpt.core.manifest.memory import LEAST_LIMIT, RAISE
from xckpt.core.manifest.rules import shape_fault
from xckpt.core.text.shown import readable_bytes
from xckpt.errors import CorruptCheckpointError, LeafTooLargeError
from xckpt.storage.buckets.listing import listed
from xckpt.storage.chunks.file_checks import longer_keys
from xckpt.storage.foreign.concurrency import machine_memory
from xckpt.storage.foreign.files import OpenFile
from xckpt.storage.foreign.paths import FilePath
from xckpt.storage.location import Location, answer

MOST_CHUNKS: Final = 1 << 24
"""Most chunks of an array: each is looked up, whether it exists or not."""
MOST_IN_SHARD: Final = 1 << 16
"""Chunks of a zarr shard, whose index is read and decoded as a whole, 16 bytes a chunk."""
DOCUMENTS: Final = ("/zarr.json", "/.zarray", "/.zattrs")
LONGEST_DOCUMENT: Final = 1 << 20
LONGEST_DATABASE: Final = 1 << 26
"""Bytes of a manifest of OCDBT, which are few."""
ASKED_AT_ONCE: Final = 256
TIMES_HELD: Final = 4
"""How many times the bytes of the longest file a chunk may take, as it is stored and decoded."""

_INDEX_CODECS: Final = [
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "crc32c"},
]
_TYPE_STRING: Final = re.compile(r"[<>|][biufc][0-9]{1,2}")
"""zarr v2's spelling of NumPy's own types; TensorStore spells the others by name."""


def document_problem(document: dict[str, object], version: int) -> str:
    """What is wrong with an array's metadata; empty if it can be opened safely."""
    if document.get("zarr_format") != version:
        return f"it is not of zarr version {version}"
    shape = document.get("shape")
    if not _are_counts(shape, 0) or shape_fault(tuple(shape), 1):
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
    count = count_cells(tuple(shape), tuple(chunk))
    if count > MOST_CHUNKS:
        return f"{count:,} chunks of {chunk} for a shape of {shape}; at most {MOST_CHUNKS:,}"
    return ""


def read_chunk(where: object, layout: ts.ChunkLayout) -> Shape:
    """The shape of what is decoded as one.

    Raises:
        CorruptCheckpointError: a zarr shard of the array has absurdly many of them.
    """
    chunk = tuple(size or 1 for size in layout.read_chunk.shape or ())
    shard = tuple(size or 1 for size in layout.write_chunk.shape or ())
    count = count_cells(shard, chunk) if len(shard) == len(chunk) else 1
    if count > MOST_IN_SHARD:
        raise CorruptCheckpointError(
            f"{where}: its metadata cannot be trusted: zarr shards of {count:,} chunks; at most "
            f"{MOST_IN_SHARD:,}"
        )
    return chunk


@dataclass(eq=False)
class Limits:
    """What reads of the arrays in a folder may take.

    Args:
        folder: where they are.
        location: the same.
        memory_bytes: what a chunk may take, as it is stored and decoded, if it takes more than
            `TIMES_HELD` times the bytes of the longest file there.
    """

    folder: FilePath
    location: Location
    memory_bytes: int

    @cached_property
    def most(self) -> int:
        """Bytes that a chunk may take."""
        held = 0
        if TIMES_HELD * self.longest > self.memory_bytes:
            held = max(_bytes_there(*each) for each in _files(self.folder))
        return max(self.memory_bytes, LEAST_LIMIT, TIMES_HELD * held)

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest file; 0 in a bucket.

        Raises:
            CorruptCheckpointError: a file that would be waited for.
        """
        return max((found.st_size for _, found in _files(self.folder)), default=0)

    def check_database(self) -> None:
        """Refuse an OCDBT database whose manifest or nodes claim much.

        A node may be as long as its file, and is read before it is looked at. A file that is not
        sparse has as many bytes in it.

        Raises:
            CorruptCheckpointError: it does.
        """
        for path, found in _files(self.folder):
            if path.name.startswith("manifest.") and found.st_size > LONGEST_DATABASE:
                raise too_long(path, LONGEST_DATABASE)
            holes = found.st_size - _bytes_there(path, found)
            if holes > max(self.memory_bytes, LEAST_LIMIT):
                raise CorruptCheckpointError(
                    f"{path}: the holes in its {readable_bytes(found.st_size)} are more than "
                    f"memory_bytes ({readable_bytes(self.memory_bytes)}); write it without holes, "
                    f"or {RAISE}"
                )

    def check_document(self, store: ts.KvStore, key: str) -> None:
        """Refuse a document in an OCDBT database that is too long.

        Raises:
            CorruptCheckpointError: it is.
        """
        if self.longest > LONGEST_DOCUMENT and longer_keys(
            store, [key], LONGEST_DOCUMENT, self.location
        ):
            raise too_long(self.location.child(key), LONGEST_DOCUMENT)

    def check_chunk(self, where: object, chunk: Shape, item: int) -> int:
        """The bytes of a chunk, which is decoded as one.

        TensorStore ends the process where there is no memory for it.

        Raises:
            LeafTooLargeError: it does not fit.
        """
        size = prod(chunk) * item
        takes = f"{where}: a chunk of {chunk} is decoded as one and takes {readable_bytes(size)}"
        if size > self.most:
            raise LeafTooLargeError(
                f"{takes}, more than memory_bytes ({readable_bytes(self.memory_bytes)}); {RAISE}"
            )
        if size > machine_memory() // 2:
            raise LeafTooLargeError(
                f"{takes}, more than half of this machine's memory; read it where there is more"
            )
        return size

    def check_stored(
        self, store: ts.KvStore, name: str, chunk: Shape, size: int, document: dict[str, object]
    ) -> None:
        """Refuse an array of which something is stored that does not fit beside a decoded chunk.

        Args:
            store: has the arrays.
            name: the array.
            chunk: what is decoded as one.
            size: bytes of it, decoded.
            document: the array's metadata.

        Raises:
            LeafTooLargeError: there is.
        """
        most = self.most - size
        if self.longest <= most:
            return
        keys = stored_chunks(store, name, self.location)
        for start in range(0, len(keys), ASKED_AT_ONCE):
            some = keys[start : start + ASKED_AT_ONCE]
            for key in longer_keys(store, some, most, self.location):
                longest = self._longest_part(store, key, chunk, document)
                if longest is None or longest > most:
                    raise LeafTooLargeError(
                        f"{self.location.child(key)}: a chunk of {chunk} is decoded as one, and "
                        f"more than {readable_bytes(most)} is stored of it; with its "
                        f"{readable_bytes(size)} this is more than memory_bytes "
                        f"({readable_bytes(self.memory_bytes)}); {RAISE}"
                    )

    def _longest_part(
        self, store: ts.KvStore, key: str, chunk: Shape, document: dict[str, object]
    ) -> int | None:
        """Bytes of the longest part of a zarr shard that is read as one; None if it is all."""
        shard = _nested(document, "chunk_grid", "configuration", "chunk_shape")
        codecs = document.get("codecs")
        codec = codecs[0] if isinstance(codecs, list) and len(codecs) == 1 else None
        sharding = _nested(codec, "configuration")
        if _nested(codec, "name") != "sharding_indexed" or not _are_counts(shard, 1):
            return None
        nested = "sharding_indexed" in str(_nested(sharding, "codecs"))
        if nested or _nested(sharding, "index_codecs") != _INDEX_CODECS:
            return None
        length = index_bytes(shard, chunk)
        at_start = _nested(sharding, "index_location") == "start"
        part = slice(0, length) if at_start else slice(-length, None)
        read = answer(store.read(key, byte_range=part), self.location)
        lengths = np.frombuffer(read.value[:-CHECKSUM_BYTES], "<u8")[1::2]
        return int(max(lengths[lengths != MISSING], default=0))


def too_long(path: object, most: int) -> CorruptCheckpointError:
    """The error of a document that is longer than what is read."""
    return CorruptCheckpointError(f"{path}: over {most:,} bytes long")


def stored_chunks(store: ts.KvStore, name: str, where: Location) -> list[str]:
    """The keys of what is stored of an array, without its metadata."""
    within = ts.KvStore.KeyRange(f"{name}/", f"{name}0")  # "0" follows "/"
    keys = (key.decode("utf-8", "surrogateescape") for key in listed(store, where, within))
    return [key for key in keys if not key.endswith(DOCUMENTS)]


def _files(folder: FilePath) -> Iterator[tuple[Path, os.stat_result]]:
    """All files below a local folder; links are followed, as TensorStore follows them.

    Raises:
        CorruptCheckpointError: a pipe or a device, which would be waited for.
    """
    if not isinstance(folder, Path):
        return
    seen: set[tuple[int, int]] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        at = os.stat(parent)
        if (at.st_dev, at.st_ino) in seen:
            folders.clear()
            continue
        seen.add((at.st_dev, at.st_ino))
        for name in names:
            path = Path(parent, name)
            try:
                found = path.stat()
            except OSError:  # a link to nothing, or one that went away
                continue
            if not stat.S_ISREG(found.st_mode):
                raise CorruptCheckpointError(f"{path} is not a plain file")
            yield path, found


def _bytes_there(path: Path, found: os.stat_result) -> int:
    """Bytes of a file without its holes, as far as its file system tells."""
    size = found.st_size
    if not hasattr(os, "SEEK_DATA") or size <= LEAST_LIMIT:
        return size
    there = at = 0
    with closing(OpenFile(path)) as file:  # a pipe in its place would be waited for
        while at < size:
            try:
                data = os.lseek(file.descriptor, at, os.SEEK_DATA)
            except OSError:  # there is no data behind this
                break
            at = os.lseek(file.descriptor, data, os.SEEK_HOLE)
            there += at - data
    return there


def _nested(document: object, *keys: str) -> object:
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def _are_counts(values: object, least: int) -> TypeGuard[list[int]]:
    if not isinstance(values, list):
        return False
    return all(type(value) is int and least <= value < 1 << 62 for value in values)
