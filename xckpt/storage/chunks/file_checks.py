"""Checks of a local file before TensorStore reads it. A checkpoint's folder may hold anything under
the names that a manifest implies.
"""

from __future__ import annotations

import os
import stat
from math import prod
from pathlib import Path

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.geometry.shards.index import CHECKSUM_BYTES, index_bytes
from xckpt.storage.location import Location


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


def file_content(path: str, most: int) -> bytes | None:
    """The content of a plain file up to ``most`` bytes long, or more of it; None if missing. Empty
    if it is not a plain file.

    Raises:
        OSError: it cannot be read.
    """
    try:
        # Opening a pipe would wait for its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        plain = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return os.pread(descriptor, most + 1, 0) if plain else b""
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


def most_bytes(array: ZarrArray, codecs: tuple[str, ...]) -> int:
    """The most bytes of an object of an array: chunks, checksums, a shard's index.

    TensorStore ignores what follows a chunk with a checksum.
    """
    unit = array.shard or array.chunk
    chunks = prod(unit) // prod(array.chunk)
    index = 0 if array.shard is None else index_bytes(array.shard, array.chunk)
    checksums = chunks * CHECKSUM_BYTES * len(codecs)
    return prod(unit) * item_size(array.dtype) + checksums + index
