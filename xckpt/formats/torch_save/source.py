"""Files of `torch.save` as a source: tensors and plain values, nothing unpickled.

1. A path means a file, or files that ``pytorch_model.bin.index.json`` holds together
   (`file_sets`). In a folder without one, ``pytorch_model.bin`` or the only file counts.
2. Each archive is described (`xckpt.formats.torch_save.archive`): dicts, lists, tuples, plain
   values, and tensors with their strides and places. Tensors that share a storage are each a
   tensor.
3. A box is read from the parts of the tensor that it meets, by their strides, straight from the
   archives (`xckpt.formats.strided_ranges`). A tensor has one part here, several in a DCP folder.

The format of torch before 1.6 is refused by name, and so is any object that is not a plain value.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache, partial
from threading import Lock
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Box, Boxes, Shape
from xckpt.core.geometry.box_lookup import intersect
from xckpt.core.names import join_keys
from xckpt.core.text.printable import in_few
from xckpt.core.tree import FlatTree, flatten
from xckpt.errors import NotACheckpointError, UnsafePickleError, UnsupportedLeafError, naming
from xckpt.formats.file_sets import INDEX, Files, find_files, owners_of
from xckpt.formats.source import TensorSource
from xckpt.formats.strided_ranges import cheap_together
from xckpt.formats.torch_save.archive import Archive, Where, stated_length
from xckpt.formats.torch_save.values import MappedTensor, kept_bytes
from xckpt.mapping.names import by_mapping_name
from xckpt.mapping.spec import TensorSpec
from xckpt.options import LoadOptions
from xckpt.storage.foreign.concurrency import map_named, reading_threads
from xckpt.storage.foreign.documents import Allowance
from xckpt.storage.foreign.files import RangeFile, StoredFile, open_file
from xckpt.storage.foreign.paths import FilePath, StoredPath, entries_in, existing_path
from xckpt.storage.foreign.single_files import LEGACY
from xckpt.storage.foreign.versions import version_of
from xckpt.storage.location import storage_errors

SUFFIXES: Final = (".bin", ".pt", ".pth")
WEIGHTS: Final = "pytorch_model.bin"


def find_saved(path: FilePath, memory: Allowance | None = None) -> Files:
    """The files of torch.save that a path means.

    Raises:
        NotACheckpointError: there are none, or several that do not belong together.

    Example:
        >>> from pathlib import Path
        >>> Path("weights").mkdir()
        >>> Path("weights/last.pt").touch()
        >>> [file.name for file in find_saved(Path("weights")).paths]
        ['last.pt']
    """
    if path.is_file() or entries_in(path, f".bin{INDEX}"):
        return find_files(path, ".bin", memory)
    if (path / WEIGHTS).is_file():
        return Files((path / WEIGHTS,))
    if not path.is_dir():
        raise NotACheckpointError(f"{path} is neither a file nor a folder")
    files = [each for each in entries_in(path, *SUFFIXES) if each.is_file()]
    if len(files) != 1:
        some = in_few([each.name for each in files]) or "none"
        raise NotACheckpointError(
            f"{path}: neither {WEIGHTS} nor a single file of torch.save is there; found: {some}; "
            f"give the path of one"
        )
    return Files((files[0],))


@dataclass(frozen=True, slots=True, eq=False)
class MappedParts:
    """A tensor that lies in files in parts: ``parts[i]`` has the elements of ``boxes[i]``."""

    shape: Shape
    dtype: str
    boxes: Boxes
    parts: tuple[MappedTensor, ...]

    def regions(
        self, box: Box, into: NDArray[np.generic]
    ) -> Iterator[tuple[MappedTensor, Shape, NDArray[np.generic]]]:
        """The parts that a box meets: each with offsets in it, and what it fills of ``into``."""
        if len(self.parts) == 1:  # It has all elements.
            yield self.parts[0], box.offsets, into
            return
        _, numbers, shared = intersect(Boxes.of([(box.offsets, box.sizes)]), self.boxes)
        for number, shared_box in zip(numbers.tolist(), shared, strict=True):
            offsets = shared_box.relative_to(self.boxes[number].offsets).offsets
            yield self.parts[number], offsets, into[shared_box.slices(box.offsets)]


class MappedSource(TensorSource):
    """Tensors that lie in archives of `torch.save`, of one part or of several.

    Args:
        path: where they are.
        tree: their tree; a tensor is a `MappedTensor` or a `MappedParts`.
        most_open: how many files are held open at a time; None for all.
    """

    def __init__(self, path: FilePath, tree: FlatTree, most_open: int | None = None) -> None:
        self.path = path
        self.threads: int | None = reading_threads(path)
        self.containers: Mapping[str, str] = tree.containers
        with naming(path):
            self.leaf_names: Mapping[str, str] = by_mapping_name(tree.leaves)
        leaves = {name: tree.leaves[leaf] for name, leaf in self.leaf_names.items()}
        self._tensors: dict[str, MappedParts] = {}
        specs: dict[str, TensorSpec] = {}
        values: dict[str, object] = {}
        for name, leaf in leaves.items():
            if isinstance(leaf, MappedTensor):
                leaf = MappedParts(leaf.shape, leaf.dtype, Boxes.whole(leaf.shape), (leaf,))
            if isinstance(leaf, MappedParts):
                self._tensors[name] = leaf
                specs[name] = TensorSpec(leaf.shape, leaf.dtype)
            else:
                values[name] = leaf
        self.specs: Mapping[str, TensorSpec] = specs
        self.values: Mapping[str, object] = values
        self._open_files = lru_cache(most_open)(open_file)
        self._lock = Lock()

    def chunks(self, name: str) -> tuple[int, ...]:
        """1 in each dimension: any part is as good; in a bucket what one request brings."""
        tensor = self._tensors[name]
        if not tensor.parts:
            return (1,) * len(tensor.shape)
        first = tensor.parts[0]
        free_bytes = StoredFile.free_bytes if isinstance(self.path, StoredPath) else 0
        return cheap_together(first.shape, first.strides, item_size(first.dtype), free_bytes)

    def read(self, name: str, box: Box, into: NDArray[np.generic]) -> None:
        """Fill ``into``, of the box's sizes, with the elements of a box; thread-safe.

        Raises:
            CorruptCheckpointError: a file is shorter than it was.
            StorageError: a file cannot be read.
        """
        tensor = self._tensors[name]
        for part, offsets, region in tensor.regions(box, into):
            with storage_errors(f"{part.path}: {name}"):
                part.read(self._open(part.path), offsets, region)

    def _open(self, path: FilePath) -> RangeFile:
        """A file; it stays open until many others were opened, and as long as it is being read."""
        with self._lock:
            return self._open_files(path)

    def close(self) -> None:
        """Close the files."""
        self._open_files.cache_clear()


class TorchSaveSource(MappedSource):
    """Files of `torch.save`, as a source of tensors.

    Args:
        path: a file, an index, or a folder.
        options: its ``memory_bytes`` is what the index and the files' values may take together.

    Raises:
        NotACheckpointError: nothing is there, or several files and no index.
        UnsafePickleError: a file holds an instance of a class, or a function.
        UnsupportedLeafError: it is of torch's old format, or holds objects that are neither tensors
            nor values.
        CorruptCheckpointError: a file is truncated, or no archive of torch.save.
        ManifestError: a pickle or the index is damaged.
        StorageError: a file cannot be read.

    Example:
        >>> import torch
        >>> torch.save({"model": {"w.weight": torch.arange(6).reshape(2, 3).T}, "step": 7}, "t.pt")
        >>> source = TorchSaveSource("t.pt")
        >>> source.specs, source.values
        ({'model/w.weight': TensorSpec(shape=(3, 2), dtype='int64')}, {'step': 7})
        >>> into = np.zeros((1, 2), np.int64)
        >>> source.read("model/w.weight", Box((2, 0), (1, 2)), into)
        >>> into
        array([[2, 5]])
    """

    def __init__(self, path: str | os.PathLike[str], *, options: LoadOptions | None = None) -> None:
        memory = Allowance.of(options)
        place = existing_path(path)
        files = find_saved(place, memory)
        named_files = [(file.name, file) for file in files.paths]
        read = map_named(place, partial(_tree, memory=memory), named_files)
        trees = {file: tree for file, (tree, _) in zip(files.paths, read, strict=True)}
        super().__init__(place, _merged(files, trees))
        # The files' pickles, sizes and times of change.
        self._identity = hashlib.sha256(b"".join(state for _, state in read)).digest()
        for file in files.paths:  # A file that replaces one of these later is not read.
            with storage_errors(file):
                self._open(file)
        self._paths: Final = files.paths

    def version(self) -> bytes:
        """A value that changes if a file may have been rewritten; see `TensorSource.version`."""
        return version_of(self._paths)

    def state(self) -> bytes:
        """A value that changes if a file is written; see `TensorSource.state`."""
        return b"".join(self._open(path).state() for path in self._paths)


def _tree(path: FilePath, memory: Allowance) -> tuple[FlatTree, bytes]:
    """The leaves of one file, and its state, which changes with it."""
    with storage_errors(path), closing(open_file(path)) as file:
        if file.head(len(LEGACY)) == LEGACY:
            raise UnsupportedLeafError(
                "written by torch before 1.6, whose files are not archives; load it with torch and "
                "save it again"
            )
        size = file.size(lambda: stated_length(file))
        state = file.state()
    try:
        archive = Archive.open(path.parent, Where(path.name, 0, size), memory)
        value = archive.value(memory)
        memory.take(kept_bytes(value), "what is saved there")
        state_text = f"{path.name} ".encode() + state + hashlib.sha256(archive.pickled).digest()
        return flatten(value), state_text
    except UnsafePickleError as error:
        raise UnsafePickleError(
            f"{error}; load it with torch, and save tensors and plain values alone, such as a "
            f"module's state_dict()"
        ) from error


def _merged(files: Files, trees: Mapping[FilePath, FlatTree]) -> FlatTree:
    """The leaves and containers of all files.

    Raises:
        ManifestError: an index names tensors that its files lack, or files share a name.
    """
    if len(trees) == 1 and files.index is None:
        [tree] = trees.values()
        return tree
    index = files.index and {join_keys((name,)): file for name, file in files.index.items()}
    leaves_of = {file: tree.leaves for file, tree in trees.items()}
    owners = owners_of(Files(files.paths, index, files.index_path), leaves_of)
    containers = {name: kind for tree in trees.values() for name, kind in tree.containers.items()}
    containers.pop("", None)  # A file of an empty dict.
    return FlatTree({name: leaves_of[file][name] for name, file in owners.items()}, containers)
