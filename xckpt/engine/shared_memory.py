"""Targets of a load in place that share memory: checked before anything is written.

Tied weights are one tensor under two names, and views may overlap. Threads fill all targets at
once, so what is stored for two of them must be equal wherever they share memory.

1. `xckpt.core.targets.shared_memory` finds the pairs of boxes that share memory; mostly none.
2. Where both boxes are the same memory, equal digests tell that what is stored is equal.
3. Else both are read and compared: part by part where the boxes are the same memory, otherwise byte
   by byte, as memory would hold them. Only such pairs are read.

`check_memory` takes the targets from a planner of xckpt; `check_filled` takes boxes from elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size, numpy_dtype
from xckpt.core.geometry.box import Box
from xckpt.core.geometry.slabs import blocks
from xckpt.core.leaf import Extent, TargetLeaf
from xckpt.core.metadata import Metadata, TensorStorageMetadata
from xckpt.core.plan.items import LoadPlan
from xckpt.core.plan.load import LoadPlanner
from xckpt.core.storage import PartReader, StorageReader
from xckpt.core.targets.shared_memory import agree, overlapping, overlapping_pairs
from xckpt.errors import UnsupportedLeafError

_PART_BYTES = 1 << 25
"""What is read at a time of each of two boxes that are compared."""


@dataclass(frozen=True, slots=True)
class Filled:
    """A box of a leaf, the memory that it fills, and what is stored for it."""

    leaf: str
    shape: Sequence[int]
    """The whole leaf's."""
    dtype: str | None
    """Its elements' in memory, by the format's name."""
    box: Box
    extent: Extent
    name: str
    """The leaf's in the checkpoint."""
    stored: object

    def __str__(self) -> str:
        is_whole = self.box.sizes == tuple(self.shape)
        return (self.leaf or "the root") + ("" if is_whole else f" {self.box}")


def check_memory(
    planner: LoadPlanner,
    plan: LoadPlan,
    metadata: Metadata,
    reader: StorageReader | PartReader,
    *,
    else_: str = "load one of them alone (select= or at=)",
) -> None:
    """Refuse a load in place whose targets share memory, but whose stored elements differ.

    Args:
        planner: has the targets.
        plan: what this rank reads; a leaf that it does not read fills nothing.
        metadata: the checkpoint's.
        reader: reads elements where digests do not decide.
        else_: what to do where the targets cannot be untied.

    Raises:
        UnsupportedLeafError: lists the pairs of targets, and says what to do about them.
    """
    targets = planner.targets
    leaves, indices, groups = _overlapping(targets)
    if not groups:
        return
    names = {item.dest_index.fqn: item.storage_index.fqn for item in plan.items}
    filled: dict[int, Filled] = {}
    for number in itertools.chain(*groups):
        leaf, index = leaves[number], indices[number]
        target, name, extent = targets[leaf], names.get(leaf), _extent(targets[leaf], index)
        if target is not None and name is not None and extent is not None:
            stored, box = metadata.state_dict_metadata[name], target.boxes[index]
            held = leaf, target.shape, target.dtype, box, extent
            filled[number] = Filled(*held, name, stored)
    check_filled(filled, groups, reader, else_)


def check_filled(
    filled: Mapping[int, Filled],
    groups: Iterable[Sequence[int]],
    reader: StorageReader | PartReader,
    else_: str,
) -> None:
    """Refuse boxes that share memory, but whose stored elements differ.

    Args:
        filled: the boxes, by number.
        groups: numbers of boxes that may share memory with each other; those that are not in
            ``filled`` are left out.
        reader: reads elements where digests do not decide.
        else_: what to do where the targets cannot be untied.

    Raises:
        UnsupportedLeafError: lists the pairs of boxes, and says what to do about them.
    """
    problems = [
        f"{filled[one]} and {filled[other]} share memory, but the checkpoint holds different "
        f"elements for them: untie them first (load into a copy of one), or {else_}"
        for group in groups
        for one, other in overlapping_pairs({n: filled[n].extent for n in group if n in filled})
        if not _are_equal(filled[one], filled[other], reader)
    ]
    if problems:
        raise UnsupportedLeafError.leaves("cannot be loaded into", problems)


def _overlapping(
    targets: Mapping[str, TargetLeaf | None],
) -> tuple[list[str], list[int], list[list[int]]]:
    """Leaf and number of each box that fills the caller's memory, and those that may share it.

    There may be very many: columns of numbers cost the garbage collector nothing.
    """
    leaves: list[str] = []
    indices, low, high = list[int](), list[int](), list[int]()
    for name, target in targets.items():
        where: Callable[[int], Extent | None] | None = getattr(target, "extent", None)
        if target is None or where is None:
            continue
        for index in range(len(target.boxes)):
            extent = where(index)
            if extent is None:  # such as of JAX's targets, which are new arrays
                break
            lowest, behind = extent.range()
            if 0 not in extent.shape:
                leaves.append(name)
                indices.append(index)
                low.append(lowest)
                high.append(behind)
    return leaves, indices, overlapping(low, high)


def _extent(target: TargetLeaf | None, index: int) -> Extent | None:
    where: Callable[[int], Extent | None] | None = getattr(target, "extent", None)
    return None if where is None else where(index)


def _are_equal(one: Filled, other: Filled, reader: StorageReader | PartReader) -> bool:
    """Whether what is stored for two boxes is equal wherever they share memory."""
    ours, theirs = one.stored, other.stored
    if not isinstance(reader, PartReader):
        return False
    if not (isinstance(ours, TensorStorageMetadata) and isinstance(theirs, TensorStorageMetadata)):
        return False
    same_types = one.dtype == other.dtype and ours.dtype == theirs.dtype
    if one.extent == other.extent and same_types:
        same_box = one.box == other.box
        if same_box and (one.name == other.name or reader.same_digests(one.name, other.name)):
            return True
        most = _PART_BYTES // item_size(ours.dtype)
        return all(
            np.array_equal(_bits(_read(one, part, reader)), _bits(_read(other, part, reader)))
            for part in blocks(Box.whole(one.box.sizes), (1,) * len(one.box.sizes), most)
        )
    if (ours.dtype, theirs.dtype) != (one.dtype, other.dtype):
        return False  # the result of a cast is not known beforehand
    whole = (_in_memory(each, reader) for each in (one, other))
    return agree(one.extent, next(whole), other.extent, next(whole))


def _in_memory(filled: Filled, reader: PartReader) -> NDArray[np.generic]:
    """What is stored for a box, as memory would hold it."""
    elements = _read(filled, Box.whole(filled.box.sizes), reader)
    if filled.extent.conjugated:
        elements = np.conjugate(elements)
    return np.negative(elements) if filled.extent.negated else elements


def _read(filled: Filled, part: Box, reader: PartReader) -> NDArray[np.generic]:
    """What is stored for a part of a box, counted from the box's first element."""
    assert isinstance(filled.stored, TensorStorageMetadata)
    elements = np.empty(part.sizes, numpy_dtype(filled.stored.dtype))
    reader.read_part(filled.name, part.shifted(filled.box.offsets), elements)
    return elements


def _bits(elements: NDArray[np.generic]) -> NDArray[np.uint8]:
    """The bytes: -0.0 is not 0.0, and a NaN is the same NaN."""
    return elements.reshape(-1).view(np.uint8)
