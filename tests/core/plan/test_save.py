"""Planning a save over random ranks: exact cover, one error for all that is wrong."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from conformance.implementations.threads import results
from tests.support.examples import examples
from tests.support.sharded_arrays import Sharded, cut, same_bits
from tests.support.tilings import holders, paint, region, tiled_shapes
from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.grid import GridOptions
from xckpt.core.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    Sharding,
    TensorProperties,
    TensorStorageMetadata,
)
from xckpt.core.plan.items import SavePlan, TensorWriteData, WriteItem, WriteItems, WriteItemType
from xckpt.core.plan.merge import global_plan
from xckpt.core.plan.save import DefaultSavePlanner
from xckpt.core.values import decode_value
from xckpt.engine.ranks.wire import SavePlanCodec
from xckpt.errors import PlanError, UnsupportedLeafError

State = dict[str, Any]


def plan_all(
    states: Sequence[State], planners: Sequence[DefaultSavePlanner] | None = None
) -> tuple[list[DefaultSavePlanner], list[SavePlan], Metadata]:
    """What an engine does up to the shares: a planner a rank, plans carried as bytes."""
    planners = planners or [DefaultSavePlanner() for _ in states]
    codec = SavePlanCodec()
    plans = []
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, None, rank == 0)
        plans.append(codec.decode(codec.encode(planner.create_local_plan())))
    shares, metadata = planners[0].create_global_plan(plans)
    shares = [codec.decode(codec.encode(share)) for share in shares]
    return (
        list(planners),
        [p.finish_plan(share) for p, share in zip(planners, shares, strict=True)],
        metadata,
    )


def numbered(shape: tuple[int, ...], dtype: str = "int32") -> np.ndarray:
    return np.arange(prod(shape)).reshape(shape).astype(dtype)


@st.composite
def many_rank_states(draw: st.DrawFn) -> tuple[dict[str, np.ndarray], list[State]]:
    """Global arrays, and the state of each rank: shards, replicas and values, some nowhere else."""
    ranks = draw(st.integers(1, 4))
    arrays: dict[str, np.ndarray] = {}
    states: list[State] = [{"model": {}, "steps": []} for _ in range(ranks)]
    for number in range(draw(st.integers(0, 4))):
        shape, boxes = draw(tiled_shapes(max_rank=3))
        array = numbered(shape, draw(st.sampled_from(["int32", "float16", "uint8"])))
        arrays[f"model/w{number}"] = array
        held = draw(holders(len(boxes), ranks))
        for rank in range(ranks):
            mine = [box for box, own in zip(boxes, held, strict=True) if rank in own]
            if mine:
                states[rank]["model"][f"w{number}"] = cut(array, mine)
    (plain,) = draw(holders(1, ranks))
    for rank in plain:
        arrays["plain"] = numbered((5, 2))
        states[rank]["plain"] = arrays["plain"]
        states[rank]["steps"] = [7, "x"]
    return arrays, states


@given(many_rank_states(), st.sampled_from([8, 64, 1 << 20]), st.sampled_from([0, 256]))
@examples(40, 1000)
def test_every_element_is_written_once_by_a_rank_that_has_it(case, chunk_bytes, shard_bytes):
    arrays, states = case
    grid = GridOptions(chunk_bytes, shard_bytes)
    planners, shares, metadata = plan_all(states, [DefaultSavePlanner(grid=grid) for _ in states])
    written: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {n: [] for n in arrays}
    values: dict[str, object] = {}
    for planner, share in zip(planners, shares, strict=True):
        for item in share.items:
            data = planner.resolve_data(item)
            name = item.index.fqn
            if item.tensor_data is None:
                assert isinstance(data, io.BytesIO) and name not in values
                values[name] = decode_value(item.kind, data.getvalue().decode())
                continue
            box = (item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes)
            assert isinstance(data, np.ndarray) and item.index.offset == box[0]
            assert same_bits(data, np.asarray(arrays[name][region(box)]))
            written[name].append(box)
    for name, array in arrays.items():
        assert (paint(array.shape, written[name]) == 1).all(), name
    assert values == {"steps/0": 7, "steps/1": "x"}
    described = metadata.state_dict_metadata
    assert set(described) == {*arrays, *values}
    for name, array in arrays.items():
        tensor = described[name]
        assert isinstance(tensor, TensorStorageMetadata) and tensor.grid is not None
        assert tensor.size == array.shape and tensor.properties.dtype == array.dtype.name
    assert described["steps/1"] == BytesStorageMetadata("str")
    assert metadata.containers["steps"] == "list"


@examples(10, 200)
@given(many_rank_states(), many_rank_states(), st.data())
def test_leaves_of_a_kind_are_planned_as_if_each_were_alone(case, other, data):
    """What a layer has in common with another makes the plan small, and no other one."""
    copies = st.lists(st.booleans(), min_size=3, max_size=3)
    same = data.draw(copies) if data.draw(st.integers(0, 3)) else None
    states = [
        {
            f"layer{n}": state if n % 2 else more
            for n, kept in enumerate(same or data.draw(copies))
            if kept
        }
        for state, more in zip_longest(case[1], other[1], fillvalue={})
    ]
    planners = [DefaultSavePlanner(grid=GridOptions(64)) for _ in states]
    plans = []
    for planner, state in zip(planners, states, strict=True):
        planner.set_up_planner(state)
        plans.append(planner.create_local_plan())
    columns = [plan.items for plan in plans]
    alone = [
        replace(plan, items=WriteItems(items.table, items.blocks))
        for plan, items in zip(plans, columns, strict=True)
    ]
    try:
        shares, metadata = global_plan(alone, GridOptions(64))
    except PlanError as error:
        with pytest.raises(PlanError, match=re.escape(str(error))):
            global_plan(plans, GridOptions(64))
        return
    found, described = global_plan(plans, GridOptions(64))
    assert [list(share.items) for share in found] == [list(share.items) for share in shares]
    assert described == metadata
    assert [len(share.items) for share in found] == [len(list(share.items)) for share in shares]


def test_leaves_keep_the_order_of_the_tree():
    state = {"z": np.zeros(3), "a": {"y": 1, "b": np.zeros(())}, "m": "text"}
    _, _, metadata = plan_all([state])
    assert list(metadata.state_dict_metadata) == ["z", "a/y", "a/b", "m"]


def test_replicas_of_many_leaves_are_spread_over_their_holders():
    """What data-parallel training holds: everything on every rank, in leaves of one chunk."""
    state = {f"w{n}": np.zeros((64 + n, 8), np.float32) for n in range(20)}
    _, shares, _ = plan_all([state] * 4)
    loads = [sum(item.box_bytes for item in share.items) for share in shares]
    assert max(loads) <= sum(loads) / 4 + 83 * 8 * 4


def test_a_share_keeps_the_planner_data_of_its_rank():
    planners = [DefaultSavePlanner(), DefaultSavePlanner()]
    plans = []
    for rank, planner in enumerate(planners):
        planner.set_up_planner({"a": 1})
        plans.append(SavePlan(planner.create_local_plan().items, planner_data={"rank": rank}))
    shares, _ = planners[0].create_global_plan(plans)
    assert [share.planner_data for share in shares] == [{"rank": 0}, {"rank": 1}]


W = np.zeros((4, 2), np.float32)


@pytest.mark.parametrize(
    "other, difference",
    [
        (np.zeros((4, 3), np.float32), "shape (4, 2) on rank 0 but (4, 3) on rank 2"),
        (np.zeros((4, 2), np.float64), "dtype float32 on rank 0 but float64 on rank 2"),
        (7, "type tensor on rank 0 but int on rank 2"),
        (None, "type tensor on rank 0 but None on rank 2"),
    ],
)
def test_a_rank_that_disagrees_is_named(other, difference):
    with pytest.raises(PlanError) as caught:
        plan_all([{"w": W, "x": 1}, {"w": W, "x": 1}, {"w": other, "x": 1}])
    assert caught.value.problems == (f"w: {difference}",)


def nothing_of(shape: tuple[int, ...]) -> Sharded:
    """A tensor of which the rank has no part, so that it knows no dtype."""
    return Sharded(shape, "", Boxes.of([], rank=len(shape)), [])


@pytest.mark.parametrize("holder", range(3))
def test_a_rank_without_a_part_need_not_know_the_dtype(holder):
    part = cut(W.astype("f2"), [((0, 0), (4, 2))])
    states = [{"w": part if rank == holder else nothing_of((4, 2))} for rank in range(3)]
    _, shares, metadata = plan_all(states)
    assert [len(share.items) for share in shares] == [int(rank == holder) for rank in range(3)]
    stored = metadata.state_dict_metadata["w"]
    assert isinstance(stored, TensorStorageMetadata)
    assert stored.properties.dtype == "float16"


def test_ranks_that_know_a_dtype_must_agree():
    half, single = (cut(W.astype(kind), [((0, 0), (4, 2))]) for kind in ("f2", "f4"))
    with pytest.raises(PlanError) as caught:
        plan_all([{"w": nothing_of((4, 2))}, {"w": half}, {"w": single}])
    assert caught.value.problems == ("w: dtype float16 on rank 1 but float32 on rank 2",)
    for states in ([nothing_of((4, 2))], [nothing_of((4, 2)), nothing_of((4, 2))]):
        with pytest.raises(PlanError, match=r"w: no rank has a part of .* shape \(4, 2\)"):
            plan_all([{"w": leaf, "x": 1} for leaf in states])


def test_every_leaf_that_ranks_disagree_on_is_listed():
    keyed = Sharded((2,), "uint32", Boxes.whole((2,)), [np.zeros(2, np.uint32)], annotation="k:a")
    other = Sharded((2,), "uint32", Boxes.whole((2,)), [np.zeros(2, np.uint32)], annotation="k:b")
    first = {"w": W, "step": 1, "key": keyed, "fine": 1, "mine": 1}
    second = {"w": W.astype(np.int8), "step": 1.5, "key": other, "fine": 2, "yours": 2}
    with pytest.raises(PlanError, match="ranks disagree") as caught:
        plan_all([first, second])
    assert caught.value.problems == (
        "w: dtype float32 on rank 0 but int8 on rank 1",
        "step: type int on rank 0 but float on rank 1",
        "key: annotation k:a on rank 0 but k:b on rank 1",
    )


def test_gaps_and_overlaps_of_all_leaves_are_listed():
    array = numbered((4, 8))
    states = [
        {"gap": cut(array, [((0, 0), (2, 8))]), "twice": cut(array, [((0, 0), (3, 8))])},
        {"gap": cut(array, [((3, 0), (1, 8))]), "twice": cut(array, [((2, 0), (2, 8))])},
    ]
    with pytest.raises(PlanError) as caught:
        plan_all(states)
    assert caught.value.problems == (
        "gap: [2, 3) x [0, 8) is held by no rank; beside it: [0, 2) x [0, 8) on rank 0, "
        "[3, 4) x [0, 8) on rank 1",
        "twice: [2, 3) x [0, 8) is held twice: [0, 3) x [0, 8) on rank 0 overlaps "
        "[2, 4) x [0, 8) on rank 1",
    )


class Pair(NamedTuple):
    one: int
    other: int


CLASH, IN_FIRST = "a leaf and a container have this name", "a container on rank 0"


def test_the_ranks_of_the_first_clashes_are_looked_for():
    """Not of all: with thousands of leaves and ranks that took minutes."""
    one: State = {f"w{n:02}": 1 for n in range(30)}
    with pytest.raises(PlanError) as caught:
        plan_all([one, {name: {"b": 1} for name in one}])
    said = list(map(str, caught.value.problems))
    assert said[0] == f"w00: {CLASH}: a leaf on rank 0, a container on rank 1"
    assert said[29] == f"w29: {CLASH}"


@pytest.mark.parametrize(
    "one, other, problem",
    [
        ({"a": 1}, {"a": {"b": 1}}, f"a: {CLASH}: a leaf on rank 0, a container on rank 1"),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": 1}}, f"a/b: {CLASH}: a leaf on rank 1, {IN_FIRST}"),
        ({"a": [1]}, {"a": 1}, f"a: {CLASH}: a leaf on rank 1, {IN_FIRST}"),
        ({"a": 1}, {"a": []}, f"a: {CLASH}: a leaf on rank 0, a container on rank 1"),
        ({"a": [1]}, {"a": (1,)}, "a: list on rank 0 but tuple on rank 1"),
        ({"a": {}}, {"a": [1]}, "a: dict on rank 0 but list on rank 1"),
        ({"a": [1]}, {"a": {"x": 1}}, "a: list on rank 0 but dict on rank 1"),
        ({"a": {"0": 1}}, {"a": (1,)}, "a: dict on rank 0 but tuple on rank 1"),
        ({"x": 1}, [1], "the root: dict on rank 0 but list on rank 1"),
        (
            {"a": (1, 2)},
            {"a": Pair(1, 2)},
            "a: tuple on rank 0 but namedtuple:Pair:one,other on rank 1",
        ),
    ],
)
def test_trees_that_do_not_fit_together_are_refused(one, other, problem):
    with pytest.raises(PlanError, match="trees do not fit together") as caught:
        plan_all([one, other])
    assert caught.value.problems == (problem,)


def test_a_root_that_is_a_leaf_on_some_ranks_is_refused_with_the_ranks():
    states: list[Any] = [{"a": 1, "b": 1}, 3, {"a": 1}]
    with pytest.raises(PlanError) as caught:
        plan_all(states)
    said = "the root is a leaf, but there are others: a leaf on rank 1, a container on ranks 0, 2"
    assert caught.value.problems == (said,)


def test_trees_of_different_ranks_are_merged():
    _, _, metadata = plan_all([{"a": [1], "e": {}}, {"a": [1, 2], "b": ()}, {"e": {"x": 1}}])
    assert list(metadata.state_dict_metadata) == ["a/0", "a/1", "e/x"]
    assert metadata.containers == {"a": "list", "b": "tuple", "e": "dict"}


def test_leaves_of_unknown_types_are_listed_by_name():
    with pytest.raises(UnsupportedLeafError, match="3 leaves") as caught:
        plan_all([{"a": {"b": object()}, "c": {1, 2}, "d": 1, "e": np.zeros(2, "M8[s]")}])
    texts = caught.value.problems
    assert [text.split(":")[0] for text in texts] == ["a/b", "c", "e"]
    assert "builtins.object" in texts[0] and "datetime64" in texts[2]


def test_a_serialiser_makes_bytes_of_unknown_types():
    planner = DefaultSavePlanner(serialise=lambda leaf: repr(leaf).encode())
    (planner,), (share,), metadata = plan_all([{"set": {1, 2}, "n": 3}], [planner])
    assert metadata.state_dict_metadata["set"] == BytesStorageMetadata("opaque")
    (item,) = [item for item in share.items if item.index.fqn == "set"]
    data = planner.resolve_data(item)
    assert isinstance(data, io.BytesIO) and data.getvalue() == b"{1, 2}"


class Transferring(Sharded):
    """A sharded array that would like to know what will be asked."""

    expected: list[int] | None = None

    def expect(self, uses: Sequence[int]) -> None:
        self.expected = list(uses)


def test_a_leaf_that_transfers_its_data_learns_how_often_each_box_is_asked_for():
    array = numbered((8, 6))
    boxes = [((0, 0), (4, 6)), ((4, 0), (4, 6))]
    leaves: list[Transferring] = []
    for held in (boxes, boxes[1:]):  # the second box is held by both ranks, and shared
        plain = cut(array, held)
        leaves.append(Transferring(plain.shape, plain.dtype, plain.boxes, plain.parts))
    _, shares, _ = plan_all([{"w": leaf, "step": 1, "v": array} for leaf in leaves])
    for leaf, share in zip(leaves, shares, strict=True):
        asked = [0] * len(leaf.boxes)
        for item in share.items:
            if item.index.fqn == "w" and item.tensor_data is not None:
                box = Boxes.of([(item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes)])
                inside = (box.offsets >= leaf.boxes.offsets) & (box.ends <= leaf.boxes.ends)
                asked[int(inside.all(axis=1).argmax())] += 1
        assert leaf.expected == asked
    assert sum(map(sum, (leaf.expected or [] for leaf in leaves))) >= 2


def test_a_leaf_that_others_write_is_not_asked_for():
    leaves: list[Transferring] = []
    for _ in range(2):
        plain = cut(numbered((4,)), [((0,), (4,))])
        leaves.append(Transferring(plain.shape, plain.dtype, plain.boxes, plain.parts))
    plan_all([{"w": leaf} for leaf in leaves])
    assert [leaf.expected for leaf in leaves] == [[1], [0]]


def test_a_box_that_the_rank_does_not_hold_is_refused():
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": cut(numbered((4, 2)), [((0, 0), (2, 2))])})
    data = TensorWriteData(ChunkStorageMetadata((1, 0), (2, 2)), TensorProperties("int32"), (4, 2))
    with pytest.raises(PlanError, match=r"w: .*\[1, 3\) x \[0, 2\)"):
        planner.resolve_data(WriteItem(MetadataIndex("w", (1, 0)), WriteItemType.SHARD, data))


@pytest.mark.parametrize(
    "name, kind, problem",
    [
        ("x", WriteItemType.TENSOR, "x: this rank has to write it, but has no leaf"),
        ("w", WriteItemType.BYTE_IO, "w: planned as BYTE_IO, but it is a tensor"),
        ("step", WriteItemType.TENSOR, "step: planned as TENSOR, but it is a Python int"),
    ],
)
def test_an_item_that_is_not_the_rank_s_is_refused(name, kind, problem):
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": numbered((4,)), "step": 3})
    data = TensorWriteData(ChunkStorageMetadata((0,), (4,)), TensorProperties("int32"), (4,))
    tensor = data if kind is WriteItemType.TENSOR else None
    with pytest.raises(PlanError, match=problem):
        planner.resolve_data(WriteItem(MetadataIndex(name), kind, tensor))


def test_resolve_data_is_a_view():
    array = numbered((4, 2))
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": array})
    data = TensorWriteData(ChunkStorageMetadata((1, 0), (2, 2)), TensorProperties("int32"), (4, 2))
    view = planner.resolve_data(WriteItem(MetadataIndex("w", (1, 0)), WriteItemType.TENSOR, data))
    assert isinstance(view, np.ndarray) and np.shares_memory(view, array)


@given(st.integers(1, 5), st.integers(1, 30))
@examples(20)
def test_a_leaf_remembers_its_sharding_and_annotation(ranks, rows):
    sharding = Sharding(axes=(("dp", ranks),), placements=("Shard(0)",))
    array = numbered((rows * ranks,))
    states = []
    for rank in range(ranks):
        leaf = cut(array, [((rank * rows,), (rows,))])
        leaf.sharding, leaf.annotation = sharding, "prng_key:threefry2x32"
        states.append({"w": leaf})
    _, _, metadata = plan_all(states)
    tensor = metadata.state_dict_metadata["w"]
    assert isinstance(tensor, TensorStorageMetadata)
    assert tensor.sharding == sharding and tensor.annotation == "prng_key:threefry2x32"


def test_one_planner_can_plan_again():
    planner = DefaultSavePlanner()
    for state in ({"a": 1}, {"b": W}, {}):
        _, (share,), metadata = plan_all([state], [planner])
        assert [item.index.fqn for item in share.items] == list(state)
        assert list(metadata.state_dict_metadata) == list(state)


@pytest.mark.parametrize("sizes", [(4, 1), (1, 4)])
def test_leaves_without_a_choice_are_shared_first(sizes):
    """The only holder of a large leaf does not write the small one that others hold too."""
    alone, both = (np.zeros((n, 64), np.float64) for n in sizes)
    _, shares, _ = plan_all([{"both": both[:1], "alone": alone}, {"both": both[:1]}])
    written = [[item.index.fqn for item in share.items] for share in shares]
    assert written == [["alone"], ["both"]]


@pytest.mark.parametrize("own, steps", [(None, 2), (GridOptions(8), 1)])
def test_a_planner_s_own_grid_counts_before_the_storage_s(own, steps):
    planner = DefaultSavePlanner(grid=own)
    planner.set_up_planner({"w": np.zeros(4, np.float64)}, GridOptions(16), True)
    _, metadata = planner.create_global_plan([planner.create_local_plan()])
    tensor = metadata.state_dict_metadata["w"]
    assert isinstance(tensor, TensorStorageMetadata) and tensor.grid is not None
    assert tensor.grid.chunks.tolist() == [[steps]]


def test_scalars_that_different_ranks_hold_are_of_different_kinds():
    """A box of no dimensions has no bytes: that there is one has to count."""
    one, none = Boxes.whole(()), Boxes.of([], rank=0)
    data = np.full((), 7, np.float32)
    full, empty = Sharded((), "float32", one, [data]), Sharded((), "float32", none, [])
    states = [{"w": empty, "b": full}, {"w": full, "b": empty}]
    results(2, lambda group: xckpt.save("memory://kinds", states[group.rank], group=group))
    assert xckpt.load("memory://kinds") == {"w": 7, "b": 7}
