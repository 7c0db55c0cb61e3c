"""The read items of one leaf: what a target wants, intersected with the arrays that are stored."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from xckpt.core.geometry.box import Box, Boxes, intersect
from xckpt.core.metadata import MetadataIndex, TensorStorageMetadata
from xckpt.core.plan.items import LoadItemType, ReadItem
from xckpt.core.plan.load_checks import stored_boxes
from xckpt.errors import XckptError


def local_reads(name: str, wanted_boxes: Boxes, stored: TensorStorageMetadata) -> list[ReadItem]:
    """Read items for the boxes that are wanted of a stored tensor, one an intersection.

    Args:
        name: the leaf.
        wanted_boxes: (n, rank); the items' ``dest_index.index`` is a box's number.
        stored: the tensor's arrays.

    Raises:
        XckptError: a wanted box is not wholly stored (a damaged manifest).
    """
    boxes = stored_boxes(stored)
    if len(wanted_boxes) == len(boxes) == 1 and wanted_boxes == boxes:
        # Most leaves of most loads: the whole of what is one array.
        box = boxes[0]
        if 0 in box.sizes:
            return []
        index, origin = MetadataIndex(name, box.offsets, 0), (0,) * len(box.sizes)
        return [ReadItem(LoadItemType.TENSOR, index, origin, index, origin, box.sizes)]
    wanted, array, shared = intersect(wanted_boxes, boxes)
    items: list[ReadItem] = []
    pairs: Iterable[tuple[int, int, Box]]
    pairs = zip(wanted.tolist(), array.tolist(), shared, strict=True)
    for i, j, box in pairs:
        wanted_at, stored_at = wanted_boxes[i].offsets, boxes[j].offsets
        items.append(
            ReadItem(
                LoadItemType.TENSOR,
                MetadataIndex(name, wanted_at, i),
                box.relative_to(wanted_at).offsets,
                MetadataIndex(name, stored_at, j),
                box.relative_to(stored_at).offsets,
                box.sizes,
            )
        )
    landed = np.bincount(wanted, weights=shared.elements, minlength=len(wanted_boxes))
    for i in np.flatnonzero(landed != wanted_boxes.elements).tolist():
        raise XckptError(f"{name}: {wanted_boxes[i]} is wanted, but not stored exactly once")
    return items
