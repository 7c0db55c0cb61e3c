"""Plans travel as bytes and come back as they were."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.plans import item_lists, names, plain, read_items
from xckpt.core.metadata import MetadataIndex
from xckpt.core.plan.items import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    WriteItem,
    WriteItems,
    WriteItemType,
)
from xckpt.core.plan.reads.items import ReadItems
from xckpt.engine.ranks.wire import LoadPlanCodec, SavePlanCodec, answer_to


def encode_plan(plan: SavePlan) -> bytes:
    return SavePlanCodec().encode(plan)


def decode_plan(data: bytes, table: bytes) -> SavePlan:
    codec = SavePlanCodec()
    assert codec.table_name(data) not in codec.tables
    codec.learn(table)
    return codec.decode(data)


@given(item_lists(), plain, plain, st.dictionaries(names, st.sampled_from(["list", "tuple"])))
@example([], None, None, {})
def test_a_save_plan_survives_the_way(items, storage_data, planner_data, containers):
    plan = SavePlan(items, storage_data, planner_data, containers)
    back = decode_plan(encode_plan(plan), SavePlanCodec().table_of(plan))
    assert isinstance(back.items, WriteItems) and back.items == WriteItems.of(items)
    assert (back.storage_data, back.planner_data) == (storage_data, planner_data)
    assert back.containers == containers
    assert encode_plan(back) == encode_plan(plan)


def test_a_codec_keeps_plans_apart():
    """It remembers what it has encoded, by identity: equal and short-lived parts must not mix."""
    codec = SavePlanCodec()
    for number in range(300):
        plan = SavePlan([], storage_data={"rank": number})
        assert codec.decode(codec.encode(plan)).storage_data == {"rank": number}


def test_a_codec_decodes_a_shared_table_once():
    item = WriteItem(MetadataIndex("step"), WriteItemType.BYTE_IO, kind="int")
    codec = SavePlanCodec()
    one, other = (codec.decode(codec.encode(SavePlan([item]))).items for _ in range(2))
    assert isinstance(one, WriteItems) and isinstance(other, WriteItems)
    assert one.table is other.table and one.table[0].name == "step"


def test_data_that_messagepack_lacks_is_a_type_error():
    for plan in (SavePlan([], planner_data=object()), SavePlan([], storage_data=object())):
        with pytest.raises(TypeError):
            encode_plan(plan)


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
