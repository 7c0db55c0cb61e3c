"""Items dealt out to their holders: each exactly once, for any number of items and ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import xckpt
from conformance.implementations.threads import ThreadGroup, results
from examples.planners.balance import BalancingPlanner, deal
from tests.support.examples import examples
from tests.support.jobs import fresh_path
from tests.support.sharded_arrays import cut
from xckpt.metadata import MetadataIndex
from xckpt.planner import SavePlan, WriteItem

State = dict[str, Any]


def states(holders: list[tuple[int, set[int]]], ranks: int) -> list[State]:
    """Each rank's state: leaf n is of some size, and a value if that is 0, on its holders."""
    leaves = {
        f"t{n}": np.full(size, n, np.int8) if size else n for n, (size, _) in enumerate(holders)
    }
    return [
        {name: leaves[name] for name, (_, on) in zip(leaves, holders, strict=True) if rank in on}
        for rank in range(ranks)
    ]


def local_plans(of_ranks: list[State]) -> list[SavePlan]:
    plans: list[SavePlan] = []
    for state in of_ranks:
        planner = BalancingPlanner()
        planner.set_up_planner(state)
        plans.append(planner.create_local_plan())
    return plans


@st.composite
def held(draw: st.DrawFn) -> tuple[int, list[tuple[int, set[int]]]]:
    """A number of ranks, and the sizes and holders of any number of leaves, none too."""
    ranks = draw(st.integers(1, 9))
    everywhere = st.just(set(range(ranks)))
    some = st.sets(st.integers(0, ranks - 1), min_size=1)
    return ranks, draw(st.lists(st.tuples(st.integers(0, 50), everywhere | some), max_size=12))


@given(held())
@example((4, []))
@example((4, [(8, {0, 1, 2, 3})]))
@example((1, [(8, {0})] * 5))
def test_every_item_is_written_exactly_once(case):
    ranks, holders = case
    plans, metadata = BalancingPlanner().create_global_plan(local_plans(states(holders, ranks)))
    assert len(plans) == ranks
    written = [(item.index.fqn, rank) for rank, plan in enumerate(plans) for item in plan.items]
    names = [f"t{n}" for n in range(len(holders))]
    assert sorted(name for name, _ in written) == sorted(names)
    assert all(rank in holders[int(name[1:])][1] for name, rank in written)
    assert sorted(metadata.state_dict_metadata) == sorted(names)


@given(st.integers(1, 9), st.lists(st.integers(0, 50), max_size=12))
def test_replicas_are_spread_evenly(ranks, sizes):
    everywhere = set(range(ranks))
    shares = deal(local_plans(states([(size, everywhere) for size in sizes], ranks)))
    loads = [sum(item.box_bytes for item in share) for share in shares]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes, default=0)
    if not any(sizes):
        counts = [len(share) for share in shares]
        assert max(counts) - min(counts) <= 1


@given(held())
@examples(20)
def test_what_was_dealt_out_is_saved(case):
    ranks, holders = case
    path, of_ranks = fresh_path(), states(holders, ranks)

    def save(group: ThreadGroup) -> xckpt.Metadata:
        planner = BalancingPlanner()
        return xckpt.save(path, of_ranks[group.rank], group=group, planner=planner)

    saved = results(ranks, save)
    assert all(metadata == saved[0] for metadata in saved)
    loaded: Any = xckpt.load(path)
    assert len(loaded) == len(holders)
    for number, (size, _) in enumerate(holders):
        leaf = loaded[f"t{number}"]
        assert np.array_equal(leaf, np.full(size, number)) if size else leaf == number
    assert xckpt.open(path).verify() == []


def test_shards_stay_where_they_are():
    whole = np.arange(24, dtype=np.float32).reshape(8, 3)
    rows = [((0, 0), (4, 3)), ((4, 0), (4, 3))]
    plans = local_plans([{"w": cut(whole, [rows[rank % 2]]), "b": whole} for rank in range(4)])
    shares = deal(plans)
    owners: dict[MetadataIndex, list[int]] = {}
    for rank, share in enumerate(shares):
        for item in share:
            owners.setdefault(item.index, []).append(rank)
    assert {index: len(ranks) for index, ranks in owners.items()} == dict.fromkeys(owners, 1)
    assert owners[MetadataIndex("w", (0, 0))][0] in (0, 2)
    assert owners[MetadataIndex("w", (4, 0))][0] in (1, 3)


def test_replicas_that_differ_are_still_refused():
    plans = local_plans([{"b": np.zeros(4)}, {"b": np.zeros(4, np.float32)}])
    with pytest.raises(xckpt.PlanError, match="b: dtype float64 on rank 0 but float32 on rank 1"):
        BalancingPlanner().create_global_plan(plans)


def test_an_item_can_be_a_key():
    [first], [again] = (list(plan.items) for plan in local_plans([{"b": np.zeros(4)}] * 2))
    assert isinstance(first, WriteItem) and {first: 1}[again] == 1
