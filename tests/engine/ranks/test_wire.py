"""Plans travel as bytes and come back as they were."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.plans import item_lists, names, plain
from xckpt.core.geometry.box import Block, Boxes
from xckpt.core.metadata import MetadataIndex
from xckpt.core.plan.items import (
    LeafRow,
    SavePlan,
    WriteItem,
    WriteItems,
    WriteItemType,
)
from xckpt.engine.ranks.wire import SavePlanCodec, narrow, widened


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


def test_rows_that_tables_of_ranks_share_are_one_object():
    names = [("a", f"rng/rank{rank}") for rank in range(2)]
    own = [SavePlan(WriteItems(tuple(LeafRow(n, "int") for n in each), [])) for each in names]
    codec = SavePlanCodec()
    for plan in own:
        codec.learn(SavePlanCodec().table_of(plan))
    one, other = codec.tables.values()
    assert one[0] is other[0] and one[1].name == "rng/rank0" and other[1].name == "rng/rank1"


def test_data_that_messagepack_lacks_is_a_type_error():
    endless: list[object] = []
    endless.append(endless)
    for data in (object(), 1 << 70, "\ud800", endless):
        for plan in (SavePlan([], planner_data=data), SavePlan([], storage_data=data)):
            with pytest.raises(TypeError, match="planner_data and storage_data must be"):
                encode_plan(plan)


@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1)))
@example([-1, 127])
@example([-1, 128])
@example([-129, 0])
def test_numbers_take_the_fewest_bytes_and_come_back(numbers: list[int]):
    data = narrow(np.array(numbers, np.int32))
    assert widened(data).tolist() == numbers
    width = next(
        w for w in (1, 2, 4) if all(-1 << 8 * w - 1 <= n < 1 << 8 * w - 1 for n in numbers)
    )
    assert len(data) == 1 + width * len(numbers)


def test_a_thousand_leaves_of_few_kinds_take_a_byte_each():
    rows = tuple(LeafRow(f"w{n}", dtype="int8", shape=(4,), sharded=True) for n in range(1000))
    kinds = np.arange(1000, dtype=np.int32) % 12
    blocks = [Block.of((kind, Boxes.whole((4,))) for kind in range(12))]
    data = encode_plan(SavePlan(WriteItems(rows, blocks, kinds)))
    assert len(data) < 1500
