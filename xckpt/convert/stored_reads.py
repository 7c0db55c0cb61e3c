"""Read items for a box of a stored tensor, cut along stored chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xckpt.convert.units.reads import SourceRead, blocks, hull, restrict_sources
from xckpt.core.geometry.box import Box, Boxes, intersect
from xckpt.core.metadata import MetadataIndex, TensorStorageMetadata
from xckpt.core.plan.items import LoadItemType, ReadItem
from xckpt.mapping.strided_copy import StridedCopy


@dataclass(slots=True)
class MappedRead:
    """A read item and the copies that take its elements to their places."""

    copies: tuple[StridedCopy, ...]
    box: Box
    """The elements of the stored tensor that are read."""
    memory: NDArray[np.generic] | None = None
    """Memory of its own, while it is read; None where it goes straight to the target."""


def stored_reads(
    leaf: str, stored: TensorStorageMetadata, index: MetadataIndex, source_read: SourceRead
) -> Iterator[tuple[ReadItem, MappedRead]]:
    """The read items of a box of a stored tensor: one for each block that its copies need.

    Args:
        leaf: the stored tensor's name.
        stored: what it is.
        index: the wanted box that the items go into.
        source_read: the box, and its copies.
    """
    arrays = stored.arrays
    wanted = Boxes.of([(source_read.box.offsets, source_read.box.sizes)])
    copies = [copy for _, copy in source_read.copies]
    for number, part in zip(*intersect(wanted, arrays)[1:], strict=True):
        origin = arrays[int(number)].offsets
        for block in blocks(stored, int(number), part):
            taken = restrict_sources(copies, block)
            if not taken:
                continue
            box = hull([copy.source_box for copy in taken])
            item = ReadItem(
                LoadItemType.TENSOR,
                index,
                (0,) * len(index.offset or ()),
                MetadataIndex(leaf, origin, int(number)),
                box.relative_to(origin).offsets,
                box.sizes,
            )
            yield item, MappedRead(taken, box)
