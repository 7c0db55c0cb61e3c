"""The reads of a load by a mapping: the part of a stored tensor that each takes, and the box that
it fills.

1. `stored_reads` cuts a box of a stored tensor along stored chunks, into `blocks` of whole chunks
   where the box contains them entirely, and restricts its copies to each block.
2. A `MappedRead` goes straight into the target where both have one order, else into memory of its
   own. When it has landed, its copies take its elements to their places.
3. A `TargetBox` is filled by the copies of several reads. Its memory is the target's own, or a copy
   of that where the host cannot reach it. Every copy is counted. With the last element the copy
   goes to the target's memory, and the default planner publishes the box.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xckpt.convert.units.make import direct_view
from xckpt.convert.units.unit import SourceRead, hull
from xckpt.core.dtypes import item_size, numpy_dtype
from xckpt.core.geometry.box import Box, Boxes
from xckpt.core.geometry.box_lookup import intersect
from xckpt.core.geometry.slabs import blocks
from xckpt.core.metadata import MetadataIndex, TensorStorageMetadata
from xckpt.core.plan.items import LoadItemType, ReadItem
from xckpt.core.plan.load import DefaultLoadPlanner
from xckpt.mapping.copy_elements import copy_elements
from xckpt.mapping.strided_copy import StridedCopy, restrict
from xckpt.storage.chunks.chunk import allocate
from xckpt.storage.chunks.read_chunks import Destination

Array = NDArray[np.generic]

BLOCK_BYTES = 1 << 23
"""Bytes read at a time of a stored tensor that has no chunks, or small ones."""


class TargetBox(Destination):
    """A box of a target, while it is filled by the copies of several reads.

    Args:
        planner: resolves the target's memory and publishes the box when it is full.
        item: how that planner would read the box: all elements at once.
        dtype: the element type that is written.
    """

    def __init__(self, planner: DefaultLoadPlanner, item: ReadItem, dtype: str) -> None:
        super().__init__(planner, item, numpy_dtype(dtype), prod(item.lengths))
        assert item.dest_index.offset is not None
        self.origin: Final = item.dest_index.offset
        """The box's first element in the target."""

    def fill(
        self,
        copies: Sequence[StridedCopy],
        source: Array | None = None,
        source_origin: tuple[int, ...] | None = None,
    ) -> None:
        """Carry out copies into the box.

        Args:
            copies: their offsets are relative to the whole tensors.
            source: what they read, a box from ``source_origin`` on; None for constants.
            source_origin: its first element in the stored tensor.
        """
        target = self.memory()
        for copy in copies:
            copy_elements(
                copy, source, target, source_origin=source_origin, target_origin=self.origin
            )
        self.count(copies)

    def count(self, copies: Sequence[StridedCopy]) -> None:
        """Count what copies wrote into the box; a full one is published."""
        self.landed(sum(copy.elements for copy in copies))


@dataclass(slots=True)
class MappedRead:
    """A read item and the copies that take its elements to their places."""

    target: TargetBox
    copies: tuple[StridedCopy, ...]
    box: Box
    """The elements of the stored tensor that are read."""
    memory: Array | None = None
    """Memory of its own, while it is read; None where it goes straight to the target."""

    def resolve(self, leaf: str, dtype: np.dtype[np.generic]) -> Array:
        """Where the elements go: their place in the target, or memory of the read's own.

        Args:
            leaf: the stored tensor's name.
            dtype: its element type.

        Raises:
            LeafTooLargeError: there is no memory for the target.
        """
        if len(self.copies) == 1:
            place = direct_view(self.copies[0], self.box, self.target.memory(), self.target.origin)
            if place is not None and place.dtype == dtype and _in_order(place):
                return place
        self.memory = allocate(self.box.sizes, dtype, leaf)
        return self.memory

    def commit(self) -> None:
        """Copy the elements to their places, unless they are there; publish a full target box."""
        if self.memory is None:
            self.target.count(self.copies)
        else:
            self.target.fill(self.copies, self.memory, self.box.offsets)
            self.memory = None


def _in_order(place: Array) -> bool:
    """Whether NumPy copies into an array in the order of its memory, in whole rows."""
    steps = [abs(step) for size, step in zip(place.shape, place.strides, strict=True) if size > 1]
    return steps == sorted(steps, reverse=True) and (not steps or steps[-1] == place.itemsize)


def stored_reads(
    leaf: str, stored: TensorStorageMetadata, target: TargetBox, source_read: SourceRead
) -> Iterator[tuple[ReadItem, MappedRead]]:
    """The read items of a box of a stored tensor: one for each block that its copies need.

    Args:
        leaf: the stored tensor's name.
        stored: what it is.
        target: the box that the items go into.
        source_read: the box that is read, and its copies.
    """
    arrays = stored.arrays
    wanted = Boxes.of([(source_read.box.offsets, source_read.box.sizes)])
    copies = [copy for _, copy in source_read.copies]
    most = BLOCK_BYTES // item_size(stored.properties.dtype)
    _, numbers, parts = intersect(wanted, arrays)
    for number, part in zip(numbers.tolist(), parts, strict=True):
        origin = arrays[number].offsets
        chunk = [1] * len(origin) if stored.grid is None else stored.grid.chunks[number].tolist()
        for block in blocks(part.relative_to(origin), chunk, most):
            taken = restrict_sources(copies, block.shifted(origin))
            if not taken:
                continue
            box = hull([copy.source_box for copy in taken])
            item = ReadItem(
                LoadItemType.TENSOR,
                target.item.dest_index,
                (0,) * len(target.origin),
                MetadataIndex(leaf, origin, number),
                box.relative_to(origin).offsets,
                box.sizes,
            )
            yield item, MappedRead(target, taken, box)


def restrict_sources(copies: Sequence[StridedCopy], box: Box) -> tuple[StridedCopy, ...]:
    """The copies restricted to the elements in a box of the source.

    Example:
        >>> copy = StridedCopy("w", "v", (4,), (2,), ((1,),), (0,), ((1,),))
        >>> [part] = restrict_sources([copy], Box((3,), (2,)))
        >>> part.source_box, part.target_box
        (Box(offsets=(3,), sizes=(2,)), Box(offsets=(1,), sizes=(2,)))
    """
    return tuple(part.turned() for part in restrict([copy.turned() for copy in copies], box))
