"""What a bucket permits, checked before anything is uploaded; and reports of keys that could not be
removed.

A save lists, reads, writes conditionally, and deletes. `look` requests these at once, together with
the manifest that it reads anyway:

1. The manifest is read, and the keys at the path are listed: a claim is among them.
2. A key that is not there is deleted, which changes nothing.
3. A save to a free path claims it by a conditional write, so it needs no trial. While an overwrite
   claims its generation, `check_conditions` tries to write a new key on the condition that it is
   the old manifest. That must be refused: a storage that accepts it ignores conditions, and could
   not separate two concurrent saves. If there is no manifest, a key is created twice, and removed.
4. TensorStore reports a listing that Google's storage refuses as empty, and data would go over the
   keys of the user that it hides. So a key that is known to exist must be listed: the manifest, or
   else a `ListingTrial`. That is written while the place is looked at, listed beside the claim, and
   removed beside the data. It is the claim of a generation that has nothing else: no key of the
   user's has such a name, `find_keys` passes it over, and after a kill ``xckpt gc`` removes it. An
   overwrite writes that generation, and keeps its claim.

So a fresh save makes 2 requests more than without these, of Google's storage 5, an overwrite 3; in
as many round trips.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Final, Self, TypeVar

import tensorstore as ts

from xckpt.core.commit import Found, Place, decide
from xckpt.core.manifest.own_keys import CLAIM, GENERATIONS, MANIFEST
from xckpt.core.text.shown import readable_bytes
from xckpt.errors import StorageError
from xckpt.storage.commit.conditional import KeyClaim
from xckpt.storage.commit.folder import new_identity
from xckpt.storage.location import Answer, Location, Writing, answer
from xckpt.storage.refusals import is_permission, refusal, said_of

logger: Final = logging.getLogger("xckpt")

T = TypeVar("T")

_BEGUN: Final = re.compile(rf"{re.escape(GENERATIONS)}/[^/]+/{re.escape(CLAIM)}")
"""The claim of a generation, in which there may be nothing else."""
_PERMISSIONS = {
    "read": "s3:GetObject; storage.objects.get",
    "list": "s3:ListBucket; storage.objects.list",
    "delete": "s3:DeleteObject; storage.objects.delete",
    "write": "s3:PutObject; storage.objects.create",
}


def look(
    store: ts.KvStore, target: Location, *, overwrite: bool
) -> tuple[ts.KvStore.ReadResult, list[str]]:
    """What is at a place in a bucket: the manifest, and the keys.

    Raises:
        CheckpointExistsError: a checkpoint, which may not be replaced; nothing waits for the keys.
        StorageError: the bucket is not there, or these credentials may not read, list or delete.
    """
    reading = store.read(MANIFEST)
    listing = store.list()
    deleting = store.write(f"xckpt.trial-{new_identity()}", None)
    seen = _permitted("read", reading, target)
    if seen.state == "value":
        decide(target, Found.CHECKPOINT, Place.KEYS, overwrite=overwrite)
    keys = [key.decode() for key in _permitted("list", listing, target)]
    _permitted("delete", deleting, target)
    if target.driver == "gcs" and seen.state == "value" and MANIFEST not in keys:
        raise _may_not("list", target)
    return seen, keys


def found_at(
    store: ts.KvStore, target: Location, *, overwrite: bool
) -> tuple[ts.KvStore.ReadResult, Found]:
    """The manifest at a place among keys, and what is there.

    Raises:
        CheckpointExistsError, StorageError: see `look`.
    """
    keys: list[str] | None = None
    if target.bucket:
        seen, keys = look(store, target, overwrite=overwrite)
        claimed = CLAIM in keys
    else:
        seen = answer(store.read(MANIFEST), target)
        claimed = answer(store.read(CLAIM), target).state == "value"
    return seen, find_keys(store, target, keys, committed=seen.state == "value", claimed=claimed)


def find_keys(
    store: ts.KvStore, target: Location, keys: list[str] | None, *, committed: bool, claimed: bool
) -> Found:
    """What is at a path; keys that are None are listed if there is neither manifest nor claim."""
    if committed:
        return Found.CHECKPOINT
    if claimed:
        return Found.UNFINISHED
    if keys is None:
        keys = [key.decode() for key in answer(store.list(), target)]
    # An empty key is the marker of a folder that a console has made.
    keys = [key for key in keys if key and not _BEGUN.fullmatch(key)]
    if any(key.startswith(f"{GENERATIONS}/") for key in keys):
        return Found.UNFINISHED
    return Found.FOREIGN if keys else Found.NOTHING


class ListingTrial:
    """A key that shows whether Google's storage lists: a refusal looks like an empty list.

    Elsewhere nothing is asked. Used as a context it is removed when the block ends, unless it is
    `kept`; `wait` waits for that, and so does a block that fails.

    Args:
        store: at the target.
        target: for errors.
    """

    def __init__(self, store: ts.KvStore, target: Location) -> None:
        self._store, self._target = store, target
        self.identity: Final = new_identity()
        """Of the generation."""
        self._claim = KeyClaim.of(f"{GENERATIONS}/{self.identity}/{CLAIM}", self.identity)
        self._listing: ts.Future[list[bytes]] | None = None
        self._asked: Writing | None = None
        """Its write, and later its deletion."""
        if target.driver == "gcs":
            self._asked = store.write(self._claim.key, self._claim.text)

    def ask(self) -> None:
        """Begin to list it.

        Raises:
            StorageError: it could not be written.
        """
        if self._asked is not None:
            _permitted("write", self._asked, self._target)
            only = ts.KvStore.KeyRange(self._claim.key, f"{self._claim.key}\0")
            self._listing = self._store.list(only)

    def check(self, claim: KeyClaim) -> None:
        """Refuse a bucket that does not list it.

        Args:
            claim: of the save, which goes again then.

        Raises:
            StorageError: these credentials may not list.
        """
        if self._listing is not None and not _permitted("list", self._listing, self._target):
            claim.release(self._store, self._target)
            raise _may_not("list", self._target)

    def kept(self) -> tuple[KeyClaim, Writing | None]:
        """The claim, for a save that writes that generation, and its write if that has begun."""
        asked, self._asked = self._asked, None
        return self._claim, asked

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *failure: object) -> None:
        if self._asked is not None:
            with contextlib.suppress(Exception):
                answer(self._asked, self._target)  # else it might come after its deletion
            self._asked = self._store.write(self._claim.key, None)
            if kind is not None:
                self.wait()

    def wait(self) -> None:
        """Wait until it is gone; the log says if that fails."""
        if self._asked is not None:
            asked, self._asked = self._asked, None
            try:
                answer(asked, self._target)
            except Exception as error:  # whatever it is, the save does not depend on it
                note_left(self._target, {self._claim.key: 0}, error, failed=False)


def check_conditions(
    store: ts.KvStore, target: Location, key: str, seen: ts.KvStore.ReadResult
) -> None:
    """Check that a bucket refuses to write a new key on a condition that does not hold.

    Args:
        store: at the target.
        target: for errors.
        key: which key; it does not exist before or afterwards.
        seen: what was read at another key.

    Raises:
        StorageError: these credentials may not write, or the bucket knows or keeps no conditions.
    """
    other, made = seen.stamp.generation, False
    if seen.state != "value":
        # The condition is that the key does not exist: it holds the first time.
        made = bool(_permitted("write", store.write(key, b"", if_equal=other), target).generation)
    kept = not _permitted("write", store.write(key, b"", if_equal=other), target).generation
    if made or not kept:
        answer(store.write(key, None), target)
    if not kept:
        raise StorageError(
            f"{target}: the storage does not keep the conditions of a write (If-Match), so that "
            f"two saves at once could not be distinguished; save to another storage"
        )


def _permitted(what: str, asked: Answer[T], target: Location) -> T:
    try:
        return answer(asked, target)
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, StorageError):
            raise
        refused = refusal(str(target), error)
        if is_permission(error):
            refused = _may_not(what, target)
        elif what == "list" and str(error).startswith("NOT_FOUND"):
            refused = StorageError(
                f"{target}: there is no such bucket: check its name, or create it"
            )
        raise refused from error


def _may_not(what: str, target: Location) -> StorageError:
    return StorageError(
        f"{target}: these credentials may not {what} in the bucket, which a save has to "
        f"({_PERMISSIONS[what]}); nothing was written: have that permitted"
    )


def note_left(target: Location, left: Mapping[str, int], error: Exception, *, failed: bool) -> None:
    """Report keys that could not be removed: in the log, and in the error of a failed save.

    Args:
        target: of the save.
        left: key -> bytes as far as they are known.
        error: why.
        failed: whether the error of the save is being handled now.
    """
    keys = list(left)
    size = sum(left.values())
    about = f", {readable_bytes(size)}" if size else ""
    first = f", the first of them {target.child(keys[0])}" if keys else ""
    why = said_of(str(target), error)
    text = (
        f"{target}: up to {len(keys):,} objects{about} that this save wrote or replaced could not "
        f"be removed{first}: {why}"
    )
    logger.warning(text)
    handled = sys.exception() if failed else None
    while handled is not None and handled is error:
        handled = handled.__context__
    if handled is not None:
        handled.add_note(text)


def check_listed(keys: Iterable[bytes], target: Location) -> None:
    """Refuse a listing that lacks the manifest: with it the data would be gone from sight."""
    if MANIFEST.encode() not in keys:
        raise StorageError(
            f"{target}: the bucket does not list {MANIFEST}, which is there, so nothing was "
            f"deleted: these credentials may not list (s3:ListBucket; storage.objects.list), or "
            f"its listings are late: have that permitted, or try again"
        )
