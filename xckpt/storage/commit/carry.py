"""The user's own files in the folder of a checkpoint that is overwritten: they are carried over.

Files that the manifest of the old checkpoint does not imply (`xckpt.core.manifest.own_keys`) are
the user's: a config.json, a tokenizer. The new folder takes the old one's place by an exchange, so:

1. Before anything is written, `can_carry` lists these files and tries to link them. Where it
   cannot, or where the new checkpoint needs one of their names, the save is staged in a generation
   instead, which leaves existing files alone.
2. Just before the exchange `carry` links them into the new folder: files by hard links, folders
   made again, symbolic links copied. The folders are synced, so a power cut loses none.
3. After it `remove_old` removes the old folder file by file: the old checkpoint's own files, and
   those that are the same file in the new folder. A file that has appeared meanwhile is linked into
   the new folder first. If the new one has another file of that name, the old folder keeps it,
   under the name ``NAME.kept-ID``, and a warning says so.
4. A save killed in between leaves the old folder behind. `rescue` does 3 for the next save.

A deletion of the old checkpoint may have begun meanwhile: its manifest is gone, and there is the
claim of the deletion. Then what the save has seen of the manifest says what is the user's; of
another writer's checkpoint, which took its place, the shape of keys does.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import logging
import os
import shutil
import stat
import time
import warnings
from collections.abc import Iterator
from itertools import chain, takewhile
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from xckpt.core.manifest.codec import parse
from xckpt.core.manifest.entries import Manifest
from xckpt.core.manifest.own_keys import (
    BY_SHAPE,
    CLAIM,
    GENERATIONS,
    MANIFEST,
    OwnKeys,
    is_manifest,
)
from xckpt.core.text.printable import in_few
from xckpt.core.text.shown import readable_bytes
from xckpt.engine.ranks.alive import WORK
from xckpt.errors import CheckpointExistsError, ManifestError, VersionError
from xckpt.storage.abilities.walk import walk, walk_up
from xckpt.storage.array import digest_bytes
from xckpt.storage.chunks.file_checks import documents_in, manifest_in
from xckpt.storage.commit.file_system import is_at, opened_folder
from xckpt.storage.commit.folder import remove_tree, sync_folder, unlisted

logger: Final = logging.getLogger("xckpt")

_LAST: Final = (MANIFEST, CLAIM, f"{MANIFEST}.__lock", f"{CLAIM}.__lock")
"""They say which other files are ours; a deletion may write its claim until the end."""
_TRIAL = ".carried"
"""Folder in the staging folder, for trial links."""


class Seen(NamedTuple):
    """The checkpoint that a save is to replace, as it was when the save began."""

    keys: OwnKeys = BY_SHAPE
    folder: os.stat_result | None = None  # if it was not gone by then


def own_keys(manifest: bytes | None) -> OwnKeys:
    """The keys that belong to a checkpoint, by the bytes of its manifest; none without one."""
    if manifest is None:
        return OwnKeys()
    try:
        return OwnKeys.of(parse(manifest, digest_bytes))
    except (ManifestError, VersionError):
        return BY_SHAPE


def check_manifest(text: bytes | None, target: object) -> None:
    """Refuse to replace a file of the user that has a manifest's name.

    Raises:
        CheckpointExistsError: it is one.
    """
    if text is not None and not is_manifest(text):
        raise CheckpointExistsError(
            f"{target}: {MANIFEST} there is no manifest of xckpt, so it may be yours; nothing "
            f"there was touched: rename it, or save elsewhere"
        )


def own_keys_in(folder: Path, deleted: OwnKeys = BY_SHAPE) -> OwnKeys:
    """The keys that belong to the checkpoint in a folder.

    Args:
        folder: where it is.
        deleted: what counts if it is being deleted just now.
    """
    manifest = manifest_in(folder)
    is_deleted = manifest is None and (folder / CLAIM).exists()
    own = deleted if is_deleted else own_keys(manifest)
    return own.among(names_below(folder), documents_in(folder)) if own.by_shape else own


def names_below(folder: Path) -> list[str]:
    """All files and folders below a folder, relative to it; pathlib takes twice the time."""
    start = len(os.path.join(folder, ""))
    found = walk(folder, unlisted)
    return [f"{top}/{name}"[start:] for top, *names in found for name in chain(*names)]


def foreign_files(folder: Path, own: OwnKeys) -> Iterator[str]:
    """The user's files and empty folders in a checkpoint's folder, as keys.

    Folders of arrays are looked through as well; measured: 28 microseconds for a leaf.

    Raises:
        OSError: a folder cannot be listed.
    """
    left = [""]
    while left:
        at = left.pop()
        try:
            with os.scandir(folder / at) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except FileNotFoundError:
            continue  # it was removed just now
        ours = at in ("", GENERATIONS) or own.is_group(at) or own.is_array(at) or own.owns(at)
        if not entries and not ours:
            yield at
        keys = {(f"{at}/{entry.name}" if at else entry.name): entry for entry in entries}
        folders = [key for key, each in keys.items() if each.is_dir(follow_symlinks=False)]
        yield from sorted(key for key in keys.keys() - folders if not own.owns(key))
        left += reversed(folders)


def can_carry(old: Path, staging: Path, planned: Manifest | None) -> Seen | None:
    """Whether the user's files in ``old`` can be carried over to a new folder, found out by trying.

    Args:
        old: the checkpoint's folder.
        staging: the folder that will take its place.
        planned: the new checkpoint, as far as it is known.

    Returns:
        What is there; None if the user's files cannot be carried over.

    Raises:
        CheckpointExistsError: the old manifest is a file of the user's.
    """
    check_manifest(manifest_in(old), old)
    trial = staging / _TRIAL
    try:
        seen, files = _looked_into(old, Seen())
        needed = OwnKeys.of(planned or Manifest((), "")) if files else OwnKeys()
        if any(needed.needs(key) for key in files):
            return None
        for key in files:
            _link(old, trial, key)
    except OSError:
        return None
    finally:
        remove_tree(trial)
    return seen


def carry(old: Path, new: Path, seen: Seen) -> None:
    """Link the user's files from the old folder into the new one, durably.

    Args:
        old: the folder that has the name.
        new: the one that will have it.
        seen: the checkpoint that was there, in case it is being deleted.

    Raises:
        CheckpointExistsError: the new checkpoint has files of their names.
        OSError: a file cannot be linked.
    """
    clashing: list[str] = []
    synced: set[Path] = set()
    for key in _looked_into(old, seen)[1]:
        try:
            synced |= _link(old, new, key)
        except FileNotFoundError:
            continue  # it was removed just now
        except (FileExistsError, NotADirectoryError):
            clashing.append(key)
    if clashing:
        raise CheckpointExistsError(
            f"{old} holds files of the names that the new checkpoint needs: {in_few(clashing)}; "
            f"nothing there was touched: move them away, or save elsewhere"
        )
    with contextlib.suppress(FileNotFoundError):  # it was removed just now
        shutil.copymode(old, new)
    for folder in sorted(synced, reverse=True):
        sync_folder(folder)


def _looked_into(folder: Path, before: Seen) -> tuple[Seen, list[str]]:
    """The checkpoint in a folder, whose name another's may take meanwhile; the user's files."""
    while True:
        with opened_folder(folder) as opened:
            if opened is None:
                return Seen(), []
            status = os.fstat(opened)
            is_same = before.folder is not None and os.path.samestat(before.folder, status)
            own = own_keys_in(folder, before.keys if is_same else BY_SHAPE)
            found = list(foreign_files(folder, own))
            if is_at(opened, folder):
                return Seen(own, status), found


def remove_old(old: Path, new: Path) -> None:
    """Remove a folder whose name a new folder has taken, except files that would be lost."""
    kept: list[str] = []
    refused: list[OSError] = []

    def note(error: OSError) -> None:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):  # a folder with what is kept
            refused.append(error)  # the next save tries again

    try:
        own = own_keys_in(old)
    except OSError as error:
        return remove_last(old, new, error)
    for each, folders, names in walk_up(old, note):
        at = os.path.relpath(each, old).replace(os.sep, "/")
        links = [name for name in folders if os.path.islink(f"{each}/{name}")]
        for name in names + links:
            key = name if at == "." else f"{at}/{name}"
            if key in _LAST:
                continue
            try:
                if own.owns(key) or _same(old / key, new / key) or _late(old, new, key):
                    os.unlink(old / key)
                else:
                    kept.append(key)
            except OSError as error:
                note(error)
            WORK.get().moved = time.monotonic()
        if at != ".":
            try:
                os.rmdir(each)
            except OSError as error:
                note(error)
    for name in () if refused else _LAST:
        with contextlib.suppress(OSError):
            os.unlink(old / name)
    if kept := [key for key in kept if os.path.lexists(old / key)]:  # a deletion may be at work
        _keep(old, new, kept)
    remove_last(old, new, *refused[:1])


def remove_last(old: Path, new: Path, refused: OSError | None = None) -> None:
    """Remove the emptied folder that ``new`` replaced; the log says if it stays, and why."""
    try:
        os.rmdir(old)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        why = refused or error
        size = 0
        with contextlib.suppress(OSError):  # what cannot be listed does not count
            size = sum(os.lstat(old / name).st_size for name in names_below(old))
        logger.warning(
            f"{new} is committed, but the folder that it replaced could not be removed: {old} "
            f"({readable_bytes(size)}) is left, because of {why.filename}: {why.strerror}; unmount "
            f"what is mounted in it and see to its permissions, then remove it: xckpt gc "
            f"{old.parent}"
        )


def rescue(staged: Path, target: Path) -> None:
    """Clean up after a killed save that may have exchanged its folder with the old one."""
    if target.exists():
        remove_old(staged, target)
    else:
        remove_tree(staged)


def _keep(old: Path, new: Path, kept: list[str]) -> None:
    identity = old.name.rpartition("-")[2]
    place = new.with_name(f"{new.name}.kept-{identity}")
    os.rename(old, place)
    warnings.warn(
        f"{new}: while it was overwritten, files in it changed: {in_few(kept)}; "
        f"their old contents are kept in {place}",
        stacklevel=2,
    )


def _late(old: Path, new: Path, key: str) -> bool:
    """Link a file that appeared after `carry` into the new folder; False if the name is taken."""
    try:
        synced = _link(old, new, key)
    except OSError:
        return False
    for folder in sorted(synced, reverse=True):
        sync_folder(folder)
    return True


def _link(old: Path, new: Path, key: str) -> set[Path]:
    """Have ``new`` hold what ``old`` holds at a key; returns the folders that changed.

    Raises:
        FileExistsError: something else is there.
        OSError: it cannot be linked.
    """
    changed = _make_folders(old, new, os.path.dirname(key))
    source, target = old / key, new / key
    status = os.lstat(source)
    if stat.S_ISDIR(status.st_mode):
        return changed | _make_folders(old, new, key)
    if _same(source, target):
        return changed
    if stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(source), target)
    else:
        os.link(source, target)
    return changed | {target.parent}


def _make_folders(old: Path, new: Path, key: str) -> set[Path]:
    """Make a folder and those above it, with the modes and times of the old ones."""
    above = chain([key], map(str, PurePosixPath(key).parents))
    missing = list(takewhile(lambda each: not (new / each).is_dir(), above))
    changed = set[Path]()
    for each in reversed(missing):
        (new / each).mkdir()
        shutil.copystat(old / each, new / each)
        changed |= {new / each, (new / each).parent}
    return changed


def _same(one: Path, other: Path) -> bool:
    """Whether two names are of one file, or of links or files with the same content."""
    try:
        a, b = os.lstat(one), os.lstat(other)
        if stat.S_ISLNK(a.st_mode) and stat.S_ISLNK(b.st_mode):
            return os.readlink(one) == os.readlink(other)
        plain = stat.S_ISREG(a.st_mode) and stat.S_ISREG(b.st_mode)
        # A copy of the disk, from a backup, may have made two files of one.
        return os.path.samestat(a, b) or (plain and filecmp.cmp(one, other, shallow=False))
    except (FileNotFoundError, NotADirectoryError):
        return False
