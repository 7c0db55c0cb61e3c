"""Plans that no planner may make: they contradict the metadata, or each other.

The default planner's plans are right by construction, but every hook of it can be overridden, and a
checkpoint whose parts contradict each other must not be committed. So after a planner's hooks:

1. `checked_plan` and `checked_plans`, of loads too: a hook gave back plans, and not None, say; so
   does `resolved` with tensors.
2. `check_shares`, on the coordinator: each share's leaves are what the metadata says they are.
3. `check_finished`, on every rank: `finish_plan` did not change what the leaves of the share are.
4. `merge_containers`, on the coordinator: the ranks' trees fit together.

2 and 3 compare leaf tables, which all ranks usually share, and no items. That every chunk and value
is written exactly once is checked where it is free: in the reports of what was written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Final, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Box
from xckpt.core.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    Sharding,
    TensorProperties,
    TensorStorageMetadata,
)
from xckpt.core.part.per_rank import KIND
from xckpt.core.plan.items import (
    LeafRow,
    LeafTable,
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItems,
    WriteItemType,
)
from xckpt.core.problem import Problem
from xckpt.core.text.arguments import named
from xckpt.core.tree import unflatten
from xckpt.errors import SHOWN_PROBLEMS, ManifestError, PlanError, ranks_in_words

if TYPE_CHECKING:
    from xckpt.core.plan.save import SavePlanner

Leaf = tuple[str, str, tuple[int, ...]]
"""(a value's kind or "", dtype, shape) of a leaf."""
_WRITE: Final = "WriteItem(MetadataIndex(name), type, TensorWriteData(chunk, properties, size))"
_READ: Final = "ReadItem(type, dest_index, dest_offsets, storage_index, storage_offsets, lengths)"
Plan = TypeVar("Plan", SavePlan, LoadPlan)


def checked_plan(planner: object, hook: str, plan: Plan, kind: type[Plan]) -> Plan:
    """The plan that a planner's hook has returned.

    Raises:
        PlanError: it is not a plan, its items are not a list, or one of them is of other types.

    Example:
        >>> checked_plan("a planner", "finish_plan", None, SavePlan)
        Traceback (most recent call last):
        ...
        xckpt.errors.PlanError: str.finish_plan returned None: it must return a SavePlan, such as \
super().finish_plan(...) does
    """
    found = cast(object, plan)
    if not isinstance(found, cast(type[SavePlan | LoadPlan], kind)):
        what = "None" if found is None else f"an object of type {type(found).__name__}"
    elif not isinstance(cast(object, found.items), Collection):
        what = f"{named(kind.__name__)} whose items are of type {type(found.items).__name__}"
    elif (odd := _misbuilt(found)) is not None:
        item = _READ if kind is LoadPlan else _WRITE
        raise PlanError(
            f"{type(planner).__name__}.{hook} returned an item of other types than {item}: {odd}"
        )
    else:
        return plan
    raise PlanError(
        f"{type(planner).__name__}.{hook} returned {what}: it must return {named(kind.__name__)}, "
        f"such as super().{hook}(...) does"
    )


def _misbuilt(plan: SavePlan | LoadPlan) -> str | None:
    """The first item that is not built of what its fields take, in words; columns have none."""
    items = cast(Collection[object], plan.items)
    if isinstance(plan, LoadPlan):
        some = items if isinstance(items, list | tuple) else ()
        return next((repr(item)[:500] for item in some if not _is_read(item)), None)
    if isinstance(items, WriteItems):
        return None
    for item in items:
        match item:
            case WriteItem(MetadataIndex(str()), WriteItemType(), None):
                continue
            case WriteItem(
                MetadataIndex(str()),
                WriteItemType(),
                TensorWriteData(Box(), TensorProperties(), [*size], None | Sharding(), str()),
            ) if all(isinstance(extent, int | np.integer) for extent in cast(list[object], size)):
                continue
            case _:
                return repr(item)[:500]
    return None


def _is_read(item: object) -> bool:
    """Whether it is an item to be read, built of what its fields take."""
    match item:
        case ReadItem(LoadItemType(), dest, [*start], stored, [*place], [*lengths]):
            numbers: list[object] = [*start, *place, *lengths]
        case _:
            return False
    for index in cast(list[object], [dest, stored]):
        match index:
            case MetadataIndex(str(), None, None | int() | np.integer()):
                continue
            case MetadataIndex(str(), [*offset], None | int() | np.integer()):
                numbers += offset
            case _:
                return False
    return all(isinstance(number, int | np.integer) for number in numbers)


def checked_plans(
    planner: object,
    plans: Sequence[Plan],
    kind: type[Plan],
    ranks: int,
    hook: str = "create_global_plan",
) -> list[Plan]:
    """The plans, one a rank, that a hook of a planner has returned, or one of a storage.

    Raises:
        PlanError: they are not plans, or not as many.
    """
    found = cast(object, plans)
    if not isinstance(found, Sequence) or len(plans) != ranks:
        count = f"{len(plans):,} plan(s)" if isinstance(found, Sequence) else "no list of plans"
        raise PlanError(
            f"{type(planner).__name__}.{hook} returned {count}: it must return {ranks:,}, a "
            f"{kind.__name__} for each rank, also for one that has nothing to do"
        )
    return [checked_plan(planner, hook, plan, kind) for plan in plans]


def resolved(planner: SavePlanner, item: WriteItem) -> NDArray[np.generic]:
    """The tensor that a planner has for an item, on the host.

    Raises:
        PlanError: it is not a tensor.
        UnsupportedLeafError: it is one without plain elements in memory.
    """
    from xckpt.core.plan.save import DefaultSavePlanner  # which imports this module

    data, adapters, name = planner.resolve_data(item), planner.adapters, item.index.fqn
    if not (issubclass(type(data), np.ndarray) or adapters.is_leaf(data)):
        what = named(type(data).__name__)
        raise PlanError(f"{name}: resolve_data must return a tensor, not {what}")
    if planner.resolve_data != MethodType(DefaultSavePlanner.resolve_data, planner):
        adapters.describe(data, name)  # as the default has done with what it is given
    return adapters.to_numpy(data, name)


def merge_containers(plans: Sequence[SavePlan], names: Sequence[str]) -> dict[str, str]:
    """The containers of all ranks' trees, which together have the leaves ``names``.

    Raises:
        PlanError: two ranks disagree on a container, or what one calls a leaf another calls a
            container, so no tree has all of them; or what one has as `PerRank` another has not.
    """
    merged = dict(plans[0].containers)
    if len(plans) == 1:
        return merged
    first = dict.fromkeys(merged, 0)
    problems: dict[str, str] = {}
    for rank, plan in enumerate(plans):
        if plan.containers == merged:
            continue
        for name, kind in plan.containers.items():
            before = merged.setdefault(name, kind)
            other = first.setdefault(name, rank)
            if kind != before:
                where = name or "the root"
                problems[name] = f"{where}: {before} on rank {other} but {kind} on rank {rank}"
    try:
        unflatten(dict.fromkeys(names), merged)
    except ManifestError as error:
        for number, clash in enumerate(error.problems or [Problem.of(str(error))]):
            name, said = clash.leaf or "", str(clash)
            if number < SHOWN_PROBLEMS:  # to look for the ranks takes long
                said = _holders(plans, name, clash) or _kinds(plans, name) or said
            problems.setdefault(name, said)
    problems |= _not_on_all(plans, [n for n in merged if merged[n] == KIND or n in problems])
    if problems:
        raise PlanError.listing("the ranks' trees do not fit together", problems.values())
    return merged


def _not_on_all(plans: Sequence[SavePlan], names: Iterable[str]) -> dict[str, str]:
    """What is wrong with each name that is a `PerRank` on some ranks and another thing on others.

    A plain dict is not among the containers: the names below it say that it is there.
    """
    own: dict[str, list[int]] = {name: [] for name in names}
    others: dict[str, list[int]] = {name: [] for name in own}
    for rank, plan in enumerate(plans):
        lacking = {name for name in own if plan.containers.get(name) != KIND}
        for name in own.keys() - lacking:
            own[name].append(rank)
        for name in lacking and lacking & _prefixes(plan):
            others[name].append(rank)
    return {
        name: f"{name or 'the root'}: an xckpt.PerRank on {ranks_in_words(ranks)}, but not on "
        f"{ranks_in_words(others[name])}: save it as one on all ranks, or on none"
        for name, ranks in own.items()
        if ranks and others[name]
    }


def _prefixes(plan: SavePlan) -> set[str]:
    """The names of a rank's leaves and containers, and of all that is around them."""
    found = {""}
    for name in (*(row.name for row in WriteItems.of(plan.items).table), *plan.containers):
        while name not in found:
            found.add(name)
            name = name.rpartition("/")[0]
    return found


def _holders(plans: Sequence[SavePlan], name: str, clash: Problem) -> str:
    """What is wrong, with the ranks that have a leaf and those that have a container; or ""."""
    leaf: list[int] = []
    container: list[int] = []
    for rank, plan in enumerate(plans):
        names = {*(row.name for row in WriteItems.of(plan.items).table), *plan.containers}
        if name in names and name not in plan.containers:
            leaf.append(rank)
        elif any(not name or each == name or each.startswith(f"{name}/") for each in names):
            container.append(rank)
    if not leaf:
        return ""
    return f"{clash}: a leaf on {ranks_in_words(leaf)}, a container on {ranks_in_words(container)}"


def _kinds(plans: Sequence[SavePlan], name: str) -> str:
    """The ranks that have each kind of container, if these differ; or "". Plans list no dict."""
    ranks: dict[str, list[int]] = {}
    for rank, plan in enumerate(plans):
        if name in _prefixes(plan):
            ranks.setdefault(plan.containers.get(name, "dict"), []).append(rank)
    said = " but ".join(f"{kind} on {ranks_in_words(those)}" for kind, those in ranks.items())
    return f"{name or 'the root'}: {said}" if len(ranks) > 1 else ""


def check_shares(shares: Sequence[SavePlan], metadata: Metadata) -> None:
    """Refuse shares of a global plan that do not agree with its metadata.

    Raises:
        PlanError: lists every leaf that is not in the metadata or is something else there, with
            the first rank that has to write it.

    Example:
        >>> from xckpt.core.metadata import MetadataIndex
        >>> from xckpt.core.plan.items import WriteItem, WriteItemType
        >>> item = WriteItem(MetadataIndex("step"), WriteItemType.BYTE_IO, kind="int")
        >>> check_shares([SavePlan([item])], Metadata({}))
        Traceback (most recent call last):
        ...
        xckpt.errors.PlanError: create_global_plan returned plans and metadata that disagree
          - step: rank 0 has to write it, but it is not in the metadata
    """
    known = metadata.state_dict_metadata
    problems: dict[str, str] = {}
    # Comparing a row takes long, and most ranks have nearly the same ones.
    compared: dict[int, LeafRow] = {}
    tables: dict[int, LeafTable] = {}
    differences: dict[str, str] = {}
    for rank, share in enumerate(shares):
        items = WriteItems.of(share.items)
        table = items.table
        if id(table) not in tables:
            tables[id(table)] = table
            new = {id(row): row for row in table if id(row) not in compared}
            compared |= new
            said = ((row, _described(known.get(row.name))) for row in new.values())
            differences |= dict(_differences(said, "the metadata"))
        if differences:
            for name in {item.index.fqn: None for item in items}:
                if name in differences:
                    text = f"{name}: rank {rank} has to write it, but {differences[name]}"
                    problems.setdefault(name, text)
    if problems:
        raise PlanError.listing(
            "create_global_plan returned plans and metadata that disagree", problems.values()
        )


def check_finished(share: SavePlan, finished: SavePlan) -> None:
    """Refuse a finished plan with a leaf that is not in the share, or is something else there.

    Raises:
        PlanError: lists every such leaf.
    """
    if finished.items is share.items:
        return
    table = WriteItems.of(share.items).table
    known = {row.name: _leaf(row) for row in table}
    said = ((row, known.get(row.name)) for row in WriteItems.of(finished.items).table)
    problems = [f"{name}: {problem}" for name, problem in _differences(said, "the share")]
    if problems:
        raise PlanError.listing("finish_plan changed what the leaves of a share are", problems)


def _differences(
    said: Iterable[tuple[LeafRow, Leaf | None]], where: str
) -> Iterator[tuple[str, str]]:
    """(name, how it differs) for each leaf that is not what is said of it ``where``."""
    for row, other in said:
        leaf = _leaf(row)
        if other is None:
            yield row.name, f"it is not in {where}"
        elif other != leaf:
            yield row.name, f"it is {_spelled(leaf)}, and {_spelled(other)} in {where}"


def _leaf(row: LeafRow) -> Leaf:
    return row.kind, row.dtype, row.shape


def _described(leaf: TensorStorageMetadata | BytesStorageMetadata | None) -> Leaf | None:
    if leaf is None:
        return None
    if isinstance(leaf, BytesStorageMetadata):
        return leaf.kind or "opaque", "", ()
    return "", leaf.properties.dtype, tuple(leaf.size)


def _spelled(leaf: Leaf) -> str:
    kind, dtype, shape = leaf
    return f"a Python {kind}" if kind else f"{dtype} of shape {shape}"
