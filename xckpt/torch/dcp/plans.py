"""DCP's plans and metadata <-> xckpt's.

To save, on the coordinator (`described`), from the plans of all ranks:

1. DCP's planners have chosen one rank for each box, so a box that several write is refused.
2. The leaves are named, and the rest is the global step of any save (`xckpt.core.plan.merge`): a
   planner that drops or misplaces an item, or ranks that disagree, are refused there.

With ``DefaultSavePlanner(enable_plan_caching=True)`` each plan that has not changed is replaced by
an empty one that is not ``usable``. The plans left out are in DCP's cache itself, which has no
public names and is touched here only. `whole_plans` decides:

1. All plans are usable: nothing was left out.
2. Some are: a leaf's grid depends on all ranks' boxes, so all ranks get their plans again.
3. None is: every rank has its plan, with orders that still hold, and there is nothing to send;
   unless the save that made these plans failed before it could send them. The coordinator sees that
   by its own local plan, which is usable then, or has noted it (`note_unsent`).

If plans are wrongly taken for delivered, the commit finds that they do not fit the metadata.

To load (`torch_metadata`): a stored tensor's chunks are its zarr arrays, so a planner asks for one
part of an array at a time, whatever chunks that part touches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import prod

import numpy as np
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.planner import WriteItemType as TorchItemType

from xckpt.core.geometry.box import Block, Box, Boxes, Shape
from xckpt.core.geometry.grid import GridOptions
from xckpt.core.manifest.rules import MAX_RANK
from xckpt.core.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from xckpt.core.plan.items import (
    LeafRow,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItems,
    WriteItemType,
)
from xckpt.core.plan.merge import global_plan
from xckpt.errors import PlanError, UnsupportedLeafError
from xckpt.formats.dcp.keys import LeafNames, StoredObject, key_paths, name_leaves
from xckpt.torch.leaf import advice_on, format_dtype, torch_dtype

_Box = tuple[Shape, Shape]
"""Offsets and sizes."""

_Kind = tuple[torch.dtype | None, Shape]
"""A leaf's dtype, None for bytes, and its shape."""


def check_items(items: Iterable[dcp.WriteItem]) -> None:
    """Refuse what cannot be stored, before anything is planned.

    Raises:
        UnsupportedLeafError: tensors of a dtype or layout that the format lacks; all are listed.
    """
    problems: dict[str, str] = {}
    for item in items:
        if item.tensor_data is None:
            continue
        properties = item.tensor_data.properties
        if properties.layout is not torch.strided:
            problems[item.index.fqn] = (
                f"{item.index.fqn}: a tensor with the layout {properties.layout}; store its "
                f"indices and values, or to_dense(), instead"
            )
        elif format_dtype(properties.dtype) is None:
            problems[item.index.fqn] = (
                f"{item.index.fqn}: dtype {properties.dtype} cannot be stored; "
                f"{advice_on(properties.dtype)}"
            )
        elif len(item.tensor_data.size) > MAX_RANK:
            problems[item.index.fqn] = (
                f"{item.index.fqn}: {len(item.tensor_data.size)} dimensions, and a checkpoint "
                f"holds at most {MAX_RANK}: reshape it first"
            )
    if problems:
        raise UnsupportedLeafError.leaves("cannot be saved", problems.values())


def write_item(item: dcp.WriteItem, name: str) -> WriteItem:
    """The same item, for the leaf ``name``."""
    data = item.tensor_data
    if data is None:
        return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO, kind="opaque")
    offsets = tuple(data.chunk.offsets)
    kind = WriteItemType.SHARD if item.type is TorchItemType.SHARD else WriteItemType.TENSOR
    chunk = Box(offsets, tuple(data.chunk.sizes))
    properties = TensorProperties(format_dtype(data.properties.dtype) or "")
    return WriteItem(
        MetadataIndex(name, offsets),
        kind,
        TensorWriteData(chunk, properties, tuple(data.size)),
    )


def described(
    plans: Sequence[dcp.SavePlan], options: GridOptions
) -> tuple[list[SavePlan], Metadata, LeafNames]:
    """Each rank's share, what the checkpoint will say about itself, and how the leaves are named.

    Args:
        plans: one plan a rank, as the planner's global step has left them.
        options: target sizes of chunks.

    Raises:
        PlanError: the items do not write every element exactly once, or ranks disagree on what a
            leaf is; all such leaves are listed.
    """
    boxes = [[_box_of(item) for item in plan.items] for plan in plans]
    _check_single_writers(plans, boxes)
    mappings = [key_paths(plan.planner_data) for plan in plans]
    planned = dict.fromkeys(item.index.fqn for plan in plans for item in plan.items)
    # In the order of the state, which the items have lost where replicas were given away.
    ordered = dict.fromkeys(fqn for mapping in mappings for fqn in mapping if fqn in planned)
    leaves = name_leaves([*ordered, *planned], mappings)
    row = cache(_row)  # ranks share the rows in which they agree
    columns = [
        SavePlan(_columns(plan, held, leaves.names, row))
        for plan, held in zip(plans, boxes, strict=True)
    ]
    shares, merged = global_plan(columns, options)
    stored = {name: merged.state_dict_metadata[name] for name in leaves.names.values()}
    return shares, Metadata(stored, leaves.containers), leaves


def _check_single_writers(plans: Sequence[dcp.SavePlan], boxes: Sequence[Sequence[_Box]]) -> None:
    """Refuse items that several ranks are to write: the planner has chosen, so none may be shared.

    Raises:
        PlanError: lists all of them.
    """
    writers: dict[tuple[str, tuple[Shape, Shape]], int] = {}
    problems: list[str] = []
    for rank, plan in enumerate(plans):
        for item, box in zip(plan.items, boxes[rank], strict=True):
            fqn = item.index.fqn
            if (fqn, box) not in writers:
                writers[fqn, box] = rank
            elif prod(box[1]):
                what = f"{Box(*box)} is " if item.tensor_data is not None else ""
                ranks = [writers[fqn, box], rank]
                problems.append(f"{fqn}: {what}to be written by ranks {ranks}, not by one")
    if problems:
        raise PlanError.listing("the planner's items do not make up whole tensors", problems)


def _columns(
    plan: dcp.SavePlan,
    held: Sequence[_Box],
    names: Mapping[str, str],
    row: Callable[[str, _Kind], LeafRow],
) -> WriteItems:
    """A rank's items as columns; there may be too many to make a `WriteItem` of each.

    Args:
        plan: the items.
        held: the box of each item.
        names: fqn -> leaf name.
        row: makes the row of a leaf.

    Raises:
        PlanError: two items of a leaf disagree on what it is.
    """
    kinds: dict[str, _Kind] = {}
    numbers: dict[str, int] = {}
    columns: dict[int, tuple[list[int], list[_Box]]] = {}
    for item, box in zip(plan.items, held, strict=True):
        name, data = names[item.index.fqn], item.tensor_data
        kind = (None, ()) if data is None else (data.properties.dtype, tuple(data.size))
        first, shape = kinds.setdefault(name, kind), kind[1]
        if kind != first or not len(box[0]) == len(box[1]) == len(shape):
            raise PlanError(
                f"{name}: one item is of {_dtype_of(first)} of shape {first[1]}, another of "
                f"{_dtype_of(kind)} of shape {shape} with a box of {len(box[1])} dimensions"
            )
        leaf, boxes = columns.setdefault(len(shape), ([], []))
        leaf.append(numbers.setdefault(name, len(numbers)))
        boxes.append(box)
    return WriteItems(
        tuple(row(name, kind) for name, kind in kinds.items()),
        [Block(np.array(leaf, np.int32), Boxes.of(boxes)) for leaf, boxes in columns.values()],
    )


def _row(name: str, kind: _Kind) -> LeafRow:
    if kind[0] is None:
        return LeafRow(name, "opaque")
    return LeafRow(name, dtype=_dtype_of(kind), shape=kind[1], sharded=True)


def _dtype_of(kind: _Kind) -> str:
    return "bytes" if kind[0] is None else format_dtype(kind[0]) or ""


def _box_of(item: dcp.WriteItem) -> _Box:
    """(offsets, sizes); those of a scalar for bytes."""
    if item.tensor_data is None:
        return (), ()
    return tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes)


_unsent: set[str] = set()
"""Keys in DCP's cache of plans that some rank lacks."""


def whole_plans(
    plans: Sequence[dcp.SavePlan], local: dcp.SavePlan, rank: int
) -> Sequence[dcp.SavePlan] | None:
    """All ranks' plans, or None if every rank has its own from an earlier save.

    Args:
        plans: what the planner would send.
        local: the coordinator's own local plan.
        rank: the coordinator's rank.

    Raises:
        PlanError: plans were left out that cannot be found.
    """
    usable = [plan.usable for plan in plans]
    if all(usable):
        return plans
    keys = _keys_of(plans)
    if any(usable):
        if len(keys) != 1:
            raise PlanError(
                "the planner sends only those plans that have changed since an earlier save, and "
                "the others cannot be found; save with enable_plan_caching=False"
            )
    elif local.usable:
        gathered = dcp.SavePlanner._cached_all_plans
        keys = [key for key in keys if gathered[key][rank].items == local.items]
    elif len(keys) != 1 or keys[0] not in _unsent:
        return None
    if not keys:
        return None
    _unsent.discard(keys[0])
    return dcp.SavePlanner._cached_global_plan[keys[0]]


def note_unsent(plans: Sequence[dcp.SavePlan]) -> None:
    """A save has failed before all ranks could get these plans."""
    if any(plan.usable for plan in plans):
        _unsent.update(_keys_of(plans))


def _keys_of(plans: Sequence[dcp.SavePlan]) -> list[str]:
    """Under which keys of the cache the plans may be; one, as soon as one of them is usable."""
    return [
        key
        for key, cached in dcp.SavePlanner._cached_global_plan.items()
        if len(cached) == len(plans)
        and all(
            new.items is old.items for new, old in zip(plans, cached, strict=True) if new.usable
        )
    ]


def check_metadata(planned: dcp.Metadata, laid_out: Metadata, names: Mapping[str, str]) -> None:
    """Refuse a checkpoint that is not what the planner's metadata says.

    Raises:
        PlanError: other leaves, shapes or dtypes; all are listed.
    """
    problems: list[str] = []
    stated = planned.state_dict_metadata
    for fqn in dict.fromkeys([*stated, *names]):
        if fqn not in names:
            problems.append(f"{fqn}: in the metadata, but in no rank's plan")
        elif fqn not in stated:
            problems.append(f"{fqn}: in the plans, but not in the metadata")
        else:
            metadata, written = stated[fqn], laid_out.state_dict_metadata[names[fqn]]
            expected = planned_kind = ("bytes", ())
            if isinstance(metadata, dcp_metadata.TensorStorageMetadata):
                expected = (format_dtype(metadata.properties.dtype), tuple(metadata.size))
            if isinstance(written, TensorStorageMetadata):
                planned_kind = (written.properties.dtype, written.size)
            if expected != planned_kind:
                problems.append(
                    f"{fqn}: {expected[0]} of shape {expected[1]} in the metadata, "
                    f"{planned_kind[0]} of shape {planned_kind[1]} in the plans"
                )
    if problems:
        raise PlanError.listing("the planner's plans do not fit its metadata", problems)


def torch_metadata(
    metadata: Metadata, objects: Mapping[str, StoredObject]
) -> dict[str, dcp_metadata.STORAGE_TYPES]:
    """fqn -> what DCP's planners want to know of a stored object.

    A tensor of a dtype that torch lacks is called bytes here: a plan that wants it is refused.
    """
    described: dict[str, dcp_metadata.STORAGE_TYPES] = {}
    for fqn, stored in objects.items():
        leaf = metadata.state_dict_metadata[stored.leaf] if stored.leaf is not None else None
        described[fqn] = dcp_metadata.BytesStorageMetadata()
        if not isinstance(leaf, TensorStorageMetadata):
            continue
        dtype = torch_dtype(leaf.properties.dtype)
        if dtype is not None:
            described[fqn] = dcp_metadata.TensorStorageMetadata(
                dcp_metadata.TensorProperties(dtype=dtype),
                torch.Size(leaf.size),
                [
                    dcp_metadata.ChunkStorageMetadata(
                        torch.Size(box.offsets), torch.Size(box.sizes)
                    )
                    for box in leaf.chunks
                ],
            )
    return described
