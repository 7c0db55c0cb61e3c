"""Walking through the folders below one, however deep: `os.walk` calls itself for each level."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

Walked: TypeAlias = tuple[str, list[str], list[str]]
"""A folder, and the names of the folders and of the files in it."""


def walk(top: Path, onerror: Callable[[OSError], object] | None = None) -> Iterator[Walked]:
    """What `os.walk` yields, from the top down; no link is followed."""
    left = [str(top)]
    while left:
        folder = left.pop()
        try:
            with os.scandir(folder) as entries:
                found = list(entries)
        except OSError as error:
            if onerror is not None:
                onerror(error)
            continue
        folders = [each for each in found if _is_folder(each)]
        names = [each.name for each in folders]
        yield folder, names, sorted({each.name for each in found}.difference(names))
        left += [each.path for each in reversed(folders) if not each.is_symlink()]


def walk_up(top: Path, onerror: Callable[[OSError], object] | None = None) -> Iterator[Walked]:
    """The same from the innermost folders up; they are all listed before the first is yielded."""
    yield from reversed(list(walk(top, onerror)))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False
