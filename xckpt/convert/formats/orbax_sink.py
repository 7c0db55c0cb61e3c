"""Orbax-readable checkpoints as a sink, written without Orbax.

1. `prepare` writes what Orbax wants to know: ``_METADATA`` (the tree), ``_strings.json``, and
   ``_CHECKPOINT_METADATA`` beside them; and makes an empty zarr v3 array for each tensor.
2. Boxes of whole chunks are written by TensorStore, from any thread or process. Chunks are plain
   files with a crc32c each: no OCDBT database, which only one process could merge, and so each
   chunk is durable, and can be written again, on its own.
3. `commit` renames the folder.

Orbax restores it as NumPy arrays, or as jax.Arrays with the shardings that it is given. Python
numbers and strings stay such. Every container becomes a dict, since a mapping name does not tell a
list from one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xckpt.convert.formats.names import flat_names
from xckpt.convert.formats.orbax_tree import CHECKPOINT, STRINGS, TREE, Leaf, encode_tree
from xckpt.convert.formats.paths import file_problem, local_path, system_errors
from xckpt.convert.formats.staging import Staging
from xckpt.convert.names import keys_of
from xckpt.convert.tensors import TensorSpec
from xckpt.core.dtypes import item_size
from xckpt.core.metadata import ChunkStorageMetadata
from xckpt.errors import NotACheckpointError, UnsupportedLeafError
from xckpt.storage.zarr_folders import StoredZarr, ZarrFolder

__all__ = ["OrbaxSink", "chunk_shape"]

CHUNK_BYTES: Final = 1 << 23
"""Target for a chunk, bytes."""
HANDLER: Final = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
NUMBERS: Final[Mapping[type, str]] = {bool: "bool", int: "int64", float: "float64"}


class OrbaxSink:
    """Writes a checkpoint that Orbax restores.

    Args:
        path: the folder; for a `CheckpointManager`, ``ROOT/STEP/default``.
        overwrite: replace what is there, if it is such a checkpoint.

    Example:
        >>> sink = OrbaxSink("for-orbax")
        >>> _ = sink.prepare({"a/w": TensorSpec((2, 2), "float32")}, {"step": 7}, {})
        >>> sink.write("a/w", ChunkStorageMetadata((0, 0), (2, 2)), np.eye(2, dtype=np.float32))
        >>> sink.commit()
        >>> from xckpt.convert.formats.orbax import OrbaxSource
        >>> source = OrbaxSource("for-orbax")
        >>> source.specs, source.values
        ({'a/w': TensorSpec(shape=(2, 2), dtype='float32')}, {'step': 7})
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.path = local_path(path)
        self.overwrite = overwrite
        self._staging: Staging | None = None
        self._arrays: dict[str, StoredZarr] = {}

    def prepare(
        self,
        specs: Mapping[str, TensorSpec],
        values: Mapping[str, object],
        metadata: Mapping[str, str],
        *,
        attach: str = "",
    ) -> str:
        """Check everything, and write what describes it; see `TensorSink.prepare`."""
        _check(specs, values)
        names = flat_names((*specs, *values))
        _check_paths(names)
        leaves = [Leaf(keys_of(name), "np.ndarray") for name in specs]
        leaves += [Leaf(keys_of(name), _kind(value)) for name, value in values.items()]
        tree = encode_tree(leaves, dict(metadata) or None)
        if attach:
            self._staging = Staging.attach(self.path, attach)
            self._check_tree(tree)
        else:
            self._staging = Staging.begin(
                self.path, _problem_to_replace if self.overwrite else None
            )
        folder = ZarrFolder(self._staging.folder)
        try:
            for name, spec in specs.items():
                chunk = chunk_shape(spec.shape, CHUNK_BYTES // item_size(spec.dtype))
                self._arrays[name] = folder.create(names[name], spec.dtype, spec.shape, chunk)
            if not attach:
                self._describe(folder, tree, {names[name]: v for name, v in values.items()})
        except BaseException:
            if not attach:
                self.abort()
            raise
        return self._staging.token

    def _check_tree(self, tree: bytes) -> None:
        assert self._staging is not None
        path = self._staging.folder / TREE
        with system_errors(path):
            if not path.is_file() or path.read_bytes() != tree:
                raise NotACheckpointError(f"{path} was begun for other tensors")

    def _describe(self, folder: ZarrFolder, tree: bytes, values: Mapping[str, object]) -> None:
        """Write all but the arrays, the tree last."""
        assert self._staging is not None
        place = self._staging.folder
        for name, value in values.items():
            if type(value) in NUMBERS:
                stored = folder.create(name, NUMBERS[type(value)], (), ())
                stored.write((), np.array(value, NUMBERS[type(value)]))
        strings = {name: value for name, value in values.items() if isinstance(value, str)}
        now = time.time_ns()
        told = {
            "item_handlers": HANDLER,
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": now,
            "commit_timestamp_nsecs": now,
            "custom_metadata": {},
        }
        with system_errors(place):
            if strings:
                (place / STRINGS).write_text(json.dumps(strings), "utf-8")
            (place / CHECKPOINT).write_text(json.dumps(told), "utf-8")
            (place / TREE).write_bytes(tree)

    def chunks(self, name: str) -> tuple[int, ...]:
        """The shape of a chunk."""
        return self._arrays[name].chunk

    def write(self, name: str, box: ChunkStorageMetadata, data: NDArray[np.generic]) -> None:
        """Write a box of whole chunks; see `TensorSink.write`."""
        if data.dtype == np.bool_:
            data = np.asarray(data.view(np.uint8) != 0)  # Memory may hold other bytes than 0 and 1.
        self._arrays[name].write(box.offsets, data)

    def commit(self) -> None:
        """Sync and rename."""
        assert self._staging is not None
        self._staging.publish(replace=self.overwrite)

    def abort(self) -> None:
        """Remove what was written."""
        if self._staging is not None:
            self._staging.abort()

    def close(self) -> None:
        """Let go of the arrays."""
        self._arrays = {}


def _kind(value: object) -> str:
    if value is None:
        return "None"
    return "string" if isinstance(value, str) else "scalar"


def _check(specs: Mapping[str, TensorSpec], values: Mapping[str, object]) -> None:
    problems: list[str] = []
    for name, value in values.items():
        if type(value) is int and not -(1 << 63) <= value < 1 << 63:
            problems.append(f"{name}: an int beyond 64 bits")
        elif value is not None and type(value) not in (*NUMBERS, str):
            problems.append(f"{name}: Orbax has no {type(value).__qualname__} as a leaf")
    problems += [
        f"{name or 'the root'}: an empty key"
        for name in (*specs, *values)
        if not name or "" in keys_of(name)
    ]
    if problems:
        raise UnsupportedLeafError.listing("Orbax cannot carry this", problems)


def _check_paths(names: Mapping[str, str]) -> None:
    """Refuse names that are no paths, and arrays whose folders would lie in each other."""
    problems = [
        f"{name}: its name {problem}"
        for name, flat in names.items()
        if (problem := file_problem(flat))
    ]
    reserved = {TREE, CHECKPOINT, STRINGS, "_sharding", "array_metadatas", "commit_success.txt"}
    places = {flat: name for name, flat in names.items()}
    for flat, name in places.items():
        parts = flat.split("/")
        if any(part in ("", ".") for part in parts) or parts[0] in reserved:
            problems.append(f"{name}: {flat!r} is no name of an array of Orbax")
        inside = next((p for d in range(1, len(parts)) if (p := "/".join(parts[:d])) in places), "")
        if inside:
            problems.append(f"{name}: it would lie inside the array {inside}")
    if problems:
        raise UnsupportedLeafError.listing("Orbax cannot carry these names", problems)


def chunk_shape(shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    """The shape of chunks of about ``most`` elements, whole in the fastest dimensions.

    Example:
        >>> chunk_shape((1000, 8, 4), 100), chunk_shape((4, 5), 100), chunk_shape((3, 1000), 100)
        ((2, 8, 4), (4, 5), (1, 63))
    """
    chunk = [max(1, size) for size in shape]
    for d in range(len(shape)):
        while prod(chunk) > most and chunk[d] > 1:
            chunk[d] = -(-chunk[d] // 2)
    return tuple(chunk)


def _problem_to_replace(path: Path) -> str:
    """Why what is there is no checkpoint of Orbax."""
    if path.is_dir() and (path / TREE).is_file():
        return ""
    return f"it is no checkpoint of Orbax, which has {TREE}"
