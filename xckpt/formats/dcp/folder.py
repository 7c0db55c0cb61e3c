"""What a folder of torch.distributed.checkpoint holds, as a tree whose tensors are read on demand.

1. `read_metadata` and `parse_metadata` describe ``.metadata`` without unpickling it.
2. `read_tree` finds the elements of each chunk in the ``.distcp`` files (`archives`) and checks
   them against the metadata. Every fault of every entry is found before any is reported.
3. A tensor becomes a `LazySource` over `MappedParts`: nothing of it is read until it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Boxes
from xckpt.core.leaf import LazySource
from xckpt.core.names import KeyPath, join_keys
from xckpt.core.tree import DEEPEST, unflatten
from xckpt.errors import (
    CorruptCheckpointError,
    ManifestError,
    NotACheckpointError,
    UnsafePickleError,
    UnsupportedLeafError,
    XckptError,
)
from xckpt.formats.dcp.metadata import MAX_BYTES, DCPMetadata, StoredTensor, parse
from xckpt.formats.source import Opaque
from xckpt.formats.torch_save.archive import Archive, MappedTensor, Where
from xckpt.storage.foreign.files import open_file
from xckpt.storage.foreign.paths import FilePath, map_concurrently, named
from xckpt.storage.location import storage_errors

MOST_POSITIONS: Final = 1 << 20
"""Longest list of entries, those included that are absent."""


def read_metadata(folder: FilePath) -> bytes:
    """The bytes of ``.metadata``.

    Raises:
        NotACheckpointError: there is none.
        ManifestError: it is absurdly long.
        StorageError: it cannot be read.
    """
    path = folder / ".metadata"
    if not path.is_file():
        own = [part.name for part in named(folder, ".metadata") if part.name.startswith("__")]
        hint = (
            f"it holds {', '.join(own[:3])}, which ranks wrote each for itself (use_collectives="
            f"False); such folders are not read"
            if own
            else "check the path, or whether the save finished"
        )
        raise NotACheckpointError(f"{folder} is no DCP folder: there is no .metadata in it; {hint}")
    with storage_errors(path), closing(open_file(path)) as file:
        data = file.whole(MAX_BYTES)
    if data is None:
        raise ManifestError(f"{path}: it is over {MAX_BYTES:,} bytes long")
    return data


def parse_metadata(folder: FilePath, data: bytes) -> DCPMetadata:
    """What the bytes of ``.metadata`` say; see `xckpt.formats.dcp.metadata.parse`."""
    try:
        return parse(data)
    except XckptError as error:
        raise type(error)(f"{folder / '.metadata'}: {error}", error.problems) from error


def _content(folder: FilePath, where: Where) -> bytes:
    """The bytes of an entry."""
    path = folder / where.file
    with storage_errors(path), closing(open_file(path)) as file:
        return file.fetch([(where.offset, where.offset + where.length)])[0]


def read_tree(folder: FilePath, described: DCPMetadata, *, opaque: bool) -> object:
    """The tree that was saved.

    Args:
        folder: where it is.
        described: what its ``.metadata`` says.
        opaque: make an `Opaque` object of an entry that is no plain value, instead of refusing it.

    Raises:
        XckptError: entries are damaged, foreign or not representable; all of the worst kind are
            listed.
    """
    archive = _opener(folder, described)
    faults = _Faults()
    leaves: dict[str, object] = {}
    for name in described.order:
        with faults.of(name):
            tensor = described.tensors.get(name)
            if tensor is not None:
                leaves[name] = _tensor(archive, tensor)
            else:
                leaves[name] = _object(archive, folder, described.objects[name], opaque)
    faults.report(folder)
    return _tree(described, leaves)


Opener = Callable[[Where], Archive]


def _opener(folder: FilePath, described: DCPMetadata) -> Opener:
    """What opens an entry's archive. Those in a bucket are opened at once, before they are asked
    for one by one.
    """
    if isinstance(folder, Path):
        return lambda where: Archive.open(folder, where)
    wanted = [place for tensor in described.tensors.values() for place in tensor.places]
    wanted += described.objects.values()

    def tried(where: Where) -> Archive | XckptError:
        try:
            return Archive.open(folder, where)
        except XckptError as error:
            return error

    archives = dict(zip(wanted, map_concurrently(folder, tried, wanted), strict=True))

    def opened(where: Where) -> Archive:
        archive = archives[where]
        if isinstance(archive, XckptError):
            raise archive
        return archive

    return opened


class _Faults:
    """Gathers what is wrong with entries, by kind of error."""

    KINDS = (UnsafePickleError, CorruptCheckpointError, ManifestError, UnsupportedLeafError)

    def __init__(self) -> None:
        self._problems: dict[type[XckptError], list[str]] = {}
        self._name = ""

    def of(self, name: str) -> _Faults:
        self._name = name
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        for fault in self.KINDS:
            if isinstance(error, fault):
                problems = error.problems or (f"{self._name}: {error}",)
                self._problems.setdefault(fault, []).extend(problems)
                return True
        return False

    def report(self, folder: FilePath) -> None:
        """Raise the worst kind of error, with all of its kind."""
        for kind in self.KINDS:
            problems = self._problems.get(kind)
            if problems:
                raise kind.listing(f"{folder}: {len(problems)} entries cannot be read", problems)


def _tensor(archive: Opener, tensor: StoredTensor) -> LazySource:
    """A tensor with its chunks, each found and checked.

    Raises:
        XckptError: chunks that cannot be read.
    """
    parts: list[MappedTensor] = []
    for place, box in zip(tensor.places, tensor.boxes, strict=True):
        where = f"{tensor.name}: chunk {box}"
        try:
            part = archive(place).value()
        except XckptError as error:
            raise type(error)(f"{where}: {error}", (f"{where}: {error}",)) from error
        stored = _dtype_and_shape(part)
        if stored != (tensor.dtype, box.sizes):
            problem = (
                f"{where}: the metadata say {tensor.dtype} of shape {box.sizes}, but "
                f"{place.file} holds {' of shape '.join(map(str, stored))}"
            )
            raise CorruptCheckpointError(problem, (problem,))
        assert isinstance(part, MappedTensor)
        parts.append(part)
    return _lazy(tensor.shape, tensor.dtype, tensor.boxes, parts)


def _dtype_and_shape(part: object) -> tuple[object, ...]:
    if isinstance(part, MappedTensor):
        return part.dtype, part.shape
    return (f"a {type(part).__name__}",)


@dataclass(frozen=True, slots=True)
class MappedParts:
    """The parts of a tensor, one a box: what a `LazySource` reads."""

    parts: tuple[MappedTensor, ...]

    def __call__(self, index: int) -> NDArray[np.generic]:
        """Part ``index`` as an array that maps its file."""
        return self.parts[index].array()


def _lazy(
    shape: tuple[int, ...], dtype: str, boxes: Boxes, parts: Sequence[MappedTensor]
) -> LazySource:
    return LazySource(shape, dtype, boxes, MappedParts(tuple(parts)))


def _object(archive: Opener, folder: FilePath, where: Where, opaque: bool) -> object:
    """The value of an entry of bytes, with a `LazySource` for each tensor in it.

    Raises:
        UnsupportedLeafError: it is no plain value, and ``opaque`` is False.
        CorruptCheckpointError: the file is missing, truncated or damaged.
    """
    try:
        return _leaves(archive(where).value())
    except (UnsafePickleError, UnsupportedLeafError) as error:
        if opaque:
            return Opaque(partial(_content, folder, where))
        raise UnsupportedLeafError(
            f"no plain value: {error}; opaque=True keeps its bytes as they are"
        ) from error


def _leaves(value: object) -> object:
    if isinstance(value, MappedTensor):
        whole = Boxes.whole(value.shape)
        return _lazy(value.shape, value.dtype, whole, [value])
    if isinstance(value, dict):
        for key in value:
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise UnsupportedLeafError(f"a dict with a {type(key).__name__} as a key")
        return {key: _leaves(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_leaves(part) for part in value]
    if isinstance(value, tuple):
        return tuple(_leaves(part) for part in value)
    return value


def _tree(described: DCPMetadata, leaves: Mapping[str, object]) -> object:
    """The tree of key paths: an int is a position in a list, a string a key of a dict.

    Where an entry of a list is absent, torch too puts None.

    Raises:
        ManifestError: two entries have one path, or one lies inside another; all are listed.
    """
    entries: dict[str, object] = {}
    keys: dict[KeyPath, set[str | int]] = {}
    problems: list[str] = []
    for fqn, leaf in leaves.items():
        path = described.paths[fqn]
        name = join_keys(path)
        if name in entries:
            problems.append(f"{fqn}: another entry has its place {name} too")
        if len(path) > DEEPEST:
            problems.append(f"{fqn}: more than {DEEPEST} containers deep")
            continue
        entries[name] = leaf
        for depth, key in enumerate(path):
            keys.setdefault(path[:depth], set()).add(key)
    lists = {path: below for path, below in keys.items() if all(type(k) is int for k in below)}
    for path, positions in lists.items():
        last = max(map(int, positions))
        if last >= MOST_POSITIONS:
            problems.append(f"{join_keys(path)}: a list with an entry at {last:,}")
            continue
        absent = set(range(last)) - positions
        entries.update({join_keys((*path, number)): None for number in absent})
    try:
        if not problems:
            return unflatten(entries, {join_keys(path): "list" for path in lists})
    except ManifestError as error:
        problems += error.problems or (str(error),)
    raise ManifestError.listing("the entries make up no tree", problems)
