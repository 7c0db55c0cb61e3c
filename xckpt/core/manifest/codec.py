"""The manifest: the one document that makes a folder a checkpoint.

On disk it is ``{"format":"xckpt","version":1,"digest":"<hex>","checkpoint":{...}}``, in this
spelling, where the digest is taken of the exact bytes of ``checkpoint``. To read it (`parse`):

1. Refuse a document that is too long, no JSON, of another format, or of a newer version.
2. Refuse it if the bytes around the inner ones are spelled otherwise, or if the digest differs: it
   was altered.
3. Decode it against the types in `xckpt.core.manifest.entries`, its leaves one by one; an unknown
   field is an error, and so is a name that an object has twice.
4. Refuse it if it takes more memory than allowed (`xckpt.core.manifest.memory`).
5. Check it against the rules (`xckpt.core.manifest.rules`), before anything is allocated.

`to_metadata` gives it in the planners' words: the description of a leaf is made when it is asked
for (`Described`), and a grid once for all leaves that are alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from xckpt.core.geometry.box import Boxes, Shape
from xckpt.core.geometry.grid import Grid
from xckpt.core.json_values import check_json
from xckpt.core.manifest.decode import decode, decode_body, decoded_bytes, encode_body
from xckpt.core.manifest.entries import (
    EDITION,
    BytesEntry,
    Entry,
    Manifest,
    TensorEntry,
    ValueEntry,
    arrays,
)
from xckpt.core.manifest.memory import check_memory, described_bytes, maybe_small
from xckpt.core.manifest.pieces import Pieces
from xckpt.core.manifest.rules import (
    MOST_FAULTS,
    SMALL_CHUNK,
    count_pieces,
    default_pack_bytes,
    problems,
)
from xckpt.core.metadata import (
    BytesStorageMetadata,
    Metadata,
    Sharding,
    TensorProperties,
    TensorStorageMetadata,
)
from xckpt.core.names import refuse_dimension_names
from xckpt.core.struct_types import prepare_structs
from xckpt.errors import RESTORE, ManifestError, VersionError

FORMAT: Final = "xckpt"
VERSION: Final = 1

MAX_BYTES: Final = 1 << 30
"""Longest manifest, bytes."""

Digest = Callable[[bytes | memoryview], bytes]


class _Head(msgspec.Struct):
    """What the document of every version begins with."""

    format: str
    version: int


class _Envelope(_Head):
    """The document of this version."""

    digest: str
    checkpoint: msgspec.Raw


prepare_structs(_Head, _Envelope, Manifest)


def draft(
    metadata: Metadata,
    codecs: tuple[str, ...] = (),
    dimension_names: Mapping[str, Sequence[str]] | None = None,
    pack_bytes: int | None = 0,
) -> Manifest:
    """The manifest of a planned checkpoint, before the values are known.

    It has the tensors, and no containers, which may hold nothing but values. ``dimension_names``
    name the dimensions of some tensors, by their leaf names. ``pack_bytes`` is None for what suits
    the tensors (`default_pack_bytes`).

    Raises:
        ManifestError: metadata is not JSON.
        ValueError: dimensions that are not there are named; see `refuse_dimension_names`.
    """
    grids: dict[int, _GridFields] = {}
    described = {
        name: tensor
        for name, tensor in metadata.state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata)
    }
    names = dimension_names or {}
    refuse_dimension_names(names, {n: described[n].size for n in names if n in described})
    for name, given in names.items():
        described[name] = replace(described[name], dimension_names=tuple(given))
    tensors = tuple(_tensor_entry(name, tensor, grids) for name, tensor in described.items())
    head = Manifest(tensors, "", codecs=codecs, zarr_json=EDITION)
    if pack_bytes is None:
        listed = maybe_small(head, SMALL_CHUNK) if count_pieces(head) else arrays(head)
        pack_bytes = default_pack_bytes(listed)
    return _with_data(msgspec.structs.replace(head, pack_bytes=pack_bytes), metadata)


def complete(
    draft: Manifest,
    metadata: Metadata,
    values: Mapping[str, ValueEntry | BytesEntry],
    *,
    root: str = "",
) -> Manifest:
    """A draft with what is known at the end.

    Raises:
        ManifestError: a value is missing, or metadata is not JSON.
    """
    entries: dict[str, TensorEntry | ValueEntry | BytesEntry] = {
        **{leaf.name: leaf for leaf in draft.leaves},
        **values,
    }
    missing = [name for name in metadata.state_dict_metadata if name not in entries]
    if missing:
        raise ManifestError(f"{missing[0]}: no rank has written this value")
    leaves = tuple(entries[name] for name in metadata.state_dict_metadata)
    containers = dict(metadata.containers)
    whole = msgspec.structs.replace(draft, leaves=leaves, root=root, containers=containers)
    return _with_data(whole, metadata)


def _with_data(manifest: Manifest, metadata: Metadata) -> Manifest:
    """A manifest with the caller's and the planners' own data."""
    for data, what in (
        (metadata.user_metadata, "metadata"),
        (metadata.planner_data, "planner_data"),
    ):
        if data is not None:
            check_json(data, what)
    return msgspec.structs.replace(
        manifest, user=metadata.user_metadata, planner=metadata.planner_data
    )


_GridFields = tuple[Shape | None, Shape | None, Pieces | None]
"""``chunk``, ``shard`` and ``pieces`` of an entry."""


def _tensor_entry(
    name: str, tensor: TensorStorageMetadata, grids: dict[int, _GridFields]
) -> TensorEntry:
    """A tensor's entry; ``grids`` keeps what follows from a grid, which many tensors share."""
    grid = tensor.grid
    assert grid is not None
    if id(grid) not in grids:
        grids[id(grid)] = _grid_fields(grid, tensor.size)
    dtype = tensor.properties.dtype
    about = tensor.sharding, tensor.annotation, tensor.dimension_names
    return TensorEntry(name, dtype, tensor.size, *grids[id(grid)], *about)


def _grid_fields(grid: Grid, shape: Shape) -> _GridFields:
    if not grid.is_regular(shape):
        return None, None, Pieces.of(grid)
    shard = None if grid.shards is None else tuple(grid.shards[0].tolist())
    return tuple(grid.chunks[0].tolist()), shard, None


def to_metadata(manifest: Manifest, entries: Mapping[str, Entry] | None = None) -> Metadata:
    """What a manifest says in the planners' words: a tensor's chunks are its zarr arrays.

    Args:
        manifest: what to describe.
        entries: leaf name -> entry, if the caller has made it already.
    """
    if entries is None:
        entries = {leaf.name: leaf for leaf in manifest.leaves}
    containers, planned = manifest.containers, manifest.planner
    return Metadata(Described(entries), containers, manifest.user, planner_data=planned)


class Described(Mapping[str, TensorStorageMetadata | BytesStorageMetadata]):
    """Leaf name -> what the leaf is, in the planners' words, made when it is asked for.

    Args:
        entries: leaf name -> what the manifest says.

    Example:
        >>> Described({"n": ValueEntry("n", "int", "0x7")})["n"]
        BytesStorageMetadata(kind='int')
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries

    def __getitem__(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        leaf = self._entries[name]
        if isinstance(leaf, TensorEntry):
            about = leaf.sharding, leaf.annotation, leaf.dimension_names
            if leaf.chunk is not None:
                return _regular(leaf.dtype, leaf.shape, leaf.chunk, leaf.shard, *about)
            assert leaf.pieces is not None
            return _described(leaf.dtype, leaf.shape, leaf.pieces.grid, *about)
        return _kind(leaf.type)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return repr(dict(self))


@functools.lru_cache(maxsize=64)
def _kind(kind: str) -> BytesStorageMetadata:
    return BytesStorageMetadata(kind)


@functools.lru_cache(maxsize=64)
def _properties(dtype: str) -> TensorProperties:
    return TensorProperties(dtype)


def _described(
    dtype: str,
    shape: Shape,
    grid: Grid,
    sharding: Sharding | None,
    annotation: str,
    names: tuple[str, ...] | None,
) -> TensorStorageMetadata:
    about = sharding, annotation, names
    return TensorStorageMetadata(_properties(dtype), shape, grid.arrays, grid, *about)


@functools.lru_cache(maxsize=1024)
def _regular(
    dtype: str,
    shape: Shape,
    chunk: Shape,
    shard: Shape | None,
    sharding: Sharding | None,
    annotation: str,
    names: tuple[str, ...] | None,
) -> TensorStorageMetadata:
    """A regular leaf, made once for all that are alike."""
    grid = Grid.of(Boxes.whole(shape), [chunk], [shard])
    return _described(dtype, shape, grid, sharding, annotation, names)


def encode(manifest: Manifest, digest: Digest) -> bytes:
    """The manifest as it is stored.

    Raises:
        ManifestError: it breaks a rule of the format, so no reader would take it.
    """
    check(manifest)
    # Without pieces a manifest is stored as it is.
    body = encode_body(manifest) if count_pieces(manifest) else msgspec.json.encode(manifest)
    envelope = _Envelope(FORMAT, VERSION, digest(body).hex(), msgspec.Raw(body))
    return msgspec.json.encode(envelope)


def parse(
    data: bytes, digest: Digest, memory_bytes: int | None = None, *, is_ours: bool = False
) -> Manifest:
    """The manifest that stored bytes hold.

    Args:
        data: what is stored.
        digest: makes a digest of bytes.
        memory_bytes: what it may take in memory; None for any amount.
        is_ours: whether `encode` made it in this job, and so has checked it against the rules.

    Raises:
        VersionError: a newer version wrote it.
        ManifestError: it is truncated, altered, or breaks a rule of the format.
    """
    if len(data) > MAX_BYTES:
        raise ManifestError(f"the manifest is {len(data):,} bytes long; at most {MAX_BYTES:,}")
    head = decode(data, _Head, "the manifest is truncated, or it is not a manifest", RESTORE)
    if head.format != FORMAT:
        raise ManifestError(f"the manifest's format is {head.format[:40]!r}, not {FORMAT!r}")
    if head.version > VERSION:
        raise VersionError(
            f"the checkpoint has version {head.version} of the format, and this xckpt reads "
            f"version {VERSION}; upgrade xckpt to read it"
        )
    if head.version != VERSION:
        raise ManifestError(f"the format never had a version {head.version}")
    body = _body(data, digest)
    if memory_bytes is not None:
        check_memory(decoded_bytes(body), f"the manifest of {len(data):,} bytes", memory_bytes)
    manifest = decode_body(body, memory_bytes)
    if memory_bytes is not None:
        size, leaves = described_bytes(manifest), len(manifest.leaves)
        check_memory(size, f"the manifest of {leaves:,} leaves", memory_bytes)
    if not is_ours:
        check(manifest)
    return manifest


def _body(data: bytes, digest: Digest) -> memoryview:
    """The inner bytes of a manifest of this version; one that was altered is refused."""
    envelope = decode(data, _Envelope, "the manifest is truncated or altered", RESTORE)
    body = memoryview(envelope.checkpoint)  # it may be a gigabyte
    around = msgspec.json.encode(msgspec.structs.replace(envelope, checkpoint=msgspec.Raw(b"0")))
    before, after = around[:-2], around[-1:]
    whole = len(data) == len(before) + len(body) + len(after)
    if not (whole and data.startswith(before) and data.endswith(after)):
        # Nothing digests what is around the content, so it has one spelling and no other field.
        raise ManifestError(
            f"the manifest was altered: something is added around its content; {RESTORE}"
        )
    if digest(body).hex() != envelope.digest:
        raise ManifestError(
            f"the manifest was altered: its digest does not fit its content; {RESTORE}"
        )
    return body


def check(manifest: Manifest) -> None:
    """Refuse a manifest that no reader would take.

    Raises:
        ManifestError: it breaks a rule of the format; the faults are listed, of many the first.
    """
    faults = problems(manifest)
    if faults:
        often = f" in {len(faults):,} places or more" if len(faults) >= MOST_FAULTS else ""
        raise ManifestError.listing(f"the manifest breaks the format{often}", faults)
