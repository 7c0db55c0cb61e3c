"""Leftovers of killed saves below a folder of checkpoints: finding, measuring, removing them.

1. `find_in_folders` walks through folders. In a folder that holds a checkpoint it looks at the
   generations only, and at the steps of a run that has its root there.
2. A staging folder's owner is dead, alive or unknown (`xckpt.storage.commit.leftovers`), and so is
   that of a claim in place. Only the age of generations is known.
   An empty folder of a step is what a deletion leaves that is killed last of all.
3. `remove` removes dead ones, and unknown ones in which nothing has changed for long enough. It
   looks at the claim again, under its lock.

What lies in buckets and ``memory://`` is found in `xckpt.storage.commit.collect_keys`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from xckpt.core.manifest.codec import parse
from xckpt.core.manifest.own_keys import BY_SHAPE, CLAIM, GENERATIONS, MANIFEST, own_among
from xckpt.core.run.names import step_number
from xckpt.core.text.printable import printable
from xckpt.core.text.shown import readable_bytes
from xckpt.errors import ManifestError
from xckpt.storage.array import digest_bytes
from xckpt.storage.chunks.file_checks import documents_in, manifest_in
from xckpt.storage.commit.carry import names_below, own_keys_in
from xckpt.storage.commit.file_system import (
    delete_entries,
    held_in,
    is_local,
    lock,
    opened_folder,
)
from xckpt.storage.commit.folder import (
    LEFTOVER,
    ONE_SAVE,
    journals,
    staging_folder,
)
from xckpt.storage.commit.leftovers import (
    OwnerState,
    is_checkpoint,
    opened_claim,
    owner_of_claim,
    owner_of_empty,
    owner_state,
    owner_without_claim,
    remove_emptied,
    remove_empty,
    remove_if_dead,
    remove_unlocked,
    staged_in,
    target_of,
)
from xckpt.storage.location import Location

SHOWN = 5
"""Most leftovers that a message lists."""

BLOCK = 512
"""Bytes of what ``st_blocks`` counts, on every system."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """The remains of a save or a conversion that was cut off. ``print`` shows it in a line."""

    path: str
    """The folder, or the prefix of the keys, that would go."""
    target: str
    """Where the save would have gone, as far as it is known."""
    owner: str
    """``"dead"``, ``"alive"``, or ``"unknown"``: it may be alive on another host."""
    bytes: int
    """Bytes that it takes; in a bucket those of arrays that are described, so at least these."""
    files: int
    """Files or keys."""
    age: float | None
    """Seconds since something in it changed, by this host's clock; in a bucket, since the save
    began. None if unknown: it goes with ``older_than=0`` alone."""
    removed: bool = False

    def __str__(self) -> str:
        size = readable_bytes(self.bytes)
        aged = ", of unknown age" if self.age is None else f", {_spelled(self.age)} old"
        fates = {"dead": "dead", "alive": "still being written", "unknown": "perhaps alive"}
        state = "removed" if self.removed else fates[self.owner]
        files = "1 file" if self.files == 1 else f"{self.files:,} files"
        return f"{printable(self.path)}: {size} in {files}{aged}: {state}"


def _spelled(seconds: float) -> str:
    """A time in words.

    Example:
        >>> _spelled(3), _spelled(7300), _spelled(200_000)
        ('3 s', '2 h', '2 days')
    """
    for size, unit in ((86400, " days"), (3600, " h"), (60, " min")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)} s"


def is_due(left: Leftover, older_than: float | None) -> bool:
    """Whether a leftover should be removed.

    Args:
        left: what.
        older_than: seconds after which an unknown owner counts as dead; None for never.
    """
    if left.owner == OwnerState.UNKNOWN.value:
        return older_than is not None and (left.age or 0.0) >= older_than
    return left.owner == OwnerState.DEAD.value


def find_in_folders(top: Path, unread: list[str]) -> Iterator[Leftover]:
    """What was left in a folder and those below it.

    Args:
        top: the folder.
        unread: takes what cannot be read of it and below it, which is passed over.

    Raises:
        OSError: the folder cannot be read.
    """
    left = [top]
    while left:
        folder = left.pop()
        try:
            if folder != top and (owner := owner_of_empty(folder)):
                yield _measured(folder, folder, owner, [folder])
            with os.scandir(folder) as entries:
                found = sorted(entries, key=lambda entry: entry.name, reverse=True)
            names = {entry.name for entry in found}
            if not names.isdisjoint((MANIFEST, CLAIM, GENERATIONS)):
                yield from _in_checkpoint(folder)
            yield from beside(folder, names, unread)
            steps = _steps_in_checkpoint(folder, found) if MANIFEST in names else found
            folders = (each for each in steps if each.is_dir(follow_symlinks=False))
            left += [folder / each.name for each in folders if not _is_left(folder, each.name)]
        except OSError as error:
            if folder == top:
                raise
            if not isinstance(error, FileNotFoundError):  # deleted meanwhile
                unread.append(f"{folder} ({error.strerror})")


def _steps_in_checkpoint(top: Path, found: list[os.DirEntry[str]]) -> list[os.DirEntry[str]]:
    """The steps in a run's root that is itself a checkpoint; its leaves are not steps."""
    steps = [entry for entry in found if step_number(entry.name) is not None]
    own = own_keys_in(top) if steps else BY_SHAPE
    return [] if own.by_shape else [entry for entry in steps if not own.needs(entry.name)]


def _is_left(parent: Path, name: str) -> bool:
    """Whether a name is that of a leftover, and not a checkpoint of such a name."""
    return LEFTOVER.fullmatch(name) is not None and not is_checkpoint(parent / name)


def beside(parent: Path, names: Iterable[str], unread: list[str]) -> Iterator[Leftover]:
    """Staging folders and claims in a folder."""
    local = is_local(parent)
    names = [name for name in names if _is_left(parent, name)]
    for staged in staged_in(parent, names):
        paths = [parent / name for name in names if name.startswith(staged.name)]
        try:
            with opened_claim(staged) as (descriptor, text):
                if text is not None:
                    owner = owner_state(text, lock(descriptor), local=local)
                else:
                    owner = owner_without_claim(paths)
                yield _measured(staged, target_of(staged, text), owner, paths)
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError as error:
            unread.append(f"{staged} ({error.strerror})")


def _in_checkpoint(folder: Path) -> Iterator[Leftover]:
    """Generations in a folder that its manifest does not name, and a save in place.

    A manifest that cannot be read is perhaps a newer release's, and may name any generation.
    """
    root, there = _root_in(folder)
    if there and root is None:
        return
    living = held_in(folder / GENERATIONS)
    for entry in _generations(folder):
        if root != f"{GENERATIONS}/{entry.name}":
            owner = OwnerState.ALIVE if entry.name in living else OwnerState.UNKNOWN
            yield _measured(entry, folder, owner, [entry])
    if (folder / CLAIM).is_file():
        own = [] if there else _own_files(folder)
        yield _measured(
            folder / CLAIM, folder, owner_of_claim(folder / CLAIM), [folder / CLAIM, *own]
        )


def _generations(folder: Path) -> list[Path]:
    """The generations in a folder; what has no name of one is the user's, and so is a link."""
    place = folder / GENERATIONS
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if not place.is_symlink():
            found = sorted(each for each in place.iterdir() if ONE_SAVE.fullmatch(each.name))
            return [each for each in found if each.is_dir() and not each.is_symlink()]
    return []


def root_of(manifest: bytes) -> str | None:
    """The root that a manifest names; None if it cannot be read."""
    try:
        return parse(manifest, digest_bytes).root
    except ManifestError:
        return None


def _root_in(folder: Path) -> tuple[str | None, bool]:
    """The root that the manifest in a folder names, and whether there is a manifest."""
    manifest = manifest_in(folder)
    return (None, False) if manifest is None else (root_of(manifest), True)


def _own_keys(folder: Path) -> list[str]:
    """What a save in place has written to a folder, with its folders, and no file of the user."""
    keys = names_below(folder)
    return own_among(keys, [BY_SHAPE], GENERATIONS, CLAIM, MANIFEST, read=documents_in(folder))


def _own_files(folder: Path) -> list[Path]:
    paths = map(folder.joinpath, _own_keys(folder))
    return [path for path in paths if path.is_symlink() or not path.is_dir()]


def _measured(place: Path, target: Path, owner: OwnerState, paths: Iterable[Path]) -> Leftover:
    """A leftover of some files and folders; a file with another name elsewhere counts no bytes."""
    total, files, newest = 0, 0, 0.0
    for path in _files(paths):
        with contextlib.suppress(OSError):
            status = path.lstat()
            files += 1
            newest = max(newest, status.st_mtime)
            # A file that is laid out before it is written is as long as it will be, with holes.
            written = min(status.st_size, BLOCK * status.st_blocks)
            total += written if status.st_nlink == 1 else 0
    if not files:
        with contextlib.suppress(OSError):
            newest = place.lstat().st_mtime
    age = max(0.0, time.time() - newest) if newest else None
    return Leftover(str(place), str(target), owner.value, total, files, age)


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            for folder, _, names in os.walk(path):
                yield from (Path(folder, name) for name in names)
        else:
            yield path


def remove(left: Leftover, older_than: float | None) -> Leftover:
    """Remove a leftover of a local folder, if it is still due; says whether it has gone.

    Raises:
        OSError: it cannot be removed.
    """
    place = Path(left.path)
    if not is_due(left, older_than):
        return left
    if LEFTOVER.fullmatch(place.name):
        old = left.owner == OwnerState.UNKNOWN.value
        local = is_local(place.parent)
        gone = remove_if_dead(place, local=local, resumable=False, old=old)
        remove_unlocked(place.parent, [f"{place.name}.new"])
        return replace(left, removed=gone or not _exists(place))
    target = Path(left.target)
    if place == target:
        return replace(left, removed=remove_empty(place))
    root, there = _root_in(target)
    if there and root is None:
        return left  # a newer release has committed just now
    if place.name == CLAIM:
        try:
            begun = place.stat().st_mtime_ns
        except FileNotFoundError:  # another call has removed it
            return replace(left, removed=True)
        with opened_folder(target) as opened:
            own = [] if there else sorted(_own_keys(target), reverse=True)
            for entries in (own, [CLAIM]):  # it says what is left where some are not deleted
                for error in delete_entries(entries, opened).values():
                    raise error
        remove_emptied(target, begun)
        if step_number(target.name) is not None:
            with contextlib.suppress(OSError):
                target.rmdir()
    elif root == f"{GENERATIONS}/{place.name}":
        return left  # it was committed just now
    else:
        shutil.rmtree(place)
        with contextlib.suppress(OSError):
            place.parent.rmdir()
    return replace(left, removed=True)


def _exists(staged: Path) -> bool:
    return any(each.name.startswith(staged.name) for each in staged.parent.iterdir())


def in_words(parent: Path) -> str:
    """What was left in a folder, for the message of a full disk; empty if nothing."""
    try:
        with os.scandir(parent) as entries:
            names = [entry.name for entry in entries]
        left = [each for each in beside(parent, names, []) if each.owner != OwnerState.ALIVE.value]
    except OSError:
        return ""
    if not left:
        return ""
    shown = sorted(left, key=lambda each: each.bytes, reverse=True)[:SHOWN]
    total = readable_bytes(sum(each.bytes for each in left))
    lines = "".join(f"\n  - {each}" for each in shown)
    more = f"\n  ... and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
    return f"; {total} there were left by saves that were cut off (xckpt gc {parent}):{lines}{more}"


def kept_for_later(path: str | os.PathLike[str], identity: str) -> str:
    """What a resumable save to a local path has left, in words; empty if nothing."""
    folder = Location.parse(path).folder
    if folder is None:
        return ""
    target = Path(os.path.realpath(folder))
    staged = staging_folder(target, identity)
    if not staged.is_dir():
        return ""
    left = _measured(staged, target, OwnerState.UNKNOWN, [staged, *journals(staged)])
    return (
        f"{readable_bytes(left.bytes)} that were written are kept in {staged}: the same call "
        f"goes on with them, and xckpt gc {target.parent} removes them"
    )
