"""How much of a local checkpoint lies in files that other checkpoints have too."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
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
    return sum(size for _, size in shared_files(place))


def shared_files(place: Location) -> Iterator[tuple[str, int]]:
    """Path below a local checkpoint, and bytes, of each file of chunks that has another name.

    Raises:
        StorageError: a folder cannot be read.
    """
    folders = [""] if place.folder is not None else []
    with storage_errors(place):
        while folders:
            folder = folders.pop()
            try:
                with os.scandir(os.path.join(place.path, folder)) as entries:
                    for entry in entries:
                        path = f"{folder}/{entry.name}" if folder else entry.name
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(path)
                        elif entry.name.isdigit() or entry.name == "c" or _is_pack(entry.path):
                            status = entry.stat(follow_symlinks=False)
                            if status.st_nlink > 1:
                                yield path, status.st_size
            except (FileNotFoundError, NotADirectoryError):  # deleted meanwhile, or one file
                continue


def _is_pack(path: str) -> bool:
    folder, name = os.path.split(path)
    return os.path.basename(folder) == PACKS and not PLACES.endswith(f"/{name}")
