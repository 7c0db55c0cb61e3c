"""Carrying out a commit: the place that a save writes to, and the one step that makes it visible.

`begin` looks at the path and opens a `Staging` by the rules of `xckpt.core.commit`; ranks write
below `Staging.location`; `Staging.publish` takes the atomic step with the manifest, `Staging.abort`
removes what was written. Only the coordinator does any of this.

1. Local files: staged in a claimed folder beside the path (`xckpt.storage.commit.claims`).
   Publishing writes the manifest into it, syncs every folder upward, renames (or exchanges) it with
   the path, and syncs the parent.
2. Elsewhere, and where a local folder cannot be renamed (a mount point): staged in place behind a
   create-once claim, or in ``.generations/ID`` where a checkpoint exists; publishing writes the
   manifest on the condition that nobody else has. What is to be deleted then is listed before:
   whoever was writing it began before this commit, and cannot commit after it.
3. An object store may do what it is asked and fail to say so; asked again, it says that the
   condition does not hold. So the key is read then, and what it holds tells who has won. Where
   that stays unknown, nothing that the manifest names is removed: it may be written yet.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import tensorstore as ts

from xckpt.core.commit import Found, Step, decide
from xckpt.errors import CheckpointExistsError, StorageError, XckptError
from xckpt.storage.commit.claims import Claim, ClaimText, claim, reclaim, remove_dead
from xckpt.storage.commit.folder import exchange, make_folder, sync_folder
from xckpt.storage.commit.stale_locks import empty_stale_lock
from xckpt.storage.errors import storage_errors
from xckpt.storage.location import MANIFEST, Location, open_store

__all__ = ["CLAIM", "Staging", "begin"]

CLAIM = "xckpt.saving"
GENERATIONS = ".generations"


@dataclass(slots=True)
class Staging:
    """A save in progress."""

    step: Step
    target: Location
    """The checkpoint's place, symbolic links followed."""
    location: Location
    """Where data is written: the root group goes here."""
    root: str = ""
    """`location` relative to the manifest; goes into the manifest."""
    seen: bytes = b""
    """Generation of the manifest at the beginning, or of its absence; of a folder with a claim none
    is needed."""
    claimed: bytes = b""
    """Generation of the key `CLAIM`, where there is one."""
    claim: Claim | None = None
    """The claim to the staging folder, where there is one."""
    committed: bool = False
    sent: bool = False
    """Whether the manifest was written, or may be yet, for nobody has said that it was not."""
    resumed: bool = False
    """Whether an earlier process has written some of it; see `begin`."""

    def suspend(self) -> None:
        """Stop, and keep what is written for a process that goes on with it."""
        if self.claim is not None:
            self.claim.release()

    def clear(self) -> None:
        """Remove what an earlier process has written."""
        if self.claim is not None:
            _remove_tree(self.claim.folder)
            self.claim.folder.mkdir(exist_ok=True)
            self.resumed = False

    def tidy(self) -> None:
        """Remove what an earlier process was killed over, and its manifest."""
        if self.claim is not None:
            for lock in self.claim.folder.rglob("*.__lock"):
                lock.unlink()
            (self.claim.folder / MANIFEST).unlink(missing_ok=True)

    def publish(self, manifest: bytes) -> None:
        """Make the checkpoint visible; afterwards it is committed.

        Raises:
            CheckpointExistsError: another save committed to the path meanwhile.
            StorageError: the storage refused.
        """
        with storage_errors(self.target):
            if self.claim is not None:
                self._publish_folder(self.claim, manifest)
            else:
                self._publish_key(manifest)

    def abort(self) -> None:
        """Remove what was written, as far as possible; what is readable stays as it is."""
        if self.claim is not None:
            _remove_tree(self.claim.folder)
            self.claim.release()
        elif not (self.committed or self.sent):
            with contextlib.suppress(OSError, ValueError, XckptError):
                self._abort_keys()

    def _publish_folder(self, claim: Claim, manifest: bytes) -> None:
        staged, target = claim.folder, Path(self.target.path)
        open_store(self.location).write(MANIFEST, manifest).result()
        _sync_tree(staged)
        if self.step is Step.EXCHANGE:
            exchange(staged, target)
        else:
            try:
                os.rename(staged, target)
            except OSError as error:
                if target.exists():
                    raise CheckpointExistsError(
                        f"{target} was taken by somebody else during this save, which is not "
                        f"committed"
                    ) from error
                raise
        self.committed = True
        sync_folder(target.parent)
        # After an exchange the old checkpoint is there.
        shutil.rmtree(staged, ignore_errors=True)
        claim.release()

    def _publish_key(self, manifest: bytes) -> None:
        folder = self.location.folder
        if folder is not None:
            _sync_tree(folder)
            sync_folder(folder.parent)
            if self.step is Step.GENERATION:
                # The manifest may survive a power cut before the name of the generations' folder.
                sync_folder(folder.parent.parent)
        store = open_store(self.target)
        # Listed before the commit: what others begin to write after it is not to be touched.
        replaced = self._replaced(store)
        if self.target.folder is not None:
            empty_stale_lock(self.target.folder, MANIFEST)
        self._write_manifest(store, manifest)
        self.committed = True
        with contextlib.suppress(ValueError, OSError):
            self._delete(store, replaced)

    def _write_manifest(self, store: ts.KvStore, manifest: bytes) -> None:
        self.sent = True
        try:
            if _write_if(store, MANIFEST, manifest, self.seen):
                return
        except (OSError, ValueError) as error:
            there = bool(_generation_if(store, MANIFEST, manifest))
            if self.target.folder is not None:
                self.sent = there  # a file that is not there now doesn't come later
                raise
            if there:
                return
            raise StorageError(
                f"{self.target}: the storage did not say whether it wrote the manifest ({error}); "
                f"this save may be committed yet, so what it wrote is left: load it, or save again "
                f"with overwrite=True"
            ) from error
        self.sent = False
        raise CheckpointExistsError(
            f"{self.target}: another save committed here meanwhile; this one is not committed"
        )

    def _replaced(self, store: ts.KvStore) -> list[str]:
        """What the new manifest will no longer name."""
        if self.step is Step.IN_PLACE:
            return [CLAIM]
        return self._all_but(store, MANIFEST, f"{MANIFEST}.__lock", self.root)

    def _all_but(self, store: ts.KvStore, *kept: str) -> list[str]:
        """The keys at the path, but for some; of a local folder also empty folders and locks."""
        folder = self.target.folder
        if folder is None:
            keys = [key.decode() for key in store.list().result()]
        else:
            keys = [str(entry.relative_to(folder)) for entry in folder.rglob("*")]
        return [key for key in keys if not any(f"{key}/".startswith(f"{k}/") for k in kept)]

    def _abort_keys(self) -> None:
        store = open_store(self.target)
        own = self.location.folder
        if self.step is Step.GENERATION and own is not None:
            shutil.rmtree(own, ignore_errors=True)
            own.parent.rmdir()
        elif self.step is Step.GENERATION:
            keys = self._all_but(store)
            self._delete(store, [key for key in keys if key.startswith(f"{self.root}/")])
        elif store.read(CLAIM).result().stamp.generation == self.claimed:
            # While the claim is ours, so is all but a committed manifest and its generation.
            self._delete(store, self._all_but(store, CLAIM, MANIFEST, GENERATIONS))
            store.write(CLAIM, None, if_equal=self.claimed).result()

    def _delete(self, store: ts.KvStore, keys: list[str]) -> None:
        folder = self.target.folder
        if folder is None:
            for future in [store.write(key, None) for key in keys]:
                future.result()
            return
        for entry in sorted((folder / key for key in keys), reverse=True):
            with contextlib.suppress(OSError):
                entry.rmdir() if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def begin(target: Location, *, overwrite: bool, identity: str = "") -> Staging:
    """Look at a path and open a place to write to.

    Args:
        target: where the checkpoint shall be.
        overwrite: whether it may replace another.
        identity: of a save that is gone on with after a kill: on local folders, what an earlier
            one of this identity has written is there again.

    Raises:
        CheckpointExistsError: something is there, and it may not be replaced.
        StorageError: the storage refused.
    """
    with storage_errors(target):
        if target.folder is not None:
            folder = Path(os.path.realpath(target.folder))
            target = replace(target, path=str(folder))
            if _renames(folder):
                return _begin_folder(target, folder, overwrite=overwrite, identity=identity)
        store = open_store(target)
        seen = store.read(MANIFEST).result()
        found = _found(store, committed=seen.state == "value")
        step = decide(str(target), found, overwrite=overwrite, renames=False, exchanges=False)
        if step is Step.GENERATION:
            return _generation(target, seen)
        text = msgspec.json.encode(ClaimText.own(_new_identity()))
        # Neither is there: one absence is like the other.
        absent = seen.stamp.generation
        claimed = _write_if(store, CLAIM, text, absent)
        if not claimed:
            raise CheckpointExistsError(f"{target}: another save has just begun here")
        return Staging(step, target, target, seen=absent, claimed=claimed)


def _write_if(store: ts.KvStore, key: str, content: bytes, seen: bytes) -> bytes:
    """Write to a key if its generation is ``seen``; its new generation, empty if somebody else did.

    No two savers write the same content: it tells whose the key is where the answer was lost.

    Raises:
        StorageError: ``seen`` is empty, which would be no condition.
    """
    if not seen:
        raise StorageError(
            f"the storage does not tell the generation of {key}, so that two saves at once could "
            f"not be told apart; save to another storage"
        )
    written = store.write(key, content, if_equal=seen).result().generation
    return written or _generation_if(store, key, content)


def _generation_if(store: ts.KvStore, key: str, content: bytes) -> bytes:
    """The generation of a key that holds this content; empty if it does not."""
    found = store.read(key).result()
    return found.stamp.generation if found.state == "value" and found.value == content else b""


def _renames(folder: Path) -> bool:
    """Whether a new folder can take the place of this one: not if it is a mount point."""
    return not (folder.is_dir() and (folder.is_mount() or not os.access(folder.parent, os.W_OK)))


def _begin_folder(target: Location, folder: Path, *, overwrite: bool, identity: str) -> Staging:
    found = _found_in(folder)
    step = decide(str(target), found, overwrite=overwrite, renames=True, exchanges=True)
    if step is Step.GENERATION:
        return _generation(target, open_store(target).read(MANIFEST).result())
    make_folder(folder.parent)
    remove_dead(folder, but=identity)
    claimed = reclaim(folder, identity) if identity else None
    if claimed is not None:
        location = Location("file", str(claimed.folder))
        return Staging(step, target, location, claim=claimed, resumed=True)
    claimed = claim(folder, identity or _new_identity())
    try:
        claimed.folder.mkdir()
        if step is Step.EXCHANGE and not _can_exchange(claimed.folder):
            claimed.folder.rmdir()
            claimed.release()
            return _generation(target, open_store(target).read(MANIFEST).result())
    except BaseException:
        shutil.rmtree(claimed.folder, ignore_errors=True)
        claimed.release()
        raise
    return Staging(step, target, Location("file", str(claimed.folder)), claim=claimed)


def _new_identity() -> str:
    return uuid.uuid4().hex[:12]


def _generation(target: Location, seen: ts.KvStore.ReadResult) -> Staging:
    root = f"{GENERATIONS}/{_new_identity()}"
    return Staging(Step.GENERATION, target, target.within(root), root, seen.stamp.generation)


def _found(store: ts.KvStore, *, committed: bool) -> Found:
    if committed:
        return Found.CHECKPOINT
    if store.read(CLAIM).result().state == "value":
        return Found.UNFINISHED
    keys = store.list().result()
    if any(key.startswith(f"{GENERATIONS}/".encode()) for key in keys):
        return Found.UNFINISHED
    return Found.FOREIGN if keys else Found.NOTHING


def _found_in(folder: Path) -> Found:
    if not folder.exists():
        return Found.NOTHING
    if not folder.is_dir():
        return Found.FOREIGN
    if (folder / MANIFEST).exists():
        return Found.CHECKPOINT
    if (folder / CLAIM).exists() or (folder / GENERATIONS).exists():
        return Found.UNFINISHED  # it was filled in place, as a mount point is
    return Found.FOREIGN if any(folder.iterdir()) else Found.NOTHING


def _can_exchange(folder: Path) -> bool:
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


def _remove_tree(folder: Path) -> None:
    """Remove a folder as far as possible, with one descriptor at a time: a save that has failed
    for want of them has no more, and `shutil.rmtree` takes one for each level."""
    for each, _, files in os.walk(folder, topdown=False):
        for name in files:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(each, name))
        with contextlib.suppress(OSError):
            os.rmdir(each)
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def _sync_tree(folder: Path) -> None:
    """fsync a folder and those below it that hold folders.

    TensorStore syncs each file that it writes, and then the folder that the file is in; it makes
    the folders themselves without syncing those above.
    """
    for each, folders, _ in os.walk(folder, topdown=False):
        if folders:
            sync_folder(each)
