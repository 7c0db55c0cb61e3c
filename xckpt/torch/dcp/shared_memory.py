"""Targets of `dcp.load` that share memory: checked before this rank fills any of them.

1. Whole tensors of the planner whose ranges of addresses meet are found; mostly there are none.
2. The items of such tensors are boxes of stored tensors, each with the memory that it fills.
3. `xckpt.engine.shared_memory` compares what is stored for them.

A planner with a hook of its own for tensors may hand out one piece of memory for several items, one
after the other, so it is not asked beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType

from xckpt.core.geometry.box import Box
from xckpt.core.leaf import Extent
from xckpt.core.metadata import Metadata, TensorStorageMetadata
from xckpt.core.plan.items import ReadItem
from xckpt.core.storage import StorageReader
from xckpt.core.targets.shared_memory import overlapping
from xckpt.engine.shared_memory import Filled, check_filled
from xckpt.torch.dcp.bridge import Wanted
from xckpt.torch.leaf import fillable, format_dtype, plain
from xckpt.torch.target import extent

_HOOKS = "resolve_tensor", "lookup_tensor", "transform_tensor"


def check_shared_memory(
    planner: dcp.LoadPlanner,
    items: Sequence[ReadItem],
    wanted: Sequence[Wanted],
    metadata: Metadata,
    reader: StorageReader,
) -> None:
    """Refuse items whose targets share memory, but whose stored elements differ.

    Args:
        planner: has the targets; one with hooks of its own for tensors is not asked.
        items: what this rank reads for itself; the index of a destination is a number in
            ``wanted``.
        wanted: DCP's items.
        metadata: the checkpoint's.
        reader: reads elements where digests do not decide.

    Raises:
        UnsupportedLeafError: lists the pairs of targets, and says what to do about them.
    """
    if not isinstance(planner, dcp.DefaultLoadPlanner) or not _keeps_hooks(planner):
        return
    tensors = [each.item.dest_index for each in wanted if each.item.type is LoadItemType.TENSOR]
    groups = _overlapping(planner, list(dict.fromkeys(tensors)))
    group_of = {index: number for number, group in enumerate(groups) for index in group}
    filled: dict[int, Filled] = {}
    numbers: list[list[int]] = [[] for _ in groups]
    for number, item in enumerate(items if groups else ()):
        assert item.dest_index.index is not None
        asked = wanted[item.dest_index.index].item
        if asked.type is LoadItemType.TENSOR and asked.dest_index in group_of:
            numbers[group_of[asked.dest_index]].append(number)
            target = plain(planner.resolve_tensor(asked), asked.dest_index.fqn)
            filled[number] = _filled(asked.dest_index.fqn, item, target, metadata)
    check_filled(filled, numbers, reader, "load one of them alone (leave the other out)")


def _keeps_hooks(planner: dcp.DefaultLoadPlanner) -> bool:
    """Whether each item's target is a part of a tensor in the planner's state dict."""
    return all(
        getattr(getattr(planner, hook), "__func__", None) is getattr(dcp.DefaultLoadPlanner, hook)
        for hook in _HOOKS
    )


def _overlapping(
    planner: dcp.DefaultLoadPlanner, indices: Sequence[MetadataIndex]
) -> list[list[MetadataIndex]]:
    """The tensors whose ranges of addresses meet those of others."""
    found: list[MetadataIndex] = []
    low, high = list[int](), list[int]()
    for index in indices:
        where = _extent(planner.lookup_tensor(index))
        if where is not None and 0 not in where.shape:
            lowest, behind = where.range()
            found.append(index)
            low.append(lowest)
            high.append(behind)
    return [[found[number] for number in group] for group in overlapping(low, high)]


def _extent(tensor: torch.Tensor) -> Extent | None:
    """Where a tensor's elements are; None where they are not plain memory."""
    local = fillable(tensor)
    return None if local is None else extent(local)


def _filled(fqn: str, item: ReadItem, target: torch.Tensor, metadata: Metadata) -> Filled:
    """What an item fills: its box counts from the stored tensor's first element."""
    index = item.storage_index
    stored, where = metadata.state_dict_metadata[index.fqn], extent(target)
    assert isinstance(stored, TensorStorageMetadata) and index.offset is not None
    assert where is not None
    box = Box(item.storage_offsets, item.lengths).shifted(index.offset)
    dtype = format_dtype(target.dtype)
    return Filled(fqn, stored.size, dtype, box, where, index.fqn, stored)
