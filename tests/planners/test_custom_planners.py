"""Planners of one's own: what people subclass torch's planners for, done to ours, end to end.

Each planner changes one hook and leaves the rest to the default. Ranks are threads.
"""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest

import xckpt
from conformance.implementations.threads import ThreadGroup, results
from tests.support.jobs import fresh_path
from tests.support.sharded_arrays import cut, holds, wish
from xckpt.planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    ReadItem,
    SavePlan,
    WriteItem,
    WriteItemType,
)

HALVES = [((0, 0), (4, 3)), ((4, 0), (4, 3))]
WEIGHT = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
BIAS = np.arange(5, dtype=np.float32)

ranks = pytest.mark.parametrize("size", [1, 2])


def state(rank: int, size: int) -> dict[str, Any]:
    """A model as a data-parallel rank has it; with two ranks, half of the weight each."""
    boxes = HALVES if size == 1 else [HALVES[rank]]
    return {"model": {"w": cut(WEIGHT, boxes), "b": BIAS}, "step": 3, "betas": (0.9, 0.99)}


def save(path: str, size: int, make: type[DefaultSavePlanner]) -> list[DefaultSavePlanner]:
    def run(group: ThreadGroup) -> DefaultSavePlanner:
        planner = make()
        xckpt.save(path, state(group.rank, size), group=group, planner=planner)
        return planner

    return results(size, run)


class Renaming(DefaultSavePlanner):
    """Saves every top-level key under another name."""

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        renamed = {f"foo_{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


@ranks
def test_keys_are_renamed_on_the_way(size):
    path = fresh_path()
    save(path, size, Renaming)
    assert list(xckpt.open(path)) == [
        "foo_model/w", "foo_model/b", "foo_step", "foo_betas/0", "foo_betas/1",
    ]  # fmt: skip
    loaded: Any = xckpt.load(path)
    assert np.array_equal(loaded["foo_model"]["w"], WEIGHT)
    assert loaded["foo_betas"] == (0.9, 0.99)


class RenamingItems(DefaultSavePlanner):
    """Renames in the plan instead of in the state, and back for `resolve_data`."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        items = [
            replace(item, index=replace(item.index, fqn=f"ema/{item.index.fqn}"))
            for item in plan.items
        ]
        return replace(
            plan, items=items, containers={f"ema/{n}": k for n, k in plan.containers.items()}
        )

    def resolve_data(self, write_item):
        index = replace(write_item.index, fqn=write_item.index.fqn.removeprefix("ema/"))
        return super().resolve_data(replace(write_item, index=index))


@ranks
def test_items_are_renamed_in_the_plan(size):
    path = fresh_path()
    save(path, size, RenamingItems)
    loaded: Any = xckpt.load(path)
    assert list(loaded) == ["ema"]
    assert np.array_equal(loaded["ema"]["model"]["w"], WEIGHT)
    assert loaded["ema"]["betas"] == (0.9, 0.99) and loaded["ema"]["step"] == 3


class Halving(DefaultSavePlanner):
    """Stores float16 of what is trained in float32; the items are rebuilt as a list."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        items: list[WriteItem] = []
        for item in plan.items:
            data = item.tensor_data
            if data is not None:
                narrow = replace(data, properties=replace(data.properties, dtype="float16"))
                item = replace(item, tensor_data=narrow)
            items.append(item)
        return replace(plan, items=items)

    def resolve_data(self, write_item):
        data = super().resolve_data(write_item)
        if write_item.type is WriteItemType.BYTE_IO:
            return data
        return np.asarray(data).astype(np.float16)


@ranks
def test_another_dtype_is_stored_than_is_trained(size):
    path = fresh_path()
    save(path, size, Halving)
    stored = xckpt.open(path)["model/w"]
    assert isinstance(stored, xckpt.StoredArray) and stored.dtype == "float16"
    assert np.array_equal(stored[...], WEIGHT.astype(np.float16))

    def run(group: ThreadGroup) -> Any:
        return xckpt.load(path, state(group.rank, size), group=group, cast=True)

    for loaded in results(size, run):
        assert loaded["model"]["w"].dtype == "float32"
        assert holds(loaded["model"]["w"], WEIGHT.astype(np.float16).astype(np.float32))
        assert loaded["step"] == 3


class Balancing(DefaultSavePlanner):
    """Deals the replicated leaves out to the ranks one by one, as for data-parallel training."""

    def create_global_plan(self, all_plans):
        dealt = [iter(all_plans[0].items)] * len(all_plans)
        columns = list(zip(*zip_longest(*dealt), strict=True))
        all_plans = [
            replace(plan, items=[item for item in column if item is not None])
            for plan, column in zip(all_plans, columns, strict=True)
        ]
        return super().create_global_plan(all_plans)


def test_replicated_writes_are_dealt_out():
    path = fresh_path()
    arrays = {f"w{number}": np.full((4, 4), number, np.float32) for number in range(7)}
    written: list[list[str]] = [[], [], []]

    class Noting(Balancing):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

        def finish_plan(self, new_plan):
            written[self.rank] = [item.index.fqn for item in new_plan.items]
            return super().finish_plan(new_plan)

    results(3, lambda group: xckpt.save(path, arrays, group=group, planner=Noting(group.rank)))
    assert written == [["w0", "w3", "w6"], ["w1", "w4"], ["w2", "w5"]]
    loaded: Any = xckpt.load(path)
    assert all(np.array_equal(loaded[name], array) for name, array in arrays.items())


class Annotating(DefaultSavePlanner):
    """Sends something from every rank, and keeps what all have sent with the checkpoint."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        return replace(plan, planner_data={"items": len(plan.items)})

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        merged = [plan.planner_data for plan in plans]
        return plans, replace(metadata, planner_data=merged)


@ranks
def test_data_of_every_rank_is_kept_with_the_checkpoint(size):
    path = fresh_path()
    save(path, size, Annotating)
    # Two boxes of the weight on one rank, one each on two.
    each = {"items": 6 if size == 1 else 5}
    assert xckpt.open(path).metadata.planner_data == [each] * size
    # Every load finds it, too.
    planner = DefaultLoadPlanner()
    xckpt.load(path, planner=planner)
    assert planner.metadata.planner_data == [each] * size


class Skipping(DefaultSavePlanner):
    """Saves only some leaves."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        kept = [item for item in plan.items if item.index.fqn.startswith("model/")]
        return replace(plan, items=kept, containers={})


@ranks
def test_a_part_of_the_state_is_saved(size):
    path = fresh_path()
    save(path, size, Skipping)
    loaded: Any = xckpt.load(path)
    assert list(loaded) == ["model"] and np.array_equal(loaded["model"]["b"], BIAS)


class Prefixed(DefaultLoadPlanner):
    """Loads leaves that were saved under ``ema/`` into a tree that has no such level."""

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        assert metadata is not None
        inner = {
            name.removeprefix("ema/"): stored
            for name, stored in metadata.state_dict_metadata.items()
        }
        super().set_up_planner(
            state_dict, replace(metadata, state_dict_metadata=inner), is_coordinator
        )

    def create_local_plan(self):
        plan = super().create_local_plan()
        return replace(plan, items=[self._outer(item) for item in plan.items])

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        index = replace(
            read_item.storage_index, fqn=read_item.storage_index.fqn.removeprefix("ema/")
        )
        super().load_bytes(replace(read_item, storage_index=index), value)

    @staticmethod
    def _outer(item: ReadItem) -> ReadItem:
        return replace(
            item, storage_index=replace(item.storage_index, fqn=f"ema/{item.storage_index.fqn}")
        )


@ranks
def test_leaves_are_renamed_on_the_way_back(size):
    path = fresh_path()
    save(path, size, RenamingItems)

    def run(group: ThreadGroup) -> Any:
        like = {**state(group.rank, size), "model": {"w": wish(WEIGHT, HALVES), "b": BIAS}}
        return xckpt.load(path, like, group=group, planner=Prefixed())

    for loaded in results(size, run):
        assert holds(loaded["model"]["w"], WEIGHT) and np.array_equal(loaded["model"]["b"], BIAS)
        assert loaded["step"] == 3 and loaded["betas"] == (0.9, 0.99)


class Scaling(DefaultLoadPlanner):
    """Reads into memory of its own and changes the data before it is committed."""

    def resolve_tensor(self, read_item: ReadItem) -> object:
        return np.empty(read_item.lengths, np.float32)

    def commit_tensor(self, read_item: ReadItem, tensor: object) -> None:
        target = super().resolve_tensor(read_item)
        assert isinstance(target, np.ndarray) and isinstance(tensor, np.ndarray)
        target[...] = 2 * tensor
        super().commit_tensor(read_item, target)


@ranks
def test_data_is_changed_between_storage_and_target(size):
    path = fresh_path()
    save(path, size, DefaultSavePlanner)

    def run(group: ThreadGroup) -> Any:
        return xckpt.load(path, state(group.rank, size), group=group, planner=Scaling())

    for loaded in results(size, run):
        assert holds(loaded["model"]["w"], 2 * WEIGHT)
        assert np.array_equal(loaded["model"]["b"], 2 * BIAS)


class Choosing(DefaultLoadPlanner):
    """Sends every rank something that the coordinator knows."""

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        plans = super().create_global_plan(global_plan)
        return [replace(plan, planner_data={"ranks": len(plans)}) for plan in plans]

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        self.received = central_plan.planner_data
        return super().finish_plan(central_plan)


@ranks
def test_a_coordinator_tells_every_rank_something(size):
    path = fresh_path()
    save(path, size, DefaultSavePlanner)

    def run(group: ThreadGroup) -> Any:
        planner = Choosing()
        xckpt.load(path, state(group.rank, size), group=group, planner=planner)
        return planner.received

    assert results(size, run) == [{"ranks": size}] * size


def test_a_plan_is_what_torch_users_know():
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": WEIGHT, "step": 3}, None, True)
    plan = planner.create_local_plan()
    assert isinstance(plan, SavePlan)
    kinds = {item.index.fqn: item.type for item in plan.items}
    assert kinds == {"w": WriteItemType.TENSOR, "step": WriteItemType.BYTE_IO}
