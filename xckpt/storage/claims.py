"""Staging folders beside a local checkpoint, and telling the dead ones from the living.

A save to ``NAME`` stages in ``.NAME.saving-ID`` and claims that folder by a file beside it,
``.NAME.saving-ID.claim``, which it keeps locked (`flock`) for as long as it lives.

1. `claim` makes the file as ``.NAME.saving-ID.new``, locks it, and renames it: whoever sees a claim
   of a living save sees it locked. The staging folder is made after it and removed before it.
2. `remove_dead` removes each staging folder whose claim is of this host and no longer locked.
   The kernel drops the lock with the process, so neither a reused process number nor another
   container hides a death.
3. A ``.new`` file that can be locked is removed too. Should it be a living save's that has not come
   to lock it yet, that save makes another.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

import msgspec

__all__ = ["Claim", "ClaimText", "claim", "remove_dead"]

_ATTEMPTS = 5

_LONGEST_NAME = 200
"""Bytes of the checkpoint's name that are kept; file systems take 255 for all of it."""


class ClaimText(msgspec.Struct):
    """Who is saving, for whoever finds the remains."""

    host: str
    process: int

    @classmethod
    def own(cls) -> ClaimText:
        """This process's."""
        return cls(socket.gethostname(), os.getpid())


@dataclass(slots=True)
class Claim:
    """A living save's claim to a staging folder."""

    path: Path
    folder: Path
    """The staging folder; made and filled by the save itself."""
    descriptor: int

    def release(self) -> None:
        """Give the claim up; it stays, unlocked, if the staging folder could not be removed."""
        if self.descriptor >= 0:
            if not self.folder.exists():
                with contextlib.suppress(OSError):
                    self.path.unlink()
            os.close(self.descriptor)
            self.descriptor = -1


def claim(folder: Path, identity: str) -> Claim:
    """Claim a staging folder for a save to ``folder``.

    Raises:
        OSError: the parent folder cannot be written.
    """
    staged = folder.parent / f"{_prefix(folder)}{identity}"
    path = staged.with_name(f"{staged.name}.claim")
    unlocked = staged.with_name(f"{staged.name}.new")
    for attempt in range(_ATTEMPTS):
        descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, msgspec.json.encode(ClaimText.own()))
            _lock(descriptor)
            os.rename(unlocked, path)
        except BaseException as error:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                unlocked.unlink()
            if isinstance(error, FileNotFoundError) and attempt + 1 < _ATTEMPTS:
                continue
            raise
        return Claim(path, staged, descriptor)
    raise AssertionError("unreachable")


def remove_dead(folder: Path) -> None:
    """Remove what killed saves of this host left beside ``folder``."""
    for path in folder.parent.glob(f"{glob.escape(_prefix(folder))}*.claim"):
        with contextlib.suppress(OSError, msgspec.MsgspecError), open(path, "r+b") as file:
            text = msgspec.json.decode(file.read(), type=ClaimText)
            if text.host == socket.gethostname() and _lock(file.fileno()):
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                path.unlink()
    for path in folder.parent.glob(f"{glob.escape(_prefix(folder))}*.new"):
        with contextlib.suppress(OSError), open(path, "r+b") as file:
            if _lock(file.fileno()):
                path.unlink()


def _prefix(folder: Path) -> str:
    kept = folder.name.encode("utf-8", "ignore")[:_LONGEST_NAME].decode("utf-8", "ignore")
    return f".{kept}.saving-"


def _lock(descriptor: int) -> bool:
    """Lock an open file; False if a living process holds the lock, or the file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
