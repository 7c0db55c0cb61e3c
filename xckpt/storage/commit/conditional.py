"""Conditional writes and claims among keys, and finding out who wrote a key if the answer was lost.

An object store may carry out a request and lose the answer; when it is asked again, the condition
no longer holds. So the key is read then, and its content tells who has won.

To write the local key ``K`` TensorStore locks ``K.__lock``, fills it and renames it to ``K``. A
process killed in between leaves the file, and the next one writes over it without cutting off what
is longer: the key would end in a tail of the dead process's. `empty_stale_lock` prevents that for
the one local key that is replaced, the manifest.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import posixpath
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import tensorstore as ts

from xckpt.core.manifest.own_keys import CLAIM, MANIFEST, Documents
from xckpt.engine.ranks.alive import AwaitedThread
from xckpt.errors import CheckpointExistsError, StorageError
from xckpt.storage.chunks.file_checks import documents_in, stored_content
from xckpt.storage.commit.file_system import delete_entries, opened_folder
from xckpt.storage.commit.folder import ClaimText
from xckpt.storage.location import Location, Reading, Writing, answer

SECONDS: Final = 2.0
"""Age from which on an answer says too little about a claim."""
AGAIN: Final = 1.0
"""Seconds after which a save that waits for its data looks again."""
ON_THE_WAY: Final = 2.0
"""Seconds that requests are waited for whose callers have lost their claim since they looked."""
AT_ONCE: Final = 1000
"""Keys that are deleted between two looks at a claim, and by one request to S3."""
MANY: Final = 16
"""Number of keys from which on S3 is asked to delete them together."""
TRIES: Final = 3
"""How often it is asked again, before it is asked for each: some storages know no such request."""


@dataclass(slots=True)
class KeyClaim:
    """A claim among keys: its owner works on the keys beside it, until another takes it over."""

    key: str
    text: bytes
    """Unique to the claim."""
    _asked: Reading | None = None
    """The last look at it; None if it was written since."""
    _since: float = -math.inf
    """When that was asked, by `time.monotonic`."""
    _taken: bytes = b""
    """Its generation, if `take` wrote it."""

    @classmethod
    def of(cls, key: str, identity: str) -> KeyClaim:
        """A claim of this process, which is not written yet."""
        return cls(key, msgspec.json.encode(ClaimText.own(identity)))

    @contextlib.contextmanager
    def written(
        self, store: ts.KvStore, target: Location, asked: Writing | None = None
    ) -> Iterator[None]:
        """Write it while the block runs, unless that was ``asked``; it goes again if that fails."""
        asked = asked or store.write(self.key, self.text)
        try:
            yield
            answer(asked, target)
        except BaseException:
            with contextlib.suppress(Exception):
                answer(asked, target)
            delete_keys(store, [self.key], target)
            raise

    def take(self, store: ts.KvStore, target: Location, seen: bytes) -> bool:
        """Write it if the generation of its key is ``seen``; False if another came first."""
        since = time.monotonic()
        self._taken = write_if(store, self.key, self.text, seen, target)
        if self._taken:
            self._asked, self._since = None, since
        return bool(self._taken)

    def ask(self, store: ts.KvStore) -> None:
        """Begin to look who has it."""
        self._asked, self._since = store.read(self.key), time.monotonic()

    @contextlib.contextmanager
    def asked(self, store: ts.KvStore) -> Iterator[None]:
        """`ask`; and again and again while a block runs, so that the last look is young then."""
        self.ask(store)
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(AGAIN):
                self.ask(store)

        thread = AwaitedThread(look, "xckpt_claim")
        try:
            with contextlib.suppress(RuntimeError):  # no more threads: it is looked at afterwards
                thread.start()
            yield
        finally:
            ended.set()
            thread.join()

    @property
    def is_taken(self) -> bool:
        """Whether `take` wrote it."""
        return bool(self._taken)

    @property
    def is_known(self) -> bool:
        """Whether the last look at it is young enough."""
        return time.monotonic() - self._since <= SECONDS

    def is_held(self, store: ts.KvStore, target: Location, *, now: bool = True) -> bool:
        """Whether no other has taken it over.

        Args:
            store: at the target.
            target: the checkpoint's place.
            now: look now; else the last look counts if it is young enough.

        Raises:
            StorageError: what was read is no claim at all, so the owner is not known.
        """
        if now or not self.is_known:
            self.ask(store)
        if self._asked is None:
            return True
        read = answer(self._asked, target)
        if read.value != self.text and read.state == "value":
            _require_claim(read.value, self.key, target)
        return read.value == self.text

    def require(self, store: ts.KvStore, target: Location, seen: bytes) -> None:
        """Refuse to commit what a collection (`collect_keys`) has removed.

        Another manifest than that of generation ``seen`` refuses by itself.

        Raises:
            StorageError: the claim was taken over.
        """
        if self.is_held(store, target, now=False):
            return
        if answer(store.read(MANIFEST), target).stamp.generation == seen:
            raise taken_for_dead(target)

    def release(self, store: ts.KvStore, target: Location) -> None:
        """Delete it, if no other has taken it over."""
        there = self._taken or generation_if(store, self.key, self.text, target)
        if there:
            answer(store.write(self.key, None, if_equal=there), target)


def _require_claim(text: bytes, key: str, target: Location) -> None:
    """Refuse to take damaged bytes for the claim of another call."""
    try:
        msgspec.json.decode(text, type=ClaimText)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StorageError(
            f"{target}: the claim {key} is damaged, so whether another call is at work here is not "
            f"known: if none is, save again with overwrite=True, which removes what is left"
        ) from error


def let_arrive() -> None:
    """Wait, having taken a claim over, for what its owner has sent by an earlier look at it."""
    time.sleep(SECONDS + ON_THE_WAY)


def is_kept(
    claim: KeyClaim | None, store: ts.KvStore, target: Location, manifest: bytes, old: bytes | None
) -> bool:
    """Whether what a manifest names was there when it was written; if not, ``old`` is put back.

    A process that removes what was staged first takes the claim over, and then looks at the
    manifest. So a manifest that was written soon after a look at the claim needs no second look.
    """
    if claim is None or target.folder is not None:
        return True
    # Where none was, another may have come and gone; a bucket was asked along with the manifest.
    is_sure = claim.is_known and old is not None
    if is_sure or claim.is_held(store, target, now=not target.bucket):
        return True
    # Where another save or a deletion has replaced it since, it was committed.
    there = generation_if(store, MANIFEST, manifest, target)
    return not (there and answer(store.write(MANIFEST, old, if_equal=there), target).generation)


def taken_for_dead(target: Location) -> StorageError:
    """The error of a save that lost its claim."""
    return StorageError(
        f"{target}: this save was taken for a dead one, and what it wrote was removed: save again, "
        f"with overwrite=True; give xckpt gc a longer time, and look at the clocks"
    )


def came_first(
    store: ts.KvStore, target: Location, old: bytes | None
) -> StorageError | CheckpointExistsError:
    """The error of a save whose manifest was refused: by what is there instead of the ``old``."""
    read = answer(store.read(MANIFEST), target)
    there = read.value if read.state == "value" else None
    if there == old:
        return StorageError(
            f"{target}: the storage refused to write the manifest, though it holds what it held "
            f"when this save began; this one is not committed: save again"
        )
    if there is None:
        return StorageError(
            f"{target}: the checkpoint that this save was to replace was deleted meanwhile; this "
            f"one is not committed: save again"
        )
    return CheckpointExistsError(
        f"{target}: another save committed here meanwhile; this one is not committed"
    )


def write_if(store: ts.KvStore, key: str, content: bytes, seen: bytes, target: Location) -> bytes:
    """Write to a key if its generation is ``seen``.

    No two savers write the same content, so it tells who wrote the key if the answer was lost.

    Returns:
        The key's new generation; empty if another save has written it.

    Raises:
        StorageError: ``seen`` is empty, so there is no condition.
    """
    if not seen:
        raise StorageError(
            f"the storage does not say the generation of {key}, so that two saves at once could "
            f"not be distinguished; save to another storage"
        )
    written = answer(store.write(key, content, if_equal=seen), target).generation
    return written or generation_if(store, key, content, target)


def documents_of(store: ts.KvStore, target: Location, place: str = "") -> Documents:
    """Reads the zarr.json at keys below a place, all at once."""
    if target.folder is not None:
        return documents_in(target.folder / place)
    return lambda keys: [
        answer(asked, target).value for asked in [store.read(f"{place}{key}") for key in keys]
    ]


def is_written(target: Location, manifest: bytes) -> bool:
    """Whether this is the manifest at a place; False if the storage does not say."""
    with contextlib.suppress(Exception):
        return stored_content(target, MANIFEST, len(manifest)) == manifest
    return False


def generation_if(store: ts.KvStore, key: str, content: bytes, target: Location) -> bytes:
    """The generation of a key that holds this content; empty if it does not."""
    read = answer(store.read(key), target)
    return read.stamp.generation if read.state == "value" and read.value == content else b""


def delete_keys(
    store: ts.KvStore, keys: Sequence[str], target: Location, claim: KeyClaim | None = None
) -> dict[str, Exception]:
    """Delete keys; why some are left.

    All at once; with a ``claim`` some at a time, as long as it is held: others may have deleted the
    checkpoint, and a save may write the same keys anew.
    """
    left: dict[str, Exception] = {}
    at_once = len(keys) if claim is None else AT_ONCE
    for first in range(0, len(keys), at_once or 1):
        if claim is not None and (lost := _lost(claim, store, target, now=bool(first))):
            return left | dict.fromkeys(keys[first:], lost)
        some = keys[first : first + at_once]
        claims = [key for key in some if posixpath.basename(key) == CLAIM]
        # Not with the others: the request may come late, and another call have this claim by then.
        asked = {key: store.write(key, None) for key in claims}
        others = [key for key in some if key not in asked]
        if not _deleted_together(others, target):
            asked |= {key: store.write(key, None) for key in others}
        for key, deleted in asked.items():
            try:
                answer(deleted, target)
            except Exception as error:  # whatever it is, others may go
                left[key] = error
    return left


def _lost(claim: KeyClaim, store: ts.KvStore, target: Location, *, now: bool) -> Exception | None:
    """Why no more may be deleted under a claim; None while it is held."""
    try:
        if claim.is_held(store, target, now=now):
            return None
    except Exception as error:  # whatever it is, the save is committed
        return error
    return StorageError(f"{target}: another call has replaced or removed this checkpoint")


def _deleted_together(keys: Sequence[str], target: Location) -> bool:
    """Have S3 delete many keys by few requests; False if it has not deleted all of them."""
    if target.driver != "s3" or len(keys) < MANY:
        return False
    from xckpt.storage.buckets.server_side import ServerSide

    access = replace(target.access, retries=min(target.access.retries, TRIES))
    try:
        bucket = ServerSide(replace(target, access=access))
        answer(bucket.delete([posixpath.join(target.path, key) for key in keys]), target)
    except (OSError, StorageError):
        return False
    return True


def delete_or_unlink(
    store: ts.KvStore, target: Location, keys: Sequence[str], claim: KeyClaim | None = None
) -> dict[str, Exception]:
    """Delete keys, or files and empty folders of a local one; why some keys are left."""
    folder = target.folder
    if folder is None:
        return delete_keys(store, keys, target, claim)
    with opened_folder(folder) as opened:
        return delete_entries(sorted(keys, reverse=True), opened)


def empty_stale_lock(folder: Path, key: str) -> None:
    """Empty the lock file of a local key, unless a living process holds it.

    Raises:
        OSError: it can be neither opened nor emptied.
    """
    path = folder / f"{key}.__lock"
    with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # its holder fills it
        # Only the holder of the lock renames it. It may be the key itself by now.
        if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            file.truncate(0)
