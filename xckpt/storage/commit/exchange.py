"""Whether a new folder can take the place of an old one; exchanging the two in one step."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def can_rename(folder: Path) -> bool:
    """Whether a new folder can take this one's place: no mount point or working folder."""
    if not folder.is_dir():
        return True
    with contextlib.suppress(FileNotFoundError):
        if Path.cwd().is_relative_to(folder):
            return False  # this process would stand in a deleted folder
    try:
        return not folder.is_mount() and may_write(folder.parent)
    except FileNotFoundError:
        return True  # another process has just deleted it


def may_write(folder: Path) -> bool:
    """Whether this process may make names in a folder, as the user that it acts as."""
    effective = os.access in os.supports_effective_ids
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=effective)


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


def exchange(a: Path, b: Path) -> None:
    """Exchange two folders atomically (Linux's renameat2).

    Raises:
        OSError: the kernel or the file system cannot.
    """
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError as error:
        raise OSError("this platform has no renameat2") from error
    source, target = os.fsencode(a), os.fsencode(b)
    if renameat2(_AT_FDCWD, source, _AT_FDCWD, target, _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(a))
