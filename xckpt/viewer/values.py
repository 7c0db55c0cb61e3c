"""The values of a plane of a tensor, few enough for a page: a heat map, a histogram, counts.

1. `values_of` finds the leaf of a number; `text_of` is the same for a Python value.
2. Up to `MOST_ELEMENTS` of the plane are read, and up to `MOST_READ` bytes of chunks, which are
   read whole. Of a larger plane the first rows are read, of very long rows the first columns.
3. `heat_map` gives each cell the mean of the elements that fall into it, or none where one of
   them is not finite: a single NaN among millions of elements is seen.
4. Least, largest and mean are those of `xckpt.storage.contents.statistics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Box
from xckpt.core.manifest.entries import BytesEntry, Entry, TensorEntry
from xckpt.core.text.printable import printable
from xckpt.storage.checkpoint import Checkpoint
from xckpt.storage.contents.statistics import of_block
from xckpt.storage.stored_array import StoredArray
from xckpt.viewer.model import TextShown
from xckpt.viewer.shown import Shown

MOST_ELEMENTS: Final = 1 << 22
MOST_READ: Final = 128 << 20
"""Bytes of the chunks that a plane is read from, where it has parts of more than one."""
SIDE: Final = 128
"""Cells of a heat map along each side, at most."""
BINS: Final = 48


MOST_BYTES, MOST_CHARACTERS = 16 << 20, 1 << 16
"""The most bytes of a Python value that is shown, and the most characters of it in the page."""


class PlaneValues(Shown, frozen=True):
    """The values of a plane."""

    count: int
    """Elements that were read."""
    part: str
    """Which part of the plane was read; empty if all of it was."""
    nans: int
    positive: int
    """Elements that are + infinity."""
    negative: int
    least: float | None
    """Of the finite elements, as are the largest and the mean; None if there are none."""
    largest: float | None
    mean: float | None
    down: int
    """Rows of elements that were read; 1 where no dimension goes down."""
    across: int
    rows: int
    """Rows of the heat map."""
    columns: int
    cells: list[float | None]
    """The heat map, row after row; None where an element of the cell is not finite."""
    bins: list[int]
    """The histogram of the finite elements, in equal steps from the least to the largest."""


def values_of(
    checkpoint: Checkpoint, leaf: int, down: int | None, across: int | None, at: Sequence[int]
) -> PlaneValues:
    """The values of a plane of the leaf of a number; see `plane_values`.

    Raises:
        ValueError: there is no such plane.
        CorruptCheckpointError: a chunk is not what was saved.
    """
    stored = checkpoint[_leaf(checkpoint, leaf).name]
    if not isinstance(stored, StoredArray):
        raise ValueError(f"leaf {leaf} is not a tensor")
    # Other libraries' files are read row by row, whatever they are called here.
    unit = stored.block() if checkpoint.format == "xckpt" else (1, *stored.shape[1:])
    return plane_values(stored, down, across, at, unit)


def text_of(checkpoint: Checkpoint, leaf: int) -> TextShown:
    """The Python value of a leaf that is stored as bytes, as text; of a long one the beginning.

    Raises:
        ValueError: there is no such leaf, it is a tensor, or it is longer than `MOST_BYTES`.
        CorruptCheckpointError: it is not what was saved.

    Example:
        >>> import xckpt
        >>> _ = xckpt.save("memory://text-of", {"notes": "abc" * 100_000})
        >>> shown = text_of(xckpt.open("memory://text-of"), 0)
        >>> shown.text[:6], len(shown.text), shown.characters
        ('abcabc', 65536, 300000)
    """
    entry = _leaf(checkpoint, leaf)
    if isinstance(entry, TensorEntry):
        raise ValueError(f"leaf {leaf} is a tensor")
    if isinstance(entry, BytesEntry) and entry.size > MOST_BYTES:
        raise ValueError(f"it has {entry.size:,} bytes, too many to be shown: load it")
    value = checkpoint[entry.name]
    lines = value.split("\n") if isinstance(value, str) else [repr(value)]
    text = "\n".join(map(printable, lines))
    return TextShown(text[:MOST_CHARACTERS], len(text))


def _leaf(checkpoint: Checkpoint, number: int) -> Entry:
    leaves = checkpoint.manifest.leaves
    if not 0 <= number < len(leaves):
        raise ValueError(f"there is no leaf {number}")
    return leaves[number]


def plane_values(
    stored: StoredArray,
    down: int | None,
    across: int | None,
    at: Sequence[int],
    unit: Sequence[int] | None = None,
) -> PlaneValues:
    """The values of the plane through ``at`` along one or two dimensions.

    Args:
        stored: the tensor.
        down: the dimension down, or None.
        across: the dimension across, or None of a scalar.
        at: a position in each dimension; those of ``down`` and ``across`` do not matter.
        unit: elements in each dimension that are read as one; by default a chunk's.

    Raises:
        ValueError: there is no such plane.
        CorruptCheckpointError: a chunk is not what was saved.

    Example:
        >>> import xckpt
        >>> state = {"w": np.array([[0.0, np.nan], [np.inf, 6.0]])}
        >>> _ = xckpt.save("memory://plane-values", state)
        >>> values = plane_values(xckpt.open("memory://plane-values").array("w"), 0, 1, (0, 0))
        >>> values.nans, values.positive, values.least, values.largest, values.cells
        (1, 1, 0.0, 6.0, [0.0, None, None, 6.0])
    """
    unit_bytes = stored.dtype.itemsize, stored.block() if unit is None else unit
    box, part = _box(stored.shape, down, across, at, *unit_bytes)
    elements = stored[tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))]
    if down is not None and across is not None and down > across:
        elements = np.swapaxes(elements, down, across)
    rows, columns = (1 if d is None else box.sizes[d] for d in (down, across))
    plane = _numbers(elements).reshape(rows, columns)
    found = of_block(plane.reshape(-1))
    finite = np.isfinite(plane)
    cells = heat_map(plane, finite)
    return PlaneValues(
        plane.size,
        part,
        found.nans,
        int(np.isposinf(plane).sum()),
        int(np.isneginf(plane).sum()),
        _plain(found.least),
        _plain(found.largest),
        _plain(found.mean),
        rows,
        columns,
        cells.shape[0],
        cells.shape[1],
        [None if np.isnan(cell) else float(cell) for cell in cells.reshape(-1)],
        _histogram(plane[finite]),
    )


def _box(
    shape: Sequence[int],
    down: int | None,
    across: int | None,
    at: Sequence[int],
    item_bytes: int,
    unit: Sequence[int],
) -> tuple[Box, str]:
    """The part of the plane that is read, and in words which it is if it is not all."""
    chosen = [d for d in (down, across) if d is not None]
    rank = len(shape)
    if len(at) != rank or len(set(chosen)) != len(chosen) or not all(0 <= d < rank for d in chosen):
        raise ValueError(f"a tensor of {rank} dimensions has no plane along {chosen} at {list(at)}")
    if not all(
        0 <= a < size for d, (a, size) in enumerate(zip(at, shape, strict=True)) if d not in chosen
    ):
        raise ValueError(f"{list(at)} is outside the shape {list(shape)}")
    units = max(1, MOST_READ // max(1, item_bytes * prod(unit)))
    columns, units = _side(shape, across, unit, MOST_ELEMENTS, units)
    rows, _ = _side(shape, down, unit, MOST_ELEMENTS // max(1, columns), units)
    taken = {across: columns, down: rows}
    offsets = tuple(0 if d in chosen else at[d] for d in range(rank))
    sizes = tuple(taken[d] if d in chosen else 1 for d in range(rank))
    whole = all(sizes[d] == shape[d] for d in chosen)
    return Box(offsets, sizes), "" if whole else f"the first {rows:,} rows and {columns:,} columns"


def _side(
    shape: Sequence[int], side: int | None, unit: Sequence[int], elements: int, units: int
) -> tuple[int, int]:
    """How much of a side is read, and what is left for the other side.

    Example:
        >>> _side((100, 8), 0, (10, 8), 1000, 4), _side((100, 8), None, (10, 8), 1000, 4)
        ((40, 1), (1, 4))
    """
    if side is None:
        return 1, units
    taken = min(shape[side], max(1, elements), units * max(1, unit[side]))
    return taken, max(1, units // max(1, -(-taken // max(1, unit[side]))))


def _numbers(elements: NDArray[np.generic]) -> NDArray[np.float64]:
    """Elements as float64: a complex number is its absolute value, an integer the nearest."""
    number: NDArray[Any] = elements
    with np.errstate(all="ignore"):
        if number.dtype.kind == "c":
            return np.abs(number).astype(np.float64)
        if number.dtype.name.startswith(("int", "uint")) and number.dtype.kind == "V":
            return number.astype(np.int64).astype(np.float64)
        return number.astype(np.float64)


def heat_map(plane: NDArray[np.float64], finite: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The mean of the elements of each cell, NaN where one of them is not finite.

    Example:
        >>> plane = np.array([[1.0, 3.0], [np.nan, 5.0]])
        >>> heat_map(plane, np.isfinite(plane))
        array([[ 1.,  3.],
               [nan,  5.]])
    """
    cuts = [_cuts(size) for size in plane.shape]
    if 0 in plane.shape:
        return np.zeros((0, 0))
    down, across = (np.diff(cut, append=size) for cut, size in zip(cuts, plane.shape, strict=True))
    elements = np.outer(down, across)
    with np.errstate(all="ignore"):
        sums, counts = (
            np.add.reduceat(np.add.reduceat(part, cuts[0], axis=0), cuts[1], axis=1)
            for part in (np.where(finite, plane, 0.0), finite.astype(np.int64))
        )
        means = sums / np.where(counts == elements, elements, np.nan)
    return np.where(np.isfinite(means), means, np.nan)


def _cuts(size: int) -> NDArray[np.int64]:
    """Where the cells of a side begin."""
    cells = min(size, SIDE)
    return np.arange(cells, dtype=np.int64) * size // max(1, cells)


def _histogram(numbers: NDArray[np.float64]) -> list[int]:
    if not numbers.size:
        return []
    least, largest = float(numbers.min()), float(numbers.max())
    if not np.isfinite(largest - least):
        numbers, least, largest = numbers / 4, least / 4, largest / 4
    if least == largest:
        return [int(numbers.size)]
    place = (numbers - least) / (largest - least) * BINS
    return np.bincount(np.minimum(place.astype(np.int64), BINS - 1), minlength=BINS).tolist()


def _plain(number: complex | None) -> float | None:
    """A number for JSON; complex ones do not come here."""
    return float(number.real) if number is not None else None
