"""Forcing many files to disk at once, instead of each of them when it is written.

A small leaf takes two files in folders of their own, and five calls of fsync, each of which waits
for the disk. Some systems sync a whole file system in one call, and report whether any of it
failed. So:

1. A save of many leaves, or one that shares many chunks with a base, writes all files unsynced.
2. Each rank makes that call before it reports what it has written (`synced_together`), and the
   coordinator before it commits (`sync_all`).
3. On file systems that sync files but no folders, `sync_all` syncs file by file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from xckpt.engine.ranks.alive import WORK
from xckpt.storage.budget import Pool
from xckpt.storage.commit.file_system import is_at, syncs_at_once
from xckpt.storage.commit.folder import sync_folder, sync_tree, unlisted
from xckpt.storage.location import Location, storage_errors

LARGE_BYTES, FLUSH_BYTES = 1 << 22, 1 << 26
"""Bytes from which on a file is forced to disk in parts, if other ranks wait for progress; and the
bytes of a part."""

_WRITE_AND_WAIT = 7
"""Linux: flags of sync_file_range."""

THREADS = 16
"""Files that are synced at a time, where each is synced by itself."""


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
        if WORK.get().is_heard:
            _flush_all(_below(folders))
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return
    with Pool(threads=THREADS, budget=1) as threads:
        for path in _below(folders):
            threads.submit(partial(_sync, path))


def sync_beside(staged: Path, generation: int, *, together: bool) -> None:
    """Force to disk what was staged among the files of a folder.

    Args:
        staged: where it was written.
        generation: a descriptor of it, if it is a generation; else negative.
        together: whether its files are still to be forced.

    Raises:
        OSError: something could not be written, or the folder was exchanged meanwhile.
    """
    if together:
        sync_all(generation, [staged])
    sync_tree(staged)
    sync_folder(staged.parent)
    if generation >= 0:
        # The manifest may survive a power cut before the name of the generations' folder.
        sync_folder(staged.parent.parent)
        if not is_at(generation, staged):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(staged))


def flush(descriptor: int) -> None:
    """Force a file's data to disk part by part, and count each; the file is synced after that.

    One fsync of a large file may take minutes, in which other ranks see no progress.

    Raises:
        OSError: something could not be written.
    """
    size = os.fstat(descriptor).st_size
    if size < LARGE_BYTES:
        return
    call = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if call is None:
        return
    for start in range(0, size, FLUSH_BYTES):
        part = ctypes.c_int64(start), ctypes.c_int64(FLUSH_BYTES)
        if call(descriptor, *part, _WRITE_AND_WAIT) != 0:
            code = ctypes.get_errno()
            if code in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE):
                return  # the file system lacks the call
            raise OSError(code, os.strerror(code))
        WORK.get().moved = time.monotonic()


def _flush_all(paths: Iterable[str]) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError), open(path, "rb") as file:
            flush(file.fileno())


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

    A file that is still being written is left out: another rank may rename it at any moment, and
    syncs it itself.
    """
    for top in folders:
        for folder, _, names in os.walk(top, topdown=False, onerror=unlisted):
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
        WORK.get().moved = time.monotonic()
