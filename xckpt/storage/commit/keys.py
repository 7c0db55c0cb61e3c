"""A save that is staged among keys and committed by a conditional write of the manifest.

Object stores and ``memory://`` rename nothing, and a mount point cannot be renamed.

1. At a free path the save creates `CLAIM` and writes there. At a checkpoint it writes to
   ``.generations/ID`` beside the old data; in a bucket that has a claim too. There the claim stays
   until the data goes: a request may be repeated and come late, and no other claim may succeed.
2. `KeyStaging.publish` writes the manifest on the condition that it is still what was seen at the
   beginning. The keys to delete are listed before: any save that was writing them began before this
   commit and cannot commit after it. Only keys of the old manifest and of generations are deleted:
   others are the user's. A save that is killed then leaves the old manifest in `REPLACED`.
3. If the storage does not say whether it wrote the manifest (`xckpt.storage.commit.conditional`)
   nothing that the manifest names is removed: it may still be written.
"""

from __future__ import annotations

import contextlib
import posixpath
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Final

import tensorstore as ts

from xckpt.core.commit import Place, Step, decide
from xckpt.core.manifest.entries import Manifest
from xckpt.core.manifest.own_keys import (
    BY_SHAPE,
    CLAIM,
    GENERATIONS,
    MANIFEST,
    OwnKeys,
    object_sizes,
    own_among,
)
from xckpt.core.manifest.packs import PACKS
from xckpt.errors import CheckpointExistsError, StorageError
from xckpt.storage.commit.carry import check_manifest, names_below, own_keys
from xckpt.storage.commit.conditional import (
    KeyClaim,
    came_first,
    delete_or_unlink,
    documents_of,
    empty_stale_lock,
    is_kept,
    is_written,
    taken_for_dead,
    write_if,
)
from xckpt.storage.commit.file_system import held_in, hold, let_go
from xckpt.storage.commit.folder import new_identity
from xckpt.storage.commit.probe import ListingTrial, check_conditions, found_at, note_left
from xckpt.storage.location import Location, Writing, answer, open_store, storage_errors
from xckpt.storage.refusals import refusal

REPLACED: Final = "xckpt.replaced"
"""Key in a generation: a copy of the manifest whose data lies outside of all generations."""


@dataclass
class KeyStaging:
    """A save in progress among keys."""

    step: Step
    target: Location
    """The checkpoint's place."""
    location: Location
    """Where data is written: the root group goes here."""
    seen: bytes
    """Generation of the manifest at the beginning, or of its absence."""
    old: bytes | None = None
    """The manifest at the beginning; None if there was none."""
    root: str = ""
    """`location` relative to the manifest; goes into the manifest."""
    claim: KeyClaim | None = None
    """Of this save; None in a local generation."""
    committed: bool = False
    sent: bool = False
    """Whether the manifest was written, or may have been: the store did not deny it."""
    planned: Manifest | None = None
    """What the checkpoint will hold, if that is known."""
    begun: int | None = None
    """How many of the planned objects may have been written, in their order; None for all."""
    generation: int = -1
    """Descriptor of a local generation, held: no call removes it while this process lives."""
    listing: ts.Future[list[bytes]] | None = None
    """The keys of a bucket, if they were asked for before the commit."""
    unlisted: Exception | None = None
    """Why what this save has left is not known: packs are named by what is in them."""
    noting: Writing | None = None
    """The write of a copy of the old manifest; see `_note_replaced`."""
    asking: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Looks at the claim, from `prepare` on."""
    trial: ListingTrial | None = None
    """What showed whether the bucket lists, while it is being removed."""

    def prepare(self) -> None:
        """Ask for what `publish` needs to know, and keep that young until then."""
        with storage_errors(self.target):
            store = open_store(self.target)
            if self.target.bucket and self.step is Step.GENERATION:
                self.listing = store.list()
                self._note(store)
            if self.claim is not None and self.target.folder is None:
                self.asking.enter_context(self.claim.asked(store))

    def publish(self, manifest: bytes) -> None:
        """Make the checkpoint visible; afterwards it is committed.

        Raises:
            CheckpointExistsError: another save committed to the path meanwhile.
            StorageError: the storage refused, or meanwhile what was written was collected, or what
                it was to replace was deleted.
        """
        with storage_errors(self.target):
            self.asking.close()
            _sync(self)
            store = open_store(self.target)
            replaced = [*self.replaced(store), *self._note_replaced(store)]
            if self.target.folder is not None:
                empty_stale_lock(self.target.folder, MANIFEST)
            if self.claim is not None and self.target.folder is None:
                self.claim.require(store, self.target, self.seen)
            self._write_manifest(store, manifest)
            self.committed = self.sent = is_kept(self.claim, store, self.target, manifest, self.old)
            if not self.committed:
                raise taken_for_dead(self.target)
            self._close()
            self.delete(store, replaced)

    def _write_manifest(self, store: ts.KvStore, manifest: bytes) -> None:
        if self.claim is not None and self.old is None and self.target.bucket:
            self.claim.ask(store)  # on the way together: no round trip more
        self.sent = True
        try:
            if write_if(store, MANIFEST, manifest, self.seen, self.target):
                return
        except (OSError, ValueError, RuntimeError) as error:
            if isinstance(error, NotImplementedError):
                self.sent = False
                raise
            self.target.access.clean_up()
            written = is_written(self.target, manifest)
            if self.target.folder is not None:
                self.sent = written  # a file that is not there now doesn't come later
                raise
            if written:
                return
            raise StorageError(
                f"{refusal(str(self.target), error)}; whether the manifest was written is not "
                f"known: this save may still be committed, so what it wrote stays: load it, or "
                f"save again with overwrite=True"
            ) from error
        self.sent = False
        raise came_first(store, self.target, self.old)

    @cached_property
    def own(self) -> OwnKeys:
        """The keys that the old manifest implies."""
        return own_keys(self.old)

    def replaced(self, store: ts.KvStore) -> list[str]:
        """What the new manifest will no longer name."""
        if self.step is Step.IN_PLACE:
            return [] if self.target.bucket else [CLAIM]
        keys = _keys_of(self, store)
        others = (key for key in keys if not key.startswith(f"{self.root}/"))
        notes = [store.read(key) for key in others if key.endswith(f"/{REPLACED}")]
        kinds = [self.own, *(own_keys(answer(note, self.target).value) for note in notes)]
        if CLAIM in keys and "" not in self.own.groups and not notes:
            kinds.append(BY_SHAPE)  # a save in place was killed, and has left no manifest
        kept = MANIFEST, f"{MANIFEST}.__lock", self.root
        return own_among(keys, kinds, *kept, read=documents_of(store, self.target))

    def _note(self, store: ts.KvStore) -> None:
        """Begin to copy the old manifest, if a later save needs it to clean up after a kill."""
        if self.noting is None and self.old is not None and "" in self.own.groups:
            self.noting = store.write(f"{self.root}/{REPLACED}", self.old)

    def _note_replaced(self, store: ts.KvStore) -> list[str]:
        """Have that copy written; its key."""
        self._note(store)
        if self.noting is None:
            return []
        answer(self.noting, self.target)
        return [f"{self.root}/{REPLACED}"]

    def abort(self) -> None:
        """Remove what was written, as far as possible; what is readable stays as it is."""
        self._close()
        if self.committed or self.sent:
            return
        self.target.access.clean_up()
        self.listing = None  # what was written since is not in it
        if self.noting is not None:
            with contextlib.suppress(Exception):
                answer(self.noting, self.target)
        try:
            self._abort()
        except Exception as error:  # whatever it is, another one is under way
            note_left(self.target, _written(self), error, failed=True)

    def _close(self) -> None:
        self.asking.close()
        if self.trial is not None:
            self.trial.wait()
        let_go(self.generation)
        self.generation = -1

    def _abort(self) -> None:
        store = open_store(self.target)
        own = self.location.folder
        if self.step is Step.GENERATION and own is not None:
            shutil.rmtree(own, ignore_errors=True)
            delete_or_unlink(store, self.target, [GENERATIONS])  # unless another's lies there
        elif self.step is Step.GENERATION:
            listed = [key for key in self._listed(store) if key.startswith(f"{self.root}/")]
            self.delete(store, listed, _written(self))
        elif self.claim is not None:
            # All keys that look like ours are ours, except a committed manifest and its generation.
            listed = own_among(self._listed(store), [BY_SHAPE], CLAIM, MANIFEST, GENERATIONS)
            if self.claim.is_held(store, self.target):
                if not self.delete(store, listed, _written(self)) and self.unlisted is None:
                    self.claim.release(store, self.target)
            elif listed:  # it was written after another cleared the path: the next save removes it
                write_if(store, CLAIM, self.claim.text, self.seen, self.target)
        if self.unlisted is not None:
            packs = posixpath.join(self.root, PACKS)
            note_left(self.target, {packs: 0}, self.unlisted, failed=True)

    def _listed(self, store: ts.KvStore) -> list[str]:
        """The keys at the path, as far as the store lists them: written keys are known anyway."""
        try:
            return _keys_of(self, store)
        except Exception as error:
            if self.target.folder is not None:
                raise
            if self.planned is None or self.planned.pack_bytes:
                self.unlisted = error
            return []

    def delete(
        self, store: ts.KvStore, keys: list[str], written: Mapping[str, int] | None = None
    ) -> bool:
        """Delete keys, and those that may have been written; marks of what else there is go last.

        Returns:
            Whether something is left, which the log then says.
        """
        keys = list(dict.fromkeys([*keys, *(written or ())]))
        marks = [key for key in keys if key.endswith(f"/{REPLACED}")]
        marks = marks or [key for key in keys if key == CLAIM]
        others = [key for key in keys if key not in marks]
        left = delete_or_unlink(store, self.target, others, self.claim if self.committed else None)
        if self.target.folder is not None:
            marks += [posixpath.dirname(mark) for mark in marks if "/" in mark]
        left = left or delete_or_unlink(store, self.target, marks)
        if left:
            sizes = {key: (written or {}).get(key, 0) for key in left}
            note_left(self.target, sizes, next(iter(left.values())), failed=not self.committed)
        return bool(left)


def _keys_of(staging: KeyStaging, store: ts.KvStore) -> list[str]:
    """The keys at the path; of a local folder its folders too, but no save's that is under way."""
    if (folder := staging.target.folder) is not None:
        from xckpt.storage.commit.collect import root_of  # few saves need it

        held = {f"{GENERATIONS}/{name}" for name in held_in(folder / GENERATIONS)}
        held.discard(root_of(staging.old or b"") or "")  # its save is committed, if not at its end
        return [key for key in names_below(folder) if not key.startswith(tuple(held))]
    listing, staging.listing = staging.listing, None
    return [key.decode() for key in answer(listing or store.list(), staging.target)]


def _written(staging: KeyStaging) -> dict[str, int]:
    """Key -> bytes of what this save may have written to a bucket, by its plan."""
    if not staging.target.bucket or staging.planned is None:
        return {}
    written = dict(islice(object_sizes(staging.planned), staging.begun))
    if staging.root:
        written |= {CLAIM: 0, **({} if staging.noting is None else {REPLACED: 0})}
    return {posixpath.join(staging.root, key): size for key, size in written.items()}


def _sync(staging: KeyStaging) -> None:
    """Force what was staged in a local folder to disk."""
    if (folder := staging.location.folder) is not None:
        from xckpt.storage.commit.batch import sync_beside

        sync_beside(folder, staging.generation, together=staging.location.unsynced)


def begin_keys(target: Location, planned: Manifest | None, *, overwrite: bool) -> KeyStaging:
    """Look at a path and open a place to write to among its keys; see `staging.begin`."""
    store = open_store(target)
    with ListingTrial(store, target) as trial:
        seen, found = found_at(store, target, overwrite=overwrite)
        step, absent = decide(target, found, Place.KEYS, overwrite=overwrite), seen.stamp.generation
        if step is Step.GENERATION:
            return _claim_beside(_beside(target, seen, planned, trial.identity), store, seen, trial)
        trial.ask()
        claim = KeyClaim.of(CLAIM, new_identity())
        # Neither manifest nor claim exists, so both have the same generation: that of absence.
        if not claim.take(store, target, absent):
            raise CheckpointExistsError(f"{target}: another save has just begun here: wait for it")
        trial.check(claim)
    if not target.bucket and answer(store.read(MANIFEST), target).state == "value":
        claim.release(store, target)  # another save has committed, and its claim is gone
        return begin_keys(target, planned, overwrite=overwrite)
    return KeyStaging(step, target, target, absent, claim=claim, planned=planned, trial=trial)


def _claim_beside(
    staging: KeyStaging, store: ts.KvStore, seen: ts.KvStore.ReadResult, trial: ListingTrial
) -> KeyStaging:
    """Claim a generation, while the bucket shows that it keeps conditions."""
    target = staging.target
    if target.folder is not None:
        return staging
    staging.claim, asked = trial.kept()
    with staging.claim.written(store, target, asked):
        if target.bucket:
            check_conditions(store, target, f"{staging.root}/xckpt.trial-condition", seen)
    return staging


def stage_beside(target: Location, planned: Manifest | None, *, in_batch: bool) -> KeyStaging:
    """Stage beside the data at a local path; all files may be synced together."""
    seen = answer(open_store(target).read(MANIFEST), target)
    staging = _beside(target, seen, planned, new_identity())
    if in_batch:
        staging.location = replace(staging.location, unsynced=True)
    return staging


def _beside(
    target: Location, seen: ts.KvStore.ReadResult, planned: Manifest | None, identity: str
) -> KeyStaging:
    root, absent = f"{GENERATIONS}/{identity}", seen.state != "value"
    check_manifest(None if absent else seen.value, target)
    about = Step.GENERATION, target, target.within(root), seen.stamp.generation
    staging = KeyStaging(*about, None if absent else seen.value, root, planned=planned)
    if target.folder is not None:
        staging.generation = hold(target.folder / root)
    return staging
