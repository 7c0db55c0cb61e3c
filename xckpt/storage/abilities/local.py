"""What the file system of a folder can do, tried in a folder that is made there and removed."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from xckpt.core.commit import FileSystem
from xckpt.errors import StorageError
from xckpt.storage.commit.file_system import exchange, is_local, look_into, syncs_at_once
from xckpt.storage.location import storage_errors

SYNCS = 5
"""Number of files that are written and synced to measure how long one takes."""


@dataclass(frozen=True, slots=True)
class LocalAbilities:
    """What was found out about a folder."""

    folder: str
    """Where it was tried: the folder, or the nearest one above it that exists."""
    able: FileSystem
    """What a save finds out at its beginning."""
    exchanges_folders: bool
    """Whether an overwrite can exchange the old folder and the new one in one step."""
    links_files: bool
    """Whether a file can have two names, which copies and saves with a base use."""
    syncs_at_once: bool
    """Whether many small files are synced in one call."""
    is_local: bool
    """Whether the file system is this host's own."""
    sync_seconds: float
    """Median time to write a file of 4 KiB and sync it."""
    free_bytes: int
    """Bytes that a user may still write."""
    free_files: int | None
    """Files that can still be created; None if the file system has no limit."""


def local_abilities(path: Path) -> LocalAbilities:
    """Try what a save to a path would use.

    Args:
        path: a folder, which need not exist.

    Raises:
        StorageError: nothing can be written there, or a file is in the way.
    """
    folder = next(each for each in (path, *path.parents) if each.exists())
    if not folder.is_dir():
        raise StorageError(f"{folder} is not a folder; choose another path")
    try:
        trial = Path(tempfile.mkdtemp(prefix=".xckpt-doctor-", dir=folder))
    except OSError as error:
        text = f"{folder} cannot be written: {error.strerror}; choose another folder"
        raise StorageError(text) from error
    try:
        with storage_errors(folder):
            return _tried(folder, trial)
    finally:
        shutil.rmtree(trial, ignore_errors=True)


def _tried(folder: Path, trial: Path) -> LocalAbilities:
    seconds: list[float] = []
    for number in range(SYNCS):
        started = time.perf_counter()
        with open(trial / f"file{number}", "wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
        seconds.append(time.perf_counter() - started)
    with open(trial / "file0", "r+b") as file:
        able = look_into(trial, file.fileno())
    links = False
    with contextlib.suppress(OSError):
        os.link(trial / "file0", trial / "link")
        links = True
    room = os.statvfs(trial)
    return LocalAbilities(
        str(folder),
        able,
        can_exchange(trial),
        links,
        syncs_at_once(trial),
        is_local(trial),
        statistics.median(seconds),
        room.f_bavail * room.f_frsize,
        room.f_favail if room.f_files else None,
    )


def can_exchange(folder: Path) -> bool:
    """Whether the file system exchanges two folders in one step; found out inside ``folder``."""
    one, other = folder / "one", folder / "other"
    one.mkdir()
    other.mkdir()
    try:
        exchange(one, other)
    except OSError:
        return False
    finally:
        one.rmdir()
        other.rmdir()
    return True
