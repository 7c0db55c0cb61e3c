"""Folders beside a local path, where a save is staged: claimed, synced, exchanged, removed.

A save to ``NAME`` stages in ``.NAME.saving-ID`` and claims that folder by a file beside it,
``.NAME.saving-ID.claim``, which it keeps locked (`flock`) for as long as it lives. That tells dead
saves from living ones.

1. `claim` makes the file as ``.NAME.saving-ID.new``, locks it, and renames it: the claim of a
   living save is never seen unlocked. The staging folder is made after it and removed before it.
2. `remove_dead` removes each staging folder whose claim is of this host and no longer locked.
   The kernel drops the lock with the process, so neither a reused process number nor another
   container hides a death.
3. A save of many hours is resumable: its ID is fixed, so `reclaim` takes over what a killed one
   left. Its journals, ``.NAME.saving-ID.journal-RANK``, are removed with the rest.
4. A ``.new`` file that can be locked is removed too. If it belongs to a living save that has not
   locked it yet, that save makes another.
5. `claim_folder` does all of this for a save that begins.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import os
import shutil
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from xckpt.core.struct_types import prepare_structs
from xckpt.errors import CheckpointExistsError

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100

_ATTEMPTS = 5

_LONGEST_NAME = 200
"""Bytes of the checkpoint's name that are kept; file systems take 255 for all of it."""

_descriptors: set[int] = set()
"""Descriptors of this process's claims."""


def _close_claims() -> None:
    """Run in a forked process, which may outlive its parent and must not keep its claims alive."""
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_claims)


class ClaimText(msgspec.Struct):
    """Owner of a save in progress, read when cleaning up after a crash."""

    host: str
    process: int
    save: str = ""
    """Unique to the save: in containers, host and process of two savers may be the same."""
    exchanging: bool = False
    """Whether the staging folder may be the old checkpoint's by now, with files of the user."""

    @classmethod
    def own(cls, save: str) -> ClaimText:
        """The owner that this process is."""
        return cls(socket.gethostname(), os.getpid(), save)


prepare_structs(ClaimText)


@dataclass(slots=True)
class Claim:
    """The claim of a living save to a staging folder."""

    path: Path
    folder: Path
    """The staging folder, which the save makes and fills."""
    descriptor: int

    def __post_init__(self) -> None:
        _descriptors.add(self.descriptor)

    def note_exchange(self) -> None:
        """Say durably that the staging folder is about to be exchanged with the old one."""
        before = self.path.read_bytes()
        text = msgspec.json.decode(before, type=ClaimText)
        content = msgspec.json.encode(msgspec.structs.replace(text, exchanging=True))
        os.pwrite(self.descriptor, content.ljust(len(before)), 0)
        os.fsync(self.descriptor)

    def release(self) -> None:
        """Unlock the claim; remove it and the journals unless the staging folder is still there."""
        if self.descriptor >= 0:
            if not self.folder.exists():
                with contextlib.suppress(OSError):
                    remove_journals(self.folder)
                    self.path.unlink()
            _descriptors.discard(self.descriptor)
            os.close(self.descriptor)
            self.descriptor = -1


def new_identity() -> str:
    """A name for a save that no other save has."""
    return uuid.uuid4().hex[:12]


def staging_folder(folder: Path, identity: str) -> Path:
    """Where a save to ``folder`` is staged.

    Example:
        >>> staging_folder(Path("/data/model"), "conversion")
        PosixPath('/data/.model.saving-conversion')
    """
    return folder.parent / f"{_prefix(folder)}{identity}"


def claim(folder: Path, identity: str) -> Claim:
    """Claim a staging folder for a save to ``folder``.

    Raises:
        OSError: the parent folder cannot be written.
    """
    staged = staging_folder(folder, identity)
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
    """Take over what a killed save of this identity left; None if there is nothing.

    Raises:
        CheckpointExistsError: that save is alive.
        OSError: its claim cannot be opened.
    """
    staged = staging_folder(folder, identity)
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
    taken = Claim(path, staged, descriptor)
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(descriptor), os.stat(path)) and staged.is_dir():
            return taken
    taken.release()
    return None


def journal_of(staged: Path, rank: int) -> Path:
    """Path of a rank's journal of a resumable save."""
    return staged.with_name(f"{staged.name}.journal-{rank}")


def journals(staged: Path) -> list[Path]:
    """The journals of a resumable save."""
    return sorted(staged.parent.glob(f"{glob.escape(staged.name)}.journal-*"))


def remove_journals(staged: Path) -> None:
    """Remove the journals of a save that has ended or cannot be resumed."""
    for path in journals(staged):
        path.unlink(missing_ok=True)


def remove_dead(folder: Path, rescue: Callable[[Path, Path], None], *, but: str = "") -> None:
    """Remove what killed saves of this host left beside ``folder``, except those of ``but``.

    Args:
        folder: the path that they saved to.
        rescue: removes a staging folder that may have been exchanged with ``folder``.
        but: name of a resumable save.
    """
    for path in folder.parent.glob(f"{glob.escape(_prefix(folder))}*.claim"):
        staged = path.with_suffix("")
        resumable = bool(but) and staged == staging_folder(folder, but)
        with contextlib.suppress(OSError, msgspec.MsgspecError), open(path, "r+b") as file:
            text = msgspec.json.decode(file.read(), type=ClaimText)
            if resumable and not text.exchanging:
                continue
            if text.host == socket.gethostname() and _lock(file.fileno()):
                if text.exchanging:
                    rescue(staged, folder)
                else:
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


def claim_folder(
    target: Path, rescue: Callable[[Path, Path], None], identity: str = ""
) -> tuple[Claim, bool]:
    """Claim and make a staging folder, after removing those of dead saves.

    Args:
        target: the path to save to, symbolic links followed.
        rescue: see `remove_dead`.
        identity: name of a resumable save.

    Returns:
        The claim, and whether staging was left under this identity and is reused.

    Raises:
        CheckpointExistsError: another process uses the staging of this identity.
        OSError: the parent folder cannot be written.
    """
    make_folder(target.parent)
    remove_dead(target, rescue, but=identity)
    claimed = reclaim(target, identity) if identity else None
    if claimed is not None:
        return claimed, True
    claimed = claim(target, identity or new_identity())
    try:
        if identity:
            remove_journals(claimed.folder)
        claimed.folder.mkdir()
    except BaseException:
        claimed.release()
        raise
    return claimed, False


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


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, so that their names survive a power cut."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


def sync_folder(folder: str | Path) -> None:
    """fsync a folder, so that the names in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path, *, files: bool = False) -> None:
    """fsync a folder and those below it that hold folders.

    TensorStore syncs each file that it writes, and then the folder that the file is in; it makes
    the folders themselves without syncing those above.

    Args:
        folder: where.
        files: sync also every file, and every folder.
    """
    for each, folders, names in os.walk(folder, topdown=False):
        for name in names if files else ():
            with open(os.path.join(each, name), "rb") as file:
                os.fsync(file.fileno())
        if folders or files:
            sync_folder(each)


def remove_tree(folder: Path) -> None:
    """Remove a folder as far as possible, with one descriptor at a time.

    A save that has failed for want of descriptors has no more of them, and `shutil.rmtree` takes
    one for each level.
    """
    for each, folders, files in os.walk(folder, topdown=False):
        for name in files + [name for name in folders if os.path.islink(f"{each}/{name}")]:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(each, name))
        with contextlib.suppress(OSError):
            os.rmdir(each)
    with contextlib.suppress(OSError):
        os.rmdir(folder)
