"""What a manifest consists of, and the zarr arrays and zarr.json documents that follow from it.

1. A manifest has an entry for each leaf.
2. `arrays` lists what the entries imply: each zarr array with its path, grid and the number of its
   first digest. Digests are numbered over leaves in order, arrays in order, chunks in C order.
3. `documents` gives the zarr.json of each array and of each folder above one. They follow from the
   manifest byte for byte, so a reader compares instead of parsing: what differs was edited.
   TensorStore never opens a document that a checkpoint holds; it is given the metadata made here.
   An array's first chunk brings its document; the coordinator writes the others (`DocumentTree`).

An array's document has ``shape``, a regular chunk grid and ``bytes`` (little-endian), with
``crc32c`` behind it if the checkpoint asks for it, and ``sharding_indexed`` around both where a
zarr shard holds several chunks. A folder is a group; a leaf in pieces is a group whose attributes
say so. The root group repeats them all as consolidated metadata; zarr-python would refuse all of it
where it lacks the type of one array, so then the root's attributes name these types. Every
dimension has a name, because xarray needs one: the caller's, or its size.
"""

from __future__ import annotations

import functools
import posixpath
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import msgspec

from xckpt.core.dtypes import EXTENDED, fill_value, item_size
from xckpt.core.geometry.box import Shape
from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.manifest.packs import PACKED
from xckpt.core.manifest.pieces import Pieces
from xckpt.core.metadata import JSONValue, Sharding
from xckpt.core.names import names_by_size, zarr_path
from xckpt.core.text.shown import brief


class _Strict(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False
):
    """A struct that rejects what it doesn't know and writes no defaults."""

    __repr__ = brief


class TensorEntry(_Strict, frozen=True, tag="tensor", tag_field="kind"):
    """A tensor: regular (``chunk`` is set) or in pieces (``pieces`` is)."""

    name: str
    dtype: str
    shape: Shape
    chunk: Shape | None = None
    shard: Shape | None = None
    pieces: Pieces | None = None
    sharding: Sharding | None = None
    annotation: str = ""
    dimension_names: tuple[str, ...] | None = None
    """The caller's name for each dimension."""


class ValueEntry(_Strict, frozen=True, tag="value", tag_field="kind"):
    """A Python value, spelled out."""

    name: str
    type: str
    value: str


class BytesEntry(_Strict, frozen=True, tag="bytes", tag_field="kind"):
    """A value too long to spell out, or opaque bytes: a uint8 array of ``size`` elements."""

    name: str
    type: str
    size: int
    chunk: int


Entry = TensorEntry | ValueEntry | BytesEntry

MANY_PIECES = 1 << 16
"""The root does not repeat the metadata of more pieces than this."""
EDITION = 2
"""That of new zarr.json documents. The first named no dimensions, and the root had all metadata."""


class Manifest(_Strict, frozen=True, dict=True, gc=True):
    """Everything in a checkpoint but the data; counts of it are cached beside it."""

    leaves: tuple[Entry, ...]
    digests: str
    """Digest of the digest file, hex."""
    root: str = ""
    """Folder of the zarr group within the checkpoint; empty for the checkpoint's own."""
    codecs: tuple[str, ...] = ()
    """Names of the codecs after ``bytes``: none, or ``crc32c``."""
    containers: dict[str, str] = {}
    user: Any = None
    """The caller's own JSON values; msgspec has no name for a recursive type."""
    planner: Any = None
    """What planners merged."""
    pack_bytes: int = 0
    """Arrays with chunks of up to this many bytes lie in packs (`xckpt.core.manifest.packs`)."""
    packs: int = 0
    """How many packs there are."""
    places: str = ""
    """Digest of the file of places, hex; empty where there is none."""
    inline_places: bytes = b""
    """The table of places where it is short; then there is no file of them."""
    zarr_json: int = 1
    """The edition of the checkpoint's zarr.json documents: 1, or `EDITION`."""


def arrays(manifest: Manifest) -> Iterator[ZarrArray]:
    """Every zarr array of a checkpoint, in the order of their digests."""
    first = place = 0
    for leaf in manifest.leaves:
        if isinstance(leaf, TensorEntry) and leaf.chunk is not None:  # as most are
            about = leaf.dtype, leaf.shape, leaf.chunk, leaf.shard
            origin, count, packed = regular(*about, manifest.pack_bytes)
            shape, names, at = about[1:], leaf.dimension_names, place if packed else None
            yield ZarrArray(leaf.name, 0, leaf.dtype, origin, *shape, first, None, names, at)
            first, place = first + count, place + count * packed
            continue
        for array in leaf_arrays(leaf, first):
            first += array.count
            if is_packed(array, manifest.pack_bytes):
                yield msgspec.structs.replace(array, place=place)
                place += array.count
            else:
                yield array


@functools.lru_cache(maxsize=1024)
def regular(
    dtype: str, shape: Shape, chunk: Shape, shard: Shape | None, pack_bytes: int
) -> tuple[Shape, int, bool]:
    """Origin, chunks, and whether it is packed, of all arrays that are alike."""
    array = ZarrArray("", 0, dtype, (0,) * len(shape), shape, chunk, shard)
    return array.offset, array.count, is_packed(array, pack_bytes)


def is_packed(array: ZarrArray, pack_bytes: int) -> bool:
    """Whether the chunks of an array lie in packs.

    Example:
        >>> array = ZarrArray("w", 0, "float32", (0, 0), (9, 8), (4, 8))
        >>> is_packed(array, 128), is_packed(array, 127)
        (True, False)
    """
    if not pack_bytes or array.shard is not None:
        return False
    return prod(array.chunk) * item_size(array.dtype) <= pack_bytes


def leaf_arrays(leaf: Entry, first: int = 0) -> Iterator[ZarrArray]:
    """The zarr arrays of one leaf, whose first digest has the number ``first``."""
    if isinstance(leaf, ValueEntry):
        return
    if isinstance(leaf, BytesEntry):
        yield ZarrArray(leaf.name, 0, "uint8", (0,), (leaf.size,), (leaf.chunk,), None, first)
        return
    names = leaf.dimension_names
    if leaf.pieces is None:
        assert leaf.chunk is not None
        shape, origin, grid = leaf.shape, (0,) * len(leaf.shape), (leaf.chunk, leaf.shard)
        yield ZarrArray(leaf.name, 0, leaf.dtype, origin, shape, *grid, first, None, names)
        return
    firsts: list[int] = leaf.pieces.firsts.tolist()
    for number, row in enumerate(leaf.pieces.rows()):
        at = first + firsts[number]
        yield ZarrArray(leaf.name, number, leaf.dtype, *row, at, leaf.shape, names)


LITTLE_ENDIAN: dict[str, object] = {"name": "bytes", "configuration": {"endian": "little"}}


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
        "fill_value": fill_value(dtype),
        "codecs": chain,
        "attributes": {},
        "storage_transformers": [],
    }


def array_document(array: ZarrArray, codecs: tuple[str, ...], edition: int) -> bytes:
    """The content of an array's zarr.json."""
    return _contents(array, codecs, edition)[0]


def _contents(array: ZarrArray, codecs: tuple[str, ...], edition: int) -> tuple[bytes, msgspec.Raw]:
    """An array's zarr.json, and the same for consolidated metadata."""
    grid, is_regular = (array.chunk, array.shard), array.piece_of is None
    about = (None, array.dimension_names) if is_regular else (array.offset, None)
    return _contents_of(array.dtype, array.shape, *grid, *about, codecs, edition)


@functools.lru_cache(maxsize=1024)
def _contents_of(
    dtype: str,
    shape: Shape,
    chunk: Shape,
    shard: Shape | None,
    offset: Shape | None,
    names: tuple[str, ...] | None,
    codecs: tuple[str, ...],
    edition: int,
) -> tuple[bytes, msgspec.Raw]:
    """`_contents`, found once for all arrays that are alike."""
    metadata = array_metadata(dtype, shape, chunk, shard, codecs)
    if offset is not None:
        # Pieces tell zarr users where they belong; xckpt itself reads the manifest.
        metadata["attributes"] = {"offset": list(offset)}
    if edition > 1:
        metadata["dimension_names"] = names_by_size(shape) if names is None else names
    encoded = msgspec.json.encode(metadata)
    return msgspec.json.format(encoded, indent=2), msgspec.Raw(encoded)


def documents(manifest: Manifest) -> Iterator[tuple[str, bytes]]:
    """(key, content) of every zarr.json of a checkpoint, the root's last; keys lie in the root."""
    about = manifest.codecs, manifest.zarr_json
    for array in arrays(manifest):
        if array.place is None and array.count:
            yield f"{array.path}/zarr.json", array_document(array, *about)
    tree = DocumentTree(manifest.codecs, manifest.pack_bytes, manifest.zarr_json)
    yield from tree.add(manifest.leaves)
    yield "zarr.json", tree.root()


class DocumentTree:
    """The zarr.json documents that go with no chunk, each made once, as leaves become known."""

    def __init__(self, codecs: tuple[str, ...], pack_bytes: int, edition: int = EDITION) -> None:
        self._codecs, self._pack_bytes, self._edition = codecs, pack_bytes, edition
        self._lacking: set[str] = set()
        """The element types that zarr-python lacks."""
        self._arrays: dict[str, msgspec.Raw] = {}
        """Path -> metadata, as in the root's."""
        self._groups: dict[str, msgspec.Raw] = {}
        self._packed = 0
        """Arrays that have no document."""
        self._pieces = 0
        """Pieces that have one."""

    def add(self, leaves: Iterable[Entry]) -> Iterator[tuple[str, bytes]]:
        """(key, content) for arrays without chunks, and for the folders above arrays if new."""
        new: dict[str, msgspec.Raw] = {}
        for leaf in leaves:
            if isinstance(leaf, ValueEntry):
                continue
            if isinstance(leaf, TensorEntry) and leaf.chunk is not None:  # as most are
                about = leaf.dtype, leaf.shape, leaf.chunk, leaf.shard
                if regular(*about, self._pack_bytes)[2]:
                    self._packed += 1
                    continue
            parent = zarr_path(leaf.name)
            if isinstance(leaf, BytesEntry) or leaf.pieces is None:
                (array,) = leaf_arrays(leaf)
                if is_packed(array, self._pack_bytes):
                    self._packed += 1
                    continue
                if not array.count:
                    yield f"{parent}/zarr.json", array_document(array, self._codecs, self._edition)
                parent = posixpath.dirname(parent)
            else:
                packed = leaf.pieces.packed(self._pack_bytes // item_size(leaf.dtype))
                self._packed += packed
                if packed == len(leaf.pieces):
                    continue
                self._pieces += len(leaf.pieces) - packed
                names = leaf.dimension_names
                named: dict[str, JSONValue] = {} if names is None else {"dimension_names": [*names]}
                new[parent] = _group({"shape": [*leaf.shape], **named})
            self._list(leaf)
            while parent and parent not in self._groups:
                self._groups[parent] = new.setdefault(parent, _PLAIN_GROUP)
                parent = posixpath.dirname(parent)
        for path, group in new.items():
            yield f"{path}/zarr.json", msgspec.json.format(bytes(group), indent=2)

    def _list(self, leaf: TensorEntry | BytesEntry) -> None:
        """Note what the root repeats of a leaf: of very many pieces nothing, so none is made."""
        if isinstance(leaf, TensorEntry) and leaf.dtype in EXTENDED:
            self._lacking.add(leaf.dtype)
        if self._is_alone:
            self._arrays.clear()
            return
        for array in leaf_arrays(leaf):
            if not is_packed(array, self._pack_bytes):
                self._arrays[array.path] = _contents(array, self._codecs, self._edition)[1]

    @property
    def _is_alone(self) -> bool:
        """Whether the root does not repeat the other documents."""
        return self._edition > 1 and (bool(self._lacking) or self._pieces > MANY_PIECES)

    def root(self) -> bytes:
        """The root group, which repeats all other documents, or says why it does not."""
        about: dict[str, JSONValue] = {}
        if self._packed:
            about |= {"packed_arrays": self._packed, "packed": PACKED}
        if self._lacking and self._edition > 1:
            about |= {"data_types": [*sorted(self._lacking)], "note": LACKING}
        attributes: dict[str, JSONValue] = {"xckpt": about} if about else {}
        if self._is_alone:
            return msgspec.json.format(bytes(_group(attributes)), indent=2)
        # Sorted: zarr-python loses children of a group that do not stand together.
        listed = dict(sorted((self._arrays | self._groups).items()))
        consolidated = {"kind": "inline", "must_understand": False, "metadata": listed}
        return msgspec.json.format(bytes(_group(attributes, consolidated)), indent=2)


LACKING = (
    "zarr-python lacks these data types: it opens arrays of other types by their paths, and lists "
    "groups without these. To open and list all: pip install xckpt, then import xckpt.zarr_dtypes"
)


def _group(attributes: dict[str, JSONValue], consolidated: object = None) -> msgspec.Raw:
    group: dict[str, object] = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    if consolidated is not None:
        group["consolidated_metadata"] = consolidated
    return msgspec.Raw(msgspec.json.encode(group))


_PLAIN_GROUP = _group({})
