"""The manifest: the one document that makes a folder a checkpoint.

On disk it is ``{"format": "xckpt", "version": 1, "digest": "<hex>", "checkpoint": {...}}``, where
the digest is taken of the exact bytes of ``checkpoint``. To read it (`parse`):

1. Refuse a document that is too long, no JSON, not ours, or of a newer version.
2. Refuse it if the digest of the inner bytes differs: it was altered.
3. Decode it against the types below; an unknown field is an error.
4. Check every count and shape against the limits, before anything is allocated (`_problems`).

`arrays` lists what the manifest implies: each zarr array with its path, grid and the number of its
first digest. Digests are numbered over leaves in order, arrays in order, chunks in C order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import msgspec
import numpy as np

from xckpt.core.boxes import Boxes, cover_fault, interval
from xckpt.core.dtypes import DTYPES, item_size
from xckpt.core.grid import Grid, count_cells
from xckpt.core.json_values import check_json
from xckpt.core.keys import zarr_path
from xckpt.core.metadata import (
    BytesStorageMetadata,
    Metadata,
    Sharding,
    TensorProperties,
    TensorStorageMetadata,
)
from xckpt.errors import ManifestError, VersionError

__all__ = [
    "BytesEntry",
    "Manifest",
    "PieceEntry",
    "TensorEntry",
    "ValueEntry",
    "ZarrArray",
    "arrays",
    "build",
    "encode",
    "parse",
    "to_metadata",
]

FORMAT: Final = "xckpt"
VERSION: Final = 1

MAX_BYTES: Final = 1 << 30
"""Longest manifest, bytes."""
MAX_RANK: Final = 32
"""Most dimensions of a tensor; TensorStore's limit."""
MAX_TENSOR_BYTES: Final = 1 << 56
"""Largest tensor, bytes."""
MAX_CHUNK_BYTES: Final = 1 << 32
"""Largest chunk, bytes: what a reader may have to hold at once."""

Shape = tuple[int, ...]
Digest = Callable[[bytes], bytes]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A struct that rejects what it doesn't know and writes no defaults."""


class PieceEntry(_Strict, frozen=True):
    """One array of a leaf in pieces."""

    offset: Shape
    """First element of the piece in the tensor."""
    shape: Shape
    """Elements of the piece."""
    chunk: Shape
    """Chunk shape."""
    shard: Shape | None = None
    """Zarr shard shape where several chunks are one object."""


class TensorEntry(_Strict, frozen=True, tag="tensor", tag_field="kind"):
    """A tensor: regular (``chunk`` is set) or in pieces (``pieces`` is)."""

    name: str
    dtype: str
    shape: Shape
    chunk: Shape | None = None
    shard: Shape | None = None
    pieces: tuple[PieceEntry, ...] | None = None
    sharding: Sharding | None = None
    annotation: str = ""


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


class Manifest(_Strict, frozen=True):
    """All that a checkpoint is, but for the data."""

    leaves: tuple[TensorEntry | ValueEntry | BytesEntry, ...]
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


class _Envelope(msgspec.Struct):
    """The outermost document; the rest of it may be of any version."""

    format: str
    version: int
    digest: str
    checkpoint: msgspec.Raw


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """One zarr array of a checkpoint."""

    leaf: str
    """The leaf that it belongs to."""
    number: int
    """Its number among the leaf's arrays."""
    path: str
    """Where it is, relative to the root group."""
    dtype: str
    offset: Shape
    """Its first element in the tensor."""
    shape: Shape
    chunk: Shape
    shard: Shape | None
    first: int
    """The number of its first chunk's digest."""
    piece_of: Shape | None = None
    """Shape of the whole tensor if the array is a piece of one."""

    @property
    def count(self) -> int:
        """Number of chunks."""
        return count_cells(self.shape, self.chunk)


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
    check_json(metadata.user, "metadata")
    check_json(metadata.planner_data, "planner_data")
    leaves: list[TensorEntry | ValueEntry | BytesEntry] = []
    for name, described in metadata.state_dict_metadata.items():
        if isinstance(described, BytesStorageMetadata):
            if name not in values:
                raise ManifestError(f"{name}: no rank has written this value")
            leaves.append(values[name])
        else:
            leaves.append(_tensor_entry(name, described))
    return Manifest(
        tuple(leaves),
        digests,
        root,
        codecs,
        dict(metadata.containers),
        metadata.user,
        metadata.planner_data,
    )


def _tensor_entry(name: str, tensor: TensorStorageMetadata) -> TensorEntry:
    grid = tensor.grid
    assert grid is not None
    shards = None if grid.shards is None else [tuple(shape) for shape in grid.shards.tolist()]
    chunks = [tuple(shape) for shape in grid.chunks.tolist()]
    if grid.is_regular(tensor.size):
        return TensorEntry(
            name,
            tensor.properties.dtype,
            tensor.size,
            chunk=chunks[0],
            shard=shards[0] if shards else None,
            sharding=tensor.sharding,
            annotation=tensor.annotation,
        )
    pieces = tuple(
        PieceEntry(box.offsets, box.sizes, chunk, shards[number] if shards else None)
        for number, (box, chunk) in enumerate(zip(grid.arrays, chunks, strict=True))
    )
    return TensorEntry(
        name,
        tensor.properties.dtype,
        tensor.size,
        pieces=pieces,
        sharding=tensor.sharding,
        annotation=tensor.annotation,
    )


def arrays(manifest: Manifest) -> Iterator[ZarrArray]:
    """Every zarr array of a checkpoint, in the order of their digests."""
    first = 0
    for leaf in manifest.leaves:
        for array in _leaf_arrays(leaf, first):
            yield array
            first += array.count


def _leaf_arrays(leaf: TensorEntry | ValueEntry | BytesEntry, first: int) -> Iterator[ZarrArray]:
    path = zarr_path(leaf.name)
    if isinstance(leaf, ValueEntry):
        return
    if isinstance(leaf, BytesEntry):
        yield ZarrArray(leaf.name, 0, path, "uint8", (0,), (leaf.size,), (leaf.chunk,), None, first)
        return
    if leaf.pieces is None:
        assert leaf.chunk is not None
        origin = (0,) * len(leaf.shape)
        yield ZarrArray(
            leaf.name, 0, path, leaf.dtype, origin, leaf.shape, leaf.chunk, leaf.shard, first
        )
        return
    for number, piece in enumerate(leaf.pieces):
        array = ZarrArray(
            leaf.name,
            number,
            f"{path}/{number}",
            leaf.dtype,
            piece.offset,
            piece.shape,
            piece.chunk,
            piece.shard,
            first,
            leaf.shape,
        )
        yield array
        first += array.count


def to_metadata(manifest: Manifest) -> Metadata:
    """What a manifest says in the planners' words: a tensor's chunks are its zarr arrays."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for leaf in manifest.leaves:
        if not isinstance(leaf, TensorEntry):
            described[leaf.name] = BytesStorageMetadata(leaf.type)
            continue
        placed = list(_leaf_arrays(leaf, 0))
        rank = len(leaf.shape)
        boxes = Boxes.of([(array.offset, array.shape) for array in placed], rank=rank)
        shape = (len(placed), rank)
        chunks = np.array([array.chunk for array in placed], np.int64).reshape(shape)
        shards = None
        if any(array.shard for array in placed):
            outer = [array.shard or array.chunk for array in placed]
            shards = np.array(outer, np.int64).reshape(shape)
        described[leaf.name] = TensorStorageMetadata(
            TensorProperties(leaf.dtype),
            leaf.shape,
            boxes,
            Grid(boxes, chunks, shards),
            leaf.sharding,
            leaf.annotation,
        )
    return Metadata(described, manifest.containers, manifest.user, planner_data=manifest.planner)


def encode(manifest: Manifest, digest: Digest) -> bytes:
    """The manifest as it is stored.

    Raises:
        ManifestError: it breaks a rule of the format, so no reader would take it.
    """
    _refuse(_problems(manifest))
    body = msgspec.json.encode(manifest)
    envelope = _Envelope(FORMAT, VERSION, digest(body).hex(), msgspec.Raw(body))
    return msgspec.json.encode(envelope)


def parse(data: bytes, digest: Digest) -> Manifest:
    """The manifest that stored bytes hold.

    Raises:
        VersionError: a newer version wrote it.
        ManifestError: it is truncated, altered, or breaks a rule of the format.
    """
    if len(data) > MAX_BYTES:
        raise ManifestError(f"the manifest is {len(data):,} bytes long; at most {MAX_BYTES:,}")
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ManifestError(f"the manifest is truncated or no manifest at all: {error}") from error
    if envelope.format != FORMAT:
        raise ManifestError(f"the manifest's format is {envelope.format[:40]!r}, not {FORMAT!r}")
    if envelope.version != VERSION:
        raise VersionError(
            f"the checkpoint has version {envelope.version} of the format, and this xckpt reads "
            f"version {VERSION}; upgrade xckpt to read it"
        )
    body = bytes(envelope.checkpoint)
    if digest(body).hex() != envelope.digest:
        raise ManifestError("the manifest was altered: its digest does not fit its content")
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ManifestError(f"the manifest breaks the format: {error}") from error
    _refuse(_problems(manifest))
    return manifest


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ManifestError.listing("the manifest breaks the format", problems)


def _problems(manifest: Manifest) -> list[str]:
    """Everything in a manifest that no honest writer writes."""
    problems: list[str] = []
    if any(codec != "crc32c" for codec in manifest.codecs) or len(manifest.codecs) > 1:
        problems.append(f"codecs {manifest.codecs} are not those of the format")
    if manifest.root.startswith("/") or any(
        part in ("", ".", "..") for part in manifest.root.split("/") if manifest.root
    ):
        problems.append(f"the root {manifest.root[:80]!r} leads out of the checkpoint")
    names: set[str] = set()
    for leaf in manifest.leaves:
        if leaf.name in names:
            problems.append(f"{leaf.name[:80]}: two leaves have this name")
        names.add(leaf.name)
        if isinstance(leaf, TensorEntry):
            problems.extend(f"{leaf.name[:80]}: {problem}" for problem in _tensor_problems(leaf))
        elif isinstance(leaf, BytesEntry) and not (
            0 <= leaf.size <= MAX_TENSOR_BYTES and 1 <= leaf.chunk <= MAX_CHUNK_BYTES
        ):
            problems.append(f"{leaf.name[:80]}: {leaf.size} bytes in chunks of {leaf.chunk}")
    return problems


def _tensor_problems(leaf: TensorEntry) -> Iterator[str]:
    if leaf.dtype not in DTYPES:
        yield f"dtype {leaf.dtype[:40]!r} is not one of the format's"
        return
    item = item_size(leaf.dtype)
    fault = _shape_fault(leaf.shape, item)
    if fault:
        yield fault
        return
    if (leaf.chunk is None) == (leaf.pieces is None):
        yield "exactly one of chunk and pieces must be given"
        return
    if leaf.chunk is not None:
        yield from _grid_problems(leaf.shape, leaf.chunk, leaf.shard, item)
        return
    pieces = leaf.pieces or ()
    for number, piece in enumerate(pieces):
        if len(piece.offset) != len(leaf.shape) or _shape_fault(piece.shape, item):
            yield f"piece {number} has offset {piece.offset} and shape {piece.shape}"
            return
        yield from _grid_problems(piece.shape, piece.chunk, piece.shard, item)
    if any(len(piece.shape) != len(leaf.shape) for piece in pieces):
        yield "a piece has another number of dimensions than the tensor"
        return
    boxes = Boxes.of([(piece.offset, piece.shape) for piece in pieces], rank=len(leaf.shape))
    cover = cover_fault(leaf.shape, boxes)
    if cover is not None:
        yield f"the pieces have an {cover.kind} at {interval(cover.box.offsets, cover.box.sizes)}"


def _shape_fault(shape: Shape, item_bytes: int) -> str:
    if len(shape) > MAX_RANK:
        return f"{len(shape)} dimensions; at most {MAX_RANK}"
    if any(size < 0 or size > MAX_TENSOR_BYTES for size in shape):
        return f"impossible shape {shape}"
    if prod(max(size, 1) for size in shape) * item_bytes > MAX_TENSOR_BYTES:
        return f"shape {shape} is more than {MAX_TENSOR_BYTES:,} bytes"
    return ""


def _grid_problems(shape: Shape, chunk: Shape, shard: Shape | None, item: int) -> Iterator[str]:
    for what, cell in (("chunk", chunk), ("shard", shard)):
        if cell is None:
            continue
        fits = len(cell) == len(shape) and all(1 <= size <= MAX_TENSOR_BYTES for size in cell)
        if not fits or prod(cell) * item > MAX_CHUNK_BYTES:
            most = f"{MAX_CHUNK_BYTES:,} bytes"
            yield f"{what} shape {cell} does not suit shape {shape}, or is over {most}"
            return
    if shard is not None and any(outer % inner for outer, inner in zip(shard, chunk, strict=True)):
        yield f"shard shape {shard} is no multiple of chunk shape {chunk}"
