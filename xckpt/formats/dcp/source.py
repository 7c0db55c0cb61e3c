"""A folder of torch.distributed.checkpoint (DCP) as a source; neither torch nor pickle is needed.

1. ``.metadata`` is described, and the elements of every chunk are found and checked
   (`xckpt.formats.dcp.folder`). Key paths become names, as torch keeps them.
2. A box is read from the chunks that it meets, each by its strides (`file_ranges`).
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Box, Boxes, intersect
from xckpt.core.leaf import LazySource
from xckpt.core.tree import flatten
from xckpt.core.values import value_kind
from xckpt.errors import UnsupportedLeafError
from xckpt.formats.dcp.folder import MappedParts, parse_metadata, read_metadata, read_tree
from xckpt.formats.source import Opaque, TensorSource
from xckpt.formats.strided_ranges import cheap_together
from xckpt.formats.torch_save.source import read_mapped
from xckpt.mapping.names import by_mapping_name
from xckpt.mapping.spec import TensorSpec
from xckpt.storage.foreign.files import RangeFile, StoredFile, open_file
from xckpt.storage.foreign.paths import FilePath, StoredPath, find_path, naming, reading_threads
from xckpt.storage.location import storage_errors

MOST_OPEN: Final = 64
"""Files that are held open at a time."""


class DCPSource(TensorSource):
    """A DCP folder, as a source of tensors.

    Args:
        path: a folder with a ``.metadata``; a local path or a URL.
        opaque: keep entries that are neither tensors nor values as the bytes that they are.

    Raises:
        NotACheckpointError: there is no ``.metadata``.
        UnsafePickleError: a pickle names a class or function that has no place there.
        ManifestError: ``.metadata`` is damaged, or not what torch writes.
        CorruptCheckpointError: files are missing, truncated or damaged; all are listed.
        UnsupportedLeafError: entries that are neither tensors nor values; all are listed.
        PlanError: chunks overlap, or elements are in none.

    Example:
        >>> import xckpt
        >>> from xckpt.convert import convert
        >>> _ = xckpt.save("memory://for-dcp", {"model": {"w": np.arange(6.0)}, "step": 7})
        >>> _ = convert("memory://for-dcp", "a-dcp-folder", format="dcp")
        >>> source = DCPSource("a-dcp-folder")
        >>> source.specs, source.values
        ({'model/w': TensorSpec(shape=(6,), dtype='float64')}, {'step': 7})
    """

    def __init__(self, path: str | os.PathLike[str], *, opaque: bool = False) -> None:
        folder = self.path = find_path(path)
        self.threads = reading_threads(self.path)
        data = read_metadata(folder)
        with naming(folder):
            flat = flatten(read_tree(folder, parse_metadata(folder, data), opaque=opaque))
            self.leaf_names = by_mapping_name(flat.leaves)
        self.containers = flat.containers
        self._tensors: dict[str, tuple[Boxes, MappedParts]] = {}
        self.specs = {}
        self.values = {}
        self._sort({name: flat.leaves[leaf] for name, leaf in self.leaf_names.items()})
        self._state = hashlib.sha256(data)
        self._files: OrderedDict[FilePath, RangeFile] = OrderedDict()
        self._lock = Lock()

    def _sort(self, leaves: Mapping[str, object]) -> None:
        """Divide the leaves into tensors and values."""
        specs: dict[str, TensorSpec] = {}
        values: dict[str, object] = {}
        problems: list[str] = []
        for name, leaf in leaves.items():
            if isinstance(leaf, LazySource) and isinstance(leaf.read, MappedParts):
                specs[name] = TensorSpec(leaf.shape, leaf.dtype)
                self._tensors[name] = leaf.boxes, leaf.read
            elif value_kind(leaf) is not None or isinstance(leaf, Opaque):
                values[name] = leaf
            else:
                problems.append(f"{name}: a {type(leaf).__qualname__} is neither tensor nor value")
        if problems:
            raise UnsupportedLeafError.listing(f"{self.path}: it cannot be read", problems)
        self.specs, self.values = specs, values

    def chunks(self, name: str) -> tuple[int, ...]:
        """1 in each dimension: any part is as good; in a bucket what one request brings."""
        _, mapped = self._tensors[name]
        if not mapped.parts:
            return (1,) * len(self.specs[name].shape)
        first = mapped.parts[0]
        free_bytes = StoredFile.free_bytes if isinstance(self.path, StoredPath) else 0
        return cheap_together(first.shape, first.strides, item_size(first.dtype), free_bytes)

    def read(self, name: str, box: Box, into: NDArray[np.generic]) -> None:
        """Fill ``into``, of the box's sizes, with the elements of a box; thread-safe.

        Raises:
            CorruptCheckpointError: a file is shorter than it was.
            StorageError: a file cannot be read.
        """
        boxes, mapped = self._tensors[name]
        _, numbers, shared = intersect(Boxes.of([(box.offsets, box.sizes)]), boxes)
        for number, part in zip(numbers.tolist(), shared, strict=True):
            tensor = mapped.parts[number]
            offsets = part.relative_to(boxes[number].offsets).offsets
            region = into[(*part.slices(box.offsets), ...)]  # a view even without dimensions
            with storage_errors(f"{tensor.path}: {name}"):
                read_mapped(self._open(tensor.path), tensor, offsets, region)

    def _open(self, path: FilePath) -> RangeFile:
        """A file; it stays open until many others were opened, and as long as it is being read."""
        with self._lock:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = open_file(path)
            self._files.move_to_end(path)
            if len(self._files) > MOST_OPEN:
                self._files.popitem(last=False)
            return file

    def identity(self) -> bytes:
        """A digest of ``.metadata``."""
        return self._state.digest()

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            self._files.clear()
