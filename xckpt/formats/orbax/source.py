"""Orbax checkpoints as a source: v0 and v1, zarr 2 and 3, OCDBT or plain files.

1. `find_item` goes from the user's path to the folder with ``_METADATA``, and `user_metadata`
   gathers what lies beside it (`xckpt.formats.orbax.step`).
2. The tree is read from ``_METADATA`` (`xckpt.formats.orbax.tree`), strings from ``_strings.json``.
3. Arrays are opened and checked before anything is read (`xckpt.storage.foreign.zarr_arrays`).

Orbax and JAX are not needed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import numpy_dtype
from xckpt.core.geometry.box import Box
from xckpt.core.names import join_keys
from xckpt.core.tree import unflatten
from xckpt.errors import (
    RESTORE,
    CorruptCheckpointError,
    ManifestError,
    naming,
)
from xckpt.formats.orbax.step import find_item, user_metadata
from xckpt.formats.orbax.tree import (
    ARRAY_METADATA,
    ARRAYS,
    CHECKPOINT,
    CONTAINERS,
    STRINGS,
    TREE,
    Leaf,
    Tree,
    parse_json,
    parse_tree,
)
from xckpt.formats.source import USER, TensorSource, metadata_texts
from xckpt.mapping.names import by_mapping_name
from xckpt.mapping.spec import TensorSpec
from xckpt.options import LoadOptions
from xckpt.storage.foreign.concurrency import map_named, reading_threads
from xckpt.storage.foreign.documents import Allowance, read_json
from xckpt.storage.foreign.paths import entries_in, existing_path, file_name_problem
from xckpt.storage.foreign.versions import state_of, version_of
from xckpt.storage.foreign.zarr_arrays import StoredZarr, ZarrFolder

LEAF_BYTES: Final = 400
"""Bytes of memory of a leaf that the tree lists, beside its text."""


class OrbaxSource(TensorSource):
    """A checkpoint of Orbax, as a source of tensors.

    Args:
        path: the folder of an item, of a step with one item, or of a `CheckpointManager` with one
            step.
        options: its ``memory_bytes`` is what the documents may take together, and the chunks that
            are being decoded.

    Raises:
        NotACheckpointError: there is none, or several.
        ManifestError: its description is damaged.
        CorruptCheckpointError: arrays are missing, or their metadata cannot be trusted; all are
            listed.
        UnsupportedLeafError: arrays of a dtype that the format lacks; all are listed.
        StorageError: a file cannot be read.

    Example:
        >>> import xckpt
        >>> from xckpt.convert import convert
        >>> _ = xckpt.save("memory://for-orbax", {"model": {"w": np.arange(6.0)}, "step": 7})
        >>> _ = convert("memory://for-orbax", "an-orbax-folder", format="orbax")
        >>> source = OrbaxSource("an-orbax-folder")
        >>> source.specs, source.values
        ({'model/w': TensorSpec(shape=(6,), dtype='float64')}, {'step': 7})
    """

    def __init__(self, path: str | os.PathLike[str], *, options: LoadOptions | None = None) -> None:
        self._memory = Allowance.of(options)
        given = existing_path(path)
        self.path: Final = find_item(given)
        self.threads: int | None = reading_threads(self.path)
        with self._memory.passing() as needed:
            data = read_json(self.path / TREE, needed)
            with naming(self.path / TREE):
                tree = parse_tree(data)
        kept = len(data) + len(tree.leaves) * LEAF_BYTES
        self._memory.take(kept, f"{self.path / TREE}: what it lists")
        user = user_metadata(given, self.path, tree.custom, self._memory)
        with naming(given):
            self.metadata: Mapping[str, str] = _texts(user)
        """Custom metadata, and items of JSON."""
        self.containers: Mapping[str, str] = _containers(tree)
        with naming(self.path):
            leaves = _by_name(tree, self.containers)
            stored = {n: leaf for n, leaf in leaves.items() if leaf.kind not in CONTAINERS}
            self.leaf_names: Mapping[str, str] = by_mapping_name(stored)
        by_name = {name: leaves[leaf] for name, leaf in self.leaf_names.items()}
        arrays = self._open(tree, by_name)
        self._arrays = {name: arrays[name] for name in arrays if by_name[name].kind in ARRAYS}
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec(array.shape, array.dtype) for name, array in self._arrays.items()
        }
        self.values: Mapping[str, object] = self._values(by_name, arrays)
        self.annotations: Mapping[str, str] = self._annotations(by_name)
        self._identity = self._digest(data)

    def _open(self, tree: Tree, leaves: Mapping[str, Leaf]) -> dict[str, StoredZarr]:
        """Every array, opened and checked."""
        ocdbt = tree.ocdbt
        if ocdbt is None:
            ocdbt = (self.path / "manifest.ocdbt").is_file()
        if ocdbt and not (self.path / "manifest.ocdbt").is_file():
            raise CorruptCheckpointError(f"{self.path}: manifest.ocdbt is missing; {RESTORE}")
        folder = ZarrFolder(
            self.path, ocdbt=ocdbt, fill_missing=tree.fill_missing, memory=self._memory
        )

        def opened(leaf: Leaf) -> StoredZarr:
            problem = file_name_problem(leaf.stored_name)
            if problem:
                raise ManifestError(f"its name {problem}")
            return folder.open(leaf.stored_name, version=tree.zarr_version)

        stored = {n: leaf for n, leaf in leaves.items() if leaf.kind in ARRAYS | {"scalar"}}
        arrays = map_named(self.path, opened, stored.items())
        return dict(zip(stored, arrays, strict=True))

    def _values(
        self, leaves: Mapping[str, Leaf], arrays: Mapping[str, StoredZarr]
    ) -> dict[str, object]:
        strings = self._strings() if any(x.kind == "string" for x in leaves.values()) else {}
        values: dict[str, object] = {}
        for name, leaf in leaves.items():
            if leaf.kind == "None":
                values[name] = None
            elif leaf.kind == "string":
                if not isinstance(strings.get(leaf.stored_name), str):
                    raise CorruptCheckpointError(
                        f"{self.path / STRINGS}: {name} is not in it; {RESTORE}"
                    )
                values[name] = strings[leaf.stored_name]
            elif leaf.kind == "scalar":
                values[name] = _number(name, arrays[name])
        return values

    def _strings(self) -> Mapping[str, object]:
        path = self.path / STRINGS
        with naming(path):
            if not path.is_file():
                raise CorruptCheckpointError(f"missing; {RESTORE}")
            return parse_json(read_json(path, self._memory), dict[str, object])

    def _annotations(self, leaves: Mapping[str, Leaf]) -> dict[str, str]:
        """The kinds of random keys, of which Orbax keeps the data."""
        kinds: dict[str, str] = {}
        for path in entries_in(self.path / ARRAY_METADATA):
            if not path.name.startswith("process_"):
                continue
            with naming(path), self._memory.passing() as needed:
                document = parse_json(read_json(path, needed), dict[str, object])
            listed = document.get("array_metadatas")
            for each in listed if isinstance(listed, list) else ():
                match each:
                    case {
                        "array_metadata": {
                            "param_name": str(stored),
                            "ext_metadata": {"random_key_impl": str(kind)},
                        }
                    }:
                        kinds[stored] = f"prng_key:{kind}"
        names = {leaf.stored_name: name for name, leaf in leaves.items()}
        return {names[stored]: text for stored, text in kinds.items() if stored in names}

    def _digest(self, tree: bytes) -> bytes:
        """A digest of the tree and the time of its writing: another save is another source."""
        parts = [tree, self.state()]
        noted = (folder / CHECKPOINT for folder in (self.path, self.path.parent))
        first = next((path for path in noted if path.is_file()), None)
        if first is not None:
            with self._memory.passing() as needed:
                parts.append(read_json(first, needed))
        return hashlib.sha256(b"".join(parts)).digest()

    def chunks(self, name: str) -> tuple[int, ...]:
        """The shape of a chunk, which is decoded as one."""
        return tuple(max(1, size) for size in self._arrays[name].chunk)

    def read(self, name: str, box: Box, into: NDArray[np.generic]) -> None:
        """Fill ``into``, of the box's sizes, with the elements of a box; thread-safe.

        Raises:
            CorruptCheckpointError: a chunk is missing or damaged.
            StorageError: the storage refused.
        """
        self._arrays[name].read(box.offsets, into)

    def check(self, name: str, box: Box) -> None:
        """Find out whether a box can be read; one element of a chunk has all of it decoded."""
        if box.elements and self._arrays[name].chunks_met(box) == 1:
            box = Box(box.offsets, (1,) * len(box.sizes))
        super().check(name, box)

    def version(self) -> bytes:
        """A value that changes if the item may have been rewritten; see `TensorSource.version`."""
        noted = (self.path / TREE, self.path / "manifest.ocdbt")
        return version_of(path for path in noted if path.is_file())

    def state(self) -> bytes:
        """A value that changes if the item is written; see `TensorSource.state`."""
        return state_of(self.path / TREE) + state_of(self.path / "manifest.ocdbt")

    def close(self) -> None:
        """Nothing stays open beyond this object's life."""


def _texts(user: Mapping[str, object]) -> Mapping[str, str]:
    """User metadata as texts; what `xckpt.formats.orbax.sink` wrote of other ones than a dict."""
    text = user.get(USER) if len(user) == 1 else None
    return {USER: text} if isinstance(text, str) else metadata_texts(user or None)


def _by_name(tree: Tree, containers: Mapping[str, str]) -> dict[str, Leaf]:
    """The leaves by their names, which make a tree.

    Raises:
        ManifestError: they make none, or two leaves have one name.
    """
    leaves: dict[str, Leaf] = {}
    for leaf in tree.leaves:
        name = join_keys(leaf.keys)
        if leaves.setdefault(name, leaf) is not leaf:
            raise ManifestError(f"{name}: two leaves of the tree have this name")
    unflatten({n: None for n, leaf in leaves.items() if leaf.kind not in CONTAINERS}, containers)
    return leaves


def _containers(tree: Tree) -> dict[str, str]:
    """The containers that leaf names do not imply: sequences, and empty ones."""
    containers: dict[str, str] = {}
    for leaf in tree.leaves:
        for depth, key in enumerate(leaf.keys):
            if isinstance(key, int):
                containers[join_keys(leaf.keys[:depth])] = "list"
        if leaf.kind in CONTAINERS:
            containers[join_keys(leaf.keys)] = CONTAINERS[leaf.kind]
    return containers


def _number(name: str, array: StoredZarr) -> object:
    """A Python number, which Orbax stores as an array without dimensions."""
    if array.shape:
        raise ManifestError(f"{name}: a number of shape {array.shape}")
    into = np.zeros((), numpy_dtype(array.dtype))
    array.read((), into)
    return into.item()
