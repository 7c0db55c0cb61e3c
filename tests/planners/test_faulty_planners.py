"""Planners that drop, double or misplace an item: refused on every rank, and nothing is left.

1. A fault is what a planner does to the items of one rank in one hook (`Faulty`).
2. A save with it must fail with a `PlanError` on every rank, name the leaf and the range, and leave
   the folder as it was.
3. A load with it must fail too: a target is filled exactly once, or the load is an error.

Ranks are threads. The tensor ``w`` is sharded, ``b`` is a replica; the leaves whose names end in 0
are rank 0's alone.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xckpt
from conformance.implementations.threads import ThreadGroup, results, run_ranks
from tests.support.jobs import fresh_path
from tests.support.sharded_arrays import cut
from xckpt.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
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
LONG = "x" * 5000
"""A value that is stored as an array of bytes."""

Items = list[WriteItem]
Fault = Callable[[Items], Items]
SIZES = [1, 2]


def state(rank: int, size: int) -> dict[str, Any]:
    boxes = HALVES if size == 1 else [HALVES[rank]]
    return {
        "w": cut(WEIGHT, boxes),
        "b": BIAS,
        "step": 3,
        f"own{rank}": np.full(3, rank, np.int32),
        f"name{rank}": f"rank {rank}",
        f"long{rank}": LONG,
    }


def drop(name: str) -> Fault:
    def fault(items: Items) -> Items:
        first = next(item for item in items if item.index.fqn == name)
        return [item for item in items if item is not first]

    return fault


def double(name: str) -> Fault:
    return lambda items: items + [item for item in items if item.index.fqn == name][:1]


def change(name: str, make: Callable[[WriteItem], WriteItem]) -> Fault:
    """Change the first item of a leaf."""

    def fault(items: Items) -> Items:
        first = next(item for item in items if item.index.fqn == name)
        return [make(item) if item is first else item for item in items]

    return fault


def rename(old: str, new: str) -> Fault:
    return change(old, lambda item: replace(item, index=replace(item.index, fqn=new)))


def boxed(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Callable[[WriteItem], WriteItem]:
    """The item with another box."""

    def make(item: WriteItem) -> WriteItem:
        assert item.tensor_data is not None
        data = replace(item.tensor_data, chunk=ChunkStorageMetadata(offsets, sizes))
        return replace(item, index=MetadataIndex(item.index.fqn, offsets), tensor_data=data)

    return make


def as_half(item: WriteItem) -> WriteItem:
    assert item.tensor_data is not None
    data = replace(item.tensor_data, properties=TensorProperties("float16"))
    return replace(item, tensor_data=data)


def as_float31(item: WriteItem) -> WriteItem:
    assert item.tensor_data is not None
    data = replace(item.tensor_data, properties=TensorProperties("float31"))
    return replace(item, tensor_data=data)


def as_value(item: WriteItem) -> WriteItem:
    return WriteItem(MetadataIndex(item.index.fqn), WriteItemType.BYTE_IO, kind="str")


class Faulty(DefaultSavePlanner):
    """Does something wrong to rank 0's items in one hook."""

    def __init__(self, rank: int, hook: str, fault: Fault) -> None:
        super().__init__()
        self.rank, self.hook, self.fault = rank, hook, fault

    def spoil(self, plan: SavePlan, hook: str, rank: int) -> SavePlan:
        if hook != self.hook or rank != 0:
            return plan
        return replace(plan, items=self.fault(list(plan.items)))

    def create_local_plan(self) -> SavePlan:
        return self.spoil(super().create_local_plan(), "local", self.rank)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return [self.spoil(plan, "global", rank) for rank, plan in enumerate(plans)], metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return self.spoil(super().finish_plan(new_plan), "finish", self.rank)


def refused(
    folder: Path, size: int, make: Callable[[int], DefaultSavePlanner], *texts: str
) -> None:
    """Every rank raises a `PlanError` with these texts, and nothing is left in the folder."""
    outcomes = run_ranks(
        size,
        lambda group: xckpt.save(
            folder / "ckpt", state(group.rank, size), group=group, planner=make(group.rank)
        ),
    )
    for outcome in outcomes:
        error = outcome.error
        assert isinstance(error, xckpt.PlanError), error
        assert {failure.kind for failure in error.failures} == (
            {"PlanError"} if size > 1 else set()
        )
        for text in texts:
            assert text in str(error)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "fault, text",
    [
        (drop("w"), "w: [0, 4) x [0, 3) is held by no rank"),
        (change("w", boxed((1, 0), (4, 3))), "w: [0, 1) x [0, 3) is held by no rank"),
        (change("w", boxed((0, 1), (4, 3))), "w: [0, 4) x [1, 4) on rank 0 lies outside the shape"),
        (change("w", boxed((-1, 0), (4, 3))), "w: [-1, 3) x [0, 3) on rank 0 lies outside the"),
        (change("w", boxed((8, 0), (4, 3))), "w: [8, 12) x [0, 3) on rank 0 lies outside the"),
        (change("w", boxed((0, 0), (3, 3))), "w: [3, 4) x [0, 3) is held by no rank"),
        (change("w", boxed((0, 0), (5, 3))), "w: [4, 5) x [0, 3) is held twice"),
        (change("w", boxed((0,), (4,))), "w: a box of 1 dimensions in a tensor of shape (8, 3)"),
        (change("w", as_half), "w: dtype float"),
        (change("w", as_float31), "w: dtype 'float31', which is not a name that the format has"),
        (rename("w", "v"), "w: [0, 4) x [0, 3) is held by no rank"),
        (rename("own0", "mine"), "mine: this rank has to write it, but has no leaf of this"),
        (rename("name0", "mine"), "mine: this rank has to write it, but has no leaf of this"),
        (rename("name0", "step"), "step: "),
        (rename("name0", "own0"), "own0: one item is of a tensor, another of a Python value"),
        (change("own0", as_value), "own0: planned as BYTE_IO, but it is a tensor"),
    ],
)
def test_a_faulty_local_plan_is_refused(tmp_path, size, fault, text):
    refused(tmp_path, size, lambda rank: Faulty(rank, "local", fault), text)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("hook", ["global", "finish"])
@pytest.mark.parametrize(
    "fault, text",
    [
        (drop("w"), "w: [0, 4) x [0, 3) was written by no rank"),
        (drop("b"), "b: [0, 5) was written by no rank"),
        (drop("name0"), "name0: the value was written by no rank"),
        (drop("long0"), "long0: the value was written by no rank"),
        (double("w"), "w: [0, 4) x [0, 3) was written by rank 0 twice"),
        (double("b"), "b: [0, 5) was written by rank 0 twice"),
        (double("name0"), "name0: two items of this rank's plan write this value"),
        (double("long0"), "long0: two items of this rank's plan write this value"),
        (change("w", boxed((1, 0), (4, 3))), "w: this rank has to write [1, 5) x [0, 3)"),
        (change("w", boxed((0, 1), (4, 3))), "w: [0, 4) x [1, 4) lies in no array"),
        (change("w", boxed((8, 0), (4, 3))), "w: [8, 12) x [0, 3) lies in no array"),
        (change("w", boxed((-4, 0), (4, 3))), "w: [-4, 0) x [0, 3) lies in no array"),
        (change("w", boxed((0, 0), (3, 3))), "w: this rank has to write [0, 3) x [0, 3)"),
        (change("w", boxed((0, 0), (0, 3))), "w: [0, 4) x [0, 3) was written by no rank"),
        (change("w", boxed((0,), (4,))), "w: a box of 1 dimensions in a tensor of shape (8, 3)"),
        (change("b", as_half), "b: "),
        (change("b", as_value), "b: "),
        (rename("b", "c"), "c: "),
        (rename("name0", "unknown"), "unknown: "),
        (rename("own0", "own1"), "own1: "),
    ],
)
def test_a_faulty_share_is_refused(tmp_path, size, hook, fault, text):
    refused(tmp_path, size, lambda rank: Faulty(rank, hook, fault), text)


def moved(name: str) -> Callable[[list[SavePlan]], list[SavePlan]]:
    """Gives rank 0's items of a leaf to rank 1."""

    def move(plans: list[SavePlan]) -> list[SavePlan]:
        taken = [item for item in plans[0].items if item.index.fqn == name]
        kept = [item for item in plans[0].items if item.index.fqn != name]
        return [replace(plans[0], items=kept), replace(plans[1], items=[*plans[1].items, *taken])]

    return move


def doubled(name: str) -> Callable[[list[SavePlan]], list[SavePlan]]:
    """Gives rank 0's or rank 1's items of a leaf to both."""

    def share(plans: list[SavePlan]) -> list[SavePlan]:
        shared = [item for plan in plans for item in plan.items if item.index.fqn == name]
        others = [[i for i in plan.items if i.index.fqn != name] for plan in plans]
        return [replace(p, items=rest + shared) for p, rest in zip(plans, others, strict=True)]

    return share


class Rearranging(DefaultSavePlanner):
    """Changes all plans and the metadata at once."""

    def __init__(
        self,
        plans: Callable[[list[SavePlan]], list[SavePlan]] = lambda plans: plans,
        metadata: Callable[[Metadata], Metadata] = lambda metadata: metadata,
    ) -> None:
        super().__init__()
        self.plans, self.metadata = plans, metadata

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return self.plans(plans), self.metadata(metadata)


@pytest.mark.parametrize(
    "fault, text",
    [
        (moved("w"), "w: this rank has to write [0, 4) x [0, 3), but does not hold it"),
        (moved("own0"), "own0: this rank has to write it, but has no leaf of this name"),
        (moved("name0"), "name0: this rank has to write it, but has no leaf of this name"),
        (lambda plans: plans[::-1], "this rank has to write it, but has no leaf"),
        (doubled("b"), "b: [0, 5) was written by ranks 0 and 1"),
        (doubled("step"), "step: the value was written by ranks 0 and 1"),
    ],
)
def test_an_item_given_to_the_wrong_rank_is_refused(tmp_path, fault, text):
    refused(tmp_path, 2, lambda rank: Rearranging(fault), "rank ", text)


def described(name: str, **changes: Any) -> Callable[[Metadata], Metadata]:
    """Changes what the metadata says of a leaf."""

    def make(metadata: Metadata) -> Metadata:
        leaves = dict(metadata.state_dict_metadata)
        leaves[name] = replace(leaves[name], **changes)
        return replace(metadata, state_dict_metadata=leaves)

    return make


def forgotten(metadata: Metadata) -> Metadata:
    leaves = {name: leaf for name, leaf in metadata.state_dict_metadata.items() if name != "b"}
    return replace(metadata, state_dict_metadata=leaves)


def invented(metadata: Metadata) -> Metadata:
    leaves = dict(metadata.state_dict_metadata)
    return replace(metadata, state_dict_metadata={**leaves, "c": leaves["b"], "s": leaves["step"]})


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "change, texts",
    [
        (
            described("b", properties=TensorProperties("float16")),
            ["b: rank 0 has to write it, but it is float32 of shape (5,), and float16 of"],
        ),
        (described("w", size=(16, 3)), ["w: rank 0 has to write it", "in the metadata", "(16, 3)"]),
        (
            described("step", kind="str"),
            ["step: rank ", "a Python int, and a Python str in the metadata"],
        ),
        (forgotten, ["b: rank 0 has to write it, but it is not in the metadata"]),
        (invented, ["s: the value was written by no rank"]),
    ],
)
def test_metadata_that_contradict_the_plans_are_refused(tmp_path, size, change, texts):
    refused(tmp_path, size, lambda rank: Rearranging(metadata=change), *texts)


@pytest.mark.parametrize("size", SIZES)
def test_a_tensor_of_the_metadata_without_a_writer_is_refused(tmp_path, size):
    def invent(metadata: Metadata) -> Metadata:
        leaves = dict(metadata.state_dict_metadata)
        return replace(metadata, state_dict_metadata={**leaves, "c": leaves["b"]})

    refused(
        tmp_path, size, lambda rank: Rearranging(metadata=invent), "c: [0, 5) was written by no"
    )


def test_few_of_many_chunks_are_named(tmp_path):
    """And with the box in the tensor, not in the piece that it is a chunk of."""
    rows = [((0, 0), (7, 3)), ((7, 0), (13, 3)), ((20, 0), (31, 3)), ((51, 0), (50, 3))]
    state = {"w": cut(np.zeros((101, 3), np.int32), rows), "even": np.zeros(1000, np.int8)}

    class Spoiling(DefaultSavePlanner):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            spoilt = [
                drop("w"),
                change("even", boxed((0,), (200,))),
                lambda items: [*items, *(i for i in items if i.index.offset == (51, 0))],
            ]
            items = list(new_plan.items)
            for fault in spoilt:
                items = fault(items)
            return replace(new_plan, items=items)

    options = xckpt.SaveOptions(chunk_bytes=200)
    with pytest.raises(xckpt.PlanError) as caught:
        xckpt.save(tmp_path / "ckpt", state, planner=Spoiling(), options=options)
    assert caught.value.problems == (
        "w: [0, 7) x [0, 3) was written by no rank",
        "w: [51, 61) x [0, 3) was written by rank 0 twice",
        "w: [61, 71) x [0, 3) was written by rank 0 twice",
        "w: [71, 81) x [0, 3) was written by rank 0 twice",
        "w: and 2 more of its chunks",
        "even: [200, 400) was written by no rank",
        "even: [400, 600) was written by no rank",
        "even: [600, 800) was written by no rank",
        "even: and 1 more of its chunks",
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", SIZES)
def test_a_box_that_is_planned_twice_by_its_holders_is_a_replica(size):
    path = fresh_path()

    def save(group: ThreadGroup) -> None:
        planner = Faulty(group.rank, "local", double("w"))
        xckpt.save(path, state(group.rank, size), group=group, planner=planner)

    results(size, save)
    assert np.array_equal(xckpt.load(path)["w"], WEIGHT) and xckpt.open(path).verify() == []


# Loading.

ReadFault = Callable[[list[ReadItem]], list[ReadItem]]


class FaultyLoad(DefaultLoadPlanner):
    """Does something wrong to one rank's items in one hook."""

    def __init__(self, rank: int, hook: str, fault: ReadFault, **options: Any) -> None:
        super().__init__(**options)
        self.rank, self.hook, self.fault = rank, hook, fault

    def spoil(self, plan: LoadPlan, hook: str, rank: int) -> LoadPlan:
        if hook != self.hook or rank != 0:
            return plan
        return replace(plan, items=self.fault(list(plan.items)))

    def create_local_plan(self) -> LoadPlan:
        return self.spoil(super().create_local_plan(), "local", self.rank)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        plans = super().create_global_plan(global_plan)
        return [self.spoil(plan, "global", rank) for rank, plan in enumerate(plans)]

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return self.spoil(super().finish_plan(central_plan), "finish", self.rank)


def read_change(name: str, **changes: Any) -> ReadFault:
    """Change the first item of a leaf; a callable is given the old value."""

    def fault(items: list[ReadItem]) -> list[ReadItem]:
        first = next(item for item in items if item.dest_index.fqn == name)
        new = {
            key: value(getattr(first, key)) if callable(value) else value
            for key, value in changes.items()
        }
        return [replace(item, **new) if item is first else item for item in items]

    return fault


def read_drop(name: str) -> ReadFault:
    def fault(items: list[ReadItem]) -> list[ReadItem]:
        first = next(item for item in items if item.dest_index.fqn == name)
        return [item for item in items if item is not first]

    return fault


def read_double(name: str) -> ReadFault:
    return lambda items: items + [item for item in items if item.dest_index.fqn == name][:1]


TALL = np.arange(303, dtype=np.int32).reshape(101, 3)
ROWS = [((0, 0), (7, 3)), ((7, 0), (13, 3)), ((20, 0), (31, 3)), ((51, 0), (50, 3))]
COLUMNS = [((0, 0), (101, 2)), ((0, 2), (101, 1))]


def wanted() -> dict[str, Any]:
    return {"w": cut(np.zeros_like(TALL), COLUMNS), "b": np.zeros_like(BIAS), "step": 0}


@pytest.fixture(scope="module")
def pieces() -> str:
    """A checkpoint whose ``w`` is four arrays, with a part of every column in each."""
    path = fresh_path()
    saved = xckpt.save(path, {"w": cut(TALL, ROWS), "b": BIAS, "step": 3})
    described = saved.state_dict_metadata["w"]
    assert isinstance(described, TensorStorageMetadata) and len(described.chunks) == 4
    return path


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("hook", ["local", "global", "finish"])
@pytest.mark.parametrize(
    "fault, text",
    [
        (read_drop("w"), "is wanted, but no item reads it"),
        (read_drop("b"), "b: [0, 5) is wanted, but no item reads it"),
        (read_drop("step"), "step: wanted, but no item reads it"),
        (lambda items: [], "b: [0, 5) is wanted, but no item reads it"),
        (read_double("w"), "is filled by two items"),
        (read_double("b"), "b: [0, 5) is filled by two items"),
        (read_double("step"), "step: 2 items read it"),
        (read_change("b", dest_offsets=(1,)), "b: an item fills [1, 6), beyond the box [0, 5)"),
        (read_change("b", dest_offsets=(-1,)), "b: an item fills [-1, 4), beyond the box [0, 5)"),
        (read_change("b", lengths=(4,)), "b: [4, 5) is wanted, but no item reads it"),
        (
            read_change("b", dest_offsets=(), lengths=()),
            "b: an item reads a tensor of 1 dimensions",
        ),
        (read_change("b", lengths=(0,)), "b: an item reads [0, 0), which is not in [0, 5)"),
        (
            read_change("b", lengths=(-2,)),
            "b: an item reads what is not a range of its array: the sizes",
        ),
        (read_change("b", lengths=(6,)), "b: an item reads [0, 6), which is not in [0, 5)"),
        (read_change("b", storage_offsets=(1,)), "b: an item reads [1, 6), which is not in [0, 5)"),
        (
            read_change("b", storage_index=MetadataIndex("b", (0,), 1)),
            "b: an item reads array 1 of",
        ),
        (
            read_change("w", storage_index=MetadataIndex("w", (7, 0))),
            "w: an item reads the array at (7, 0), but number 0 is at (0, 0)",
        ),
        (read_change("b", storage_index=MetadataIndex("c")), "c: an item reads it, but it is not"),
        (read_change("b", storage_index=MetadataIndex("step")), "step: an item of type TENSOR"),
        (read_change("step", storage_index=MetadataIndex("b")), "b: an item of type BYTE_IO reads"),
        (read_change("b", dest_index=MetadataIndex("b", (0,), 1)), "b: an item fills box 1, but 1"),
        (read_change("b", dest_index=MetadataIndex("b", (0,))), "b: an item fills box None"),
        (read_change("b", dest_index=MetadataIndex("w", (0, 0), 0)), "b: [0, 5) is wanted"),
    ],
)
def test_a_faulty_load_is_refused(pieces, size, hook, fault, text):
    def load(group: ThreadGroup) -> None:
        planner = FaultyLoad(group.rank, hook, fault)
        # Ranks that share reads would notice after a second that rank 0 is gone.
        options = xckpt.LoadOptions(share_reads=False)
        xckpt.load_into(pieces, wanted(), group=group, planner=planner, options=options)

    for outcome in run_ranks(size, load):
        assert isinstance(outcome.error, xckpt.PlanError), outcome.error
        failed = [f.kind for f in outcome.error.failures if f.rank == 0]
        assert failed == (["PlanError"] if size > 1 else [])
        assert text in str(outcome.error)


def test_two_faults_that_cancel_out_are_refused(pieces):
    """As many elements as are wanted, but half of them twice."""

    def fault(items: list[ReadItem]) -> list[ReadItem]:
        _, second = (item for item in items if item.dest_index.fqn == "b")
        return [replace(item, dest_offsets=(0,)) if item is second else item for item in items]

    def halve(items: list[ReadItem]) -> list[ReadItem]:
        [whole] = [item for item in items if item.dest_index.fqn == "b"]
        others = [item for item in items if item is not whole]
        low = replace(whole, lengths=(2,))
        high = replace(whole, lengths=(3,), dest_offsets=(2,), storage_offsets=(2,))
        return [*others, low, high]

    loaded = xckpt.load(pieces, wanted(), planner=FaultyLoad(0, "local", halve))
    assert np.array_equal(loaded["b"], BIAS)
    with pytest.raises(xckpt.PlanError, match=r"b: \[0, 2\) is filled by two items"):
        xckpt.load(pieces, wanted(), planner=FaultyLoad(0, "local", lambda i: fault(halve(i))))


def test_nothing_is_filled_before_a_plan_was_checked(pieces):
    state = {"w": np.zeros_like(TALL), "b": np.zeros_like(BIAS), "step": 0}
    with pytest.raises(xckpt.PlanError, match="step: wanted"):
        xckpt.load_into(pieces, state, planner=FaultyLoad(0, "finish", read_drop("step")))
    assert not state["w"].any() and not state["b"].any()


def test_ranks_that_share_reads_all_fail(pieces):
    def load(group: ThreadGroup) -> None:
        planner = FaultyLoad(group.rank, "finish", read_drop("w"))
        xckpt.load(pieces, {"w": TALL, "b": BIAS, "step": 0}, group=group, planner=planner)

    for outcome in run_ranks(3, load):
        # A rank may have seen first that another had gone: that is no cause.
        assert isinstance(outcome.error, xckpt.PlanError)
        assert "w: [0, 7) x [0, 3) is wanted, but no item reads it" in str(outcome.error)


def test_a_planner_that_skips_a_leaf_leaves_it_out_of_the_state(pieces):
    class Skipping(DefaultLoadPlanner):
        def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
            assert state_dict is not None
            kept = {name: leaf for name, leaf in state_dict.items() if name != "b"}
            super().set_up_planner(kept, metadata, is_coordinator)

    state = {"w": np.zeros_like(TALL), "b": np.zeros_like(BIAS), "step": 0}
    xckpt.load_into(pieces, state, planner=Skipping(strict=False))
    assert np.array_equal(state["w"], TALL) and not state["b"].any()


ERRORS = [ValueError("the planner's own"), OSError(5, "the planner's own")]


class FailingSave(DefaultSavePlanner):
    """Cannot give the data of one leaf."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__()
        self.name, self.error = name, error

    def resolve_data(self, write_item: WriteItem) -> object:
        if write_item.index.fqn == self.name:
            raise self.error
        return super().resolve_data(write_item)


class FailingLoad(DefaultLoadPlanner):
    """Fails in one hook."""

    def __init__(self, hook: str, error: Exception) -> None:
        super().__init__()
        self.hook, self.error = hook, error

    def _fail(self, hook: str) -> None:
        if hook == self.hook:
            raise self.error

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self._fail("load_bytes")
        super().load_bytes(read_item, value)

    def resolve_tensor(self, read_item: ReadItem) -> object:
        self._fail("resolve_tensor")
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: object) -> None:
        self._fail("commit_tensor")
        super().commit_tensor(read_item, tensor)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", ["b", "step"])
def test_what_a_planner_raises_in_a_save_is_its_own(tmp_path, size, error, name):
    def save(group: ThreadGroup) -> None:
        planner = FailingSave(name, error)
        xckpt.save(tmp_path / "ckpt", state(group.rank, size), group=group, planner=planner)

    for outcome in run_ranks(size, save):
        check_own(outcome.error, size, error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("hook", ["load_bytes", "resolve_tensor", "commit_tensor"])
def test_what_a_planner_raises_in_a_load_is_its_own(pieces, size, error, hook):
    def load(group: ThreadGroup) -> None:
        planner = FailingLoad(hook, error)
        options = xckpt.LoadOptions(share_reads=False)
        xckpt.load(pieces, wanted(), group=group, planner=planner, options=options)

    for outcome in run_ranks(size, load):
        check_own(outcome.error, size, error)


def check_own(found: BaseException | None, size: int, error: Exception) -> None:
    if size == 1:
        assert found is error
    else:
        assert found is not None and type(found) is type(error)
        together = found if isinstance(found, xckpt.XckptError) else found.__cause__
        assert isinstance(together, xckpt.XckptError)
        assert {failure.kind for failure in together.failures} == {type(error).__name__}


def test_a_plan_that_is_finished_otherwise_is_read_as_it_was_finished(pieces):
    """Ranks that share their reads have announced what they read before."""

    def load(group: ThreadGroup) -> Any:
        planner = FaultyLoad(group.rank, "finish", lambda items: items[::-1])
        target = {"w": np.zeros_like(TALL), "b": np.zeros_like(BIAS), "step": 0}
        return xckpt.load(pieces, target, group=group, planner=planner)

    for loaded in results(3, load):
        assert np.array_equal(loaded["w"], TALL)
        assert np.array_equal(loaded["b"], BIAS)
