"""How much of a local checkpoint lies in files that other checkpoints have too."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from xckpt.core.manifest.packs import PACKS, PLACES
from xckpt.storage.location import Location, storage_errors

THREADS = 16
"""Folders that are looked through at a time."""


def shared_bytes(places: Iterable[Location]) -> list[int]:
    """Bytes of the chunks' files of each checkpoint that have another name; 0 in a bucket.

    Raises:
        StorageError: a folder cannot be read.
    """
    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(_shared_bytes, places))


def _shared_bytes(place: Location) -> int:
    total, folders = 0, [place.path] if place.folder is not None else []
    with storage_errors(place):
        while folders:
            try:
                with os.scandir(folders.pop()) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                        elif entry.name.isdigit() or entry.name == "c" or _is_pack(entry.path):
                            status = entry.stat(follow_symlinks=False)
                            total += status.st_size if status.st_nlink > 1 else 0
            except (FileNotFoundError, NotADirectoryError):  # deleted meanwhile, or one file
                continue
    return total


def _is_pack(path: str) -> bool:
    folder, name = os.path.split(path)
    return os.path.basename(folder) == PACKS and not PLACES.endswith(f"/{name}")
