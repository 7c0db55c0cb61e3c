"""The pieces of a leaf, in columns.

Layers repeat, so many leaves are cut alike: the manifest has the pieces of all of them once, and
each leaf says which. A column is numbers of 64 bits, little-endian, row by row: (pieces, rank).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Boxes, Int64s, Shape
from xckpt.core.geometry.cover import cover_fault
from xckpt.core.geometry.grid import MAX_CHUNK_BYTES, Grid
from xckpt.core.text.shown import brief

MAX_RANK: Final = 32
"""Most dimensions of a tensor; TensorStore's limit."""
MAX_TENSOR_BYTES: Final = 1 << 56
"""Largest tensor, bytes."""
MAX_PIECES: Final = 1 << 24
"""Most pieces of a checkpoint: each is a zarr array."""
MANY_OBJECTS: Final = 1_000_000
"""A save makes no more objects, unless its options confirm it."""
MANY_CHUNKS: Final = 200_000
"""Up to this many, a save needs no check of its objects, and a load fits the default memory."""

_NUMBER: Final = np.dtype("<i8")


class Pieces(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True
):
    """A cut: the arrays of a leaf in pieces, as columns of little-endian int64."""

    rank: int
    """Dimensions of the tensor; at least 1."""
    offset: bytes
    """First element of each piece in the tensor."""
    shape: bytes
    """Elements of each piece."""
    chunk: bytes
    """Chunk shape of each piece."""
    shard: bytes | None = None
    """Zarr shard shape of each piece; None if they have none."""

    __repr__ = brief

    @classmethod
    def of(cls, grid: Grid) -> Pieces:
        """The pieces that a grid consists of."""
        columns = [grid.arrays.offsets, grid.arrays.sizes, grid.chunks]
        columns += [] if grid.shards is None else [grid.shards]
        return cls(grid.arrays.rank, *(column.astype(_NUMBER).tobytes() for column in columns))

    @classmethod
    def listed(cls, pieces: Iterable[tuple[Shape, ...]]) -> Pieces:
        """Pieces from their offset, shape, chunk shape and, if all have one, zarr shard shape.

        Example:
            >>> pieces = Pieces.listed([((0, 0), (3, 8), (3, 4)), ((3, 0), (2, 8), (2, 8))])
            >>> len(pieces), pieces.grid.arrays, pieces.firsts.tolist()
            (2, Boxes([0, 3) x [0, 8), [3, 5) x [0, 8)), [0, 2, 3])
        """
        columns = [np.array(column, _NUMBER) for column in zip(*pieces, strict=True)]
        return cls(columns[0].shape[1], *(column.tobytes() for column in columns))

    def take(self, numbers: Int64s) -> Pieces:
        """Some of the pieces, in an order; they no longer cover the tensor."""
        columns = (self._column(column)[numbers].tobytes() for column in self.columns)
        return Pieces(self.rank, *columns)

    @property
    def columns(self) -> list[bytes]:
        """The columns that are set."""
        columns = self.offset, self.shape, self.chunk, self.shard
        return [column for column in columns if column is not None]

    def fault(self) -> str:
        """Why the columns do not describe pieces; empty if they do."""
        if not 1 <= self.rank <= MAX_RANK:
            return f"pieces of {self.rank} dimensions"
        if any(len(column) != len(self) * self.rank * 8 for column in self.columns):
            return f"columns of {[*map(len, self.columns)]} bytes, of {self.rank} dimensions"
        return ""

    @cached_property
    def grid(self) -> Grid:
        """The same as a grid."""
        parts = [self._column(column) for column in self.columns]
        return Grid(Boxes(parts[0], parts[1]), parts[2], parts[3] if len(parts) > 3 else None)

    def _column(self, column: bytes) -> Int64s:
        return np.frombuffer(column, _NUMBER).astype(np.int64, copy=False).reshape(-1, self.rank)

    @cached_property
    def firsts(self) -> Int64s:
        """The number of each piece's first chunk in the leaf, and how many chunks the leaf has."""
        grid = self.grid
        counts = np.prod(-(-grid.arrays.sizes // grid.chunks), axis=1, dtype=np.int64)
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

    @cached_property
    def least_chunk(self) -> int:
        """Elements of the smallest chunk shape; 0 if there is none."""
        # As floats, which do not wrap around.
        return int(np.prod(self.grid.chunks, axis=1, dtype=np.float64).min()) if len(self) else 0

    def packed(self, most: int) -> int:
        """How many are packed where chunks of up to ``most`` elements are."""
        return int(np.count_nonzero(self.are_packed(most)))

    def packed_chunks(self, most: int) -> int:
        """How many chunks these have; found once for all leaves that are cut alike."""
        if most not in self._packed_chunks:
            self._packed_chunks[most] = int(np.diff(self.firsts)[self.are_packed(most)].sum())
        return self._packed_chunks[most]

    @cached_property
    def _packed_chunks(self) -> dict[int, int]:
        return {}

    def objects(self, most: int) -> int:
        """How many objects the chunks of the others are."""
        grid = self.grid
        counts = np.prod(-(-grid.arrays.sizes // grid.units), axis=1, dtype=np.int64)
        return int(counts[~self.are_packed(most)].sum())

    def are_packed(self, most: int) -> NDArray[np.bool_]:
        """Which are packed, (pieces,)."""
        if self.shard is not None:
            return np.zeros(len(self), np.bool_)
        # As floats, which do not wrap around.
        return np.prod(self.grid.chunks, axis=1, dtype=np.float64) <= most

    @property
    def chunks(self) -> int:
        """How many chunks all of them have."""
        return int(self.firsts[-1])

    def __len__(self) -> int:
        return len(self.offset) // (_NUMBER.itemsize * max(self.rank, 1))

    def rows(self) -> Iterator[tuple[Shape, Shape, Shape, Shape | None]]:
        """Offset, shape, chunk shape and zarr shard shape, if it has one, of each piece."""
        grid = self.grid
        columns = grid.arrays.offsets, grid.arrays.sizes, grid.chunks, grid.units
        for row in zip(*(column.tolist() for column in columns), strict=True):
            offset, shape, chunk, unit = map(tuple, row)
            yield offset, shape, chunk, None if grid.shards is None else unit


def pieces_problems(
    shape: Shape,
    pieces: Pieces,
    item: int,
    grid_problems: Callable[[Shape, Shape, Shape | None, int], Iterable[str]],
) -> Iterator[str]:
    """What is wrong with the pieces of a tensor.

    Args:
        shape: the tensor's.
        pieces: its pieces.
        item: bytes an element.
        grid_problems: what is wrong with the shape, chunk and zarr shard of one array.
    """
    if pieces.fault() or pieces.rank != len(shape):
        yield pieces.fault() or f"pieces of {pieces.rank} dimensions, the tensor has {len(shape)}"
        return
    grid = pieces.grid
    offsets, sizes = grid.arrays.offsets, grid.arrays.sizes
    # Sizes and what is left behind an offset: no sum of two may wrap around.
    outside = (offsets < 0) | (sizes < 0) | (sizes > np.array(shape) - np.maximum(offsets, 0))
    if outside.any():
        number = int(np.flatnonzero(outside.any(axis=1))[0])
        yield f"piece {number}, at {offsets[number].tolist()}, lies outside the shape {shape}"
        return
    fault = _first_bad_grid(grid, item)
    if fault is not None:
        piece, chunk, shard = (
            tuple(column[fault].tolist()) for column in (sizes, grid.chunks, grid.units)
        )
        (found,) = grid_problems(piece, chunk, shard, item)
        yield f"piece {fault}: {found}"
        return
    cover = cover_fault(shape, grid.arrays)
    if cover is not None:
        where = str(cover.box)
        yield f"{cover.kind} among the pieces at {where}"


def _first_bad_grid(grid: Grid, item: int) -> int | None:
    """The first piece whose chunk or zarr shard is impossible."""
    bad = np.zeros(len(grid.arrays), bool)
    for cells in (grid.chunks, grid.units):
        bad |= ((cells < 1) | (cells > MAX_TENSOR_BYTES)).any(axis=1)
        # As floats, which do not wrap around and are exact where it matters.
        bad |= np.prod(cells, axis=1, dtype=np.float64) * item > MAX_CHUNK_BYTES
    bad[~bad] |= (grid.units[~bad] % grid.chunks[~bad]).any(axis=1)
    return int(np.argmax(bad)) if bad.any() else None
