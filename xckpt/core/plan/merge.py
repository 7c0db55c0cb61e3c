"""The global step of a save: all ranks' plans in, each rank's share and the metadata out.

1. `merge_tables`, `merge_containers`: one table of all leaves, one tree of all containers; ranks
   that contradict each other are an error.
2. `_collect`: all ranks' boxes, leaf by leaf.
3. `_lay_out_all`: a `Layout` for each leaf, computed once for leaves that are alike.
4. `_share_all`: what each rank writes, as blocks of columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.grid import GridOptions
from xckpt.core.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from xckpt.core.plan.items import Block, LeafRow, LeafTable, SavePlan, WriteItems
from xckpt.core.plan.layout import Layout, LeafShards, lay_out, share
from xckpt.core.tree import unflatten
from xckpt.errors import ManifestError, PlanError

_Share = tuple[int, NDArray[np.int64], Boxes]
"""A leaf's number, ranks that write parts of it, (n,), and the box that each of them writes."""


def global_plan(
    plans: Sequence[SavePlan], options: GridOptions | None = None
) -> tuple[list[SavePlan], Metadata]:
    """Each rank's share of a save, and the metadata of the whole.

    Args:
        plans: one plan a rank, in rank order.
        options: target sizes of chunks.

    Raises:
        PlanError: ranks disagree on a leaf or a container, boxes overlap, or elements are missing;
            all listed.
    """
    columns = [WriteItems.of(plan.items) for plan in plans]
    table, numbers = merge_tables([items.table for items in columns])
    shards = _collect(table, columns, numbers)
    layouts, problems = _lay_out_all(table, shards, options or GridOptions())
    if problems:
        raise PlanError.listing("the ranks' shards do not make up whole tensors", problems)
    containers = merge_containers(plans, [row.name for row in table])
    blocks = _share_all(shards, layouts, len(plans))
    shares = [
        SavePlan(WriteItems(table, blocks[rank]), plan.storage_data, plan.planner_data)
        for rank, plan in enumerate(plans)
    ]
    return shares, Metadata(_metadata_of(table, layouts), containers)


def merge_tables(tables: Sequence[LeafTable]) -> tuple[LeafTable, list[NDArray[np.int32] | None]]:
    """One table of all ranks' leaves, and for each rank its leaf numbers in it (None: the same).

    A rank without a part of a tensor may not know its dtype; then another one must.

    Raises:
        PlanError: two ranks disagree on what a leaf is, or none knows it; all such leaves are
            listed.
    """
    first = tables[0]
    if all(table is first or table == first for table in tables):
        _check_known(first)
        return first, [None] * len(tables)
    rows: dict[str, LeafRow] = {}
    ranks: dict[str, int] = {}
    """The rank that each row is from."""
    problems: dict[str, str] = {}
    numbers: dict[str, int] = {}
    mapped: list[NDArray[np.int32] | None] = []
    known: dict[int, NDArray[np.int32]] = {}
    for rank, table in enumerate(tables):
        if id(table) not in known:
            for row in table:
                name = row.name
                numbers.setdefault(name, len(numbers))
                before = rows.setdefault(name, row)
                difference = _difference(before, ranks.setdefault(name, rank), row, rank)
                if difference:
                    problems[name] = f"{name}: {difference}"
                elif row.dtype and not before.dtype:
                    rows[name], ranks[name] = row, rank
            known[id(table)] = np.array([numbers[row.name] for row in table], np.int32)
        mapped.append(known[id(table)])
    if problems:
        raise PlanError.listing("ranks disagree on what a leaf is", problems.values())
    merged = tuple(rows.values())
    _check_known(merged)
    return merged, mapped


def _check_known(table: LeafTable) -> None:
    problems = [
        f"{row.name}: no rank has a part of this tensor of shape {row.shape}, so its dtype is "
        f"unknown"
        for row in table
        if row.is_tensor and not row.dtype
    ]
    if problems:
        raise PlanError.listing("tensors of an unknown dtype", problems)


def _difference(one: LeafRow, rank: int, other: LeafRow, other_rank: int) -> str:
    """How the rows of two ranks for one leaf contradict each other; empty if they do not."""
    compared = (
        ("type", one.kind or "tensor", other.kind or "tensor"),
        # Only a rank with a part of the tensor may know its dtype.
        ("dtype", one.dtype or other.dtype, other.dtype or one.dtype),
        ("shape", one.shape, other.shape),
        ("annotation", one.annotation, other.annotation),
    )
    for what, a, b in compared:
        if a != b:
            return f"{what} {a} on rank {rank} but {b} on rank {other_rank}"
    if one.content != other.content:
        return f"rank {rank} and rank {other_rank} hold different contents under one name"
    return ""


def merge_containers(plans: Sequence[SavePlan], names: Sequence[str]) -> dict[str, str]:
    """The containers of all ranks' trees, which together have the leaves ``names``.

    Raises:
        PlanError: two ranks disagree on a container, or what one calls a leaf another calls a
            container, so no tree has all of them.
    """
    merged = dict(plans[0].containers)
    ranks = dict.fromkeys(merged, 0)
    problems: dict[str, str] = {}
    for rank, plan in enumerate(plans):
        if plan.containers == merged:
            continue
        for name, kind in plan.containers.items():
            before = merged.setdefault(name, kind)
            other = ranks.setdefault(name, rank)
            if kind != before:
                where = name or "the root"
                problems[name] = f"{where}: {before} on rank {other} but {kind} on rank {rank}"
    try:
        unflatten(dict.fromkeys(names), merged)
    except ManifestError as error:
        problems.setdefault("", str(error))
    if problems:
        raise PlanError.listing("the ranks' trees do not fit together", problems.values())
    return merged


def _collect(
    table: LeafTable,
    columns: Sequence[WriteItems],
    numbers: Sequence[NDArray[np.int32] | None],
) -> list[LeafShards]:
    """All ranks' boxes, leaf by leaf."""
    gathered: dict[int, list[tuple[NDArray[np.int32], Boxes, int]]] = {}
    for rank, (items, mapped) in enumerate(zip(columns, numbers, strict=True)):
        for block in items.blocks:
            leaf = block.leaf if mapped is None else mapped[block.leaf]
            gathered.setdefault(block.boxes.rank, []).append((leaf, block.boxes, rank))
    shards: dict[int, LeafShards] = {}
    for parts in gathered.values():
        leaves, boxes, ranks = zip(*parts, strict=True)
        leaf = np.concatenate(leaves)
        order = np.argsort(leaf, kind="stable")
        ordered = Boxes.concatenated(boxes, order)
        rank = np.repeat(np.array(ranks, np.int64), list(map(len, leaves)))[order]
        for number, part in _runs(leaf[order]):
            row = table[number]
            shards[number] = LeafShards(row.shape, _item_bytes(row), ordered[part], rank[part])
    no_ranks = np.zeros(0, np.int64)
    return [
        shards.get(number)
        or LeafShards(row.shape, _item_bytes(row), Boxes.of([], rank=len(row.shape)), no_ranks)
        for number, row in enumerate(table)
    ]


def _runs(ordered: NDArray[np.integer]) -> Iterator[tuple[int, slice]]:
    """(number, where it stands) for each distinct number of a sorted column."""
    starts = np.flatnonzero(np.diff(ordered, prepend=-1)).tolist()
    for start, stop in pairwise([*starts, len(ordered)]):
        yield int(ordered[start]), slice(start, stop)


def _item_bytes(row: LeafRow) -> int:
    return item_size(row.dtype) if row.is_tensor else 0


def _lay_out_all(
    table: LeafTable, shards: Sequence[LeafShards], options: GridOptions
) -> tuple[list[Layout], list[str]]:
    known: dict[tuple[object, ...], Layout | str] = {}
    layouts: list[Layout] = []
    problems: list[str] = []
    for row, leaf in zip(table, shards, strict=True):
        key = leaf.key()
        if key not in known:
            known[key] = lay_out(leaf, options)
        layout = known[key]
        if isinstance(layout, str):
            problems.append(f"{row.name}: {layout}")
        else:
            layouts.append(layout)
    return layouts, problems


def _share_all(
    shards: Sequence[LeafShards], layouts: Sequence[Layout], size: int
) -> list[list[Block]]:
    """Blocks for each of ``size`` ranks: leaves without a choice first, then large before small."""
    loads = np.zeros(size, np.int64)
    weight = [
        1 + prod(leaf.shape) * leaf.item_bytes if layout.contested else 0
        for leaf, layout in zip(shards, layouts, strict=True)
    ]
    order = sorted(range(len(layouts)), key=lambda n: (weight[n] != 0, -weight[n]))
    shared: dict[int, list[_Share]] = {}
    settled: dict[int, tuple[NDArray[np.int64], Boxes, NDArray[np.int64]]] = {}
    for number in order:
        layout = layouts[number]
        if layout.contested:
            ranks, boxes = share(layout, loads)
        else:
            # There is no choice, so leaves of one layout are shared the same way.
            if id(layout) not in settled:
                added = np.zeros(size, np.int64)
                settled[id(layout)] = (*share(layout, added), added)
            ranks, boxes, added = settled[id(layout)]
            loads += added
        shared.setdefault(boxes.rank, []).append((number, ranks, boxes))
    return _blocks(shared, size)


def _blocks(shared: Mapping[int, Sequence[_Share]], size: int) -> list[list[Block]]:
    """Shared leaves as blocks for each of ``size`` ranks, those of few dimensions first."""
    blocks: list[list[Block]] = [[] for _ in range(size)]
    for _, shares in sorted(shared.items()):
        numbers, ranks, boxes = zip(*sorted(shares, key=itemgetter(0)), strict=True)
        rank = np.concatenate(ranks)
        order = np.argsort(rank, kind="stable")
        ordered = Block.of(zip(numbers, boxes, strict=True), order)
        for number, part in _runs(rank[order]):
            blocks[number].append(Block(ordered.leaf[part], ordered.boxes[part]))
    return blocks


def _metadata_of(
    table: LeafTable, layouts: Sequence[Layout]
) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for row, layout in zip(table, layouts, strict=True):
        if row.is_tensor:
            properties, boxes = TensorProperties(row.dtype), layout.boxes
            described[row.name] = TensorStorageMetadata(
                properties, row.shape, boxes, layout.grid, row.sharding, row.annotation
            )
        else:
            described[row.name] = BytesStorageMetadata(row.kind)
    return described
