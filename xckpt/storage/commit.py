"""Carrying out a commit: the place that a save writes to, and the one step that makes it visible.

`begin` looks at the path and opens a `Staging` by the rules of `xckpt.core.commit`; ranks write
below `Staging.location`; `Staging.publish` takes the atomic step with the manifest, `Staging.abort`
removes what was written. Only the coordinator does any of this.

1. Local files: staged in ``.NAME.saving-ID`` beside the path. Publishing writes the manifest into
   it, syncs every folder upward, renames (or exchanges) it with the path, and syncs the parent.
2. Elsewhere: staged in place behind a create-once claim, or in ``.generations/ID`` where a
   checkpoint exists; publishing writes the manifest on the condition that nobody else has.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import tensorstore as ts

from xckpt.core.commit import Found, Step, decide
from xckpt.core.manifest import Manifest, parse
from xckpt.errors import CheckpointExistsError, ManifestError, StorageError, XckptError
from xckpt.storage.digests import digest_bytes
from xckpt.storage.location import Location, open_store

__all__ = ["CLAIM", "DIGESTS", "MANIFEST", "Staging", "begin", "storage_errors"]

MANIFEST = "xckpt.json"
DIGESTS = "xckpt.digests"
CLAIM = "xckpt.saving"
GENERATIONS = ".generations"

_MISSING = b"\x02"
"""TensorStore's generation of a key that does not exist."""

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@contextlib.contextmanager
def storage_errors(where: str) -> Iterator[None]:
    """Turn what TensorStore and the system raise into a `StorageError` that says where."""
    try:
        yield
    except XckptError:
        raise
    except OSError as error:
        raise StorageError(f"{where}: {error.strerror or error}{_advice(str(error))}") from error
    except ValueError as error:
        raise StorageError(f"{where}: {error}{_advice(str(error))}") from error


def _advice(message: str) -> str:
    if "RESOURCE_EXHAUSTED" in message or "No space left" in message:
        return "; the disk is full: free space or save elsewhere"
    if "PERMISSION_DENIED" in message or "Permission denied" in message or "Read-only" in message:
        return "; check the permissions of this folder"
    return ""


class _Claim(msgspec.Struct):
    """Who is saving, for whoever finds the remains."""

    host: str
    process: int


@dataclass(slots=True)
class Staging:
    """A save in progress."""

    step: Step
    target: Location
    """The path that the caller gave."""
    location: Location
    """Where data is written: the root group goes here."""
    root: str = ""
    """`location` relative to the manifest; goes into the manifest."""
    seen: bytes = _MISSING
    """Generation of the manifest that was there at the beginning."""
    old: Manifest | None = field(default=None)
    """The manifest that is being replaced, if it could be read."""

    def publish(self, manifest: bytes) -> None:
        """Make the checkpoint visible; afterwards it is committed.

        Raises:
            CheckpointExistsError: another save committed to the path meanwhile.
            StorageError: the storage refused.
        """
        with storage_errors(str(self.target)):
            if self.step in (Step.RENAME, Step.EXCHANGE):
                self._publish_folder(manifest)
            else:
                self._publish_key(manifest)

    def abort(self) -> None:
        """Remove what was written, as far as possible; what is readable stays as it is."""
        with contextlib.suppress(OSError, ValueError, XckptError):
            if self.step in (Step.RENAME, Step.EXCHANGE):
                assert self.location.folder is not None
                shutil.rmtree(self.location.folder, ignore_errors=True)
            else:
                if self.location.folder is not None:
                    shutil.rmtree(self.location.folder, ignore_errors=True)
                open_store(self.location).delete_range(ts.KvStore.KeyRange()).result()

    def _publish_folder(self, manifest: bytes) -> None:
        staged, target = self.location.folder, self.target.folder
        assert staged is not None and target is not None
        open_store(self.location).write(MANIFEST, manifest, if_equal=_MISSING).result()
        (staged / CLAIM).unlink(missing_ok=True)
        for folder, _, _ in os.walk(staged, topdown=False):
            _sync_folder(Path(folder))
        if self.step is Step.EXCHANGE:
            _exchange(staged, target)
            _sync_folder(target.parent)
            shutil.rmtree(staged, ignore_errors=True)
            return
        try:
            os.rename(staged, target)
        except OSError as error:
            if target.exists():
                raise CheckpointExistsError(
                    f"{target} was taken by somebody else during this save, which is not committed"
                ) from error
            raise
        _sync_folder(target.parent)

    def _publish_key(self, manifest: bytes) -> None:
        if self.location.folder is not None:
            for folder, _, _ in os.walk(self.location.folder, topdown=False):
                _sync_folder(Path(folder))
        store = open_store(self.target)
        stamp = store.write(MANIFEST, manifest, if_equal=self.seen).result()
        if not stamp.generation:
            raise CheckpointExistsError(
                f"{self.target}: another save committed here meanwhile; this one is not committed"
            )
        with contextlib.suppress(ValueError, OSError):
            self._remove_old(store)

    def _remove_old(self, store: ts.KvStore) -> None:
        """Delete the claim and the data that the manifest no longer names."""
        store.write(CLAIM, None).result()
        if self.step is Step.IN_PLACE or self.old is None:
            return
        keep = f"{self.root}/".encode()
        prefix = f"{self.old.root}/".encode() if self.old.root else b""
        futures = [
            store.write(key, None)
            for key in store.list().result()
            if key.startswith(prefix)
            and not key.startswith(keep)
            and key != MANIFEST.encode()
            and (prefix or not key.startswith(f"{GENERATIONS}/".encode()))
        ]
        for future in futures:
            future.result()


def begin(target: Location, *, overwrite: bool) -> Staging:
    """Look at a path and open a place to write to.

    Raises:
        CheckpointExistsError: something is there, and it may not be replaced.
        StorageError: the storage refused.
    """
    with storage_errors(str(target)):
        folder = target.folder
        identity = uuid.uuid4().hex[:12]
        if folder is not None:
            return _begin_folder(target, folder, identity, overwrite=overwrite)
        store = open_store(target)
        current = store.read(MANIFEST).result()
        found = _found(store, committed=current.state == "value")
        step = decide(str(target), found, overwrite=overwrite, renames=False, exchanges=False)
        staging = _staging_by_key(step, target, identity, current.value, current.stamp.generation)
        if step is Step.IN_PLACE:
            claim = msgspec.json.encode(_Claim(socket.gethostname(), os.getpid()))
            if not store.write(CLAIM, claim, if_equal=_MISSING).result().generation:
                raise CheckpointExistsError(f"{target}: another save has just begun here")
        return staging


def _begin_folder(target: Location, folder: Path, identity: str, *, overwrite: bool) -> Staging:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_dead_stagings(folder)
    found = _found_in(folder)
    staged = _sibling(folder, identity)
    exchanges = found is Found.CHECKPOINT and overwrite and _can_exchange(folder)
    step = decide(str(target), found, overwrite=overwrite, renames=True, exchanges=exchanges)
    if step is Step.GENERATION:
        current = open_store(target).read(MANIFEST).result()
        generation = current.stamp.generation
        return _staging_by_key(step, target, identity, current.value, generation)
    staged.mkdir()
    claim = msgspec.json.encode(_Claim(socket.gethostname(), os.getpid()))
    (staged / CLAIM).write_bytes(claim)
    return Staging(step, target, Location("file", str(staged)))


def _staging_by_key(
    step: Step, target: Location, identity: str, manifest: bytes, generation: bytes
) -> Staging:
    root = f"{GENERATIONS}/{identity}" if step is Step.GENERATION else ""
    old: Manifest | None = None
    with contextlib.suppress(ManifestError):
        old = parse(manifest, digest_bytes) if manifest else None
    return Staging(step, target, target.within(root), root, generation, old)


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
    return Found.FOREIGN if any(folder.iterdir()) else Found.NOTHING


def _sibling(folder: Path, identity: str) -> Path:
    return folder.parent / f".{folder.name[:200]}.saving-{identity}"


def _remove_dead_stagings(folder: Path) -> None:
    """Remove what killed saves of this host left beside the path; others' may be alive."""
    for staged in folder.parent.glob(f".{glob.escape(folder.name[:200])}.saving-*"):
        try:
            claim = msgspec.json.decode((staged / CLAIM).read_bytes(), type=_Claim)
        except (OSError, msgspec.MsgspecError):
            continue
        if claim.host == socket.gethostname() and not _alive(claim.process):
            shutil.rmtree(staged, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _can_exchange(folder: Path) -> bool:
    """Whether the file system exchanges two folders in one step; found out by doing it."""
    probe = _sibling(folder, f"probe-{uuid.uuid4().hex[:8]}")
    one, other = probe / "one", probe / "other"
    try:
        one.mkdir(parents=True)
        other.mkdir()
        _exchange(one, other)
    except OSError:
        return False
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    return True


def _exchange(a: Path, b: Path) -> None:
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


def _sync_folder(folder: Path) -> None:
    """fsync a folder, so that the names in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
