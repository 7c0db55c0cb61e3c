"""Copying a checkpoint to another place, and whether one is there.

1. The copy is staged as a save is (`xckpt.storage.commit.staging`).
2. Every object that the manifest implies is linked, where both places are local folders of one file
   system: committed files never change. In one bucket, the bucket copies it, and no byte of it
   travels. Elsewhere, and where the bucket refuses, it passes through here, without being decoded.
3. The source is looked at again: if another save has replaced it meanwhile, objects of both may
   have been taken, and nothing is committed.
4. The manifest is published, as the last step of a save.
"""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from xckpt.core.geometry.grid import MAX_CHUNK_BYTES
from xckpt.core.manifest.codec import encode, parse
from xckpt.core.manifest.entries import Manifest, arrays
from xckpt.core.manifest.memory import check_memory
from xckpt.core.manifest.own_keys import DIGESTS, MANIFEST, object_bytes, object_sizes
from xckpt.core.manifest.packs import PACK_BYTES, PLACES
from xckpt.core.manifest.rules import count_chunks
from xckpt.errors import RESTORE, CorruptCheckpointError, StorageError, XckptError, naming
from xckpt.options import LoadOptions
from xckpt.storage.array import digest_bytes
from xckpt.storage.base.identity import object_identity
from xckpt.storage.buckets.listing import listed
from xckpt.storage.buckets.server_side import ServerSide
from xckpt.storage.budget import Pool, ProgressCounter
from xckpt.storage.chunks.digests import Digests
from xckpt.storage.chunks.file_checks import file_bytes, file_problem, most_bytes
from xckpt.storage.commit.folder import sync_folder
from xckpt.storage.commit.keys import KeyStaging
from xckpt.storage.commit.staging import Staging, begin
from xckpt.storage.location import REQUESTS, Location, answer, open_store, storage_errors
from xckpt.storage.packs.places import LONGEST_PACK, places_of
from xckpt.storage.read_checkpoint import read_manifest

logger: Final = logging.getLogger("xckpt")

Thing = TypeVar("Thing")

COPIED_AT_ONCE: Final = 1 << 20
"""Bytes of a file that is copied, in memory at a time."""
THREADS = 16
"""Objects on their way at a time, within the memory of a load; a larger object goes alone."""


def has_checkpoint(location: Location) -> bool:
    """Whether a committed checkpoint is at a place; its manifest is not read.

    Raises:
        StorageError: the storage gives no answer.
    """
    with storage_errors(location):
        if location.folder is not None:
            return (location.folder / MANIFEST).is_file()
        store = open_store(location)
        only = type(store).KeyRange(MANIFEST, f"{MANIFEST}\0")
        return bool(listed(store, location, only))


def copy_checkpoint(
    source: Location, target: Location, options: LoadOptions, *, overwrite: bool
) -> None:
    """Copy a checkpoint, and commit the copy in one step.

    Args:
        source: where it is.
        target: where the copy shall be.
        options: memory, progress.
        overwrite: whether the copy may replace another checkpoint.

    Raises:
        NotACheckpointError: no committed checkpoint is at the source.
        ManifestError: its manifest cannot be trusted.
        CheckpointExistsError: the target is taken.
        CorruptCheckpointError: an object of the source is missing.
        MemoryLimitError: an object that passes through here takes more memory than allowed.
        StorageError: a storage refused, or another save has replaced the source meanwhile.
    """
    data = read_manifest(source)
    with naming(source):
        manifest = parse(data, digest_bytes)
    seen = _identity(source, manifest, data)
    planned = msgspec.structs.replace(manifest, root="")  # where the source's root is, says nothing
    staging = begin(target, overwrite=overwrite, planned=planned)
    if isinstance(staging, KeyStaging):
        staging.begun = 0
    try:
        try:
            with storage_errors(target):
                staging.location.make_folder()
                _copy_objects(manifest, source.within(manifest.root), staging, options)
        except CorruptCheckpointError as error:
            _refuse_replaced(source, manifest, data, seen, error)
            raise
        _refuse_replaced(source, manifest, data, seen)
        copied = msgspec.structs.replace(manifest, root=staging.root)
        staging.publish(encode(copied, digest_bytes))
    except BaseException:
        staging.abort()
        raise


def _identity(source: Location, manifest: Manifest, data: bytes) -> bytes:
    """What another save in place of a bucket changes, though its manifest be the same."""
    return b"" if source.folder else object_identity(source, manifest.root, data)


def _refuse_replaced(
    source: Location,
    manifest: Manifest,
    data: bytes,
    seen: bytes,
    cause: XckptError | None = None,
) -> None:
    """Do nothing if the checkpoint that is copied is still there.

    Raises:
        NotACheckpointError, StorageError: none is there now, or another.
    """
    now = read_manifest(source)
    if now != data or seen != _identity(source, manifest, now):
        raise StorageError(f"{source} was replaced while it was copied; copy it again") from cause


def _copy_objects(
    manifest: Manifest, source: Location, staging: Staging, options: LoadOptions
) -> None:
    target = staging.location
    Digests(source, count_chunks(manifest), manifest.digests).require()
    packs = _packs(manifest, source)
    progress = ProgressCounter(object_bytes(manifest) + PACK_BYTES * len(packs), options.progress)
    planned = chain(object_sizes(manifest), ((key, PACK_BYTES) for key in packs))
    objects = _counted(planned, staging)
    if source.folder is not None:
        objects = _plain(objects, manifest, source)
        if target.folder is not None:
            _link_objects(objects, source.folder, target.folder, progress)
            return
    from_store, to_store = open_store(source), open_store(target)

    def copy(key: str, size: int) -> None:
        found = answer(from_store.read(key), source)
        if found.state != "value":
            raise not_copied(source.child(key), "missing")
        answer(to_store.write(key, found.value), target)
        progress.add(size)

    with contextlib.ExitStack() as opened:
        if source.is_in_bucket_of(target):
            left = _copy_there(objects, source, target, progress)
            objects = opened.enter_context(contextlib.closing(left))
        pool = opened.enter_context(Pool(threads=THREADS, budget=options.memory_bytes))
        for key, size in _held(objects, source, options.memory_bytes):
            if pool.failed:
                break  # there may be billions of others
            pool.submit(partial(copy, key, size), size)


def _counted(objects: Iterable[tuple[str, int]], staging: Staging) -> Iterator[tuple[str, int]]:
    """The objects; each is noted before it may be written, and a failure removes no others."""
    for number, each in enumerate(objects, 1):
        if isinstance(staging, KeyStaging):
            staging.begun = number
        yield each


def _plain(
    objects: Iterable[tuple[str, int]], manifest: Manifest, source: Location
) -> Iterator[tuple[str, int]]:
    """The objects, each a plain file that is no longer than any of the manifest may be.

    Raises:
        CorruptCheckpointError: one is a pipe, a device, or longer.
    """
    longest = packed = 0
    for array in arrays(manifest):
        most = most_bytes(array, manifest.codecs) if array.count else 0
        longest = max(longest, most)
        packed += most * array.count if array.place is not None else 0
    for key, size in objects:
        # The size is exact but for chunks with codecs, zarr shards and packs.
        if problem := file_problem(source, key, max(size, longest, packed + LONGEST_PACK)):
            raise not_copied(source.child(key), problem)
        yield key, size


def _held(
    objects: Iterable[tuple[str, int]], source: Location, memory_bytes: int
) -> Iterator[tuple[str, int]]:
    """The objects, each as a whole within memory: what is no longer than a chunk may go alone.

    Raises:
        MemoryLimitError: one is not.
    """
    for key, size in objects:
        length = size if source.folder is None else max(size, file_bytes(source.folder / key))
        if length > MAX_CHUNK_BYTES or key in (DIGESTS, PLACES):
            check_memory(length, f"{source.child(key)}, of {length:,} bytes,", memory_bytes)
        yield key, size


def _copy_there(
    objects: Iterable[tuple[str, int]],
    source: Location,
    target: Location,
    progress: ProgressCounter,
) -> Generator[tuple[str, int]]:
    """Have the bucket of both places copy objects; those that it has not copied, empty ones too.

    Raises:
        CorruptCheckpointError: an object is missing.
    """
    try:
        bucket = ServerSide(target)
    except StorageError as error:
        logger.info("%s: the bucket is not asked to copy: %s", target, error)
        yield from objects
        return
    is_seen = is_logged = False
    with contextlib.closing(bucket):
        begun = (
            (key, size, bucket.copy(*(posixpath.join(at.path, key) for at in (source, target))))
            for key, size in objects
        )
        for key, size, asked in _ahead(begun, target.access.concurrency or REQUESTS):
            problem = ""
            try:
                answer(asked, source)
            except FileNotFoundError as error:
                raise not_copied(source.child(key), "missing") from error
            except StorageError as error:
                problem = f"the bucket does not copy: {error}"
            else:
                is_seen = is_seen or (size > 0 and _is_there(target, key))
                if is_seen:
                    progress.add(size)
                    continue
                if size:
                    bucket.close()
                    problem = "what the bucket has copied is not there; the endpoints may differ"
            if problem and not is_logged:
                logger.info("%s: %s; objects are read and written", target, problem)
                is_logged = True
            yield key, size


def _is_there(target: Location, key: str) -> bool:
    """Whether this process finds an object that is not empty."""
    found = open_store(target).read(key, byte_range=slice(0, 1))
    return answer(found, target).state == "value"


def _ahead(things: Iterable[Thing], most: int) -> Iterator[Thing]:
    """The things in order, each once ``most`` more have been made: they are under way."""
    made: deque[Thing] = deque()
    for thing in things:
        made.append(thing)
        if len(made) > most:
            yield made.popleft()
    yield from made


def _packs(manifest: Manifest, root: Location) -> list[str]:
    """The keys of the packs.

    Raises:
        CorruptCheckpointError: the file of places, if there is one, is not the manifest's.
    """
    if not manifest.packs:
        return []
    places = places_of(root, manifest)
    places.check()
    return list(places.names())


def _link_objects(
    objects: Iterable[tuple[str, int]], source: Path, target: Path, progress: ProgressCounter
) -> None:
    folders: set[Path] = {target}
    for key, size in objects:
        new = target / key
        if new.parent not in folders:
            new.parent.mkdir(parents=True, exist_ok=True)
            folders.add(new.parent)
        try:
            link_or_copy(source / key, new)
        except FileNotFoundError as error:
            if (source / key).exists():
                raise  # where it goes is gone
            raise not_copied(Location("file", str(source)).child(key), "missing") from error
        progress.add(size)
    for folder in folders:
        sync_folder(folder)


def not_copied(place: object, problem: str) -> CorruptCheckpointError:
    """The error about an object or a file that is not as it has to be, which ends a copy."""
    return CorruptCheckpointError(f"{place}: it is {problem}, so nothing was copied: {RESTORE}")


def link_or_copy(source: Path, new: Path) -> None:
    """One more name for a file, links followed; a synced copy where the file system gives none."""
    with contextlib.suppress(OSError):
        os.link(os.path.realpath(source), new)
        return
    with open(source, "rb") as old, open(new, "wb") as copied:
        left = os.fstat(old.fileno()).st_size  # some files of /proc never end, and say 0
        while part := old.read(min(left, COPIED_AT_ONCE)):
            copied.write(part)
            left -= len(part)
        copied.flush()
        os.fsync(copied.fileno())
