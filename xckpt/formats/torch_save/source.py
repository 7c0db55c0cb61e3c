"""What `torch.save` wrote as a source: tensors and plain values, nothing unpickled.

1. A path means a file, or files that ``pytorch_model.bin.index.json`` holds together
   (`file_sets`). Of a folder without one, ``pytorch_model.bin`` or the only file is taken.
2. Each archive is described (`xckpt.formats.torch_save.archive`): dicts, lists, tuples, plain
   values, and tensors with their strides and places. Tensors that share a storage are each a
   tensor.
3. A box is read by its strides straight from the archive (`file_ranges`).

The way in which torch wrote before 1.6 is refused by name, as is whatever is no plain value.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import closing
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size, numpy_dtype
from xckpt.core.geometry.box import Box
from xckpt.core.names import join_keys
from xckpt.core.tree import FlatTree, flatten
from xckpt.core.values import value_kind
from xckpt.errors import NotACheckpointError, UnsupportedLeafError
from xckpt.formats.file_sets import INDEX, Files, find_files, owners_of
from xckpt.formats.source import TensorSource
from xckpt.formats.strided_ranges import FileTensor, cheap_together
from xckpt.formats.torch_save.archive import Archive, MappedTensor, Where
from xckpt.formats.torch_save.file_range import stated_length
from xckpt.mapping.names import by_mapping_name
from xckpt.mapping.spec import TensorSpec
from xckpt.storage.foreign.files import RangeFile, open_file
from xckpt.storage.foreign.paths import (
    FilePath,
    existing_path,
    map_concurrently,
    named,
    naming,
    reading_threads,
)
from xckpt.storage.location import storage_errors

SUFFIXES: Final = (".bin", ".pt", ".pth")
WEIGHTS: Final = "pytorch_model.bin"
LEGACY: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first bytes of what torch wrote before 1.6: a pickle of a number."""


def _files(path: FilePath) -> Files:
    if path.is_file() or named(path, f".bin{INDEX}"):
        return find_files(path, ".bin")
    if (path / WEIGHTS).is_file():
        return Files((path / WEIGHTS,))
    if not path.is_dir():
        raise NotACheckpointError(f"{path} is neither a file nor a folder")
    files = [each for each in named(path, *SUFFIXES) if each.is_file()]
    if len(files) != 1:
        some = ", ".join(each.name for each in files[:5]) or "none"
        raise NotACheckpointError(
            f"{path}: files of torch.save were looked for, {WEIGHTS} or the only one; found: "
            f"{some}; give the path of one"
        )
    return Files((files[0],))


class TorchSaveSource(TensorSource):
    """Files of `torch.save`, as a source of tensors.

    Args:
        path: a file, an index, or a folder.

    Raises:
        NotACheckpointError: nothing is there, or several files and no index.
        UnsafePickleError: a file holds an instance of a class, or a function.
        UnsupportedLeafError: it is of torch's old way, or holds what is neither tensor nor value.
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

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = existing_path(path)
        self.threads = reading_threads(self.path)
        self._state = hashlib.sha256()
        files = _files(self.path)
        trees: dict[FilePath, FlatTree] = {}
        for file, (tree, state) in zip(
            files.paths, map_concurrently(self.path, _tree, files.paths), strict=True
        ):
            trees[file] = tree
            self._state.update(state)
        leaves, self.containers = _merged(files, trees)
        with naming(self.path):
            self.leaf_names = by_mapping_name(leaves)
            self._tensors, self.values = split_leaves(self.leaf_names, leaves)
        self.specs = {
            name: TensorSpec(tensor.shape, tensor.dtype) for name, tensor in self._tensors.items()
        }
        with storage_errors(self.path):
            self._files: dict[FilePath, RangeFile] = {file: open_file(file) for file in trees}

    def chunks(self, name: str) -> tuple[int, ...]:
        """1 in each dimension: any part is as good; in a bucket what one request brings."""
        tensor = self._tensors[name]
        free_bytes = self._files[tensor.path].free_bytes
        return cheap_together(tensor.shape, tensor.strides, item_size(tensor.dtype), free_bytes)

    def read(self, name: str, box: Box, into: NDArray[np.generic]) -> None:
        """Fill ``into``, of the box's sizes, with the elements of a box; thread-safe.

        Raises:
            CorruptCheckpointError: the file is shorter than it was.
            StorageError: it cannot be read.
        """
        tensor = self._tensors[name]
        with storage_errors(f"{tensor.path}: {name}"):
            read_mapped(self._files[tensor.path], tensor, box.offsets, into)

    def identity(self) -> bytes:
        """A digest of the files' pickles, sizes and times of change."""
        return self._state.digest()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


def _tree(path: FilePath) -> tuple[FlatTree, bytes]:
    """The leaves of one file, and what changes when it does."""
    with storage_errors(path), closing(open_file(path)) as file:
        if file.head(len(LEGACY)) == LEGACY:
            raise UnsupportedLeafError(
                f"{path}: written by torch before 1.6, whose files are no archives; load it with "
                f"torch and save it again"
            )
        size = file.size(lambda: stated_length(path))
        state = file.state()
    archive = Archive.open(path.parent, Where(path.name, 0, size))
    state_text = f"{path.name} ".encode() + state + hashlib.sha256(archive.pickled).digest()
    with naming(path):
        return flatten(archive.value()), state_text


def read_mapped(
    file: RangeFile, tensor: MappedTensor, offsets: tuple[int, ...], into: NDArray[np.generic]
) -> None:
    """Fill ``into`` with a box of a tensor, at ``offsets``.

    Raises:
        CorruptCheckpointError: the file is shorter than it was.
        OSError: it cannot be read.
    """
    dtype = numpy_dtype(tensor.dtype)
    stored = FileTensor(file, tensor.position, dtype, tensor.shape, tensor.strides)
    stored.read(offsets, into)
    if tensor.conjugated:
        np.conjugate(into, out=into)
    if tensor.negated:
        np.negative(into, out=into)


def split_leaves(
    names: Mapping[str, str], leaves: Mapping[str, object]
) -> tuple[dict[str, MappedTensor], dict[str, object]]:
    """Mapping name -> tensor, and mapping name -> value, of leaves by leaf name.

    Raises:
        UnsupportedLeafError: leaves that are neither; all are listed.
    """
    tensors: dict[str, MappedTensor] = {}
    values: dict[str, object] = {}
    problems: list[str] = []
    for name, leaf_name in names.items():
        leaf = leaves[leaf_name]
        if isinstance(leaf, MappedTensor):
            tensors[name] = leaf
        elif value_kind(leaf) is not None:
            values[name] = leaf
        else:
            problems.append(f"{name}: a {type(leaf).__qualname__} is neither tensor nor value")
    if problems:
        raise UnsupportedLeafError.listing("it holds what cannot be read", problems)
    return tensors, values


def _merged(
    files: Files, trees: Mapping[FilePath, FlatTree]
) -> tuple[dict[str, object], dict[str, str]]:
    """The leaves and containers of all files.

    Raises:
        ManifestError: an index names tensors that its files lack, or files share a name.
    """
    if len(trees) == 1 and files.index is None:
        [tree] = trees.values()
        return tree.leaves, tree.containers
    index = files.index and {join_keys((name,)): file for name, file in files.index.items()}
    leaves_of = {file: tree.leaves for file, tree in trees.items()}
    owners = owners_of(Files(files.paths, index, files.index_path), leaves_of)
    containers = {name: kind for tree in trees.values() for name, kind in tree.containers.items()}
    containers.pop("", None)  # A file of an empty dict.
    return {name: leaves_of[file][name] for name, file in owners.items()}, containers
