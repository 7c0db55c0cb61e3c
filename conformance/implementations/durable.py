"""Files and folders that survive a power cut."""

from __future__ import annotations

import os
from pathlib import Path


def put(path: Path, content: bytes) -> None:
    """Write a file, and sync it."""
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def sync(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
