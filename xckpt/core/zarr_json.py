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
from dataclasses import replace
from typing import Any

import msgspec

from xckpt.core.manifest import Manifest, ZarrArray, arrays

__all__ = ["array_document", "array_metadata", "documents", "encode_document"]

LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}
PLAIN_BYTES = {"name": "bytes"}


def array_metadata(array: ZarrArray, codecs: Iterable[str]) -> dict[str, Any]:
    """The zarr v3 metadata of an array, as JSON values.

    Example:
        >>> array = ZarrArray("w", 0, "w", "int8", (0,), (4,), (2,), None, 0)
        >>> array_metadata(array, ())["chunk_grid"]
        {'name': 'regular', 'configuration': {'chunk_shape': [2]}}
    """
    chain = [LITTLE_ENDIAN, *({"name": codec} for codec in codecs)]
    if array.shard is not None:
        index = [LITTLE_ENDIAN, {"name": "crc32c"}]
        inner = {"chunk_shape": list(array.chunk), "codecs": chain, "index_codecs": index}
        chain = [{"name": "sharding_indexed", "configuration": {**inner, "index_location": "end"}}]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(array.shape),
        "data_type": array.dtype,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(array.shard or array.chunk)},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": _zero(array.dtype),
        "codecs": chain,
        # Pieces tell zarr users where they belong; xckpt itself reads the manifest.
        "attributes": {} if array.piece_of is None else {"offset": list(array.offset)},
        "storage_transformers": [],
    }


def array_document(array: ZarrArray, codecs: tuple[str, ...]) -> bytes:
    """The content of an array's zarr.json; found once for arrays that are alike."""
    offset = array.offset if array.piece_of is not None else ()
    alike = replace(array, leaf="", number=0, path="", offset=offset, first=0)
    return _array_document(alike, codecs)


@functools.lru_cache(maxsize=1024)
def _array_document(array: ZarrArray, codecs: tuple[str, ...]) -> bytes:
    return encode_document(array_metadata(array, codecs))


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
    groups: dict[str, dict[str, Any]] = {}
    nodes: dict[str, dict[str, Any]] = {}
    for array in arrays(manifest):
        nodes[array.path] = array_metadata(array, manifest.codecs)
        parent = posixpath.dirname(array.path)
        while parent and parent not in groups:
            groups[parent] = _group({})
            parent = posixpath.dirname(parent)
        if array.piece_of is not None:
            groups[posixpath.dirname(array.path)] = _group({"shape": list(array.piece_of)})
    nodes.update(groups)
    for path, document in nodes.items():
        yield f"{path}/zarr.json", encode_document(document)
    # Sorted: zarr-python loses children of a group that do not stand together.
    listed = dict(sorted(nodes.items()))
    consolidated = {"kind": "inline", "must_understand": False, "metadata": listed}
    yield "zarr.json", encode_document({**_group({}), "consolidated_metadata": consolidated})


def _group(attributes: dict[str, Any]) -> dict[str, Any]:
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def encode_document(document: dict[str, Any]) -> bytes:
    """A document as it is stored: the same bytes for the same content."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2)
