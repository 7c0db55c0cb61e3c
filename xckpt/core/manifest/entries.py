"""What a manifest consists of, and the zarr arrays that follow from it.

A manifest has an entry for each leaf. `arrays` lists what the entries imply: each zarr array with
its path, grid and the number of its first digest. Digests are numbered over leaves in order, arrays
in order, chunks in C order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from xckpt.core.geometry.box import Box, Shape
from xckpt.core.geometry.grid import count_cells
from xckpt.core.metadata import Sharding
from xckpt.core.names import zarr_path


class _Strict(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False
):
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


class ZarrArray(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One zarr array of a checkpoint: planned, sent to those who write it, or stored."""

    leaf: str
    """The leaf that it belongs to."""
    number: int
    """Its number among the leaf's arrays."""
    dtype: str
    offset: Shape
    """Its first element in the tensor."""
    shape: Shape
    chunk: Shape
    shard: Shape | None = None
    first: int = 0
    """The number of its first chunk's digest, in the manifest that lists the array."""
    piece_of: Shape | None = None
    """Shape of the whole tensor if the array is a piece of one."""

    @property
    def path(self) -> str:
        """Where it is, relative to the root group."""
        path = zarr_path(self.leaf)
        return path if self.piece_of is None else f"{path}/{self.number}"

    @property
    def box(self) -> Box:
        """The part of the tensor that it holds."""
        return Box(self.offset, self.shape)

    @property
    def unit(self) -> Shape:
        """Shape of what has a single writer and is one object: the shard, else the chunk."""
        return self.shard or self.chunk

    @property
    def count(self) -> int:
        """Number of chunks."""
        return count_cells(self.shape, self.chunk)

    def key(self, offsets: Shape) -> str:
        """The key of the object that holds the chunk at ``offsets``.

        Example:
            >>> ZarrArray("w", 0, "int8", (0, 0), (4, 8), (2, 8)).key((2, 0))
            'w/c/1/0'
        """
        numbers = [str(o // n) for o, n in zip(offsets, self.unit, strict=True)]
        return "/".join([self.path, "c", *numbers])


def arrays(manifest: Manifest) -> Iterator[ZarrArray]:
    """Every zarr array of a checkpoint, in the order of their digests."""
    first = 0
    for leaf in manifest.leaves:
        for array in leaf_arrays(leaf, first):
            yield array
            first += array.count


def leaf_arrays(leaf: TensorEntry | ValueEntry | BytesEntry, first: int = 0) -> Iterator[ZarrArray]:
    """The zarr arrays of one leaf, whose first digest has the number ``first``."""
    if isinstance(leaf, ValueEntry):
        return
    if isinstance(leaf, BytesEntry):
        yield ZarrArray(leaf.name, 0, "uint8", (0,), (leaf.size,), (leaf.chunk,), None, first)
        return
    if leaf.pieces is None:
        assert leaf.chunk is not None
        origin = (0,) * len(leaf.shape)
        yield ZarrArray(leaf.name, 0, leaf.dtype, origin, leaf.shape, leaf.chunk, leaf.shard, first)
        return
    for number, piece in enumerate(leaf.pieces):
        array = ZarrArray(
            leaf.name,
            number,
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
