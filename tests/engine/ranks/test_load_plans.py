"""Load plans travel as bytes and come back as they were; what a rank has itself is not sent."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import names, plain, read_items
from xckpt.core.metadata import MetadataIndex
from xckpt.core.plan.items import LoadItemType, LoadPlan, ReadItem
from xckpt.core.plan.mismatch import merged_problems
from xckpt.core.plan.reads.items import ReadItems
from xckpt.core.problem import Problem
from xckpt.engine.ranks.load_plans import LoadPlanCodec, answer_to
from xckpt.errors import PlanError


@given(
    st.lists(read_items(), max_size=4), plain, plain, st.lists(names, unique=True),
    st.lists(names).map(tuple), st.lists(names, unique=True),
)  # fmt: skip
def test_a_load_plan_survives_the_way(items, storage_data, planner_data, wanted, problems, stored):
    known = [name for name in stored if name in wanted]
    asked = (*known, *(name for name in wanted if name not in known))
    plan = LoadPlan(items, storage_data, planner_data, asked, problems)
    data = LoadPlanCodec(stored).encode(plan)
    back = LoadPlanCodec(stored).decode(data)
    # A coordinator hands plans on as they are.
    assert LoadPlanCodec(stored).encode(back) == data
    assert list(back.items) == items and len(back.items) == len(items)
    # The numbers are hints, which equality leaves out.
    for one, other in zip(back.items, items, strict=True):
        assert one.dest_index.index == other.dest_index.index
        assert one.storage_index.index == other.storage_index.index
    assert replace(back, items=items) == plan
    assert LoadPlanCodec(stored).encode(back) == data


@given(st.lists(read_items(), max_size=4), plain, st.lists(names).map(tuple), st.booleans())
def test_a_rank_gets_back_the_items_that_a_planner_left_alone(items, data, left, changed):
    rank, coordinator = LoadPlanCodec(), LoadPlanCodec()
    coordinator.encode(LoadPlan([]))  # its own, which it does not mix up with others'
    came = coordinator.decode(rank.encode(LoadPlan(items, names=("w",) * 99)))
    share = replace(came, storage_data=data, left=left)
    if changed:
        share = replace(share, items=items[1:])
    sent = coordinator.encode(answer_to(came, share))
    back = rank.decode(sent)
    assert list(back.items) == items[changed:]
    assert (back.storage_data, back.left, back.names) == (data, left, came.names)
    if not changed:
        assert sent == coordinator.encode(answer_to(came, replace(share, names=("v",) * 9)))


def test_an_answer_without_new_items_is_short():
    items = ReadItems([f"layer.{n}" for n in range(100)], [(4, 2)] * 100)
    rank, coordinator = LoadPlanCodec(), LoadPlanCodec()
    sent = rank.encode(LoadPlan(items))
    assert len(sent) < 1500
    assert len(coordinator.encode(answer_to(*[coordinator.decode(sent)] * 2))) < 20


def test_what_ranks_say_alike_is_short_and_decoded_once():
    leaves = [f"layer.{n}" for n in range(800)]
    problems = tuple(Problem(n, kind="shape", text="(4,) stored, (8,) wanted") for n in leaves)
    plan = LoadPlan([], problems=problems, dtypes=dict.fromkeys(leaves, "bfloat16"))
    sent = [LoadPlanCodec(leaves).encode(plan) for _ in range(2)]
    coordinator = LoadPlanCodec(leaves)
    one, other = map(coordinator.decode, sent)
    assert (one.problems, one.dtypes) == (problems, plan.dtypes)
    assert max(map(len, sent)) < 12_000
    assert one.problems is other.problems and one.dtypes is other.dtypes
    assert merged_problems([one.problems, other.problems]) == list(problems)


def test_items_are_not_sent_to_a_planner_that_does_not_look_at_them():
    leaves = [f"layer.{n}" for n in range(800)]
    rank, coordinator = LoadPlanCodec(leaves), LoadPlanCodec(leaves)
    rank.sends_items = False
    plan = LoadPlan(ReadItems(leaves, [(4, 2)] * 800), names=(*leaves, "new"))
    sent = rank.encode(plan)
    assert len(sent) < 120
    came = coordinator.decode(sent)
    assert came.names == plan.names
    with pytest.raises(PlanError, match="give all ranks the same planner"):
        len(came.items)
    answer = coordinator.encode(answer_to(came, replace(came, left=("w",))))
    assert len(answer) < 20
    assert rank.decode(answer) == replace(plan, left=("w",))


def test_sent_items_are_added_as_lists_are():
    index = MetadataIndex("a")
    reads = [ReadItem(LoadItemType.BYTE_IO, index, (), index, (), ())]
    sent = LoadPlanCodec().decode(LoadPlanCodec().encode(LoadPlan(reads))).items
    assert [*sent, *reads] == sent + reads == reads + sent == reads * 2  # type: ignore[operator]
