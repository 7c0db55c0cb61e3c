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
4. TensorStore reports a listing that Google's storage refuses as empty. So a key that is known to
   exist must be in it: the manifest, or else the claim, once it is written (`check_listing`). That
   is a round trip more. It cannot run beside the data, which would go over keys of the user that a
   refused listing hides; and a key written at first for nothing else takes two requests more, also
   where the save is then refused, and is left over after a kill.

So a fresh save makes 2 requests more than without these, an overwrite 3; but for Google's storage
in as many round trips.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TypeVar

import tensorstore as ts

from xckpt.core.commit import Found, Place, decide
from xckpt.core.manifest.own_keys import CLAIM, GENERATIONS, MANIFEST
from xckpt.core.text.shown import readable_bytes
from xckpt.errors import StorageError, XckptError
from xckpt.storage.commit.folder import new_identity
from xckpt.storage.location import Answer, Location, answer
from xckpt.storage.refusals import is_permission, refusal

logger = logging.getLogger("xckpt")

T = TypeVar("T")

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
    if any(key.startswith(f"{GENERATIONS}/") for key in keys):
        return Found.UNFINISHED
    return Found.FOREIGN if keys else Found.NOTHING


def check_listing(store: ts.KvStore, target: Location, claimed: bytes) -> None:
    """Check that a bucket lists the claim just written: a refusal looks like an empty list.

    Args:
        store: at the target.
        target: for errors.
        claimed: the claim's generation; it is removed if it is not listed.

    Raises:
        StorageError: these credentials may not list.
    """
    if target.driver == "gcs":
        only = ts.KvStore.KeyRange(CLAIM, f"{CLAIM}\0")
        if not _permitted("list", store.list(only), target):
            answer(store.write(CLAIM, None, if_equal=claimed), target)
            raise _may_not("list", target)


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
    why = error if isinstance(error, XckptError) else refusal(str(target), _plain(error))
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


def _plain(error: Exception) -> OSError | ValueError | RuntimeError:
    known = isinstance(error, (OSError, ValueError, RuntimeError))
    return error if known else RuntimeError(f"{type(error).__name__}: {error}")
