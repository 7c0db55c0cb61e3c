"""Paths of other libraries' files and folders, and names of files that must not lead out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from xckpt.errors import NotACheckpointError, StorageError, XckptError
from xckpt.storage.errors import storage_errors
from xckpt.storage.foreign.files import read_whole
from xckpt.storage.foreign.paths import FilePath, StoredPath, find_path
from xckpt.storage.location import Location

__all__ = [
    "existing_path",
    "file_problem",
    "local_path",
    "naming",
    "read_text",
]


def local_path(path: str | os.PathLike[str]) -> Path:
    """The local path that a path or ``file://`` URL means.

    Raises:
        StorageError: it is a URL of another scheme.
    """
    folder = Location.parse(path).folder
    if folder is None:
        raise StorageError(
            f"{path}: other libraries' checkpoints are written on local file systems only; write "
            f"it there and copy it"
        )
    return folder


def existing_path(path: str | os.PathLike[str]) -> Path | StoredPath:
    """The path of something that is there, on any storage.

    Raises:
        StorageError: it is no path, a URL that is not supported, or the storage refused.
        NotACheckpointError: nothing is there.
    """
    found = find_path(path)
    with storage_errors(found):
        if not found.exists():
            raise NotACheckpointError(f"{found}: nothing is there; check the path")
    return found


def file_problem(name: object) -> str:
    """Why what a file says is the name of another beside or below it is none; empty if it is one.

    Example:
        >>> file_problem("model-00001-of-00002.safetensors"), file_problem("../../etc/passwd")
        ('', 'leads out of the folder')
    """
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        return "is no name of a file"
    path = PurePosixPath(name)
    return "leads out of the folder" if path.is_absolute() or ".." in path.parts else ""


def read_text(path: FilePath, most: int) -> bytes:
    """A small file's bytes.

    Raises:
        StorageError: it is no plain file, longer than ``most`` bytes, or cannot be read.
    """
    with storage_errors(path):
        return read_whole(path, most)


@contextlib.contextmanager
def naming(where: object) -> Iterator[None]:
    """Put the place before the message of an error."""
    try:
        yield
    except XckptError as error:
        raise type(error)(f"{where}: {error}", error.problems) from error
