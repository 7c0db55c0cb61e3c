"""The message about a path without a checkpoint: what lies there or beside it instead.

1. A folder of checkpoints (a run's root): the steps are listed.
2. A save to the path that was cut off: its staging folder is named.
3. A path that does not exist: checkpoints beside it, the likeliest first, or the file above it.
4. A format that is not read (`xckpt.storage.foreign.unread`): its name, and what to do.
5. A path into a checkpoint: the checkpoint.
6. Any other folder: some of the names in it.

A bucket is asked for its keys, for `LISTING_SECONDS` at most: 1, 3 and 6 hold there too.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

from xckpt.core.manifest.own_keys import MANIFEST
from xckpt.core.near_names import near_names
from xckpt.storage.foreign.files import open_file
from xckpt.storage.foreign.unread import HEAD_BYTES, unread_format
from xckpt.storage.location import Location, open_store

LOOKED_AT = 10_000
"""How many names of a folder are looked at."""

LISTING_SECONDS = 2.0
"""How long the keys of a bucket are waited for."""

SHOWN = 8
"""How many names are shown."""


def what_is_there(folder: Path) -> str:
    """A clause on what is at a local path, or beside it, instead of a checkpoint.

    Example:
        >>> what_is_there(Path("/nowhere/at/all"))
        '/nowhere does not exist'
    """
    meant = checkpoint_meant(folder)
    if meant:
        return meant
    names = sorted(_names(folder))
    if MANIFEST in names:
        return "a save has committed one there just now; load it again"
    unread = next(filter(None, map(unread_format, names)), "")
    if unread:
        return f"{unread}; {MANIFEST} is not there either"
    if folder.exists() and not folder.is_dir():
        return "it is a device, a pipe or a socket; give the folder of a checkpoint"
    if closed := _closed(folder):
        return closed
    return _no_manifest(f", only: {_shown(names)}" if names else ", nothing at all")


def checkpoint_meant(path: Path) -> str:
    """A clause on the checkpoints around or in a local path, or on what is missing of the path.

    Empty where something else is there.
    """
    inside = _inside(path)
    if inside and not _checkpoints(path.parent):
        return inside
    if not path.exists():
        return _beside(path)
    steps = _checkpoints(path)
    return _holds(steps, path / steps[-1]) if steps else ""


def _closed(path: Path) -> str:
    """A clause on the folders in a local one that may not be looked into; empty without any."""
    names = sorted(name for name in _names(path) if _is_closed(path / name))
    shown = _shown(names)
    return f"folders in it may not be read: {shown}; check their permissions" if names else ""


def _is_closed(folder: Path) -> bool:
    try:
        os.stat(folder / MANIFEST)
    except OSError as error:
        return isinstance(error, PermissionError)
    return False


def what_keys_are_there(location: Location) -> str:
    """A clause on what is in a bucket, or beside it, instead of a checkpoint.

    Keys that the bucket does not list in time are not mentioned.

    Example:
        >>> what_keys_are_there(Location.parse("memory://nowhere/at/all"))
        'there is no xckpt.json in it; check the path, or whether the save finished'
    """
    keys = _keys(location)
    if MANIFEST in keys:
        return "a save has committed one there just now; load it again"
    steps = _steps_among(keys)
    if steps:
        return _holds(steps, location.child(steps[-1]))
    if keys:
        names = sorted({key.partition("/")[0] for key in keys})
        return _no_manifest(f", only: {_shown(names)}")
    above, _, name = location.path.rpartition("/")
    parent = replace(location, path=above)
    others = _steps_among(_keys(parent)) if name else []
    return _missing(name, others, parent.child) if others else _no_manifest()


def what_file_is_there(file: Path) -> str:
    """A sentence on a local file at the path of a checkpoint.

    Example:
        >>> _ = Path("weights.npz").write_bytes(b"")
        >>> what_file_is_there(Path("weights.npz"))
        "weights.npz is of the format NumPy's archives, which xckpt does not read: read it with \
dict(numpy.load(path)) and save that with xckpt.save"
    """
    first = b""
    with contextlib.suppress(OSError), closing(open_file(file)) as opened:
        first = opened.head(HEAD_BYTES)
    unread = unread_format(file.name, first)
    if not unread:
        inside = _inside(file)
        return f"{file} is a file, not a checkpoint folder" + (f"; {inside}" if inside else "")
    return f"{file.parent / unread}" if file.parent.name else unread


def _inside(path: Path) -> str:
    """A clause on the checkpoint that a path leads into; empty if it leads into none."""
    for above in path.parents:
        if _is_file(above / MANIFEST):
            return f"it lies in the checkpoint {above}: give that path, and leaves by their names"
    return ""


def _beside(folder: Path) -> str:
    parent = folder.parent
    if not parent.is_dir():
        file = next((path for path in folder.parents if _is_file(path)), None)
        if file is not None:
            return f"{file} is a file, so nothing is below it"
        missing = [path for path in folder.parents if not path.exists()]
        return f"{missing[-1]} does not exist" if missing else f"{parent} is not a folder"
    if any(name.startswith(f".{folder.name}.saving-") for name in _names(parent)):
        return (
            f"nothing is at the path yet: a save to it is running or was cut off before its commit "
            f"({parent / f'.{folder.name}.saving-*'})"
        )
    others = _checkpoints(parent)
    if folder.is_symlink():
        return f"it is a link to {os.readlink(folder)}, which does not exist"
    if not others:
        return "it does not exist"
    return _missing(folder.name, others, parent.__truediv__)


def _holds(steps: list[str], last: object) -> str:
    many = "1 checkpoint" if len(steps) == 1 else f"{len(steps)} checkpoints"
    return f"it holds {many}: {_shown(steps)}; give the path of one: {last}"


def _no_manifest(found: str = "") -> str:
    return f"there is no {MANIFEST} in it{found}; check the path, or whether the save finished"


def _missing(name: str, others: list[str], path_of: Callable[[str], object]) -> str:
    """The message about a name that does not exist beside other checkpoints."""
    near = near_names(name, others, most=1)
    meant = f"; did you mean {path_of(near[0])}?" if near else ""
    return f"it does not exist; beside it: {_shown(others)}{meant}"


def _keys(location: Location) -> list[str]:
    """The keys below a place, if the store lists them in time."""
    try:
        asked = open_store(location).list()
        # What lies there may yet be of another format, and to find that takes time too.
        seconds = min(LISTING_SECONDS, location.access.left / 2)
        return [key.decode() for key in asked.result(seconds)]
    except (OSError, ValueError, RuntimeError):  # TimeoutError is an OSError
        return []


def _steps_among(keys: list[str]) -> list[str]:
    """The names of the checkpoints among some keys, numbers in their order."""
    names = (key.removesuffix(f"/{MANIFEST}") for key in keys if key.endswith(f"/{MANIFEST}"))
    return sorted((name for name in names if "/" not in name), key=_natural)


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in islice(folder.iterdir(), LOOKED_AT)]
    except OSError:
        return []


def _checkpoints(folder: Path) -> list[str]:
    """The names of the checkpoints in a folder, numbers in their order."""
    names = [name for name in _names(folder) if not name.startswith(".")]
    return sorted((name for name in names if _is_file(folder / name / MANIFEST)), key=_natural)


def _is_file(path: Path) -> bool:
    """Whether a file is there; False if it may not be examined."""
    try:
        return path.is_file()
    except OSError:
        return False


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts step_9 before step_10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _shown(names: list[str]) -> str:
    """All names if there are few, else the first and the last."""
    if len(names) <= SHOWN:
        return ", ".join(names)
    half = SHOWN // 2
    return f"{', '.join(names[:half])}, ... {', '.join(names[-half:])} ({len(names)} in all)"
