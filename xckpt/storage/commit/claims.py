"""Staging folders beside a local checkpoint, and telling the dead ones from the living.

A save to ``NAME`` stages in ``.NAME.saving-ID`` and claims that folder by a file beside it,
``.NAME.saving-ID.claim``, which it keeps locked (`flock`) for as long as it lives.

1. `claim` makes the file as ``.NAME.saving-ID.new``, locks it, and renames it: whoever sees a claim
   of a living save sees it locked. The staging folder is made after it and removed before it.
2. `remove_dead` removes each staging folder whose claim is of this host and no longer locked.
   The kernel drops the lock with the process, so neither a reused process number nor another
   container hides a death.
3. A save of many hours can be gone on with: its ID is known, so `reclaim` takes over what a killed
   one left. Its journals, ``.NAME.saving-ID.journal-RANK``, are removed with the rest.
4. A ``.new`` file that can be locked is removed too. Should it be a living save's that has not come
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

from xckpt.core.struct_types import prepare_structs
from xckpt.errors import CheckpointExistsError

__all__ = [
    "Claim",
    "ClaimText",
    "claim",
    "journal_of",
    "journals",
    "reclaim",
    "remove_dead",
    "remove_journals",
]

_ATTEMPTS = 5

_LONGEST_NAME = 200
"""Bytes of the checkpoint's name that are kept; file systems take 255 for all of it."""


_held: set[int] = set()
"""Descriptors of this process's claims."""


def _let_go() -> None:
    """In a forked process, which may outlive its parent and must not keep its claims alive."""
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


class ClaimText(msgspec.Struct):
    """Who is saving, for whoever finds the remains."""

    host: str
    process: int
    save: str = ""
    """The save's own: in containers, host and process of two savers may be the same."""

    @classmethod
    def own(cls, save: str) -> ClaimText:
        """This process's."""
        return cls(socket.gethostname(), os.getpid(), save)


prepare_structs(ClaimText)


@dataclass(slots=True)
class Claim:
    """A living save's claim to a staging folder."""

    path: Path
    folder: Path
    """The staging folder; made and filled by the save itself."""
    descriptor: int

    def __post_init__(self) -> None:
        _held.add(self.descriptor)

    def release(self) -> None:
        """Give the claim up; it stays, unlocked, if the staging folder could not be removed."""
        if self.descriptor >= 0:
            if not self.folder.exists():
                with contextlib.suppress(OSError):
                    self.path.unlink()
            _held.discard(self.descriptor)
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
            os.write(descriptor, msgspec.json.encode(ClaimText.own(identity)))
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


def reclaim(folder: Path, identity: str) -> Claim | None:
    """Take over what a save of this identity has left; None if there is nothing.

    Raises:
        CheckpointExistsError: that save is alive.
        OSError: its claim cannot be opened.
    """
    staged = folder.parent / f"{_prefix(folder)}{identity}"
    path = staged.with_name(f"{staged.name}.claim")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    if not _lock(descriptor):
        os.close(descriptor)
        raise CheckpointExistsError(
            f"{folder}: another process is writing here; wait for it, or choose another path"
        )
    found = Claim(path, staged, descriptor)
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(descriptor), os.stat(path)) and staged.is_dir():
            return found
    found.release()
    return None


def journal_of(staged: Path, rank: int) -> Path:
    """Where a rank of a save that can be gone on with notes what it has written."""
    return staged.with_name(f"{staged.name}.journal-{rank}")


def journals(staged: Path) -> list[Path]:
    """The journals of a save that can be gone on with."""
    return sorted(staged.parent.glob(f"{glob.escape(staged.name)}.journal-*"))


def remove_journals(staged: Path) -> None:
    """Remove the journals of a save, which has ended or cannot be gone on with."""
    for path in journals(staged):
        path.unlink(missing_ok=True)


def remove_dead(folder: Path, *, but: str = "") -> None:
    """Remove what killed saves of this host left beside ``folder``, but for one identity's."""
    for path in folder.parent.glob(f"{glob.escape(_prefix(folder))}*.claim"):
        if but and path.name == f"{_prefix(folder)}{but}.claim":
            continue
        with contextlib.suppress(OSError, msgspec.MsgspecError), open(path, "r+b") as file:
            text = msgspec.json.decode(file.read(), type=ClaimText)
            if text.host == socket.gethostname() and _lock(file.fileno()):
                staged = path.with_suffix("")
                shutil.rmtree(staged, ignore_errors=True)
                remove_journals(staged)
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
