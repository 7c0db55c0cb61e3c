"""The global step of a save: all ranks' plans in, each rank's share and the metadata out.

1. `merge_tables`, `merge_containers`: one table of all leaves, one tree of all containers; ranks
   that contradict each other are an error.
2. `Kinds`: leaves that are of one kind on every rank, which models have many of, are planned once.
3. `_collect`: all ranks' boxes, kind by kind.
4. `lay_out_all`: a `Layout` for each kind, computed once for those that are alike.
5. `shares_of`: what each rank writes, in blocks of columns. Leaves that several ranks could write
   are shared out one by one, so each becomes a kind of its own.

Ranks that know each other's plans do 4 and 5 alone (`xckpt.core.plan.alone`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from operator import itemgetter
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Block, Boxes, expanded
from xckpt.core.geometry.grid import Grid, GridOptions
from xckpt.core.metadata import Metadata
from xckpt.core.names import about_numbered
from xckpt.core.plan.items import LeafRow, LeafTable, SavePlan, WriteItems
from xckpt.core.plan.layout import Layout, LeafShards, lay_out, metadata_of, share
from xckpt.core.plan.save_checks import merge_containers
from xckpt.errors import PlanError

T = TypeVar("T")
Share = tuple[int, NDArray[np.int64], Boxes]
"""A kind's number, ranks that write parts of it, (n,), and the box that each of them writes."""


def global_plan(
    plans: Sequence[SavePlan], options: GridOptions | None = None
) -> tuple[list[SavePlan], Metadata]:
    """Each rank's share of a save, and the metadata of the whole.

    Args:
        plans: one plan a rank, in rank order.
        options: target sizes of chunks.

    Raises:
        PlanError: ranks disagree on leaves or containers, boxes overlap, or elements are missing.
    """
    columns = [WriteItems.of(plan.items) for plan in plans]
    table, numbers = merge_tables([items.table for items in columns])
    options = options or GridOptions()
    kept = _kept_grids(table, options)
    kinds = _kinds_on_all(kept, columns, numbers)
    shards = _collect(table, columns, kinds)
    layouts, problems = lay_out_all(table, kinds, shards, kept, options)
    if problems:
        raise PlanError.listing("the ranks' shards do not make up whole tensors", problems)
    containers = merge_containers(plans, [row.name for row in table])
    shared, parts = shares_of(kinds.of, shards, layouts, len(plans))
    blocks = _blocks_of_ranks(parts, len(plans))
    own = _tables_of_ranks(table, columns, numbers)
    shares = [
        SavePlan(
            WriteItems(own[rank], blocks[rank], shared if mapped is None else shared[mapped]),
            plan.storage_data,
            plan.planner_data,
        )
        for rank, (plan, mapped) in enumerate(zip(plans, numbers, strict=True))
    ]
    return shares, Metadata(metadata_of(table, kinds.of, layouts), containers)


def merge_tables(tables: Sequence[LeafTable]) -> tuple[LeafTable, list[NDArray[np.int32] | None]]:
    """One table of all ranks' leaves, and for each rank its leaf numbers in it (None: the same).

    A rank without a part of a tensor may not know its dtype; then another one must.

    Raises:
        PlanError: two ranks disagree on what a leaf is, or none knows it; all are listed.
    """
    first = tables[0]
    if all(table is first or table == first for table in tables):
        _check_known(first)
        return first, [None] * len(tables)
    rows: dict[str, LeafRow] = {}
    ranks: dict[str, int] = {}  # that each row is from
    problems: dict[str, str] = {}
    numbers: dict[str, int] = {}
    mapped: list[NDArray[np.int32] | None] = []
    known: dict[int, NDArray[np.int32]] = {}
    seen: dict[int, int] = {}  # id of a row -> its number: few rows of a rank are no other's
    for rank, table in enumerate(tables):
        if id(table) not in known:
            for row in (row for row in table if id(row) not in seen):
                name = row.name
                numbers.setdefault(name, len(numbers))
                before = rows.setdefault(name, row)
                difference = _difference(before, ranks.setdefault(name, rank), row, rank)
                if difference:
                    problems[name] = f"{name}: {difference}"
                elif row.dtype and not before.dtype:
                    rows[name], ranks[name] = row, rank
                seen[id(row)] = numbers[name]
            known[id(table)] = np.array([seen[id(row)] for row in table], np.int32)
        mapped.append(known[id(table)])
    if problems:
        summary = f"ranks disagree on what a leaf is{about_numbered(problems)}"
        raise PlanError.listing(summary, problems.values())
    merged = tuple(rows.values())
    _check_known(merged)
    return merged, mapped


def _tables_of_ranks(
    table: LeafTable,
    columns: Sequence[WriteItems],
    numbers: Sequence[NDArray[np.int32] | None],
) -> list[LeafTable]:
    """Each rank's leaves, as all ranks together know them: its own table wherever that says it."""
    known: dict[int, LeafTable] = {}
    for items, mapped in zip(columns, numbers, strict=True):
        if id(items.table) not in known:
            rows = table if mapped is None else tuple(_each(mapped, table))
            known[id(items.table)] = items.table if rows == items.table else rows
    return [known[id(items.table)] for items in columns]


def _check_known(table: LeafTable) -> None:
    problems = [
        f"{row.name}: no rank has a part of this tensor of shape {row.shape}, so its dtype is "
        f"unknown; save the state without it, or save it on the rank that has it"
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
    return ""


@dataclass(frozen=True, slots=True, eq=False)
class Kinds:
    """Leaves that are of one kind on every rank."""

    of: NDArray[np.int32]
    """The kind of each leaf, (leaves,)."""
    first: NDArray[np.int64]
    """The first leaf of each kind, (kinds,)."""
    on_ranks: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]
    """For each rank: the kinds that its leaves are of, in the order of its own kinds, and into how
    many of them each own kind is split. A rank that sees one kind where all ranks together have the
    kinds 0 and 2 has ``([0, 2], [2])``."""


def _kinds_on_all(
    kept: Sequence[Grid | None],
    columns: Sequence[WriteItems],
    numbers: Sequence[NDArray[np.int32] | None],
) -> Kinds:
    """The kinds of the leaves: leaves of one kind are alike on every rank and keep one grid."""
    distinct: dict[tuple[bytes, bytes], tuple[NDArray[np.integer], NDArray[np.int32]]] = {}
    known: dict[tuple[int, int], tuple[bytes, bytes]] = {}
    keys: list[tuple[bytes, bytes]] = []
    every, grids = np.arange(len(kept)), np.array(list(map(id, kept)), np.int64)
    of = np.unique(grids, return_inverse=True)[1]
    for items, mapped in zip(columns, numbers, strict=True):
        same = id(items.kinds), id(mapped)
        if same not in known:
            known[same] = items.kinds.tobytes(), b"" if mapped is None else mapped.tobytes()
        keys.append(key := known[same])
        if key not in distinct:
            where = every if mapped is None else mapped
            distinct[key] = where, items.kinds
            parted = of[where] * (1 + int(items.kinds.max(initial=0))) + items.kinds
            # Numbers that no leaf has yet: those that the rank lacks keep theirs.
            of[where] = of.max(initial=0) + 1 + np.unique(parted, return_inverse=True)[1]
    first, of = np.unique(of, return_index=True, return_inverse=True)[1:]
    split = {key: _split(of[where], own) for key, (where, own) in distinct.items()}
    return Kinds(of.astype(np.int32), first, [split[key] for key in keys])


def _split(
    of: NDArray[np.int64], own: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`Kinds.on_ranks` of one rank, from the kind of each of its leaves, and its own kind of it.

    Example:
        >>> _split(np.array([3, 0, 0, 2]), np.array([0, 0, 0, 1]))
        (array([0, 3, 2]), array([2, 1]))
    """
    kinds, first = np.unique(of, return_index=True)
    order = np.argsort(own[first], kind="stable")
    return kinds[order], np.bincount(own[first])


def _collect(table: LeafTable, columns: Sequence[WriteItems], kinds: Kinds) -> list[LeafShards]:
    """All ranks' boxes, kind by kind."""
    gathered: dict[int, list[tuple[NDArray[np.int64], Boxes, int]]] = {}
    for rank, (items, split) in enumerate(zip(columns, kinds.on_ranks, strict=True)):
        for block in items.of_kinds:
            where, kind = expanded(block.leaf, *split)
            boxes = block.boxes if len(where) == len(block.leaf) else block.boxes.take(where)
            gathered.setdefault(block.boxes.rank, []).append((kind, boxes, rank))
    shards: dict[int, LeafShards] = {}
    for parts in gathered.values():
        numbers, boxes, ranks = zip(*parts, strict=True)
        number = np.concatenate(numbers)
        order = np.argsort(number, kind="stable")
        ordered = Boxes.concatenated(boxes, order)
        rank = np.repeat(np.array(ranks, np.int64), list(map(len, numbers)))[order]
        for kind, part in _runs(number[order]):
            row = table[int(kinds.first[kind])]
            shards[kind] = LeafShards(row.shape, item_bytes(row), ordered[part], rank[part])
    no_ranks = np.zeros(0, np.int64)
    rows = _each(kinds.first, table)
    return [
        shards.get(number)
        or LeafShards(row.shape, item_bytes(row), Boxes.of([], rank=len(row.shape)), no_ranks)
        for number, row in enumerate(rows)
    ]


def _runs(ordered: NDArray[np.integer]) -> Iterator[tuple[int, slice]]:
    """(number, where it stands) for each distinct number of a sorted column."""
    starts = np.flatnonzero(np.diff(ordered, prepend=-1)).tolist()
    for start, stop in pairwise([*starts, len(ordered)]):
        yield int(ordered[start]), slice(start, stop)


def _each(numbers: NDArray[np.integer], things: Sequence[T]) -> list[T]:
    """The items with these numbers."""
    plain: list[int] = numbers.tolist()
    return [things[number] for number in plain]


def item_bytes(row: LeafRow) -> int:
    """Bytes of an element; 0 of a value."""
    return item_size(row.dtype) if row.is_tensor else 0


def _kept_grids(table: LeafTable, options: GridOptions) -> list[Grid | None]:
    """The grid that each leaf has in an earlier checkpoint, where the save keeps it."""
    if options.kept is None:
        return [None] * len(table)
    ask = options.kept
    return [ask(row.name, row.dtype, row.shape) if row.is_tensor else None for row in table]


def lay_out_all(
    table: LeafTable,
    kinds: Kinds,
    shards: Sequence[LeafShards],
    kept: Sequence[Grid | None],
    options: GridOptions,
) -> tuple[list[Layout], list[str]]:
    """The layout of each kind, or what is wrong with the leaves that have none."""
    known: dict[tuple[object, ...], Layout | str] = {}
    found: list[Layout | str] = []
    for shard, grid in zip(shards, _each(kinds.first, kept), strict=True):
        key = (*shard.key(), id(grid))
        if key not in known:
            known[key] = lay_out(shard, options, grid)
        found.append(known[key])
    layouts = [layout for layout in found if not isinstance(layout, str)]
    if len(layouts) == len(found):
        return layouts, []
    faults = zip(table, _each(kinds.of, found), strict=True)
    return [], [f"{row.name}: {fault}" for row, fault in faults if isinstance(fault, str)]


def shares_of(
    kinds: NDArray[np.int32], shards: Sequence[LeafShards], layouts: Sequence[Layout], size: int
) -> tuple[NDArray[np.int32], Iterator[Share]]:
    """The kind of each leaf as it is shared among ``size`` ranks, and the parts of each kind.

    Leaves without a choice come first, then large before small.
    """
    contested = np.array([layout.contested for layout in layouts], bool)[kinds]
    weights = np.array([1 + prod(each.shape) * each.item_bytes for each in shards], np.int64)
    numbers = kinds.copy()
    chosen = np.flatnonzero(contested)
    numbers[chosen] = len(layouts) + np.arange(len(chosen))
    ordered = chosen[np.argsort(-weights[kinds[chosen]], kind="stable")].tolist()

    def shares() -> Iterator[Share]:
        loads = np.zeros(size, np.int64)
        yield from _settled(kinds, layouts, loads)
        for leaf in ordered:
            yield int(numbers[leaf]), *share(layouts[int(kinds[leaf])], loads)

    return numbers, shares()


def _settled(
    kinds: NDArray[np.int32], layouts: Sequence[Layout], loads: NDArray[np.int64]
) -> Iterator[Share]:
    """The shares of kinds that leave no choice of writer; adds their bytes to ``loads``."""
    known: dict[int, tuple[NDArray[np.int64], Boxes, NDArray[np.int64], NDArray[np.int64]]] = {}
    counts = np.bincount(kinds, minlength=len(layouts))
    for kind, layout in enumerate(layouts):
        if layout.contested:
            continue
        if id(layout) not in known:
            added = np.zeros(len(loads), np.int64)
            shared, writers = share(layout, added), np.flatnonzero(added)
            known[id(layout)] = *shared, writers, added[writers]
        ranks, boxes, writers, some = known[id(layout)]
        loads[writers] += some * counts[kind]
        yield kind, ranks, boxes


def blocks_of(parts: Iterable[tuple[int, Boxes]]) -> list[Block]:
    """The boxes of numbered kinds as blocks, those of few dimensions first."""
    of_rank: dict[int, list[tuple[int, Boxes]]] = {}
    for number, boxes in parts:
        of_rank.setdefault(boxes.rank, []).append((number, boxes))
    return [Block.of(sorted(each, key=itemgetter(0))) for _, each in sorted(of_rank.items())]


def _blocks_of_ranks(parts: Iterable[Share], size: int) -> list[list[Block]]:
    """What is shared as blocks for each of ``size`` ranks, as `blocks_of` orders them."""
    shared: dict[int, list[Share]] = {}
    for part in parts:
        shared.setdefault(part[2].rank, []).append(part)
    blocks: list[list[Block]] = [[] for _ in range(size)]
    for _, shares in sorted(shared.items()):
        numbers, ranks, boxes = zip(*sorted(shares, key=itemgetter(0)), strict=True)
        rank = np.concatenate(ranks)
        order = np.argsort(rank, kind="stable")
        ordered = Block.of(zip(numbers, boxes, strict=True), order)
        for number, part in _runs(rank[order]):
            blocks[number].append(Block(ordered.leaf[part], ordered.boxes[part]))
    return blocks
