"""A save that is staged in a folder beside a local path, and committed by giving it the name.

1. `stage_folder` claims ``.NAME.saving-ID`` (`xckpt.storage.commit.claims`) and makes it. Where the
   step is an exchange, it finds out first whether the file system can exchange two folders.
2. `StagedFolder.take_name` renames the staged folder to the path, or exchanges the two, syncs the
   parent, and removes what is left.
3. `StagedCheckpoint` is a checkpoint of our own: the manifest goes in last, and then every folder
   is synced upward, for TensorStore has synced only the files and the folders they are in.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from xckpt.core.commit import Step
from xckpt.errors import CheckpointExistsError
from xckpt.storage.commit.claims import (
    Claim,
    claim,
    new_identity,
    reclaim,
    remove_dead,
)
from xckpt.storage.location import MANIFEST, Location, open_store, storage_errors

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@dataclass(slots=True)
class StagedFolder:
    """What is to get a path's name, in a claimed folder beside it."""

    target: Path
    """The path, symbolic links followed."""
    staging: Path
    """The staging folder."""
    claim: Claim | None
    """None in a process that takes part in what another has claimed."""

    @property
    def named(self) -> Path:
        """The folder or file that gets the name."""
        return self.staging

    def take_name(self, step: Step) -> None:
        """Give what is staged the path's name, and make that durable.

        Raises:
            CheckpointExistsError: something else has got the name meanwhile.
            OSError: the system refused.
        """
        if step is Step.EXCHANGE:
            exchange(self.named, self.target)
        else:
            try:
                os.rename(self.named, self.target)
            except OSError as error:
                if self.target.exists():
                    raise taken_meanwhile(self.target) from error
                raise
        sync_folder(self.target.parent)
        # After an exchange the old folder is there.
        shutil.rmtree(self.staging, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Give up the claim, and keep what is written for a process that resumes it."""
        if self.claim is not None:
            self.claim.release()

    def abort(self) -> None:
        """Remove what was written, as far as possible; what is readable stays as it is."""
        _remove_tree(self.staging)
        self.release()


def taken_meanwhile(target: Path) -> CheckpointExistsError:
    """The error for a name that another writer has taken."""
    return CheckpointExistsError(
        f"{target} was taken by another writer meanwhile; this save is not committed"
    )


@dataclass(slots=True)
class StagedCheckpoint(StagedFolder):
    """A checkpoint of our own."""

    step: Step
    resumed: bool
    """Whether an earlier process has written some of it."""

    @property
    def location(self) -> Location:
        """Where data is written: the root group goes here."""
        return Location("file", str(self.staging))

    @property
    def root(self) -> str:
        """`location` relative to the manifest."""
        return ""

    def publish(self, manifest: bytes) -> None:
        """Make the checkpoint visible; afterwards it is committed.

        Raises:
            CheckpointExistsError: another save committed to the path meanwhile.
            StorageError: the storage refused.
        """
        with storage_errors(self.target):
            open_store(self.location).write(MANIFEST, manifest).result()
            sync_tree(self.staging)
            self.take_name(self.step)

    def clear(self) -> None:
        """Remove what an earlier process has written."""
        _remove_tree(self.staging)
        self.staging.mkdir(exist_ok=True)
        self.resumed = False

    def tidy(self) -> None:
        """Remove what an earlier process was writing when it was killed, and its manifest."""
        for lock in self.staging.rglob("*.__lock"):
            lock.unlink()
        (self.staging / MANIFEST).unlink(missing_ok=True)


def stage_folder(target: Path, step: Step, identity: str = "") -> StagedCheckpoint | None:
    """Claim and make a staging folder for a checkpoint; None if the file system exchanges none.

    Args:
        target: the checkpoint's path, symbolic links followed.
        step: RENAME or EXCHANGE.
        identity: name of a resumable save; staging left under it is reused.

    Raises:
        CheckpointExistsError: another process uses the staging of this identity.
        OSError: the parent folder cannot be written.
    """
    claimed, resumed = claim_folder(target, identity)
    staged = StagedCheckpoint(target, claimed.folder, claimed, step, resumed)
    if not resumed and step is Step.EXCHANGE:
        try:
            exchanges = can_exchange(staged.staging)
        except BaseException:
            staged.abort()
            raise
        if not exchanges:
            staged.abort()
            return None
    return staged


def claim_folder(target: Path, identity: str = "") -> tuple[Claim, bool]:
    """Claim and make a staging folder, after removing those of dead saves.

    Args:
        target: the path to save to, symbolic links followed.
        identity: name of a resumable save.

    Returns:
        The claim, and whether staging was left under this identity and is reused.

    Raises:
        CheckpointExistsError: another process uses the staging of this identity.
        OSError: the parent folder cannot be written.
    """
    make_folder(target.parent)
    remove_dead(target, but=identity)
    claimed = reclaim(target, identity) if identity else None
    if claimed is not None:
        return claimed, True
    claimed = claim(target, identity or new_identity())
    try:
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


def _remove_tree(folder: Path) -> None:
    """Remove a folder as far as possible, with one descriptor at a time.

    A save that has failed for want of descriptors has no more of them, and `shutil.rmtree` takes
    one for each level.
    """
    for each, _, files in os.walk(folder, topdown=False):
        for name in files:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(each, name))
        with contextlib.suppress(OSError):
            os.rmdir(each)
    with contextlib.suppress(OSError):
        os.rmdir(folder)
