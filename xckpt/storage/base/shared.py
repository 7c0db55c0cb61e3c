"""How much of a local checkpoint lies in files that other checkpoints share.

What cannot be read is not counted, and the log says so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from xckpt.core.manifest.packs import PACKS, PLACES
from xckpt.core.text.printable import in_few, printable
from xckpt.storage.budget import in_threads
from xckpt.storage.location import Location

logger: Final = logging.getLogger("xckpt")

THREADS = 16
"""Folders that are read at a time."""


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A file of chunks that has another name."""

    path: str
    """Below the checkpoint."""
    bytes: int
    identity: tuple[int, int]
    """The file system and the inode, which all its names share."""


@dataclass(frozen=True, slots=True)
class SharedBytes:
    """How many bytes of checkpoints lie in files that have another name; 0 in a bucket."""

    of: list[int]
    """Of each checkpoint."""
    once: int
    """Of all of them, each file counted once."""


def shared_bytes(places: Iterable[Location]) -> SharedBytes:
    """The bytes that checkpoints share with each other, or with others."""
    found = in_threads(lambda place: list(shared_files(place)), places, THREADS)
    files = {file.identity: file.bytes for files in found for file in files}
    return SharedBytes([sum(file.bytes for file in files) for files in found], sum(files.values()))


def shared_files(place: Location) -> Iterator[SharedFile]:
    """Each file of chunks of a local checkpoint that has another name."""
    folders = [""] if place.folder is not None else []
    unread: list[str] = []
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
                            identity = (status.st_dev, status.st_ino)
                            yield SharedFile(path, status.st_size, identity)
        except (FileNotFoundError, NotADirectoryError):  # deleted meanwhile, or one file
            continue
        except OSError as error:
            unread.append(f"{folder}: {error.strerror}" if folder else str(error.strerror))
    if unread:
        text = "%s: what it shares with other checkpoints is not counted in %s"
        logger.warning(text, printable(str(place)), in_few(unread))


def _is_pack(path: str) -> bool:
    folder, name = os.path.split(path)
    return os.path.basename(folder) == PACKS and not PLACES.endswith(f"/{name}")
