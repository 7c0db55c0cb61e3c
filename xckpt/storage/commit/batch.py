"""Forcing many files to disk at once, where each of them would be synced otherwise.

A small leaf takes two files in folders of their own, and five calls of fsync, each of which waits
for the disk. Where a system syncs a whole file system in one call, and says whether any of it
failed, a save of many leaves writes all files unsynced, and every rank makes that call before it
reports. The same is done on file systems that sync files and no folders: there file by file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from xckpt.storage.commit.folder import sync_folder
from xckpt.storage.commit.leftovers import is_local
from xckpt.storage.location import Location, storage_errors

THREADS = 16
"""Files that are synced at a time, where each is synced by itself."""

TELLS_FAILURE = (5, 8)
"""The first release of Linux whose syncfs says that data could not be written."""


def syncs_at_once(folder: Path) -> bool:
    """Whether one call syncs the file system of a folder, and tells if it failed."""
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    new = release is not None and (int(release[1]), int(release[2])) >= TELLS_FAILURE
    return sys.platform == "linux" and new and is_local(folder)


def sync_all(descriptor: int, folders: Iterable[Path]) -> None:
    """Force everything below some folders to disk.

    Args:
        descriptor: of any file on their file system, open since before they were written to, so
            that no failure since then is missed.
        folders: which; all of one file system. One that does not exist counts as empty.

    Raises:
        OSError: something could not be written.
    """
    if syncs_at_once(Path(f"/proc/self/fd/{descriptor}")):
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return
    with ThreadPoolExecutor(THREADS) as threads:
        try:
            for _ in threads.map(_sync, _below(folders)):
                pass
        finally:
            threads.shutdown(cancel_futures=True)


@contextlib.contextmanager
def synced_together(place: Location, paths: Iterable[str]) -> Iterator[None]:
    """Force to disk what this process writes to some paths of a local folder.

    Raises:
        StorageError: something could not be written.
    """
    folder = Path(place.path)
    # TensorStore makes the folder with the first file in it.
    there = next(each for each in (folder, *folder.parents) if each.is_dir())
    with storage_errors(place):
        descriptor = os.open(there, os.O_RDONLY)
    try:
        yield
        with storage_errors(place):
            sync_all(descriptor, [folder / path for path in paths])
    finally:
        os.close(descriptor)


def _below(folders: Iterable[Path]) -> Iterator[str]:
    """The files below some folders, then the folders themselves, from the innermost up.

    What is still being written is another rank's, which may rename it at any moment and syncs it.
    """
    for top in folders:
        for folder, _, names in os.walk(top, topdown=False):
            yield from (
                os.path.join(folder, name) for name in names if not name.endswith(".__lock")
            )
            yield folder


def _sync(path: str) -> None:
    if os.path.isdir(path):
        sync_folder(path)
        return
    with open(path, "rb") as file:
        os.fsync(file.fileno())
