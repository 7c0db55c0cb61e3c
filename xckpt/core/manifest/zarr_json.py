"""The zarr.json documents of a checkpoint, as a pure function of its manifest.

Every document follows from the manifest byte for byte, so a reader compares instead of parsing:
what differs was edited. TensorStore never opens a document that a checkpoint holds; it is given the
metadata made here.

1. Each array has ``shape``, a regular chunk grid and ``bytes`` (little-endian), with ``crc32c``
   behind it if the checkpoint asks for it, and ``sharding_indexed`` around both where a zarr shard
   holds several chunks.
2. Each folder above an array is a group; a leaf in pieces is a group whose attributes say so.
3. The root group repeats them all as consolidated metadata, as zarr-python writes it.
"""

from __future__ import annotations

import functools
import posixpath
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from xckpt.core.geometry.box import Shape
from xckpt.core.manifest.entries import Manifest, ZarrArray, arrays
from xckpt.core.metadata import JSONValue

LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}


def array_metadata(
    dtype: str, shape: Shape, chunk: Shape, shard: Shape | None, codecs: Iterable[str]
) -> dict[str, Any]:
    """The zarr v3 metadata of an array, as JSON values.

    Example:
        >>> array_metadata("int8", (4,), (2,), None, ())["chunk_grid"]
        {'name': 'regular', 'configuration': {'chunk_shape': [2]}}
    """
    chain = [LITTLE_ENDIAN, *({"name": codec} for codec in codecs)]
    if shard is not None:
        index = [LITTLE_ENDIAN, {"name": "crc32c"}]
        inner = {"chunk_shape": list(chunk), "codecs": chain, "index_codecs": index}
        chain = [{"name": "sharding_indexed", "configuration": {**inner, "index_location": "end"}}]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(shard or chunk)},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": _zero(dtype),
        "codecs": chain,
        "attributes": {},
        "storage_transformers": [],
    }


def array_document(array: ZarrArray, codecs: tuple[str, ...]) -> bytes:
    """The content of an array's zarr.json."""
    return _contents(array, codecs)[0]


def _contents(array: ZarrArray, codecs: tuple[str, ...]) -> tuple[bytes, msgspec.Raw]:
    """An array's zarr.json, and the same for consolidated metadata."""
    offset = None if array.piece_of is None else array.offset
    return _contents_of(array.dtype, array.shape, array.chunk, array.shard, offset, codecs)


@functools.lru_cache(maxsize=1024)
def _contents_of(
    dtype: str,
    shape: Shape,
    chunk: Shape,
    shard: Shape | None,
    offset: Shape | None,
    codecs: tuple[str, ...],
) -> tuple[bytes, msgspec.Raw]:
    """`_contents`, found once for all arrays that are alike."""
    metadata = array_metadata(dtype, shape, chunk, shard, codecs)
    if offset is not None:
        # Pieces tell zarr users where they belong; xckpt itself reads the manifest.
        metadata["attributes"] = {"offset": list(offset)}
    encoded = msgspec.json.encode(metadata)
    return msgspec.json.format(encoded, indent=2), msgspec.Raw(encoded)


def _zero(dtype: str) -> object:
    if dtype == "bool":
        return False
    if dtype.startswith("complex"):
        return [0.0, 0.0]
    if dtype == "float8_e8m0fnu":
        return 1.0  # it has no zero
    return 0.0 if "float" in dtype else 0


def documents(manifest: Manifest) -> Iterator[tuple[str, bytes]]:
    """(key, content) of every zarr.json of a checkpoint, the root's last; keys lie in the root."""
    tree = DocumentTree(manifest.codecs)
    yield from tree.add(arrays(manifest))
    yield "zarr.json", tree.root()


class DocumentTree:
    """The zarr.json documents of a checkpoint, each made once, as its arrays become known."""

    def __init__(self, codecs: tuple[str, ...]) -> None:
        self._codecs = codecs
        self._arrays: dict[str, msgspec.Raw] = {}
        """Path -> metadata, as in the root's."""
        self._groups: dict[str, msgspec.Raw] = {}

    def add(self, arrays: Iterable[ZarrArray]) -> Iterator[tuple[str, bytes]]:
        """(key, content) for arrays and for the folders above them that are new."""
        new: dict[str, msgspec.Raw] = {}
        for array in arrays:
            content, self._arrays[array.path] = _contents(array, self._codecs)
            yield f"{array.path}/zarr.json", content
            parent = posixpath.dirname(array.path)
            if array.piece_of is not None and parent not in self._groups:
                new[parent] = _group({"shape": list(array.piece_of)})
            while parent and parent not in self._groups:
                self._groups[parent] = new.setdefault(parent, _PLAIN_GROUP)
                parent = posixpath.dirname(parent)
        for path, group in new.items():
            yield f"{path}/zarr.json", msgspec.json.format(bytes(group), indent=2)

    def root(self) -> bytes:
        """The root group, which repeats all other documents."""
        # Sorted: zarr-python loses children of a group that do not stand together.
        listed = dict(sorted((self._arrays | self._groups).items()))
        consolidated = {"kind": "inline", "must_understand": False, "metadata": listed}
        return msgspec.json.format(bytes(_group({}, consolidated)), indent=2)


def _group(attributes: dict[str, JSONValue], consolidated: object = None) -> msgspec.Raw:
    group: dict[str, object] = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": attributes,
    }
    if consolidated is not None:
        group["consolidated_metadata"] = consolidated
    return msgspec.Raw(msgspec.json.encode(group))


_PLAIN_GROUP = _group({})
