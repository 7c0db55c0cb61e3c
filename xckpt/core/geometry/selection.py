"""What an index picks from an array, as boxes to read and where their elements go.

1. `expand` gives each dimension one key: an int, a slice or an array of positions.
2. `axis_of` turns a key into `AxisPicks`: runs of positions that are read at once. A slice is one
   run; scattered positions are a run for each chunk, so that nothing between is read.
3. `parts` combines the runs of all axes: each part is a box, what of it is taken, and its place.
4. `points` does the same for single elements, which are grouped by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from types import EllipsisType
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Box, Shape
from xckpt.core.text.printable import printable

Positions = NDArray[np.intp]
Picks = slice | Positions


class HasArray(Protocol):
    """An array of any framework that NumPy can take."""

    def __array__(self) -> NDArray[np.generic]:
        """Its elements in host memory."""
        ...


Key = int | slice | EllipsisType | Sequence[int] | Sequence[bool] | NDArray[np.generic] | HasArray
"""What can index one dimension, or ``...`` for several."""

_INDEX = "index with ints, slices, ... and lists or arrays of ints or bools"


@dataclass(frozen=True, slots=True)
class Run:
    """Positions of one axis that are read at once."""

    low: int
    high: int
    take: Picks
    """Which of ``[low, high)``, counted from ``low``."""
    place: Picks
    """Where in the result."""


@dataclass(frozen=True, slots=True)
class AxisPicks:
    """What is picked of one axis."""

    size: int
    """Elements of the result."""
    runs: tuple[Run, ...]
    final: int | slice
    """Applied to the result in the end: 0 drops the axis, a slice has the step."""


@dataclass(frozen=True, slots=True)
class PickedBox:
    """A box to read, which of its elements are taken, and where they go."""

    box: Box
    take: tuple[Picks, ...]
    place: tuple[Picks, ...]

    @property
    def is_whole(self) -> bool:
        """Whether all of the box goes to a box of the result."""
        return all(isinstance(picks, slice) for picks in (*self.take, *self.place))


def expand(index: Key | tuple[Key, ...], shape: Shape, name: str) -> list[int | slice | Positions]:
    """One int, slice or array of positions, counted from the front, for each dimension.

    Raises:
        IndexError: the index does not fit the shape.

    Example:
        >>> expand((..., -1), (2, 3, 4), "w")
        [slice(None, None, None), slice(None, None, None), 3]
    """
    name = printable(name)
    keys = index if isinstance(index, tuple) else (index,)
    at = next((position for position, key in enumerate(keys) if key is Ellipsis), len(keys))
    before, after = keys[:at], keys[at + 1 :]
    if any(key is Ellipsis for key in after):
        raise IndexError("an index can have one ellipsis")
    given = len(before) + len(after)
    if given > len(shape):
        raise IndexError(f"{name}: too many indices: {given} for {len(shape)} dimensions")
    full = (*before, *[slice(None)] * (len(shape) - given), *after)
    return [_checked(key, d, shape[d], name) for d, key in enumerate(full)]


def mask_of(index: object, name: str) -> NDArray[np.generic] | None:
    """An index that is one mask, as an array; None for any other.

    Raises:
        IndexError: lists of different lengths.

    Example:
        >>> mask_of([[True], [False]], "w").shape, mask_of([1, 0], "w")
        ((2, 1), None)
    """
    keys = cast("tuple[object, ...]", index) if isinstance(index, tuple) else (index,)
    array = _as_array(keys[0], name) if len(keys) == 1 else None
    return array if array is not None and array.ndim and array.dtype == np.bool_ else None


def _as_array(key: object, name: str) -> NDArray[Any] | None:
    """An array of any framework, or what lists make one; None for any other key."""
    if not (isinstance(key, list | tuple) or hasattr(key, "__array__")):
        return None
    try:
        return np.asarray(key)
    except ValueError as error:
        raise IndexError(f"{printable(name)}: {_INDEX}, not lists of different lengths") from error


def _checked(key: Key, d: int, size: int, name: str) -> int | slice | Positions:
    """The key for dimension ``d``.

    Raises:
        IndexError: it is not an index, or it is outside the dimension.
    """
    if isinstance(key, slice):
        return key
    where = f"outside dimension {d} with size {size}"
    array = _as_array(key, name)
    if array is not None and array.ndim == 0 and array.dtype.kind in "iu":
        key = int(array)
    if isinstance(key, int) and not isinstance(key, bool):
        if not -size <= key < size:
            raise IndexError(f"{name}: index {key} is {where}")
        return key % size
    if array is None or array.dtype.kind not in ("biu" if array.size else "biuf"):
        raise IndexError(f"{name}: {_INDEX}, not {type(key).__name__}")
    if array.dtype.kind == "b":
        if array.shape != (size,):
            raise IndexError(
                f"{name}: dimension {d} has size {size}, but its mask has shape {array.shape}"
            )
        return np.flatnonzero(array)
    outside = (array < -size) | (array >= size)
    if outside.any():
        raise IndexError(f"{name}: index {array[outside][0]} is {where}")
    positions = array.astype(np.intp)
    return positions + size * (positions < 0)


def axis_of(key: int | slice | Positions, size: int, chunk: int) -> AxisPicks:
    """What a key picks of an axis of ``size`` in chunks of ``chunk``.

    Raises:
        IndexError: the positions have more than one dimension.

    Example:
        >>> axis_of(slice(None, None, -1), 5, 2).runs
        (Run(low=0, high=5, take=slice(None, None, None), place=slice(None, None, None)),)
        >>> [(run.low, run.high) for run in axis_of(np.array([7, 0, 1]), 9, 4).runs]
        [(0, 2), (7, 8)]
    """
    if isinstance(key, int):
        return AxisPicks(1, (Run(key, key + 1, slice(None), slice(None)),), 0)
    if isinstance(key, slice):
        picked = range(*key.indices(size))
        if abs(picked.step) < max(2, chunk):
            low, high = (
                (min(picked[0], picked[-1]), max(picked[0], picked[-1]) + 1) if picked else (0, 0)
            )
            run = Run(low, high, slice(None), slice(None))
            return AxisPicks(high - low, (run,), slice(None, None, picked.step))
        key = np.arange(picked.start, picked.stop, picked.step, dtype=np.intp)
    if key.ndim != 1:
        raise IndexError(f"the index of a dimension has {key.ndim} dimensions, not 1; use vindex")
    order = np.argsort(key, kind="stable")
    cuts = np.flatnonzero(np.diff(key[order] // chunk)) + 1
    groups = np.split(order, cuts) if len(key) else []
    return AxisPicks(len(key), tuple(_run(key, group) for group in groups), slice(None))


def _run(positions: Positions, group: Positions) -> Run:
    picked = positions[group]
    low, high = int(picked[0]), int(picked[-1]) + 1
    return Run(low, high, picked - low, group)


def parts(axes: Sequence[AxisPicks]) -> Iterator[PickedBox]:
    """The boxes to read for all axes together."""
    for runs in product(*(axis.runs for axis in axes)):
        box = Box(tuple(run.low for run in runs), tuple(run.high - run.low for run in runs))
        take, place = tuple(run.take for run in runs), tuple(run.place for run in runs)
        yield PickedBox(box, take, place)


def points(
    positions: Sequence[Positions], chunk: Shape
) -> Iterator[tuple[Box, Positions, tuple[Positions, ...]]]:
    """Single elements by chunk: a box that holds some, their numbers, their places in the box.

    Args:
        positions: for each dimension those of all elements, flat and equally many.
        chunk: the chunk shape.
    """
    cells = np.stack([axis // size for axis, size in zip(positions, chunk, strict=True)])
    _, group = np.unique(cells, axis=1, return_inverse=True)
    order = np.argsort(group.ravel(), kind="stable")
    cuts = np.flatnonzero(np.diff(group.ravel()[order])) + 1
    for numbers in np.split(order, cuts) if len(order) else []:
        chosen = [axis[numbers] for axis in positions]
        lows = tuple(int(axis.min()) for axis in chosen)
        sizes = tuple(int(axis.max()) + 1 - low for axis, low in zip(chosen, lows, strict=True))
        within = tuple(axis - low for axis, low in zip(chosen, lows, strict=True))
        yield Box(lows, sizes), numbers, within
