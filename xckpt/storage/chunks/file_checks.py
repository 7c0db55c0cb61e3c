"""Checks of files and keys before TensorStore reads them. A checkpoint's folder may hold anything
under the names that a manifest implies.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Final

import tensorstore as ts

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.geometry.shards.index import CHECKSUM_BYTES, index_bytes
from xckpt.core.manifest.codec import MAX_BYTES
from xckpt.core.manifest.own_keys import DOCUMENT_BYTES, MANIFEST, Documents
from xckpt.errors import ManifestError
from xckpt.storage.location import Location, Reading, answer, answer_within, open_store
from xckpt.storage.refusals import is_permission, refusal

logger: Final = logging.getLogger("xckpt")


def file_problem(location: Location, key: str, most: int) -> str:
    """Why a local file must not be read: it is not a plain file, or longer than ``most`` bytes.

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


def stored_content(
    root: Location, key: str, most: int, asked: Reading | None = None
) -> bytes | None:
    """All that is stored under a key; None if nothing is. Of a local file as `file_content`.

    Args:
        root: where the key is.
        key: of a file or an object.
        most: bytes that are expected at most; of a local file one more is read.
        asked: the answer, where the store was asked before.

    Raises:
        StorageError, OSError, ValueError, RuntimeError: the storage refused; see `answer`.
    """
    if root.driver == "file":
        return file_content(f"{root.path}/{key}", most)
    read = answer(asked or open_store(root).read(key), root)
    return read.value if read.state == "value" else None


def documents_in(folder: Path) -> Documents:
    """Reads the zarr.json files of a folder."""

    def read(key: str) -> bytes | None:
        with contextlib.suppress(OSError):
            return file_content(f"{folder}/{key}", DOCUMENT_BYTES)
        return b""

    return lambda keys: map(read, keys)


def manifest_in(folder: Path) -> bytes | None:
    """A manifest's bytes; None where nothing is, empty where it cannot be one: a device, 1 TiB."""
    try:
        return file_content(f"{folder}/{MANIFEST}", MAX_BYTES, _refuse_manifest)
    except ManifestError:
        return b""


def _refuse_manifest(status: os.stat_result) -> None:
    if problem := status_problem(status, MAX_BYTES):
        raise ManifestError(problem)


def file_content(
    path: str, most: int, check: Callable[[os.stat_result], None] | None = None
) -> bytes | None:
    """The content of a plain file up to ``most`` bytes long, or more of it; None if missing. Empty
    if it is not a plain file.

    It is looked at and read by one descriptor, so that nothing can take its place in between.

    Args:
        path: the file.
        most: bytes that are expected.
        check: refuses a file by its status, before it is read.

    Raises:
        OSError: it cannot be read.
    """
    try:
        # Opening a pipe would wait for its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            return b""
        raise
    try:
        status = os.fstat(descriptor)
        if check is not None:
            check(status)
        plain = stat.S_ISREG(status.st_mode)
        # All that is asked for is allocated, however short the file.
        return os.pread(descriptor, min(most, status.st_size) + 1, 0) if plain else b""
    finally:
        os.close(descriptor)


def file_bytes(path: Path) -> int:
    """The length of a plain file; 0 if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def status_problem(status: os.stat_result, most: int) -> str:
    """Why a file of this status must not be read; see `file_problem`."""
    if not stat.S_ISREG(status.st_mode):
        return "not a plain file"
    if status.st_size > most:
        return f"{status.st_size:,} bytes long, where at most {most:,} are expected"
    return ""


def longer_keys(store: ts.KvStore, keys: Iterable[str], most: int, where: Location) -> list[str]:
    """The keys whose values are longer than ``most`` bytes; those that are missing are not.

    It asks for one byte behind, which brings no data where there is none. Nothing is said of a key
    that may not be read: a read of it is refused.

    Raises:
        StorageError, OSError, ValueError, RuntimeError: the storage refused; see `answer`.
    """
    asked = [(key, store.read(key, byte_range=slice(most, most + 1))) for key in keys]
    longer: list[str] = []
    for key, reading in asked:
        try:
            read = answer_within(reading, where)
        except ValueError as error:
            if not is_permission(error):
                raise
            continue
        if read is not None and read.state == "value":
            longer.append(key)
    return longer


def lengths(root: Location, keys: Iterable[str], most: int) -> Iterator[tuple[str, int | None]]:
    """Keys, and how long each is at most, bytes; None of what must not be read, see `file_problem`.

    A bucket does not say how long an object is, only whether it is longer than some length.
    """
    folder = root.folder
    if folder is not None:
        for key in keys:
            yield key, None if file_problem(root, key, most) else file_bytes(folder / key)
        return
    store, left = open_store(root), list(keys)
    for length in (most // 256, most // 16, most):
        longer = set(longer_keys(store, left, length, root))
        yield from ((key, length) for key in left if key not in longer)
        left = [key for key in left if key in longer]
    yield from ((key, None) for key in left)


def content_of(reading: Reading | None, step: Location) -> bytes | None:
    """The manifest of a step; None if it is missing, and empty if it must not or may not be read.

    TensorStore's own copy goes with the answer, before it is looked at.

    Raises:
        StorageError, OSError, ValueError, RuntimeError: the storage refused; see `answer`.
    """
    if reading is None:
        return b""
    try:
        read = answer(reading, step)
    except ValueError as error:
        if not is_permission(error):
            raise
        logger.warning("a step is there and may not be read: %s", refusal(str(step), error))
        return b""
    return read.value if read.state == "value" else None


def most_bytes(array: ZarrArray, codecs: tuple[str, ...]) -> int:
    """The most bytes of an object of an array: chunks, checksums, a shard's index.

    TensorStore ignores what follows a chunk with a checksum.
    """
    unit = array.shard or array.chunk
    chunks = prod(unit) // prod(array.chunk)
    index = 0 if array.shard is None else index_bytes(array.shard, array.chunk)
    checksums = chunks * CHECKSUM_BYTES * len(codecs)
    return prod(unit) * item_size(array.dtype) + checksums + index
