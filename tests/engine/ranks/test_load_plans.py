"""Load plans travel as bytes and come back as they were; what a rank has itself is not sent."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import names, plain, read_items
from xckpt.core.metadata import MetadataIndex
from xckpt.core.plan.items import LoadItemType, LoadPlan, ReadItem
from xckpt.core.plan.reads.items import ReadItems
from xckpt.engine.ranks.load_plans import LoadPlanCodec, answer_to


@given(
    st.lists(read_items(), max_size=4), plain, plain, st.lists(names).map(tuple),
    st.lists(names).map(tuple),
)  # fmt: skip
def test_a_load_plan_survives_the_way(items, storage_data, planner_data, wanted, problems):
    plan = LoadPlan(items, storage_data, planner_data, wanted, problems)
    data = LoadPlanCodec().encode(plan)
    back = LoadPlanCodec().decode(data)
    # A coordinator hands plans on as they are.
    assert LoadPlanCodec().encode(back) == data
    assert list(back.items) == items and len(back.items) == len(items)
    # The numbers are hints, which equality leaves out.
    for one, other in zip(back.items, items, strict=True):
        assert one.dest_index.index == other.dest_index.index
        assert one.storage_index.index == other.storage_index.index
    assert replace(back, items=items) == plan
    assert LoadPlanCodec().encode(back) == data


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


def test_sent_items_are_added_as_lists_are():
    index = MetadataIndex("a")
    reads = [ReadItem(LoadItemType.BYTE_IO, index, (), index, (), ())]
    sent = LoadPlanCodec().decode(LoadPlanCodec().encode(LoadPlan(reads))).items
    assert [*sent, *reads] == sent + reads == reads + sent == reads * 2  # type: ignore[operator]
