"""Random leaves with what their pictures must show, found by painting every element.

1. A leaf has 0 to 5 dimensions. Its shards are those of a random mesh, or of a random tiling; the
   planner of saves lays them out, with chunks and zarr shards of random sizes.
2. A random plane of it is painted: each element of an array of NumPy gets the number of the chunk,
   array, zarr shard or set of devices that holds it. Equal numbers make the rectangles expected.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.grid import Grid, GridOptions
from xckpt.core.manifest.entries import Manifest, TensorEntry, leaf_arrays
from xckpt.core.manifest.pieces import Pieces
from xckpt.core.metadata import Sharding
from xckpt.core.plan.layout import LeafShards, lay_out

Rectangle = tuple[int, int, int, int]
"""Column, row, columns, rows."""


@dataclass(frozen=True)
class Drawn:
    """What the page must draw of a leaf in one plane."""

    name: str
    down: int | None
    across: int | None
    at: tuple[int, ...]
    chunks: set[Rectangle]
    units: set[Rectangle]
    """Zarr shards."""
    arrays: set[Rectangle]
    shards: dict[Rectangle, str] | None
    """Rectangle -> the devices that hold it; None where the sharding is not known."""


def random_grids(seed: int, count: int) -> tuple[Manifest, list[Drawn]]:
    """Leaves of every kind, and what must be drawn of them."""
    rng = np.random.default_rng(seed)
    entries, drawn = [], []
    for number in range(count):
        shape = _shape(rng, number % 6)
        name = f"grid-{number:03}"
        sharded = rng.random() < 0.5
        sharding, held = _sharded(rng, shape) if sharded else (None, _tiled(rng, shape))
        large = not sharded and rng.random() < 0.6
        options = (
            GridOptions()
            if large
            else GridOptions(*[(4, 0), (16, 0), (64, 0), (16, 96), (1 << 20, 0)][number % 5])
        )
        entry = _entry(name, shape, sharding, held, options)
        entries.append(entry)
        drawn.append(_drawn(rng, entry, held if sharded else None))
    return Manifest(tuple(entries), ""), drawn


def _shape(rng: np.random.Generator, rank: int) -> tuple[int, ...]:
    sides = [3, 4, 6, 8, 12, 13, 29] if rank < 4 else [1, 2, 3, 5, 7]
    return tuple(int(rng.choice(sides)) for _ in range(rank))


def _sharded(
    rng: np.random.Generator, shape: tuple[int, ...]
) -> tuple[Sharding, list[list[NDArray[np.int64]]]]:
    """A sharding, and for each device its rows of each dimension, cut as torch.chunk cuts."""
    mesh = [int(rng.integers(1, 4)) for _ in range(int(rng.integers(1, 4)))]
    axes = tuple((f"axis{number}", size) for number, size in enumerate(mesh))
    cut = [int(rng.integers(-1, len(shape))) for _ in mesh]
    if rng.random() < 0.5:
        spec = [tuple(f"axis{a}" for a, d in enumerate(cut) if d == k) for k in range(len(shape))]
        sharding = Sharding(axes=axes, spec=tuple(spec))
    else:
        texts = ("Replicate()" if d < 0 else f"Shard(dim={d})" for d in cut)
        sharding = Sharding(axes=axes, placements=tuple(texts))
    held = []
    for coordinate in product(*map(range, mesh)):
        rows = [np.arange(size) for size in shape]
        for axis, d in enumerate(cut):
            if d >= 0:
                step = -(-len(rows[d]) // mesh[axis])
                rows[d] = rows[d][step * coordinate[axis] :][:step]
        held.append(rows)
    return sharding, held


def _tiled(rng: np.random.Generator, shape: tuple[int, ...]) -> list[list[NDArray[np.int64]]]:
    """Boxes cut anywhere, one a rank, as the rows of each dimension."""
    boxes = [[np.arange(size) for size in shape]]
    for _ in range(int(rng.integers(0, 9))):
        box = boxes.pop(int(rng.integers(len(boxes))))
        long = [d for d, rows in enumerate(box) if len(rows) > 1]
        if not long:
            boxes.append(box)
            continue
        d = int(rng.choice(long))
        cut = int(rng.integers(1, len(box[d])))
        for part in (box[d][:cut], box[d][cut:]):
            boxes.append([*box[:d], part, *box[d + 1 :]])
    return boxes


def _entry(
    name: str,
    shape: tuple[int, ...],
    sharding: Sharding | None,
    held: list[list[NDArray[np.int64]]],
    options: GridOptions,
) -> TensorEntry:
    """The leaf as the planner of saves lays it out."""
    filled = [(rank, rows) for rank, rows in enumerate(held) if all(map(len, rows))]
    boxes = Boxes.of(
        [([int(r[0]) for r in rows], [len(r) for r in rows]) for _, rows in filled], rank=len(shape)
    )
    ranks = np.array([rank for rank, _ in filled], np.int64)
    layout = lay_out(LeafShards(shape, 4, boxes, ranks), options)
    assert not isinstance(layout, str), layout
    grid: Grid = layout.grid
    if not grid.is_regular(shape):
        return TensorEntry(name, "float32", shape, pieces=Pieces.of(grid), sharding=sharding)
    shard = None if grid.shards is None else tuple(grid.shards[0].tolist())
    chunk = tuple(grid.chunks[0].tolist())
    return TensorEntry(name, "float32", shape, chunk, shard, sharding=sharding)


def _drawn(
    rng: np.random.Generator, entry: TensorEntry, held: list[list[NDArray[np.int64]]] | None
) -> Drawn:
    rank = len(entry.shape)
    order = [int(d) for d in rng.permutation(rank)]
    down, across = (order[0], order[1]) if rank > 1 else (None, 0 if rank else None)
    at = tuple(int(rng.integers(size)) for size in entry.shape)
    plane = (entry.shape, down, across, at)
    painted = {"chunk": np.full(entry.shape, -1, np.int64)}
    painted |= {each: painted["chunk"].copy() for each in ("unit", "array")}
    for number, piece in enumerate(leaf_arrays(entry)):
        region = piece.box.slices()
        painted["array"][region] = number
        for what, cell in (("chunk", piece.chunk), ("unit", piece.shard)):
            if cell is not None:
                numbers = _cells(piece.shape, cell)
                painted[what][region] = numbers + painted[what].max() + 1
    seen = {what: set(_rectangles(_cut(whole, *plane))) for what, whole in painted.items()}
    shards = None if held is None else _devices(held, *plane)
    return Drawn(entry.name, down, across, at, seen["chunk"], seen["unit"], seen["array"], shards)


def _cells(shape: tuple[int, ...], cell: tuple[int, ...]) -> NDArray[np.int64]:
    """The number of each element's cell."""
    numbers: Any = np.zeros(shape, np.int64)
    for d, (size, step) in enumerate(zip(shape, cell, strict=True)):
        along = np.arange(size) // step
        numbers = numbers * -(-size // step) + along.reshape(
            [-1 if k == d else 1 for k in range(len(shape))]
        )
    return np.asarray(numbers, np.int64)


def _devices(
    held: list[list[NDArray[np.int64]]],
    shape: tuple[int, ...],
    down: int | None,
    across: int | None,
    at: tuple[int, ...],
) -> dict[Rectangle, str]:
    """Painted with powers of two: an element's number is the set of its holders."""
    assert len(held) < 63
    painted = np.zeros(shape, np.int64)
    for device, rows in enumerate(held):
        painted[np.ix_(*rows) if rows else ()] += 1 << device
    found = _rectangles(_cut(painted, shape, down, across, at))
    names = {}
    for rectangle, number in found.items():
        names[rectangle] = " ".join(str(d) for d in range(len(held)) if number >> d & 1)
    return names


def _cut(
    whole: NDArray[np.int64],
    shape: tuple[int, ...],
    down: int | None,
    across: int | None,
    at: tuple[int, ...],
) -> NDArray[np.int64]:
    """The plane of an array, rows down and columns across."""
    key = tuple(slice(None) if d in (down, across) else at[d] for d in range(len(shape)))
    plane = np.asarray(whole[key])
    if down is not None and across is not None and down > across:
        plane = plane.T
    return plane.reshape(1 if down is None else shape[down], -1)


def _rectangles(plane: NDArray[np.int64]) -> dict[Rectangle, int]:
    """The rectangle of each number of a plane; -1 is nothing."""
    found = {}
    for number in np.unique(plane[plane >= 0]).tolist():
        rows, columns = np.nonzero(plane == number)
        x, y = int(columns.min()), int(rows.min())
        rectangle = (x, y, int(columns.max()) - x + 1, int(rows.max()) - y + 1)
        assert prod(rectangle[2:]) == len(rows)
        found[rectangle] = number
    return found
