"""Orbax-readable checkpoints as a sink, written without Orbax.

1. The layout is what Orbax expects: ``_METADATA`` (the tree), ``_strings.json``, and
   ``_CHECKPOINT_METADATA`` beside them; and an empty zarr v3 array for each tensor.
2. Boxes of whole chunks are written by TensorStore, from any thread or process. Chunks are plain
   files with a crc32c each: no OCDBT database, which only one process could merge, and so each
   chunk is durable, and can be written again, on its own.

Orbax restores it as NumPy arrays, or as jax.Arrays with the shardings that it is given. Python
numbers and strings stay such, and JAX's random keys, which Orbax notes beside their data. Lists and
tuples are sequences to Orbax, and namedtuples dicts; with a target it gives back what the target
has. An empty container of any other class is None to Orbax.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Box
from xckpt.core.manifest.own_keys import MANIFEST
from xckpt.errors import UnsupportedLeafError
from xckpt.formats.dcp.keys import METADATA_FILE
from xckpt.formats.orbax.files import files_below, orbax_files
from xckpt.formats.orbax.tree import (
    ARRAY_METADATA,
    CHECKPOINT,
    STRINGS,
    TREE,
    Leaf,
    empty_containers,
    encode_tree,
    orbax_keys,
)
from xckpt.formats.sink import TensorSink, flat_names, other_names
from xckpt.formats.source import USER
from xckpt.mapping.names import keys_of
from xckpt.storage.foreign.paths import file_name_problem
from xckpt.storage.foreign.zarr_arrays import StoredZarr, ZarrFolder
from xckpt.storage.location import storage_errors

CHUNK_BYTES: Final = 1 << 23
"""Target for a chunk, bytes."""
NAME_BYTES: Final = 255
"""Most bytes of a name in a folder, on any usual file system."""
HANDLER: Final = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
NUMBERS: Final[Mapping[type, str]] = {bool: "bool", int: "int64", float: "float64"}


class OrbaxSink(TensorSink):
    """Writes a checkpoint that Orbax restores.

    Args:
        path: the folder; for a `CheckpointManager`, ``ROOT/STEP/default``.
        overwrite: replace what is there, if it is such a checkpoint.

    Example:
        >>> from xckpt.formats.sink import Contents
        >>> from xckpt.mapping.spec import TensorSpec
        >>> sink = OrbaxSink("for-orbax")
        >>> _ = sink.prepare(Contents({"a/w": TensorSpec((2, 2), "float32")}, {"step": 7}))
        >>> sink.write("a/w", Box((0, 0), (2, 2)), np.eye(2, dtype=np.float32))
        >>> sink.commit()
        >>> from xckpt.formats.orbax.source import OrbaxSource
        >>> source = OrbaxSource("for-orbax")
        >>> source.specs, source.values
        ({'a/w': TensorSpec(shape=(2, 2), dtype='float32')}, {'step': 7})
    """

    _names: Mapping[str, str]
    _tree: bytes
    _arrays: Mapping[str, StoredZarr]

    def _plan(self) -> object:
        """Name and cut the arrays, and encode the tree."""
        contents = self._contents
        self._names = flat_names((*contents.specs, *contents.values))
        folders = {
            name: flat
            for name, flat in self._names.items()
            if not isinstance(contents.values.get(name, 0), str | None)
        }
        problems = [*_value_problems(contents.values), *_name_problems(self._names)]
        problems += _long_names(folders)
        if problems:
            raise UnsupportedLeafError.listing("Orbax cannot carry this", problems)
        keys = {
            name: orbax_keys(contents.leaf_name(name), contents.containers) for name in self._names
        }
        leaves = [
            Leaf(keys[name], "jax.Array" if name in contents.annotations else "np.ndarray")
            for name in contents.specs
        ]
        leaves += [Leaf(keys[name], _kind(value)) for name, value in contents.values.items()]
        leaves += empty_containers(map(contents.leaf_name, keys), contents.containers)
        self._tree = encode_tree(leaves, custom_metadata(contents.metadata))
        self._chunks = {name: contents.chunk(name, CHUNK_BYTES) for name in contents.specs}
        return list(self._chunks.values())

    def _lay_out(self) -> None:
        """Write all but the tensors, the tree last."""
        arrays = ZarrFolder(self.folder)
        strings: dict[str, str] = {}
        for name, value in self._contents.values.items():
            if isinstance(value, str):
                strings[self._names[name]] = value
            elif value is not None:
                dtype = NUMBERS[type(value)]
                arrays.create(self._names[name], dtype, (), ()).write((), np.array(value, dtype))
        with storage_errors(self.folder):
            if strings:
                (self.folder / STRINGS).write_text(json.dumps(strings), "utf-8")
            (self.folder / CHECKPOINT).write_text(json.dumps(_checkpoint_metadata()), "utf-8")
            if self._contents.annotations:
                (self.folder / ARRAY_METADATA).mkdir()
                text = json.dumps({"array_metadatas": list(self._array_metadatas())})
                (self.folder / ARRAY_METADATA / "process_0").write_text(text, "utf-8")
            (self.folder / TREE).write_bytes(self._tree)

    def _array_metadatas(self) -> Iterator[object]:
        """Orbax's notes on each array, the kind of a random key among them."""
        for name, spec in self._contents.specs.items():
            prefix, _, kind = self._contents.annotations.get(name, "").partition(":")
            document = {
                "param_name": self._names[name],
                "write_shape": spec.shape,
                "chunk_shape": self._chunks[name],
                "ext_metadata": {"random_key_impl": kind} if prefix == "prng_key" else None,
            }
            yield {"array_metadata": document}

    def _open(self) -> None:
        """Make the tensors' arrays, or open them if they are made."""
        arrays = ZarrFolder(self.folder)
        self._arrays = {
            name: arrays.create(self._names[name], spec.dtype, spec.shape, self._chunks[name])
            for name, spec in self._contents.specs.items()
        }

    def _write(self, name: str, box: Box, data: NDArray[np.generic]) -> None:
        self._arrays[name].write(box.offsets, data)

    def sync(self, names: Iterable[str]) -> None:
        """Do nothing: TensorStore has synced each chunk."""

    @staticmethod
    def _foreign(path: Path) -> str:
        if path.is_dir() and (path / TREE).is_file():
            others = sorted(set(files_below(path)) - set(orbax_files(path)))
            return other_names(each.relative_to(path).as_posix() for each in others)
        return f"it is not a checkpoint of Orbax, which has {TREE}"


def _checkpoint_metadata() -> dict[str, object]:
    """Orbax's ``_CHECKPOINT_METADATA`` for a checkpoint written now."""
    now = time.time_ns()
    return {
        "item_handlers": HANDLER,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": now,
        "commit_timestamp_nsecs": now,
        "custom_metadata": {},
    }


def custom_metadata(texts: Mapping[str, str]) -> object:
    """A checkpoint's user metadata as Orbax's custom metadata, which is a dict.

    Example:
        >>> custom_metadata({"by": "me"}), custom_metadata({USER: '{"run": 3}'})
        ({'by': 'me'}, {'run': 3})
        >>> custom_metadata({USER: "[1]"}), custom_metadata({})
        ({'xckpt.user': '[1]'}, None)
    """
    if USER not in texts:
        return dict(texts) or None
    user = json.loads(texts[USER])
    return user if isinstance(user, dict) and USER not in user else {USER: texts[USER]}


def _kind(value: object) -> str:
    if value is None:
        return "None"
    return "string" if isinstance(value, str) else "scalar"


def _value_problems(values: Mapping[str, object]) -> Iterator[str]:
    for name, value in values.items():
        if type(value) is int and not -(1 << 63) <= value < 1 << 63:
            yield f"{name}: an int beyond 64 bits"
        elif value is not None and type(value) not in (*NUMBERS, str):
            yield f"{name}: Orbax has no {type(value).__qualname__} as a leaf"


def _name_problems(names: Mapping[str, str]) -> Iterator[str]:
    """Names that are not paths, and arrays whose folders would lie in each other."""
    own = {TREE, CHECKPOINT, STRINGS, "_sharding", ARRAY_METADATA, "commit_success.txt"}
    # By these the folder would be taken for a checkpoint of xckpt, or of torch's DCP.
    reserved = {*own, MANIFEST, METADATA_FILE}
    places = set(names.values())
    for name, flat in names.items():
        if not name or "" in keys_of(name):
            yield f"{name or 'the root'}: an empty key"
            continue
        if problem := file_name_problem(flat):
            yield f"{name}: its name {problem}"
        parts = flat.split("/")
        if any(part in ("", ".") for part in parts) or parts[0] in reserved:
            yield f"{name}: {flat!r} is not a name of an array of Orbax"
        inside = [above for above in accumulate(parts[:-1], "{}/{}".format) if above in places]
        if inside:
            yield f"{name}: it would lie inside the array {inside[0]}"


def _long_names(folders: Mapping[str, str]) -> Iterator[str]:
    """Arrays whose folders no file system can name."""
    for name, flat in folders.items():
        longest = max(len(part.encode("utf-8", "surrogatepass")) for part in flat.split("/"))
        if longest > NAME_BYTES:
            yield (
                f"{name}: its name takes {longest:,} bytes, and that of an array's folder has at "
                f"most {NAME_BYTES}: rename it by a mapping, or choose another format"
            )
