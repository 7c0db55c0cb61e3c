"""A folder of torch.distributed.checkpoint (DCP) as a source; without torch or pickle.

1. ``.metadata`` is described without unpickling it (`xckpt.formats.dcp.metadata`).
2. The elements of each chunk are found in the ``.distcp`` files (`xckpt.formats.torch_save`) and
   checked against the metadata. Every fault of every entry is found before any is reported.
3. Key paths become a tree, as torch keeps them.
4. A box is read from the chunks that it meets (`MappedSource`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from itertools import islice
from operator import call
from pathlib import Path
from typing import Any, Final

import msgspec

from xckpt.core.geometry.box import Box
from xckpt.core.manifest.memory import RAISE
from xckpt.core.names import KeyPath, join_keys
from xckpt.core.text.arguments import named
from xckpt.core.tree import DEEPEST, flatten, unflatten
from xckpt.errors import (
    CorruptCheckpointError,
    ManifestError,
    MemoryLimitError,
    NotACheckpointError,
    UnsafePickleError,
    UnsupportedLeafError,
    naming,
)
from xckpt.formats.dcp.keys import METADATA_FILE, keys_below
from xckpt.formats.dcp.metadata import DCPMetadata, parse
from xckpt.formats.source import Opaque
from xckpt.formats.torch_save.archive import Archive, Where
from xckpt.formats.torch_save.source import MappedParts, MappedSource
from xckpt.formats.torch_save.values import PART_BYTES, MappedTensor, kept_bytes
from xckpt.options import LoadOptions
from xckpt.storage.foreign.concurrency import map_named
from xckpt.storage.foreign.documents import Allowance
from xckpt.storage.foreign.files import open_file, read_up_to
from xckpt.storage.foreign.paths import FilePath, entries_in, find_path
from xckpt.storage.foreign.versions import state_of, version_of
from xckpt.storage.location import storage_errors

MOST_OPEN: Final = 64
"""Files that are held open at a time."""


class DCPSource(MappedSource):
    """A DCP folder, as a source of tensors.

    Args:
        path: a folder with a ``.metadata``; a local path or a URL.
        options: its ``memory_bytes`` is what ``.metadata`` and the entries' values may take
            together.
        opaque: keep entries that are neither tensors nor values as bytes.
        skip_objects: leave them out, and list them in ``skipped``.

    Raises:
        NotACheckpointError: there is no ``.metadata``.
        UnsafePickleError: a pickle names a class or function that is not allowed.
        ManifestError: ``.metadata`` is damaged, or not what torch writes.
        CorruptCheckpointError: files are missing, truncated or damaged; all are listed.
        UnsupportedLeafError: entries that are neither tensors nor values; all are listed.
        PlanError: chunks overlap, or elements are in none.

    Example:
        >>> import numpy as np
        >>> import xckpt
        >>> from xckpt.convert import convert
        >>> _ = xckpt.save("memory://for-dcp", {"model": {"w": np.arange(6.0)}, "step": 7})
        >>> _ = convert("memory://for-dcp", "a-dcp-folder", format="dcp")
        >>> source = DCPSource("a-dcp-folder")
        >>> source.specs, source.values
        ({'model/w': TensorSpec(shape=(6,), dtype='float64')}, {'step': 7})
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        options: LoadOptions | None = None,
        opaque: bool = False,
        skip_objects: bool = False,
    ) -> None:
        memory = Allowance.of(options)
        folder = find_path(path)
        data = _read_metadata(folder, memory)
        with naming(folder / METADATA_FILE):
            described = parse(data, memory)
        leaves = _read_entries(folder, described, opaque or skip_objects, memory)
        if skip_objects:
            objects = {fqn: leaf for fqn, leaf in leaves.items() if isinstance(leaf, Opaque)}
            leaves = {fqn: leaf for fqn, leaf in leaves.items() if fqn not in objects}
            self.skipped: Mapping[str, str] = {fqn: leaf.reason for fqn, leaf in objects.items()}
        with naming(folder):
            tree = flatten(_tree(described, leaves, memory))
        super().__init__(folder, tree, MOST_OPEN)
        self._identity = hashlib.sha256(data).digest()
        names = described.files if isinstance(folder, Path) else ()
        files = dict.fromkeys((METADATA_FILE, *names))
        self._files = {folder / name: place for place, name in enumerate(files)}
        """File -> its place among them. Two saves of one layout have equal metadata. A folder in a
        bucket is known by these alone, which a save writes last."""

    def version(self) -> bytes:
        """A value that changes if a file may have been rewritten; see `TensorSource.version`."""
        return version_of(self._files)

    def state(self) -> bytes:
        """A value that changes if a file is written; see `TensorSource.state`."""
        return msgspec.msgpack.encode([state_of(file) for file in self._files])

    def is_written(self, state: bytes, name: str | None = None) -> bool:
        """See `TensorSource.is_written`. Many ranks write many files: a tensor's own count."""
        if name is None:
            return super().is_written(state)
        before = msgspec.msgpack.decode(state, type=list[bytes])
        files = {self.path / METADATA_FILE, *(part.path for part in self._tensors[name].parts)}
        return any(state_of(file) != before[self._files[file]] for file in files)


def _read_metadata(folder: FilePath, memory: Allowance) -> bytes:
    """The bytes of ``.metadata``.

    Raises:
        NotACheckpointError: there is none.
        ManifestError: it is absurdly long.
        StorageError: it cannot be read.
    """
    path = folder / METADATA_FILE
    with storage_errors(folder):
        is_there = path.is_file()
    if not is_there:
        parts = [part.name for part in entries_in(folder, METADATA_FILE)]
        own = [name for name in parts if name.startswith("__")]
        hint = (
            f"it holds {', '.join(own[:3])}, which each rank wrote for itself (use_collectives="
            f"False); such folders are not read"
            if own
            else "check the path, or whether the save finished"
        )
        raise NotACheckpointError(
            f"{folder} is not a DCP folder: there is no .metadata in it; {hint}"
        )
    data = read_up_to(path, memory.most)
    if data is None:
        raise MemoryLimitError(
            f"{path}: it is over {memory.most:,} bytes long (memory_bytes); {RAISE}"
        )
    return data


def _read_entries(
    folder: FilePath, described: DCPMetadata, opaque: bool, memory: Allowance
) -> dict[str, object]:
    """FQN -> a tensor, or the value of an object, with a `MappedTensor` for each tensor in it.

    Raises:
        XckptError: entries are damaged, foreign or not representable; all of the worst kind are
            listed.
    """
    readers: list[tuple[str, partial[Any]]] = []
    chunk = partial(_chunk, folder, memory)
    for name in described.order:
        if name in described.objects:
            where = described.objects[name]
            readers.append((name, partial(_object, folder, where, opaque, memory)))
            continue
        tensor = described.tensors[name]
        readers += [
            (f"{name}: chunk {box}", partial(chunk, where, tensor.dtype, box))
            for box, where in zip(tensor.boxes, tensor.places, strict=True)
        ]
    read = iter(map_named(folder, call, readers))
    return {
        name: MappedParts(t.shape, t.dtype, t.boxes, tuple(islice(read, len(t.boxes))))
        if (t := described.tensors.get(name))
        else next(read)
        for name in described.order
    }


def _chunk(folder: FilePath, memory: Allowance, where: Where, dtype: str, box: Box) -> MappedTensor:
    """A chunk of a tensor.

    Raises:
        XckptError: it cannot be read, or differs from the metadata.
    """
    part = Archive.open(folder, where, memory).value(memory)
    if not isinstance(part, MappedTensor):
        stored = named(type(part).__name__)
    elif (part.dtype, part.shape) != (dtype, box.sizes):
        stored = f"{part.dtype} of shape {part.shape}"
    else:
        return part
    raise CorruptCheckpointError(
        f"the metadata say {dtype} of shape {box.sizes}, but {where.file} holds {stored}"
    )


def _object(folder: FilePath, where: Where, opaque: bool, memory: Allowance) -> object:
    """The value of an entry of bytes.

    Raises:
        UnsupportedLeafError: it is not a plain value, and ``opaque`` is False.
        CorruptCheckpointError: the file is missing, truncated or damaged.
    """
    try:
        value = Archive.open(folder, where, memory).value(memory)
        flatten(value)
        memory.take(kept_bytes(value), "what is saved there")
    except (UnsafePickleError, UnsupportedLeafError) as error:
        reason = "; ".join(map(str, error.problems)) or str(error)
        if opaque:
            return Opaque(partial(_content, folder, where), reason)
        raise UnsupportedLeafError(
            f"not a plain value: {reason}; opaque=True keeps its bytes as they are"
        ) from error
    return value


def _content(folder: FilePath, where: Where) -> bytes:
    """The bytes of an entry."""
    path = folder / where.file
    with storage_errors(path), closing(open_file(path)) as file:
        return file.fetch([(where.offset, where.offset + where.length)])[0]


def _tree(described: DCPMetadata, leaves: Mapping[str, object], memory: Allowance) -> object:
    """The tree of key paths: an int is a position in a list, a string a key of a dict.

    An absent entry of a list becomes None, as in torch.

    Raises:
        ManifestError: two entries have one path, or one lies inside another; all are listed.
    """
    entries: dict[str, object] = {}
    paths: list[KeyPath] = []
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
        paths.append(path)
    lists = _lists(paths)
    problems += _long_lists(lists, memory)
    try:
        if not problems:
            for path, positions in lists.items():
                absent = set(range(max(positions))) - positions
                entries.update({join_keys((*path, number)): None for number in absent})
            return unflatten(entries, {join_keys(path): "list" for path in lists})
    except ManifestError as error:
        problems += error.problems or (str(error),)
    raise ManifestError.listing("the entries make up no tree", problems)


def _lists(paths: Iterable[KeyPath]) -> dict[KeyPath, set[int]]:
    """Key path of each list -> the positions that have entries."""
    lists: dict[KeyPath, set[int]] = {}
    for path, below in keys_below(paths).items():
        positions = {key for key in below if isinstance(key, int)}
        if positions == below:
            lists[path] = positions
    return lists


def _long_lists(lists: Mapping[KeyPath, Collection[int]], memory: Allowance) -> Iterator[str]:
    """A line for the list with which the entries of all lists would take too much memory."""
    left = memory.most // PART_BYTES
    for path, positions in lists.items():
        last = max(positions)
        left -= last
        if left < 0:
            yield (
                f"{join_keys(path)}: a list with an entry at {last:,}: the absent ones before it, "
                f"{PART_BYTES} bytes each, take more than memory_bytes; {RAISE}"
            )
            return
