"""One leaf that a load wants: its boxes, their memory, and how much of each is still to come.

1. `local_reads` intersects the boxes wanted with the arrays stored: a read item for each meeting.
   A leaf that is read as a whole needs none (`WantedLeaf.reads`).
2. `WantedLeaf.memory` is the part of a box's buffer that an item fills.
3. `WantedLeaf.land` counts what has come, and publishes a box with its last element.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from math import prod

import msgspec
import numpy as np
from numpy.typing import NDArray

from xckpt.core.adapter import Adapters
from xckpt.core.geometry.box import Box, Boxes, Int64s, tuples
from xckpt.core.geometry.box_lookup import intersect
from xckpt.core.leaf import TargetLeaf
from xckpt.core.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from xckpt.core.plan.items import LoadItemType, ReadItem
from xckpt.core.plan.reads.items import ReadItems, Row
from xckpt.core.text.arguments import named
from xckpt.errors import LeafTooLargeError, PlanError, XckptError


@dataclass(slots=True, eq=False)
class Countdown:
    """Counts what is missing, elements or parts, from several threads; one `land` returns 0.

    Example:
        >>> missing = Countdown(5)
        >>> missing.land(3), missing.land(2)
        (2, 0)
        >>> missing.land(1)
        -1
    """

    missing: int
    """How many are still to come."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def land(self, count: int) -> int:
        """Count what has come, at least 1; return how many are still missing.

        Negative if more have come than were expected.
        """
        with self._lock:
            self.missing -= count
            return self.missing


def local_reads(name: str, wanted_boxes: Boxes, stored: TensorStorageMetadata) -> list[ReadItem]:
    """Read items for the boxes that are wanted of a stored tensor, one an intersection.

    Args:
        name: the leaf.
        wanted_boxes: (n, rank); the items' ``dest_index.index`` is a box's number.
        stored: the tensor's arrays.

    Raises:
        XckptError: a wanted box is not wholly stored (a damaged manifest).
    """
    arrays = stored.arrays
    wanted, array, shared = intersect(wanted_boxes, arrays)
    wanted_at, stored_at = wanted_boxes.offsets[wanted], arrays.offsets[array]
    items = [
        ReadItem(LoadItemType.TENSOR, dest, dest_offsets, source, source_offsets, lengths)
        for dest, dest_offsets, source, source_offsets, lengths in zip(
            _indices(name, wanted_at, wanted),
            tuples(shared.offsets - wanted_at),
            _indices(name, stored_at, array),
            tuples(shared.offsets - stored_at),
            tuples(shared.sizes),
            strict=True,
        )
    ]
    landed = np.bincount(wanted, weights=shared.elements, minlength=len(wanted_boxes))
    for i in np.flatnonzero(landed != wanted_boxes.elements).tolist():
        raise XckptError(f"{name}: {wanted_boxes[i]} is wanted, but not stored exactly once")
    return items


def _indices(name: str, offsets: Int64s, numbers: Int64s) -> Iterator[MetadataIndex]:
    """The indices of boxes of a leaf."""
    listed: list[int] = numbers.tolist()
    return map(MetadataIndex, repeat(name), tuples(offsets), listed)


class WantedLeaf(msgspec.Struct, gc=False):
    """A tensor of the target tree; boxes have the numbers that they have in the target."""

    name: str
    target: TargetLeaf
    missing: list[int] | tuple[()] | None = ()
    """For each box, how many of its elements are still to come; None for all of the one box."""

    @property
    def boxes(self) -> Boxes:
        """What the target wants."""
        return self.target.boxes

    def reads(self, stored: TensorStorageMetadata) -> Sequence[Row]:
        """The reads that fill all boxes, whose elements count as expected now; see `ReadItems`."""
        boxes = self.boxes
        if len(boxes) == 1 and all(stored.size) and boxes == stored.arrays:  # as most are
            self.missing = None
            return [stored.size]
        self.missing = boxes.elements.tolist()
        return local_reads(self.name, boxes, stored)

    def commit_empty(self) -> None:
        """Publish the boxes without elements: they get no read item."""
        for number, missing in enumerate(self.missing or ()):
            if missing == 0:
                self.target.commit(number)

    def memory(self, item: ReadItem) -> object:
        """The region of a box's buffer that an item fills.

        Raises:
            LeafTooLargeError: there is no memory for the buffer.
        """
        number = _box_of(item)
        try:
            buffer = self.target.buffer(number)
        except MemoryError as error:
            raise LeafTooLargeError(
                f"{self.name or 'the root'}: no memory for it; load it sharded, or a part of it "
                f"with xckpt.open ({error})"
            ) from error
        if getattr(buffer, "shape", None) == item.lengths:
            return buffer
        # Every framework's buffer slices like NumPy's.
        sliceable: NDArray[np.generic] = buffer  # type: ignore[assignment]
        offsets, lengths = item.dest_offsets, item.lengths
        return sliceable[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]

    def bring(self, item: ReadItem, tensor: object, adapters: Adapters) -> None:
        """Copy an item's elements to their memory, if they lie elsewhere.

        Raises:
            PlanError: they are of another shape or dtype.
        """
        region, given = self.memory(item), adapters.to_numpy(tensor, self.name)
        memory = adapters.writable_numpy(region)
        if memory is not None and np.may_share_memory(memory, given):
            return
        dtype = given.dtype if memory is None else memory.dtype
        if given.shape != item.lengths or given.dtype != dtype:
            raise PlanError(
                f"{self.name}: commit_tensor was given {given.dtype} of shape {given.shape} for "
                f"{dtype} elements of shape {item.lengths}; convert them before"
            )
        if memory is None:
            adapters.copy_into(region, given)
        else:
            memory[...] = given

    def result(self) -> object:
        """The loaded leaf.

        Raises:
            PlanError: an element of it has not landed.
        """
        if self.missing is None or any(self.missing):
            raise PlanError(f"{self.name}: commit_tensor was not called for each item read")
        return self.target.result()

    def replaced(self, by: object) -> object:
        """What a planner's hook has put in the place of the leaf.

        Raises:
            PlanError: it has another shape, or no memory.
        """
        shape, is_empty = getattr(by, "shape", None), is_meta(by)
        if shape is not None and tuple(shape) == self.target.shape and not is_empty:
            return by
        what = named(type(by).__name__) if shape is None else f"one of shape {tuple(shape)}"
        what = f"{what} on the meta device" if is_empty else what
        raise PlanError(
            f"{self.name}: a hook of the planner put {what} into state_dict in place of a tensor "
            f"of shape {self.target.shape}; put one of that shape there, with memory"
        )

    def land(self, item: ReadItem, lock: threading.Lock) -> None:
        """Count the elements that an item has brought; publish a box with the last of its own.

        Args:
            item: what has come.
            lock: held while it is counted.

        Raises:
            PlanError: the box had all its elements before.
        """
        number = _box_of(item)
        with lock:
            still = self.missing or self.boxes.elements.tolist()
            self.missing = still
            still[number] -= prod(item.lengths)
            missing = still[number]
        if missing == 0:
            self.target.commit(number)
        elif missing < 0:
            region = Box(item.dest_offsets, item.lengths)
            raise PlanError(
                f"{self.name}: {region} of box {number} was committed, which makes "
                f"{-missing} elements too many; commit each read item once"
            )


def reads_of(
    wanted: Mapping[str, WantedLeaf | None], metadata: Metadata, without: Container[str]
) -> ReadItems:
    """The read items of all leaves that the checkpoint has.

    Args:
        wanted: leaf name -> what is wanted of it; None for a value.
        metadata: the checkpoint's.
        without: names of leaves that are not read.
    """
    items = ReadItems([], [])
    for name, leaf in wanted.items():
        stored = metadata.state_dict_metadata.get(name)
        if stored is None or name in without:
            continue
        if isinstance(stored, BytesStorageMetadata):
            items.add(name, (None,))
        else:
            assert leaf is not None
            items.add(name, leaf.reads(stored))
    return items


def loaded_leaves(
    likes: Mapping[str, object],
    leaves: Mapping[str, object],
    wanted: Mapping[str, WantedLeaf | None],
    metadata: Metadata,
    *,
    counted: bool,
) -> dict[str, object]:
    """Each leaf of a target tree, by name, once all is read.

    Args:
        likes: the leaves as they were given.
        leaves: the same, but values that were read, and what a planner's hooks have put there.
        wanted: what is wanted of a leaf; None for a value.
        metadata: the checkpoint's.
        counted: whether elements were counted as they came.

    Raises:
        PlanError: something is missing of a leaf, or a hook has put there what does not fit.
    """
    loaded: dict[str, object] = {}
    for name, like in likes.items():
        leaf, found = leaves.get(name, like), wanted.get(name)
        if found is None or name not in metadata.state_dict_metadata:
            loaded[name] = leaf
        elif leaf is not like:
            loaded[name] = found.replaced(leaf)
        else:
            loaded[name] = (found if counted else found.target).result()
    return loaded


def is_meta(like: object) -> bool:
    """Whether a target is a tensor of torch without memory, as torch calls it.

    Torch says it of a ShardedTensor only where there is one local shard.
    """
    try:
        return bool(getattr(like, "is_meta", False))
    except NotImplementedError:
        return False


def _box_of(item: ReadItem) -> int:
    """The number of the box that an item fills."""
    assert item.dest_index.index is not None
    return item.dest_index.index
