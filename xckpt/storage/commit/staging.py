"""Beginning a save: where it is staged, and by which step it becomes visible.

`begin` looks at the path and opens a `Staging` by the rules of `xckpt.core.commit`. Ranks write
below `Staging.location`; `Staging.publish` takes the atomic step with the manifest, `Staging.abort`
removes what was written. Only the coordinator does any of this.

1. A local folder that can be renamed is staged in a claimed folder beside it
   (`xckpt.storage.commit.folder`). `StagedFolder.take_name` renames that to the path, or exchanges
   the two, syncs the parent, and removes what is left. The user's own files in the old folder are
   carried over before (`xckpt.storage.commit.carry`).
2. `StagedCheckpoint` is a checkpoint in a folder: the manifest goes in last, and then every folder
   is synced upward, because TensorStore has synced only the files and the folders they are in.
3. Elsewhere a save is staged among the path's own keys (`xckpt.storage.commit.keys`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from stat import S_ISDIR
from typing import ClassVar, TypeAlias

from xckpt.core.commit import FileSystem, Found, Place, Step, decide, has_many_files
from xckpt.core.manifest.entries import Manifest
from xckpt.core.manifest.own_keys import CLAIM, GENERATIONS, MANIFEST
from xckpt.errors import CheckpointExistsError, PathError, StorageError
from xckpt.storage.abilities.local import can_exchange
from xckpt.storage.commit.carry import Seen, can_carry, carry, remove_last, remove_old, rescue
from xckpt.storage.commit.file_system import (
    TAKEN,
    can_rename,
    check_fitness,
    is_at,
    look_into,
    syncs_at_once,
    take_name,
)
from xckpt.storage.commit.folder import (
    Claim,
    claim_folder,
    claim_of,
    journals,
    new_identity,
    real_path,
    remove_tree,
    staging_folder,
    sync_folder,
    sync_tree,
)
from xckpt.storage.commit.keys import KeyStaging, begin_keys, stage_beside
from xckpt.storage.location import Access, Location, answer, open_store, storage_errors


@dataclass(slots=True)
class StagedFolder:
    """A file or folder staged in a claimed folder beside the path that it will get."""

    target: Path
    """The path, symbolic links followed."""
    staging: Path
    """The staging folder."""
    claim: Claim | None
    """None in a process that takes part in an output that another process has claimed."""
    keep: bool = field(default=False, init=False)
    """Whether `abort` keeps what is written for a process that resumes the save."""

    @property
    def named(self) -> Path:
        """The folder or file that gets the name."""
        return self.staging

    def take_name(self, step: Step) -> None:
        """Give what is staged the path's name, and make that durable.

        Raises:
            CheckpointExistsError: the name was taken by something else meanwhile.
            OSError: the system refused.
        """
        named = self.named
        try:
            take_name(step, named, self.target)
        except OSError as error:
            if step is Step.EXCHANGE and isinstance(error, FileNotFoundError):
                return self.take_name(Step.RENAME)  # what was there has been deleted meanwhile
            if step is not Step.RENAME or error.errno not in TAKEN:
                raise
            raise taken_meanwhile(self.target) from error
        try:
            sync_folder(self.target.parent)
        except OSError:
            with contextlib.suppress(OSError):
                if step is not Step.REPLACE:  # the old file is gone: better the new one than none
                    take_name(step, self.target, named)
            raise
        self.remove_replaced()
        self.release()

    def remove_replaced(self) -> None:
        """Remove the present content of the staging folder: after an exchange, the old folder."""
        shutil.rmtree(self.staging, ignore_errors=True)
        remove_last(self.staging, self.target)

    def release(self) -> None:
        """Give up the claim, and keep what is written for a process that resumes it."""
        if self.claim is not None:
            self.claim.release()

    def abort(self) -> None:
        """Remove what was written, as far as possible, unless it is to be kept."""
        if not self.keep:
            self._remove_staged()
        self.release()

    def _remove_staged(self) -> None:
        """Remove it under another name: other ranks may be writing into it for a moment.

        That name has the same claim, so that after a kill the remains are recognised as dead.
        """
        aside = staging_folder(self.target, new_identity())
        claim = claim_of(aside)
        with contextlib.suppress(OSError):
            if self.claim is not None:
                os.link(self.claim.path, claim)
            os.rename(self.staging, aside)
            remove_tree(aside)
        remove_tree(self.staging)
        if not aside.exists():
            claim.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove what an earlier process has written, and its journals."""
        for path in journals(self.staging):
            path.unlink(missing_ok=True)
        remove_tree(self.staging)
        self.staging.mkdir(exist_ok=True)


def taken_meanwhile(target: Path) -> CheckpointExistsError:
    """The error for a name that another writer has taken."""
    return CheckpointExistsError(
        f"{target} was taken by another writer meanwhile; this save is not committed"
    )


@dataclass(slots=True)
class StagedCheckpoint(StagedFolder):
    """A checkpoint in a folder."""

    step: Step
    resumed: bool
    """Whether an earlier process has written some of it."""
    able: FileSystem
    """What the file system can do."""
    in_batch: bool = False
    """Whether files are synced together, in the end, and not one by one."""
    access: Access = field(default_factory=Access)
    root: ClassVar[str] = ""
    """`location` relative to the manifest."""
    exchanging: bool = field(default=False, init=False)
    """Whether the two folders may have been exchanged."""
    seen: Seen = field(default=Seen(), init=False)
    """The checkpoint that is to be replaced."""
    opened: int = field(default=-1, init=False)
    """A descriptor of the staging folder, which identifies it even if another took its place."""

    def __post_init__(self) -> None:
        self.opened = os.open(self.staging, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def location(self) -> Location:
        """Where data is written: the root group goes here."""
        unsynced = self.in_batch or not self.able.syncs_folders
        place = Location("file", str(self.staging), "", unsynced, not self.able.locks)
        return replace(place, access=self.access)

    def publish(self, manifest: bytes) -> None:
        """Make the checkpoint visible; afterwards it is committed.

        Raises:
            CheckpointExistsError: another save committed to the path meanwhile.
            StorageError: the storage refused.
        """
        with storage_errors(self.target):
            self._check_staging()
            place = self.location
            answer(open_store(place).write(MANIFEST, manifest), place)
            if place.unsynced:
                from xckpt.storage.commit.batch import sync_all

                assert self.claim is not None
                sync_all(self.claim.descriptor, [self.staging])
            else:
                sync_tree(self.staging)
            if self.step is Step.EXCHANGE:
                carry(self.target, self.staging, self.seen)
                self._note_exchange()
            self.take_name(self.step)

    def _check_staging(self) -> None:
        """Refuse to commit a save that went to two folders: TensorStore creates missing folders."""
        if not is_at(self.opened, self.staging):
            raise StorageError(
                f"{self.staging} was deleted or renamed while a save wrote to it; {self.target} is "
                f"as it was before: save again, and keep cleaners away from *.saving-* folders"
            )

    def release(self) -> None:
        """Give up the claim, and keep what is written for a process that resumes it."""
        if self.opened >= 0:
            os.close(self.opened)
            self.opened = -1
        StagedFolder.release(self)

    def _note_exchange(self) -> None:
        if self.claim is not None:
            self.claim.note_exchange()
        self.exchanging = True

    def remove_replaced(self) -> None:
        """Remove the old folder; files that would be lost with it are carried over first."""
        if self.exchanging:
            remove_old(self.staging, self.target)

    def abort(self) -> None:
        """Remove what was written, as far as possible, unless it is to be kept."""
        if self.exchanging:
            rescue(self.staging, self.target)
            self.release()
        else:
            # dataclass(slots=True) makes a second class, which plain `super` does not know.
            StagedFolder.abort(self)

    def clear(self) -> None:
        """Remove what an earlier process has written, and its journals."""
        StagedFolder.clear(self)
        before, self.opened = self.opened, os.open(self.staging, os.O_RDONLY | os.O_CLOEXEC)
        os.close(before)

    def tidy(self) -> None:
        """Remove what an earlier process was writing when it was killed, and its manifest."""
        for lock in self.staging.rglob("*.__lock"):
            lock.unlink()
        (self.staging / MANIFEST).unlink(missing_ok=True)


Staging: TypeAlias = StagedCheckpoint | KeyStaging
"""A save in progress."""


def begin(
    target: Location,
    *,
    overwrite: bool,
    identity: str = "",
    planned: Manifest | None = None,
    shares: bool = False,
) -> Staging:
    """Look at a path and open a place to write to.

    Args:
        target: where the checkpoint goes.
        overwrite: whether it may replace another.
        identity: name of a resumable save; on local folders, staging left under it is reused.
        planned: what the checkpoint will hold, if that is known.
        shares: whether it has a base.

    Raises:
        CheckpointExistsError: something is there, and it may not be replaced.
        StorageError: the storage refused.
    """
    with storage_errors(target):
        if target.folder is None:
            return begin_keys(target, planned, overwrite=overwrite)
        folder = real_path(target.folder)
        target = replace(target, path=str(folder))
        if folder == folder.parent:
            raise PathError("/ is the root of all folders: give a folder below it")
        if not can_rename(folder):
            there = next(each for each in (folder, *folder.parents) if each.is_dir())
            check_fitness(target, look_into(there), planned, beside=True)
            return begin_keys(target, planned, overwrite=overwrite)
        # What a resumable save notes as written is durable, so its files are not synced in a batch.
        many = not identity and has_many_files(planned, shares=shares)
        return _begin_folder(
            target, folder, planned, overwrite=overwrite, identity=identity, many=many
        )


def _begin_folder(
    target: Location,
    folder: Path,
    planned: Manifest | None,
    *,
    overwrite: bool,
    identity: str,
    many: bool,
) -> Staging:
    found = _find_folder(folder)
    step = decide(target, found, Place.FOLDER, overwrite=overwrite)
    if step is Step.GENERATION:
        able = look_into(folder)
    else:
        claimed, resumed = claim_folder(folder, identity)
        with contextlib.ExitStack() as undo:
            abort = StagedFolder(folder, claimed.folder, claimed).abort
            undo.callback(claimed.release if resumed else abort)
            able = look_into(claimed.folder, claimed.descriptor)
            staged = StagedCheckpoint(folder, claimed.folder, claimed, step, resumed, able)
            undo.callback(os.close, staged.opened)
            staged.access = target.access
            if resumed or step is not Step.EXCHANGE or _replaceable(staged, planned):
                check_fitness(target, able, planned)
                staged.in_batch = many and syncs_at_once(folder.parent)
                undo.pop_all()
                return staged
        step = decide(target, found, Place.PLAIN_FOLDER, overwrite=overwrite)
    assert step is Step.GENERATION
    check_fitness(target, able, planned, beside=True)
    return stage_beside(target, planned, in_batch=many and syncs_at_once(folder))


def _replaceable(staged: StagedCheckpoint, planned: Manifest | None) -> bool:
    """Whether the staging folder can replace the old one without a loss."""
    exchanges = can_exchange(staged.staging)
    seen = can_carry(staged.target, staged.staging, planned) if exchanges else None
    staged.seen = seen or Seen()
    return seen is not None


def _find_folder(folder: Path) -> Found:
    try:
        is_folder = S_ISDIR(folder.stat().st_mode)  # one look: another process may delete it
    except (FileNotFoundError, NotADirectoryError):
        return Found.NOTHING
    if not is_folder:
        from xckpt.storage.foreign.single_files import what_is_there

        raise CheckpointExistsError(
            f"{folder} {what_is_there(folder)}; nothing there was touched: choose another path"
        )
    if (folder / MANIFEST).exists():
        return Found.CHECKPOINT
    if (folder / CLAIM).exists() or (folder / GENERATIONS).exists():
        return Found.UNFINISHED  # it was filled in place, as a mount point is
    with contextlib.suppress(FileNotFoundError):  # another process may have just deleted it
        return Found.FOREIGN if any(folder.iterdir()) else Found.NOTHING
    return Found.NOTHING
