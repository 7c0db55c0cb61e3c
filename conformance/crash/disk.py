"""A file system that can lose power, as a pure function over frozen values.

A `Disk` is what a file system holds; `apply` is one operation of a program. What the program sees
is `Disk.image`; a power cut may keep less, and `power_cuts` lists it:

1. A change of names (create, mkdir, rename, exchange, link, unlink, rmdir) happens whole or not at
   all. It is certain once a folder that it changes was synced; until then it may have happened or
   not, whatever other changes did, in any order. Syncing a file makes its content certain and not
   its name; syncing a folder makes the names in it certain and not its own.
2. The content of a file is certain once the file was synced; until then it may be what it was at
   the last sync, or what was written since, or part of that, or zeros of that length.

This is weaker than what journaling file systems promise (they keep the order of changes), so what
survives here survives there.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from conformance.crash.operations import (
    Create,
    Exchange,
    Link,
    MakeFolder,
    Operation,
    Remove,
    RemoveFolder,
    Rename,
    Resize,
    Sync,
    SyncAll,
    Write,
)

__all__ = ["Disk", "Image", "apply", "power_cuts", "starting"]

ALL_SUBSETS = 5
"""Up to this many uncertain changes of names, every subset of them is a power cut."""

_ROOT = 0


Image = Mapping[str, bytes | None]
"""What a tree holds: path -> content of a file, or None for a folder."""


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes = b""
    synced: bytes = b""


_Name = tuple[int, str]
"""A folder's number, and a name in it."""


@dataclass(frozen=True, slots=True)
class _Change:
    """Names that change together: what each stands for afterwards, None for nothing."""

    names: tuple[tuple[_Name, int | None], ...]
    certain: bool = False


@dataclass(frozen=True, slots=True)
class Disk:
    """What a file system holds, and how certain that is. Files and folders have numbers."""

    files: Mapping[int, _File] = field(default_factory=dict)
    folders: frozenset[int] = frozenset({_ROOT})
    names: Mapping[_Name, int] = field(default_factory=dict)
    """As the program sees them."""
    changes: tuple[_Change, ...] = ()
    """All of them, the oldest first."""

    def image(self) -> Image:
        """What the program sees, and what any program sees after it was killed."""
        return _tree(self.names, self.folders, {n: file.content for n, file in self.files.items()})

    def find(self, path: str) -> int:
        """The number of what is at a path.

        Raises:
            FileNotFoundError: nothing is.
        """
        found = _ROOT
        for part in path.split("/") if path else ():
            if (found, part) not in self.names:
                raise FileNotFoundError(path)
            found = self.names[found, part]
        return found

    def name(self, path: str) -> _Name:
        """The folder that a path is in, and the name there."""
        folder, _, name = path.rpartition("/")
        return self.find(folder), name


def starting(image: Image) -> Disk:
    """A disk that holds a tree, all of it certain.

    Example:
        >>> dict(starting({"a": None, "a/b": b"1"}).image())
        {'a': None, 'a/b': b'1'}
    """
    disk = Disk()
    for path in sorted(image):
        content = image[path]
        if content is None:
            disk = apply(disk, MakeFolder(path))
        else:
            disk = apply(apply(disk, Create(path)), Write(path, 0, content))
    return apply(disk, SyncAll())


def apply(disk: Disk, operation: Operation) -> Disk:
    """The disk after an operation.

    Raises:
        FileNotFoundError: a path of it does not exist.
        FileExistsError: a path that it makes does.

    Example:
        >>> disk = apply(apply(Disk(), Create("a")), Write("a", 2, b"xy"))
        >>> dict(disk.image())
        {'a': b'\\x00\\x00xy'}
    """
    match operation:
        case Create(path) | MakeFolder(path):
            return _made(disk, path, folder=isinstance(operation, MakeFolder))
        case Write(path, offset, data):
            old = disk.files[disk.find(path)].content.ljust(offset, b"\0")
            return _filled(disk, path, old[:offset] + data + old[offset + len(data) :])
        case Resize(path, size):
            old = disk.files[disk.find(path)].content
            return _filled(disk, path, old[:size].ljust(size, b"\0"))
        case Rename(source, target):
            moved = disk.find(source)
            if disk.names.get(disk.name(target)) == moved:
                return disk  # two names of one file: rename(2) leaves both
            return _renamed(disk, {target: moved, source: None})
        case Exchange(one, other):
            return _renamed(disk, {one: disk.find(other), other: disk.find(one)})
        case Link(source, target):
            return _renamed(disk, {target: disk.find(source)})
        case Remove(path) | RemoveFolder(path):
            disk.find(path)
            return _renamed(disk, {path: None})
        case Sync(path):
            return _synced(disk, disk.find(path))
        case SyncAll():
            files = {n: _File(file.content, file.content) for n, file in disk.files.items()}
            changes = tuple(replace(change, certain=True) for change in disk.changes)
            return replace(disk, files=files, changes=changes)


def _made(disk: Disk, path: str, *, folder: bool) -> Disk:
    if disk.name(path) in disk.names:
        raise FileExistsError(path)
    number = 1 + len(disk.files) + len(disk.folders)
    if folder:
        disk = replace(disk, folders=disk.folders | {number})
    else:
        disk = replace(disk, files={**disk.files, number: _File()})
    return _renamed(disk, {path: number})


def _filled(disk: Disk, path: str, content: bytes) -> Disk:
    number = disk.find(path)
    file = replace(disk.files[number], content=content)
    return replace(disk, files={**disk.files, number: file})


def _renamed(disk: Disk, paths: Mapping[str, int | None]) -> Disk:
    change = _Change(tuple((disk.name(path), number) for path, number in paths.items()))
    names = _after(disk.names, [change])
    return replace(disk, names=names, changes=(*disk.changes, change))


def _synced(disk: Disk, number: int) -> Disk:
    if number in disk.files:
        content = disk.files[number].content
        return replace(disk, files={**disk.files, number: _File(content, content)})
    changes = tuple(
        replace(change, certain=True) if any(f == number for (f, _), _ in change.names) else change
        for change in disk.changes
    )
    return replace(disk, changes=changes)


def _after(names: Mapping[_Name, int], changes: list[_Change]) -> dict[_Name, int]:
    found = dict(names)
    for change in changes:
        for name, number in change.names:
            if number is None:
                found.pop(name, None)
            else:
                found[name] = number
    return found


def _tree(
    names: Mapping[_Name, int], folders: frozenset[int], contents: Mapping[int, bytes]
) -> Image:
    """What is reachable from the root."""
    inside: dict[int, list[tuple[str, int]]] = {}
    for (folder, name), number in names.items():
        inside.setdefault(folder, []).append((name, number))
    image: dict[str, bytes | None] = {}
    left = [("", _ROOT)]
    seen: set[int] = set()
    while left:
        prefix, folder = left.pop()
        if folder in seen:  # a folder that came apart from its old name, and lost the new one's
            continue
        seen.add(folder)
        for name, number in inside.get(folder, ()):
            image[f"{prefix}{name}"] = None if number in folders else contents[number]
            if number in folders:
                left.append((f"{prefix}{name}/", number))
    return MappingProxyType(dict(sorted(image.items())))


def power_cuts(disk: Disk, *, more: int = 0, seed: int = 0) -> Iterator[Image]:
    """The images that a power cut at this moment may produce; each once.

    Of the uncertain changes of names: every subset, if they are few; else none, all, those up to
    each of them, each alone and all but each. With all and with none of them, of the uncertain
    contents: all there, all as at the last sync, all empty, halved or zeros, and each file alone
    so. With the other subsets all contents are there.

    Args:
        disk: at the moment.
        more: how many random choices of names and contents to add.
        seed: of these.

    Example:
        >>> disk = apply(apply(Disk(), Create("a")), Write("a", 0, b"xy"))
        >>> [dict(image) for image in power_cuts(disk)]
        [{}, {'a': b'xy'}, {'a': b''}, {'a': b'x'}, {'a': b'\\x00\\x00'}]
    """
    seen: set[tuple[tuple[str, bytes | None], ...]] = set()
    for kept, contents in itertools.chain(_choices(disk), _random_choices(disk, more, seed)):
        changes = [c for n, c in enumerate(disk.changes) if c.certain or n in kept]
        image = _tree(_after({}, changes), disk.folders, contents)
        key = tuple(image.items())
        if key not in seen:
            seen.add(key)
            yield image


_Choice = tuple[frozenset[int], Mapping[int, bytes]]
"""Which changes of names happened, and the contents of the files."""


def _uncertain(disk: Disk) -> list[int]:
    return [n for n, change in enumerate(disk.changes) if not change.certain]


def _choices(disk: Disk) -> Iterator[_Choice]:
    uncertain = _uncertain(disk)
    for kept in _subsets(uncertain):
        whole = len(kept) in (0, len(uncertain))
        for contents in _contents(disk) if whole else itertools.islice(_contents(disk), 1):
            yield kept, contents


def _random_choices(disk: Disk, count: int, seed: int) -> Iterator[_Choice]:
    pick = random.Random(seed)
    kinds = ("now", *_KINDS)
    for _ in range(count):
        kept = frozenset(n for n in _uncertain(disk) if pick.random() < 0.5)
        yield kept, {n: _damaged(file, pick.choice(kinds)) for n, file in disk.files.items()}


def _subsets(uncertain: list[int]) -> Iterator[frozenset[int]]:
    count = len(uncertain)
    if count <= ALL_SUBSETS:
        for size in range(count + 1):
            yield from map(frozenset, itertools.combinations(uncertain, size))
        return
    everything = frozenset(uncertain)
    for end in range(count + 1):
        yield frozenset(uncertain[:end])
    for one in uncertain:
        yield frozenset({one})
        yield everything - {one}


def _contents(disk: Disk) -> Iterator[Mapping[int, bytes]]:
    now = {n: file.content for n, file in disk.files.items()}
    yield now
    uncertain = [n for n, file in disk.files.items() if file.content != file.synced]
    lost = [{n: _damaged(disk.files[n], kind) for n in uncertain} for kind in _KINDS]
    for damaged in lost:
        yield now | damaged
    if len(uncertain) > 1:
        for damaged, n in itertools.product(lost, uncertain):
            yield now | {n: damaged[n]}


_KINDS = ("synced", "empty", "half", "zeros")


def _damaged(file: _File, kind: str) -> bytes:
    if file.content == file.synced:
        return file.content
    match kind:
        case "now":
            return file.content
        case "synced":
            return file.synced
        case "empty":
            return b""
        case "half":
            return file.content[: len(file.content) // 2]
    return bytes(len(file.content))
