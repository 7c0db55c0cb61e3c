"""Whether files may have been written since: what their writers cannot set back.

`RangeFile.state` is equal in a copy that keeps the time of change. So it is in a file that was
written anew, with as many bytes and its old time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from xckpt.storage.foreign.files import OpenFile, RangeFile, open_file, state_from
from xckpt.storage.foreign.paths import FilePath, StoredPath
from xckpt.storage.location import storage_errors


def version(file: RangeFile) -> bytes:
    """A value that changes whenever an open file is written; a copy of the file has another."""
    return _local(os.fstat(file.descriptor)) if isinstance(file, OpenFile) else file.state()


def version_of(paths: Iterable[FilePath]) -> bytes:
    """A value that changes whenever one of some files is written; copies of them have another.

    Raises:
        StorageError: a storage refused.
    """
    versions: list[bytes] = []
    for path in paths:
        with storage_errors(path):
            local = isinstance(path, Path)
            found = _local(path.stat()) if local else open_file(path).state()
            versions.append(f"{path.name} ".encode("utf-8", "surrogateescape") + found)
    return b"\n".join(versions)


def state_of(path: FilePath) -> bytes:
    """A value that changes with a file's contents; empty if there is no such file.

    Raises:
        StorageError: a storage refused.
    """
    with storage_errors(path):
        if isinstance(path, StoredPath):
            return path.keys.generation_now(path)
        try:
            return state_from(path.stat())  # there may be very many: none is opened
        except (FileNotFoundError, NotADirectoryError):
            return b""


def _local(status: os.stat_result) -> bytes:
    """The system sets the time of a file's last change of any kind; a new file is a new inode."""
    parts = status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns
    return repr(parts).encode()
