"""Boxes to zarr chunks: which zarr arrays hold a tensor, and how each is chunked.

For a tensor of shape S and disjoint boxes that cover it (`choose_grid`):

1. Per dimension, g_d is the greatest common divisor of the interior boundaries (offsets and ends
   other than 0 and S_d), or S_d if there are none. A chunk shape that divides g lies, wherever its
   grid puts it, inside one box: every chunk has one writer.
2. **Regular**: from g, the slowest dimension is split first until a chunk is within the byte
   target, so that chunks stay contiguous in the source. A c_d that also divides S_d is preferred:
   edge chunks are stored padded.
3. **Pieces**: where that shatters the boxes (far more chunks than their bytes ask for), each box
   becomes an array of its own, chunked freely.
4. **Sharded**: with ``shard_bytes``, step 2 finds the zarr shard (one object, one writer) and the
   chunk divides the shard. With ``readers``, the chunk of step 2 becomes a shard, and chunks inside
   it suit readers that cut any dimension (`xckpt.core.geometry.shards.inner`).

`ZarrArray` is one of these arrays, from the plan over the orders of ranks to the manifest. A chunk
of an array is named by its number in C order; `cells` enumerates those that a box meets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import gcd, isqrt, prod
from typing import Final

import msgspec
import numpy as np

from xckpt.core.geometry.box import Box, Boxes, Int64s, Shape, tuples
from xckpt.core.geometry.shards.inner import inner_chunk
from xckpt.core.names import zarr_path
from xckpt.core.text.shown import brief

MAX_CHUNK_BYTES: Final = 1 << 32
"""Largest chunk, bytes: what a reader may have to hold at once."""

SHATTERED = 4
"""Pieces are chosen where a regular grid has this many times more chunks than the bytes ask for."""

FEW_CELLS = 256
"""Up to this many chunks are cached for arrays of the same shape."""

OVERSIZE = 8
"""A chunk may exceed the byte target this many times where nothing near the target divides g."""


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
    dimension_names: tuple[str, ...] | None = None
    """The caller's name for each dimension of the leaf."""
    place: int | None = None
    """The number of its first chunk's place in the manifest that lists the array, if its chunks lie
    in packs (`xckpt.core.manifest.packs`)."""

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


@dataclass(frozen=True, slots=True)
class GridOptions:
    """How large chunks shall be.

    Example:
        >>> GridOptions(chunk_bytes=1 << 20, shard_bytes=64 << 20).chunk_bytes
        1048576
    """

    chunk_bytes: int = 8 << 20
    """Target for a chunk, in bytes: what a reader reads and verifies at once."""
    shard_bytes: int = 0
    """Target for a zarr shard (one object of several chunks), in bytes; 0 for no sharding."""
    kept: Callable[[str, str, Shape], Grid | None] | None = field(
        default=None, compare=False, repr=False
    )
    """The grid of an earlier checkpoint, by name, dtype and shape of a leaf: taken where it still
    fits (`xckpt.core.geometry.kept_grid`)."""
    readers: int | tuple[int, ...] = 0
    """Into how many parts readers may cut any dimension, or each one, counted from the first; 0 for
    readers that cut as the writer."""

    def __post_init__(self) -> None:
        for name in ("chunk_bytes", "shard_bytes"):
            if not isinstance(given := getattr(self, name), int):
                raise TypeError(f"{name} is a number of bytes, an int, not {given!r}")
        if self.chunk_bytes < 1 or self.shard_bytes < 0:
            raise ValueError(
                f"chunk_bytes must be at least 1 and shard_bytes at least 0, "
                f"got {self.chunk_bytes} and {self.shard_bytes}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The zarr arrays that hold a tensor.

    Example:
        >>> grid = choose_grid((6, 4), 4, Boxes.of([((0, 0), (3, 4)), ((3, 0), (3, 4))]))
        >>> grid.is_regular((6, 4)), grid.chunks.tolist()
        (True, [[3, 4]])
    """

    arrays: Boxes
    """Which box each array holds: one, the whole, if the leaf is regular; else its pieces."""
    chunks: Int64s
    """Chunk shape of each array, (n, rank), at least 1 in each dimension."""
    shards: Int64s | None = None
    """Zarr shard shape of each array, a multiple of its chunk shape; None where unsharded."""

    __repr__ = brief

    @classmethod
    def of(cls, arrays: Boxes, chunks: Sequence[Shape], shards: Sequence[Shape | None]) -> Grid:
        """The grid of arrays with these chunk shapes, and zarr shard shapes where sharded."""
        units = [shard or chunk for shard, chunk in zip(shards, chunks, strict=True)]
        inner, outer = (
            np.array(shapes, np.int64).reshape(arrays.sizes.shape) for shapes in (chunks, units)
        )
        return cls(arrays, inner, None if np.array_equal(inner, outer) else outer)

    @property
    def units(self) -> Int64s:
        """Shape of what must have a single writer: the shard, or the chunk where there is none."""
        return self.chunks if self.shards is None else self.shards

    def is_regular(self, shape: Sequence[int]) -> bool:
        """Whether one array is all of the tensor."""
        return len(self.arrays) == 1 and self.arrays[0].sizes == tuple(shape)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Grid):
            return NotImplemented
        return (
            self.arrays == other.arrays
            and np.array_equal(self.chunks, other.chunks)
            and np.array_equal(self.units, other.units)
        )


def count_cells(sizes: Sequence[int], chunk: Sequence[int]) -> int:
    """Number of chunks that an array of ``sizes`` has; 1 for a scalar, 0 if it has no elements.

    Example:
        >>> count_cells((10, 4), (3, 4)), count_cells((), ()), count_cells((0, 4), (1, 4))
        (4, 1, 0)
    """
    return _counted(tuple(sizes), tuple(chunk))


@functools.lru_cache(maxsize=1024)
def _counted(sizes: Shape, chunk: Shape) -> int:
    """`count_cells`, found once for all arrays that are alike."""
    return prod(-(-size // step) for size, step in zip(sizes, chunk, strict=True))


def cells(
    low: Sequence[int], high: Sequence[int], sizes: Sequence[int], chunk: Sequence[int]
) -> tuple[Int64s, Boxes]:
    """The chunks that the non-empty box ``[low, high)`` of an array meets.

    Returns:
        Their numbers in C order, and their boxes clipped to the array (not to the box asked for).

    Example:
        >>> numbers, boxes = cells((2, 0), (4, 4), (10, 4), (3, 4))
        >>> numbers.tolist(), boxes
        ([0, 1], Boxes([0, 3) x [0, 4), [3, 6) x [0, 4)))
    """
    if all(size <= step for size, step in zip(sizes, chunk, strict=True)):
        return np.zeros(1, np.int64), Boxes.whole(sizes)
    first = tuple(lo // step for lo, step in zip(low, chunk, strict=True))
    last = tuple(-(-hi // step) for hi, step in zip(high, chunk, strict=True))
    if prod(b - a for a, b in zip(first, last, strict=True)) > FEW_CELLS:
        return _cells(first, last, tuple(sizes), tuple(chunk))
    return _few_cells(first, last, tuple(sizes), tuple(chunk))


def _cells(first: Shape, last: Shape, sizes: Shape, chunk: Shape) -> tuple[Int64s, Boxes]:
    """The chunks whose numbers per dimension are in ``[first, last)``, as `cells` gives them."""
    counts = [-(-size // step) for size, step in zip(sizes, chunk, strict=True)]
    axes = [np.arange(a, b, dtype=np.int64) for a, b in zip(first, last, strict=True)]
    position = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")], axis=1)
    weights = np.array([prod(counts[d + 1 :]) for d in range(len(counts))], np.int64)
    step = np.array(chunk, np.int64)
    offsets = position * step
    return position @ weights, Boxes(offsets, np.minimum(step, np.array(sizes) - offsets))


@functools.lru_cache(maxsize=1024)
def _few_cells(first: Shape, last: Shape, sizes: Shape, chunk: Shape) -> tuple[Int64s, Boxes]:
    """`_cells`, found once for all arrays that are alike."""
    numbers, boxes = _cells(first, last, sizes, chunk)
    for column in (numbers, boxes.offsets, boxes.sizes):
        column.flags.writeable = False
    return numbers, boxes


def choose_grid(
    shape: Sequence[int], item_bytes: int, boxes: Boxes, options: GridOptions | None = None
) -> Grid:
    """The grid for a tensor whose disjoint non-empty ``boxes`` cover ``shape``.

    Args:
        shape: global shape, elements.
        item_bytes: bytes an element.
        boxes: the distinct shards; each is held by one writer or by replicas of one.
        options: sizes to aim at.

    Example:
        >>> even = Boxes.of([((0,), (4,)), ((4,), (4,)), ((8,), (2,))])
        >>> choose_grid((10,), 4, even).chunks.tolist()
        [[4]]
        >>> odd = Boxes.of([((0,), (7,)), ((7,), (13,)), ((20,), (81,))])
        >>> choose_grid((101,), 4, odd).arrays
        Boxes([0, 7), [7, 20), [20, 101))
    """
    options = options or GridOptions()
    shape = tuple(int(size) for size in shape)
    if len(shape) == 0 or 0 in shape:
        chunk = tuple(max(size, 1) for size in shape)
        if prod(chunk) * item_bytes > MAX_CHUNK_BYTES:  # it is never made, yet a manifest has it
            chunk = (1,) * len(shape)
        return Grid.of(Boxes.whole(shape), [chunk], [None])
    steps = _common_steps(shape, boxes)
    chunk, shard = _fit(shape, steps, item_bytes, options)
    asked = np.sum(-(-boxes.elements * item_bytes // options.chunk_bytes))
    if len(boxes) > 1 and count_cells(shape, chunk) > SHATTERED * int(asked):
        return _pieces(boxes, item_bytes, options)
    if options.readers:
        chunk = inner_chunk(shape, shard, item_bytes, options.readers)
    return Grid.of(Boxes.whole(shape), [chunk], [shard])


def _common_steps(shape: Shape, boxes: Boxes) -> list[int | None]:
    """g_d for each dimension that has interior boundaries, else None."""
    steps: list[int | None] = []
    for d, size in enumerate(shape):
        # Where a box ends inside the tensor, another one begins.
        starts = boxes.offsets[:, d]
        steps.append(int(np.gcd.reduce(starts[starts != size])) or None)
    return steps


def _fit(
    shape: Shape, steps: Sequence[int | None], item_bytes: int, options: GridOptions
) -> tuple[Shape, Shape]:
    """(chunk, shard) for one array; equal where it is unsharded."""
    if options.shard_bytes <= options.chunk_bytes:
        chunk = _shrink(shape, steps, item_bytes, options.chunk_bytes)
        return chunk, chunk
    shard = _shrink(shape, steps, item_bytes, options.shard_bytes)
    return _shrink(shard, shard, item_bytes, options.chunk_bytes), shard


def _shrink(shape: Shape, steps: Sequence[int | None], item_bytes: int, target_bytes: int) -> Shape:
    """The largest chunk shape within the target that ``steps`` allow, slowest dimension first."""
    chunk = [size if step is None else step for size, step in zip(shape, steps, strict=True)]
    for d in range(len(chunk)):
        row_bytes = prod(chunk) // chunk[d] * item_bytes
        most = max(1, target_bytes // row_bytes)
        if chunk[d] > most:
            step = steps[d]
            chunk[d] = (
                _free_step(shape[d], most) if step is None else _dividing_step(step, shape[d], most)
            )
    return tuple(chunk)


def _free_step(size: int, most: int) -> int:
    """A step of at most ``most`` where no boundary binds it: one that divides, or pads least."""
    exact = _largest_divisor(size, most)
    return exact if 2 * exact > most else -(-size // -(-size // most))


def _dividing_step(step: int, size: int, most: int) -> int:
    """A divisor of ``step`` near ``most``: below it if that is not tiny, else somewhat above."""
    both = _largest_divisor(gcd(step, size), most)
    below = both if 2 * both > most else _largest_divisor(step, most)
    if OVERSIZE * below >= most:
        return below
    above = step // _largest_divisor(step, step // most)
    return above if above <= OVERSIZE * most else below


def _largest_divisor(number: int, most: int) -> int:
    """The largest divisor of ``number`` that is at most ``most`` (at least 1)."""
    best = 1
    for small in range(1, isqrt(number) + 1):
        if number % small == 0:
            if small <= most:
                best = max(best, small)
            if number // small <= most:
                return max(best, number // small)
    return best


def _pieces(boxes: Boxes, item_bytes: int, options: GridOptions) -> Grid:
    """An array for each box; boxes of one size share the search."""
    sizes, of = np.unique(boxes.sizes, axis=0, return_inverse=True)
    free = [None] * boxes.rank
    fitted = [_fit(each, free, item_bytes, options) for each in tuples(sizes)]
    inner, outer = np.array(fitted, np.int64).swapaxes(0, 1)[:, of.reshape(-1)]
    return Grid(boxes, inner, None if np.array_equal(inner, outer) else outer)
