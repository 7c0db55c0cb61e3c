"""What a picture of a tensor shows, as rectangles: shards, chunks, zarr shards, arrays.

1. A plane lies along one or two dimensions, and cuts the others open at a position
   (`PicturePlane`).
2. `picture_of` takes the shards from the sharding that wrote the tensor, and the rest from the
   zarr arrays that hold it; only rectangles in the plane are kept.

SVG and PNG files and the terminal draw the same picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Final

from xckpt.core.geometry.box import Box
from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.geometry.shard_cuts import device_boxes, dimension_cuts
from xckpt.core.manifest.entries import Manifest, TensorEntry, leaf_arrays
from xckpt.core.near_names import no_such_name

MOST_CELLS: Final = 20_000
"""Chunks of a picture."""
COLOURS: Final = (
    *("#f7c56b", "#a9d8f5", "#7fd6b8", "#f6ee8f", "#8fbfe3", "#f0a878"),
    *("#e8b5d0", "#cfd3d8"),
)
"""Colours of devices, in turn; distinguishable with any colour vision."""

Place = tuple[int, int, int, int]
"""First column, first row, columns, rows: in elements."""


@dataclass(frozen=True, slots=True)
class PicturePlane:
    """A plane of a tensor."""

    down: int | None
    """The dimension down, None where the plane is one row."""
    across: int | None
    at: tuple[int, ...]
    """A position in each dimension; those of ``down`` and ``across`` do not matter."""

    @classmethod
    def of(
        cls,
        leaf: TensorEntry,
        down: int | None = None,
        across: int | None = None,
        at: Sequence[int] | None = None,
    ) -> PicturePlane:
        """A plane of a tensor; what is not given is chosen.

        Args:
            leaf: the tensor.
            down: the dimension down; by default, with ``across``, the slowest two that are cut.
            across: the dimension across.
            at: a position in each dimension; by default the first.

        Raises:
            ValueError: there is no such plane, or the tensor has no elements.

        Example:
            >>> PicturePlane.of(TensorEntry("w", "int8", (4, 6, 8), (2, 6, 4)))
            PicturePlane(down=0, across=2, at=(0, 0, 0))
        """
        rank = len(leaf.shape)
        position = tuple(at) if at is not None else (0,) * rank
        chosen = [d for d in (down, across) if d is not None]
        inside = len(position) == rank and all(
            d in chosen or 0 <= place < size
            for d, (place, size) in enumerate(zip(position, leaf.shape, strict=False))
        )
        if 0 in leaf.shape:
            raise ValueError(f"{leaf.name}: it has no elements to draw")
        if len(set(chosen)) != len(chosen) or not all(0 <= d < rank for d in chosen) or not inside:
            raise ValueError(
                f"{leaf.name}: of shape {list(leaf.shape)} it has no plane along {chosen}"
                f" at {list(position)}"
            )
        others = [d for d in _ranked(leaf) if d not in chosen][: min(2, rank) - len(chosen)]
        if not chosen:
            down, across = [None, None, *sorted(others)][-2:]
        elif others and across is None:
            [across] = others
        elif others and down is None:
            [down] = others
        elif across is None:
            down, across = None, down
        return cls(down, across, position)

    def place(self, box: Box) -> Place | None:
        """Where a box lies in the plane; None if it does not."""
        for d, (low, end) in enumerate(zip(box.offsets, box.ends, strict=True)):
            if d not in (self.down, self.across) and not low <= self.at[d] < end:
                return None
        x, width = _along(box, self.across)
        y, height = _along(box, self.down)
        return x, y, width, height


@dataclass(frozen=True, slots=True)
class PictureShard:
    """A shard in a plane."""

    place: Place
    devices: tuple[int, ...]
    """The devices that hold it; several for a replica."""

    @property
    def label(self) -> str:
        """The device's number; of replicas how many more there are.

        Example:
            >>> PictureShard((0, 0, 1, 1), (4, 5, 6)).label
            '4 +2'
        """
        first, *more = self.devices
        return f"{first} +{len(more)}" if more else f"{first}"


@dataclass(frozen=True, slots=True)
class Picture:
    """The drawn part of a tensor; sizes in elements."""

    name: str
    rows: int
    columns: int
    shards: tuple[PictureShard, ...]
    """Empty where the sharding is not known."""
    chunks: tuple[Place, ...]
    units: tuple[Place, ...]
    """Zarr shards, where several chunks are one object."""
    arrays: tuple[Place, ...]


def shards_of(leaf: TensorEntry, plane: PicturePlane) -> Picture:
    """The shards in a plane, without its chunks, which may be too many to draw."""
    return Picture(leaf.name, *_sizes(leaf, plane), tuple(_shards(leaf, plane)), (), (), ())


def picture_of(leaf: TensorEntry, plane: PicturePlane) -> Picture:
    """The rectangles of a plane of a tensor.

    Raises:
        ValueError: more than `MOST_CELLS` chunks lie in the plane.

    Example:
        >>> entry = TensorEntry("w", "int8", (4, 6), (2, 6))
        >>> picture_of(entry, PicturePlane.of(entry)).chunks
        ((0, 0, 6, 2), (0, 2, 6, 2))
    """
    stored = [array for array in leaf_arrays(leaf) if plane.place(array.box)]
    units = [(array, array.shard) for array in stored if array.shard is not None]
    return Picture(
        leaf.name,
        *_sizes(leaf, plane),
        tuple(_shards(leaf, plane)),
        tuple(_cells(leaf.name, plane, [(array, array.chunk) for array in stored])),
        tuple(_cells(leaf.name, plane, units)),
        tuple(_placed(plane, [array.box for array in stored])),
    )


def _sizes(leaf: TensorEntry, plane: PicturePlane) -> tuple[int, int]:
    """Rows and columns of a plane."""
    rows, columns = (1 if d is None else leaf.shape[d] for d in (plane.down, plane.across))
    return rows, columns


def _ranked(leaf: TensorEntry) -> list[int]:
    """The dimensions, those first that a picture should show: cut ones, then long ones."""
    cuts = dimension_cuts(leaf.sharding, leaf.shape)
    stored = list(leaf_arrays(leaf))

    def is_cut(d: int) -> bool:
        in_chunks = any(min(a.shape[d], a.chunk[d]) < leaf.shape[d] for a in stored)
        return in_chunks or (cuts is not None and len(cuts[d].intervals) > 1)

    return sorted(range(len(leaf.shape)), key=lambda d: (not is_cut(d), leaf.shape[d] == 1))


def _along(box: Box, d: int | None) -> tuple[int, int]:
    return (0, 1) if d is None else (box.offsets[d], box.sizes[d])


def _placed(plane: PicturePlane, boxes: Sequence[Box]) -> Iterator[Place]:
    for box in boxes:
        place = plane.place(box)
        if place is not None:
            yield place


def _shards(leaf: TensorEntry, plane: PicturePlane) -> Iterator[PictureShard]:
    """The distinct shards in the plane."""
    cuts = dimension_cuts(leaf.sharding, leaf.shape)
    if cuts is None or leaf.sharding is None:
        return
    holders: dict[Place, list[int]] = {}
    for device, boxes in enumerate(device_boxes(cuts, [size for _, size in leaf.sharding.axes])):
        for place in _placed(plane, list(boxes)):
            holders.setdefault(place, []).append(device)
    for place, devices in holders.items():
        yield PictureShard(place, tuple(devices))


def _cells(
    name: str, plane: PicturePlane, arrays: Sequence[tuple[ZarrArray, Sequence[int]]]
) -> Iterator[Place]:
    """The chunks, or zarr shards, of arrays that lie in a plane; an edge ends with its array."""
    shown = (plane.down, plane.across)
    steps = [
        [
            range(0, size, step) if d in shown else [(plane.at[d] - low) // step * step]
            for d, (low, size, step) in enumerate(zip(array.offset, array.shape, cell, strict=True))
        ]
        for array, cell in arrays
    ]
    count = sum(prod(map(len, each)) for each in steps)
    if count > MOST_CELLS:
        raise ValueError(f"{name}: {count:,} chunks lie in the plane, too many")
    for (array, cell), each in zip(arrays, steps, strict=True):
        for offsets in product(*each):
            part = Box(offsets, tuple(cell)).meets(Box.whole(array.shape))
            if part is not None:
                yield from _placed(plane, [part.shifted(array.offset)])


def leaf_picture(
    manifest: Manifest,
    name: str,
    down: int | None,
    across: int | None,
    at: Sequence[int] | None,
) -> Picture:
    """The picture of a tensor of a checkpoint in a plane; see `PicturePlane.of`.

    Raises:
        ValueError: there is no such tensor, or no such plane of it.
    """
    for entry in manifest.leaves:
        if entry.name == name and isinstance(entry, TensorEntry):
            return picture_of(entry, PicturePlane.of(entry, down, across, at))
    tensors = [entry.name for entry in manifest.leaves if isinstance(entry, TensorEntry)]
    raise ValueError(no_such_name(name, tensors, "the checkpoint", what="tensor"))
