"""A folder beside a local path, where a save is staged: claimed and synced.

A save to ``NAME`` stages in ``.NAME.saving-ID`` and claims that folder by a file beside it,
``.NAME.saving-ID.claim``, which it keeps locked (`flock`) for as long as it lives. The lock shows
which saves are alive (`xckpt.storage.commit.leftovers`).

1. `claim` makes the file as ``.NAME.saving-ID.new``, locks it, and renames it: the claim of a
   living save is never seen unlocked. The staging folder is made after it and removed before it.
2. The text of a claim names the owner: the host, the system's start (`boot_identity`, equal in all
   containers of a host, whatever their names) and the process.
3. `claim_folder` removes what dead saves have left in the parent folder, claims, and makes the
   staging folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import errno
import functools
import os
import re
import socket
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from xckpt.core.commit import Step
from xckpt.core.struct_types import prepare_structs
from xckpt.engine.ranks.alive import WORK
from xckpt.errors import CheckpointExistsError
from xckpt.storage.abilities.walk import walk_up
from xckpt.storage.commit.file_system import (
    Lock,
    lock,
    longest_name,
    share_mode,
    sync_opened,
    take_name,
)
from xckpt.storage.refusals import refusal

_ATTEMPTS = 5

_BESIDE_NAME = 55
"""Bytes that the names of staging folders, claims and journals add to the checkpoint's name."""

ONE_SAVE: Final = re.compile("[0-9a-f]{12,}")
"""Identity of a save that cannot be resumed."""
LEFTOVER: Final = re.compile(
    rf"\.(?P<name>.*)\.(?:saving|converting)-(?P<id>{ONE_SAVE.pattern}|conversion)"
    r"(?P<kind>|\.claim|\.new|\.journal-(?:\d+|layout))",
    re.DOTALL,
)
"""Names of what a save makes beside its path; a name of the user's lacks such an identity."""

_descriptors: set[int] = set()
"""Descriptors of this process's claims."""


def _close_claims() -> None:
    """Run in a forked process, which may outlive its parent and must not keep the claims alive."""
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_claims)


@functools.cache
def boot_identity() -> str:
    """Equal for all processes of one running kernel, in whatever container; empty if unknown."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    if sys.platform == "darwin":
        content, size = ctypes.create_string_buffer(64), ctypes.c_size_t(64)
        look = getattr(ctypes.CDLL(ctypes.util.find_library("c")), "sysctlbyname", None)
        if look and look(b"kern.bootsessionuuid", content, ctypes.byref(size), None, 0) == 0:
            return content.value.decode("ascii", "replace")
    return ""


def process_identity(process: int) -> str:
    """Of a process on this system: its process namespace and its start; empty if unknown or gone.

    A process number alone is reused, and means another process in another container.
    """
    with contextlib.suppress(OSError, IndexError):
        # The command's name, in parentheses, may hold anything.
        fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2]
        return f"{os.stat('/proc/self/ns/pid').st_ino}-{fields.split()[19]}"
    return ""


class ClaimText(msgspec.Struct):
    """Owner of a save in progress, read when cleaning up after a crash."""

    host: str
    process: int
    save: str = ""
    """Unique to the save: in containers, host and process of two savers may be the same."""
    exchanging: bool = False
    """Whether the staging folder may be the old checkpoint's by now, with files of the user."""
    boot: str = ""
    """Identity of the host's system since it was started; empty if unknown."""
    life: str = ""
    """Namespace and start of the process; empty if unknown."""
    name: str = ""
    """Name of the checkpoint, which the names of files beside it may cut short."""

    @classmethod
    def own(cls, save: str, name: str = "") -> ClaimText:
        """The owner that this process is."""
        process = os.getpid()
        life = process_identity(process)
        return cls(socket.gethostname(), process, save, False, boot_identity(), life, name)


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
        text = msgspec.structs.replace(msgspec.json.decode(before, type=ClaimText), exchanging=True)
        os.pwrite(self.descriptor, msgspec.json.encode(text).ljust(len(before)), 0)
        os.fsync(self.descriptor)

    def release(self) -> None:
        """Unlock the claim; remove it and the journals unless the staging folder is still there."""
        if self.descriptor >= 0:
            if not self.folder.exists():
                with contextlib.suppress(OSError):
                    for path in journals(self.folder):
                        path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # also where no descriptor is left to list them
                    self.path.unlink()
            _descriptors.discard(self.descriptor)
            descriptor, self.descriptor = self.descriptor, -1
            with contextlib.suppress(OSError):  # nobody needs its content any more
                os.close(descriptor)


def real_path(path: str | os.PathLike[str]) -> Path:
    """A path whose links are followed.

    Raises:
        StorageError: they lead back to themselves.
    """
    real = os.path.realpath(path)
    if os.path.islink(real):
        text = os.fspath(path)
        raise refusal(text, OSError(errno.ELOOP, os.strerror(errno.ELOOP), text))
    return Path(real)


def new_identity() -> str:
    """A name for a save that no other save has; it begins with the time, in seconds, in hex."""
    return f"{int(time.time()):08x}{uuid.uuid4().hex[:8]}"


def claim_of(staged: Path) -> Path:
    """Path of the claim to a staging folder."""
    return staged.with_name(f"{staged.name}.claim")


def journal_of(staged: Path, rank: int | Literal["layout"]) -> Path:
    """Path of a journal of a resumable save: a rank's, or the note of what is laid out there."""
    return staged.with_name(f"{staged.name}.journal-{rank}")


def journals(staged: Path) -> list[Path]:
    """The journals of a resumable save. They are removed before its staging folder is."""
    with os.scandir(staged.parent) as entries:
        start = f"{staged.name}.journal-"
        return sorted(staged.parent / e.name for e in entries if e.name.startswith(start))


def staging_folder(folder: Path, identity: str) -> Path:
    """Where a save to ``folder`` is staged.

    Example:
        >>> staging_folder(Path("/data/model"), "conversion")
        PosixPath('/data/.model.saving-conversion')
    """
    most = longest_name(folder.parent) - _BESIDE_NAME
    kept = folder.name.encode("utf-8", "ignore")[:most].decode("utf-8", "ignore")
    return folder.parent / f".{kept}.saving-{identity}"


def claim(folder: Path, identity: str) -> Claim:
    """Claim a staging folder for a save to ``folder``.

    Raises:
        FileExistsError: another process has just claimed it.
        OSError: the parent folder cannot be written.
    """
    staged = staging_folder(folder, identity)
    path = claim_of(staged)
    # A save's name is its own; that of a conversion may be claimed by several processes at once.
    is_own = ONE_SAVE.fullmatch(identity) is not None
    own = identity if is_own else new_identity()
    unlocked = staged.with_name(f"{staging_folder(folder, own).name}.new")
    for attempt in range(_ATTEMPTS):
        descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, msgspec.json.encode(ClaimText.own(identity, folder.name)))
            if lock(descriptor) is Lock.HELD:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(unlocked))
            take_name(Step.REPLACE if is_own else Step.RENAME, unlocked, path)
        except BaseException as error:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                unlocked.unlink()
            if isinstance(error, FileNotFoundError) and attempt + 1 < _ATTEMPTS:
                continue  # another process removes it as a dead save's
            raise
        return Claim(path, staged, descriptor)
    raise AssertionError("unreachable")


def claim_folder(target: Path, identity: str) -> tuple[Claim, bool]:
    """Claim and make a staging folder, after removing those of dead saves.

    Args:
        target: the path to save to, symbolic links followed.
        identity: name of a resumable save; empty for any other.

    Returns:
        The claim, and whether staging was left under this identity and is reused.

    Raises:
        CheckpointExistsError: another process uses the staging of this identity.
        OSError: the parent folder cannot be written.
    """
    make_folder(target.parent)
    with os.scandir(target.parent) as entries:
        left = [
            each.name for each in entries if each.name[0] == "." and LEFTOVER.fullmatch(each.name)
        ]
    if left:
        # Most saves find nothing there.
        from xckpt.storage.commit.leftovers import reclaim, remove_dead

        remove_dead(target, left, but=identity)
        claimed = reclaim(target, identity) if identity else None
        if claimed is not None:
            return claimed, True
    try:
        claimed = claim(target, identity or new_identity())
    except FileExistsError as error:
        raise being_written(target) from error
    try:
        if identity:
            for path in journals(claimed.folder):
                path.unlink(missing_ok=True)
        claimed.folder.mkdir()
    except BaseException:
        claimed.release()
        raise
    share_mode(target, claimed.folder)
    return claimed, False


def being_written(folder: Path) -> CheckpointExistsError:
    """The error for a path that another process is writing to."""
    return CheckpointExistsError(
        f"{folder}: another process is writing here; wait for it, or choose another path"
    )


def remove_tree(folder: Path) -> None:
    """Remove a folder as far as possible, with one descriptor at a time.

    A save that has failed for want of descriptors has no more of them, and `shutil.rmtree` takes
    one for each level.
    """
    for each, folders, files in walk_up(folder):
        for name in files + [name for name in folders if os.path.islink(f"{each}/{name}")]:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(each, name))
            WORK.get().moved = time.monotonic()
        with contextlib.suppress(OSError):
            os.rmdir(each)
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, so that their names survive a power cut."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


def sync_folder(folder: str | Path) -> None:
    """fsync a folder, so that the names in it survive a power cut.

    Some file systems, of networks and in user space, sync files only, and say EINVAL of a folder:
    nothing better can be had there.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync_opened(descriptor)
    finally:
        os.close(descriptor)


def unlisted(error: OSError) -> None:
    """For `os.walk`, which skips folders that it cannot list: skip those alone that are gone."""
    if not isinstance(error, FileNotFoundError):
        raise error


def sync_tree(folder: Path, *, files: bool = False) -> None:
    """fsync a folder and those below it that hold folders; with ``files`` every file and folder.

    TensorStore syncs each file that it writes and its folder, but none above.
    """
    for each, folders, names in os.walk(folder, topdown=False, onerror=unlisted):
        for name in names if files else ():
            with open(os.path.join(each, name), "rb") as file:
                os.fsync(file.fileno())
        if folders or files:
            sync_folder(each)
