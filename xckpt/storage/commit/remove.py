"""Removing a checkpoint: a part of it is never readable as a checkpoint.

1. The claim of a save is written, so that a path whose removal was killed is known as unfinished: a
   save with ``overwrite=True`` clears it. On a full disk it is written after the next step. It
   replaces the one that was seen: of two deletions one goes on.
2. The manifest is deleted, if the rest may be deleted, on the condition that it is still the one
   that was seen. From here on there is no checkpoint; readers get an error that says so.
3. Everything that this manifest implies is deleted, a few files at a time, no faster than a `Pace`
   says. Deletions that the storage refuses are retried, at growing intervals. Among keys it ends
   when the claim is another's: an overwrite has deleted the rest, and the path may be free again.
   An overwrite may be deleting what it has replaced: its claim goes first, and what it has sent is
   waited for, because a save to the free path may write the same keys. An overwrite may take the
   place of a local folder: in 1 to 3 the folder is held open, whatever its name is by then.
4. Then the claim goes, and the folder if it is empty. Other files there are the user's and stay.
"""

from __future__ import annotations

import contextlib
import posixpath
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

import tensorstore as ts

from xckpt.core.commit import Step
from xckpt.core.manifest.codec import MAX_BYTES
from xckpt.core.manifest.own_keys import CLAIM, MANIFEST, is_manifest, with_folders
from xckpt.engine.ranks.alive import WORK
from xckpt.errors import CheckpointReplacedError, NotACheckpointError, StorageError
from xckpt.storage.budget import ProgressCounter, Watcher
from xckpt.storage.chunks.file_checks import file_problem
from xckpt.storage.commit import conditional
from xckpt.storage.commit.collect import root_of
from xckpt.storage.commit.conditional import KeyClaim, delete_keys, let_arrive
from xckpt.storage.commit.file_system import (
    check_deletable,
    delete_entries,
    is_at,
    opened_folder,
    path_of,
)
from xckpt.storage.commit.folder import new_identity, sync_folder
from xckpt.storage.commit.keys import REPLACED, KeyStaging
from xckpt.storage.commit.probe import check_listed
from xckpt.storage.location import Location, answer, open_store, storage_errors
from xckpt.storage.refusals import said_of

AT_ONCE: Final = 32
"""Files or keys that are deleted between two looks at the clock."""
UNPACED: Final = conditional.AT_ONCE
"""Keys of a bucket that are deleted at a time, where nothing says how fast."""
DELAYS: Final = (0.5, 2.0, 8.0)
"""Seconds before each further try of what could not be deleted."""


class Pace:
    """How fast files are deleted, so that training and saves do not wait for it.

    Args:
        per_second: most files or keys a second; None for as many as go.

    Example:
        >>> pace = Pace(1.0)
        >>> pace.hurry()
        >>> pace.after(1000)
    """

    def __init__(self, per_second: float | None = None) -> None:
        self._per_second = per_second
        self._next = 0.0
        self._hurried = False
        # No event: a handler of signals that deletes, or saves, would wait for its lock for ever.
        self._wake: SimpleQueue[None] = SimpleQueue()

    @property
    def at_once(self) -> int:
        """Keys of a bucket to delete between two calls of `after`."""
        return UNPACED if self._per_second is None else AT_ONCE

    def after(self, count: int) -> None:
        """Wait for as long as the deletion of some files was too quick."""
        if self._per_second is not None:
            now = time.monotonic()
            self._next = max(self._next, now) + count / self._per_second
            self.rest(self._next - now)

    def rest(self, seconds: float) -> None:
        """Wait, unless a caller waits for the end."""
        until = time.monotonic() + seconds
        while not self._hurried and (left := until - time.monotonic()) > 0:
            with contextlib.suppress(Empty):
                self._wake.get(timeout=left)

    def hurry(self) -> None:
        """Stop pausing: a caller waits for the end."""
        self._hurried = True
        self._wake.put(None)

    def calm(self) -> None:
        """Pause again: no caller waits for the end any more."""
        self._hurried = False


@dataclass(slots=True)
class Hidden:
    """A former checkpoint that is being deleted."""

    target: Location
    keys: list[str]
    """Its files, and in a local folder its folders; without those that go last."""
    last: list[str]
    """The marks that go last, before the claim."""
    claim: KeyClaim
    others: list[str] = field(default_factory=list[str])
    """Claims of other overwrites, which live or were cut off: they go first."""

    def sweep(self, pace: Pace, progress: Watcher = None) -> None:
        """Delete it.

        Args:
            pace: how fast.
            progress: called with the files that have gone.

        Raises:
            StorageError: the storage refused again and again; says what is left.
        """
        counter = ProgressCounter(len(self.keys), progress, "files")
        access = self.target.access
        with storage_errors(self.target):
            for delay in (*DELAYS, None):
                try:
                    error = self._sweep(pace, counter)
                except Exception as refused:  # to look at the claim, or to delete it
                    error = refused
                if error is None:
                    break
                if delay is None or time.monotonic() + delay >= access.until:
                    why, left = said_of(str(self.target), error), [*self.keys, *self.last, CLAIM]
                    raise StorageError(
                        f"{self.target}: files of a checkpoint that was deleted are left, up to "
                        f"{len(left):,}, the first of them {left[0]}: {why}"
                    ) from error
                pace.rest(delay)

    def _sweep(self, pace: Pace, counter: ProgressCounter) -> Exception | None:
        """Try it once; returns the first refusal, if any."""
        store, folder = open_store(self.target), self.target.folder
        if self.others and folder is None:
            for error in delete_keys(store, self.others, self.target).values():
                return error
            let_arrive()
            self.others = []
            if named := root_of(answer(store.read(MANIFEST), self.target).value):  # of a new save
                self.keys = [key for key in self.keys if not key.startswith(f"{named}/")]
        left: dict[str, Exception] = {}
        at_once = AT_ONCE if folder is not None else pace.at_once
        with opened_folder(folder) as opened:
            for first in range(0, len(self.keys), at_once):
                if (folder is None or not first) and not self._is_here(store):
                    self.keys = self.last = []
                    _remove_empty(folder)
                    return None
                some = self.keys[first : first + at_once]
                refused = _delete(store, opened, some, self.target)
                left |= refused
                counter.add(len(some) - len(refused))
                pace.after(len(some))
                WORK.get().moved = time.monotonic()
            self.keys = with_folders(left, self.keys)
            if not left:
                left = _delete(store, opened, self.last, self.target)
        if not left:
            self._release(store, folder)
            _remove_empty(folder)
        return next(iter(left.values()), None)

    def _release(self, store: ts.KvStore, folder: Path | None) -> None:
        try:
            self.claim.release(store, self.target)
        except (OSError, ValueError, RuntimeError):
            if folder is None or not self.claim.is_held(store, self.target):
                raise
            (folder / CLAIM).unlink()
            (folder / f"{CLAIM}.__lock").unlink(missing_ok=True)

    def _is_here(self, store: ts.KvStore) -> bool:
        """Whether the place is still this call's; a full disk may have had no room for a claim."""
        folder = self.target.folder
        if folder is None or self.claim.is_taken:
            return self.claim.is_held(store, self.target)
        return not any((folder / key).exists() for key in (MANIFEST, CLAIM))


def hide_checkpoint(target: Location, chosen: Callable[[bytes], bool] | None = None) -> Hidden:
    """Hide the checkpoint at a place: delete its manifest and nothing else.

    Args:
        target: where it is.
        chosen: says by the manifest whether it is the one that is to go.

    Raises:
        NotACheckpointError: no committed checkpoint is there.
        CheckpointReplacedError: another one is there by now.
        StorageError: the storage refused, or another call replaces or removes it just now.
    """
    with storage_errors(target), opened_folder(target.folder) as opened:
        held = target if opened is None else replace(target, path=path_of(opened, target.path))
        for key in (MANIFEST, CLAIM):
            if problem := file_problem(held, key, MAX_BYTES):
                raise StorageError(
                    f"{target}: {key} is {problem}, so nothing was deleted: remove the folder "
                    f"yourself, if nothing in it is wanted"
                )
        try:
            return _hidden(target, held, chosen)
        except StorageError as error:
            if opened is None:
                raise
            if is_at(opened, Path(target.path)):
                raise type(error)(str(error).replace(held.path, target.path)) from error
            raise _replaced(target) from error


def _replaced(target: Location) -> CheckpointReplacedError:
    why = "another save has replaced this checkpoint just now, or a deletion has removed it"
    return CheckpointReplacedError(f"{target}: {why}: what is there stays")


def _hidden(target: Location, held: Location, chosen: Callable[[bytes], bool] | None) -> Hidden:
    with storage_errors(target):
        store = open_store(held)
        listing = store.list() if target.bucket else None
        claiming, seen = store.read(CLAIM), answer(store.read(MANIFEST), target)
        if seen.state == "value" and not is_manifest(seen.value):
            why = f"{MANIFEST} there is no manifest of xckpt, so it may be yours"
            raise StorageError(f"{target}: {why}; nothing was deleted: remove it if it is unwanted")
        if seen.state != "value":
            why = "holds no committed checkpoint, so nothing was deleted"
            raise NotACheckpointError(f"{target} {why}")
        if chosen is not None and not chosen(seen.value):
            raise _replaced(target)
        generation = seen.stamp.generation
        about = Step.GENERATION, held, held, generation
        staging = KeyStaging(*about, seen.value, listing=listing)
        # Listed before: keys that others begin to write afterwards must not be touched.
        keys = sorted(staging.replaced(store), reverse=True)  # files before their folders
        check_deletable(held.folder, [*keys, MANIFEST])
        if listing is not None:
            check_listed(answer(listing, target), target)
        claim, before = KeyClaim.of(CLAIM, new_identity()), answer(claiming, target)
        claimed = _claim(store, claim, before.stamp.generation, held)
        withdrawn = _withdraw(store, held, generation, claimed=claimed)
        # If none is there, the answer was lost, or the deletion withdrew it whose claim this took.
        if not withdrawn and answer(store.read(MANIFEST), target).state == "value":
            claim.release(store, target)
            raise _replaced(target)
        if not claimed:
            _claim(store, claim, before.stamp.generation, held)  # there is room now
        if held.folder is not None:
            _make_lasting(held.folder, seen.value, partial(claim.release, store, target))
    marks = [key for key in keys if key.endswith(f"/{REPLACED}")]
    groups = {posixpath.dirname(mark) for mark in marks}
    last = [*marks, *sorted(groups, reverse=True)]
    settled = {root_of(seen.value)} - groups  # its overwrite has deleted what it replaced
    others = [k for k in keys if k.endswith(f"/{CLAIM}") and posixpath.dirname(k) not in settled]
    own = [key for key in keys if key not in {*last, *others, CLAIM}]
    return Hidden(target, own, last, claim, others)


def _make_lasting(folder: Path, manifest: bytes, release: Callable[[], object]) -> None:
    """Have a manifest's deletion survive a power cut; if it may not, show the checkpoint again."""
    try:
        sync_folder(folder)
    except OSError:
        aside = folder / f"{MANIFEST}.__lock"
        with contextlib.suppress(OSError):
            aside.write_bytes(manifest)
            aside.rename(folder / MANIFEST)
        release()
        raise


def _claim(store: ts.KvStore, claim: KeyClaim, seen: bytes, target: Location) -> bool:
    """Write the claim, unless a full disk has no room for it: deleting makes room."""
    try:
        taken = claim.take(store, target, seen)
    except (OSError, ValueError, RuntimeError):
        if target.folder is None:
            raise
        (target.folder / f"{CLAIM}.__lock").unlink(missing_ok=True)
        return False
    if not taken:
        raise StorageError(
            f"{target}: another save, deletion or collection is at work here just now, so nothing "
            f"was deleted: try again"
        )
    return True


def _withdraw(store: ts.KvStore, target: Location, generation: bytes, *, claimed: bool) -> bool:
    """Delete the manifest if it is still the one that was seen; returns whether it was."""
    try:
        return bool(answer(store.write(MANIFEST, None, if_equal=generation), target).generation)
    except (OSError, ValueError, RuntimeError):
        # A full disk may have no room for a lock. Nor has it for others to commit without a claim.
        there = target.folder and answer(store.read(MANIFEST), target).stamp.generation
        if target.folder is None or (claimed and there != generation):
            raise
        if there == generation:
            (target.folder / MANIFEST).unlink()
            (target.folder / f"{MANIFEST}.__lock").unlink(missing_ok=True)
        return there == generation


def _remove_empty(folder: Path | None) -> None:
    """Remove a checkpoint's folder, unless the user's files are in it, or another checkpoint."""
    if folder is not None:
        with contextlib.suppress(OSError):
            folder.rmdir()
            sync_folder(folder.parent)


def _delete(
    store: ts.KvStore, folder: int | None, keys: list[str], target: Location
) -> dict[str, Exception]:
    """Delete keys; why some are left. A local folder that is not empty is not left."""
    if target.folder is None:
        return delete_keys(store, keys, target)
    return delete_entries(keys, folder)


def remove_checkpoint(target: Location, progress: Watcher = None) -> None:
    """Delete the checkpoint at a place.

    Args:
        target: where it is.
        progress: called with the files that have gone.

    Raises:
        NotACheckpointError: no committed checkpoint is there.
        StorageError: the storage refused, or another call replaces or removes it just now.
    """
    target.access.start()
    hide_checkpoint(target).sweep(Pace(), progress)
