"""The manifest: the one document that makes a folder a checkpoint.

On disk it is ``{"format":"xckpt","version":1,"digest":"<hex>","checkpoint":{...}}``, in this
spelling, where the digest is taken of the exact bytes of ``checkpoint``. To read it (`parse`):

1. Refuse a document that is too long, no JSON, of another format, or of a newer version.
2. Refuse it if the bytes around the inner ones are spelled otherwise, or if the digest differs: it
   was altered.
3. Decode it against the types in `xckpt.core.manifest.entries`; an unknown field is an error, and
   so is a name that an object has twice.
4. Refuse it if it takes more memory than allowed (`xckpt.core.manifest.memory`).
5. Check it against the rules (`xckpt.core.manifest.rules`), before anything is allocated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import msgspec

from xckpt.core.geometry.box import Boxes, Shape
from xckpt.core.geometry.grid import Grid
from xckpt.core.json_values import check_json, repeated_name
from xckpt.core.manifest.entries import (
    EDITION,
    BytesEntry,
    Manifest,
    PieceEntry,
    TensorEntry,
    ValueEntry,
)
from xckpt.core.manifest.memory import check_memory, decoded_bytes, described_bytes
from xckpt.core.manifest.rules import problems
from xckpt.core.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from xckpt.core.struct_types import prepare_structs
from xckpt.errors import ManifestError, VersionError

FORMAT: Final = "xckpt"
VERSION: Final = 1

MAX_BYTES: Final = 1 << 30
"""Longest manifest, bytes."""

Digest = Callable[[bytes], bytes]
Document = TypeVar("Document")


class _Head(msgspec.Struct):
    """What the document of every version begins with."""

    format: str
    version: int


class _Envelope(_Head):
    """The document of this version."""

    digest: str
    checkpoint: msgspec.Raw


prepare_structs(_Head, _Envelope, Manifest)


def build(
    metadata: Metadata,
    values: Mapping[str, ValueEntry | BytesEntry],
    *,
    root: str = "",
    codecs: tuple[str, ...] = (),
    digests: str = "",
) -> Manifest:
    """The manifest of a planned checkpoint whose values are known.

    Raises:
        ManifestError: a value is missing, or metadata is no JSON.
    """
    tensors = draft(metadata, codecs=codecs)
    return complete(tensors, metadata, values, root=root, digests=digests)


def draft(
    metadata: Metadata,
    codecs: tuple[str, ...] = (),
    dimension_names: Mapping[str, Sequence[str]] | None = None,
) -> Manifest:
    """The manifest of a planned checkpoint as far as it is known before the values are.

    It has the tensors, and no containers, which may hold nothing but values. ``dimension_names``
    name the dimensions of some tensors, by their leaf names.

    Raises:
        ManifestError: metadata is no JSON.
        ValueError: dimensions of no tensor are named.
    """
    grids: dict[int, _GridFields] = {}
    described = {
        name: tensor
        for name, tensor in metadata.state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata)
    }
    names = dimension_names or {}
    if not names.keys() <= described.keys():
        raise ValueError(
            f"dimension_names: {', '.join(sorted(names.keys() - described.keys())[:5])}: no tensor"
            " of the state has this name"
        )
    for name, given in names.items():
        described[name] = replace(described[name], dimension_names=tuple(given))
    tensors = tuple(_tensor_entry(name, tensor, grids) for name, tensor in described.items())
    return _with_data(Manifest(tensors, "", codecs=codecs, zarr_json=EDITION), metadata)


def complete(
    draft: Manifest,
    metadata: Metadata,
    values: Mapping[str, ValueEntry | BytesEntry],
    *,
    root: str = "",
    digests: str = "",
) -> Manifest:
    """A draft with what is known at the end.

    Raises:
        ManifestError: a value is missing, or metadata is no JSON.
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
    whole = msgspec.structs.replace(
        draft, leaves=leaves, digests=digests, root=root, containers=containers
    )
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


_GridFields = tuple[Shape | None, Shape | None, tuple[PieceEntry, ...] | None]
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
    shards = None if grid.shards is None else [tuple(shape) for shape in grid.shards.tolist()]
    chunks = [tuple(shape) for shape in grid.chunks.tolist()]
    if grid.is_regular(shape):
        return chunks[0], shards[0] if shards else None, None
    pieces = tuple(
        PieceEntry(box.offsets, box.sizes, chunk, shards[number] if shards else None)
        for number, (box, chunk) in enumerate(zip(grid.arrays, chunks, strict=True))
    )
    return None, None, pieces


def to_metadata(manifest: Manifest) -> Metadata:
    """What a manifest says in the planners' words: a tensor's chunks are its zarr arrays."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for leaf in manifest.leaves:
        if not isinstance(leaf, TensorEntry):
            described[leaf.name] = BytesStorageMetadata(leaf.type)
            continue
        pieces = leaf.pieces
        if pieces is None:
            assert leaf.chunk is not None
            grid = _regular_grid(leaf.shape, leaf.chunk, leaf.shard)
        else:
            rank = len(leaf.shape)
            boxes = Boxes.of([(piece.offset, piece.shape) for piece in pieces], rank=rank)
            chunks, shards = [p.chunk for p in pieces], [p.shard for p in pieces]
            grid = Grid.of(boxes, chunks, shards)
        described[leaf.name] = TensorStorageMetadata(
            TensorProperties(leaf.dtype),
            leaf.shape,
            grid.arrays,
            grid,
            leaf.sharding,
            leaf.annotation,
            leaf.dimension_names,
        )
    return Metadata(described, manifest.containers, manifest.user, planner_data=manifest.planner)


@functools.lru_cache(maxsize=1024)
def _regular_grid(shape: Shape, chunk: Shape, shard: Shape | None) -> Grid:
    """The grid of a regular leaf, made once for all that are alike."""
    return Grid.of(Boxes.whole(shape), [chunk], [shard])


def encode(manifest: Manifest, digest: Digest) -> bytes:
    """The manifest as it is stored.

    Raises:
        ManifestError: it breaks a rule of the format, so no reader would take it.
    """
    check(manifest)
    body = msgspec.json.encode(manifest)
    envelope = _Envelope(FORMAT, VERSION, digest(body).hex(), msgspec.Raw(body))
    return msgspec.json.encode(envelope)


def parse(data: bytes, digest: Digest, memory_bytes: int | None = None) -> Manifest:
    """The manifest that stored bytes hold.

    Args:
        data: what is stored.
        digest: makes a digest of bytes.
        memory_bytes: what it may take in memory; None for any amount.

    Raises:
        VersionError: a newer version wrote it.
        ManifestError: it is truncated, altered, or breaks a rule of the format.
    """
    if len(data) > MAX_BYTES:
        raise ManifestError(f"the manifest is {len(data):,} bytes long; at most {MAX_BYTES:,}")
    if memory_bytes is not None:
        check_memory(decoded_bytes(data), f"the manifest of {len(data):,} bytes", memory_bytes)
    head = _decode(data, _Head, "the manifest is truncated or no manifest at all")
    if head.format != FORMAT:
        raise ManifestError(f"the manifest's format is {head.format[:40]!r}, not {FORMAT!r}")
    if head.version > VERSION:
        raise VersionError(
            f"the checkpoint has version {head.version} of the format, and this xckpt reads "
            f"version {VERSION}; upgrade xckpt to read it"
        )
    if head.version != VERSION:
        raise ManifestError(f"the format never had a version {head.version}")
    envelope = _decode(data, _Envelope, "the manifest is truncated or altered")
    body = memoryview(envelope.checkpoint)  # it may be a gigabyte
    if msgspec.json.encode(envelope) != data:
        # Nothing digests what is around the content, so it has one spelling and no other field.
        raise ManifestError("the manifest was altered: something is added around its content")
    if digest(bytes(body)).hex() != envelope.digest:
        raise ManifestError("the manifest was altered: its digest does not fit its content")
    manifest = _decode(body, Manifest, "the manifest breaks the format")
    if memory_bytes is not None:
        size, leaves = described_bytes(manifest), len(manifest.leaves)
        check_memory(size, f"the manifest of {leaves:,} leaves", memory_bytes)
    _refuse_repeated_names(manifest, body)
    check(manifest)
    return manifest


def _refuse_repeated_names(manifest: Manifest, body: memoryview) -> None:
    if memoryview(msgspec.json.encode(manifest)) == body:
        return  # as this library spells it, which is soon seen, no name comes twice
    try:
        name = repeated_name(bytes(body))
    except RecursionError as error:
        raise ManifestError("the manifest breaks the format: it is nested too deep") from error
    if name is not None:
        raise ManifestError(
            f"the manifest breaks the format: an object in it has two members named {name[:80]!r}"
        )


def _decode(data: bytes | memoryview, kind: type[Document], complaint: str) -> Document:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ManifestError(f"{complaint}: {error}") from error


def check(manifest: Manifest) -> None:
    """Refuse a manifest that no reader would take.

    Raises:
        ManifestError: it breaks a rule of the format; all faults are listed.
    """
    faults = problems(manifest)
    if faults:
        raise ManifestError.listing("the manifest breaks the format", faults)
