"""Items and columns are two views of one plan; plans travel as bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from xckpt.core.metadata import ChunkStorageMetadata, MetadataIndex, Sharding, TensorProperties
from xckpt.core.plan.items import (
    LeafTable,
    LoadItemType,
    LoadPlan,
    PlanCodec,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItems,
    WriteItemType,
    decode_load_plan,
    decode_plan,
    encode_load_plan,
    encode_plan,
)

names = st.text("ab/%0", max_size=4)
shardings = st.sampled_from(
    [
        None,
        Sharding(axes=(("dp", 2), ("tp", 4)), placements=("Shard(0)", "Replicate()")),
        Sharding(axes=(("x", 8),), spec=(("x",), ())),
    ]
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


def vectors(rank: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[st.integers(0, 1 << 40)] * rank)


@st.composite
def leaf_items(draw: st.DrawFn, name: str) -> list[WriteItem]:
    """The items of one leaf on one rank: a value, or boxes that share their properties."""
    if draw(st.booleans()):
        kind = draw(st.sampled_from(["int", "str", "opaque"]))
        return [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO, kind=kind)]
    rank = draw(st.integers(0, 3))
    data = TensorWriteData(
        ChunkStorageMetadata((), ()),
        TensorProperties(draw(st.sampled_from(["float32", "int4", "bool"]))),
        draw(vectors(rank)),
        draw(shardings),
        draw(st.sampled_from(["", "prng_key:threefry2x32"])),
    )
    kind = draw(st.sampled_from([WriteItemType.SHARD, WriteItemType.TENSOR]))
    chunks = [
        ChunkStorageMetadata(draw(vectors(rank)), draw(vectors(rank)))
        for _ in range(draw(st.integers(1, 3)))
    ]
    return [
        WriteItem(MetadataIndex(name, chunk.offsets), kind, replace(data, chunk=chunk))
        for chunk in chunks
    ]


@st.composite
def item_lists(draw: st.DrawFn) -> list[WriteItem]:
    distinct = draw(st.lists(names, unique=True, max_size=5))
    return draw(st.permutations([item for name in distinct for item in draw(leaf_items(name))]))


def rank_of(item: WriteItem) -> int:
    return len(item.tensor_data.size) if item.tensor_data else 0


@given(item_lists())
def test_columns_hold_the_items_they_were_made_of(items):
    columns = WriteItems.of(items)
    found = list(columns)
    assert len(columns) == len(items)
    # Leaf by leaf, as the leaves came, and each leaf's items as they came.
    leaves = list(dict.fromkeys(item.index.fqn for item in items))
    assert [i.index.fqn for i in found] == sorted((i.index.fqn for i in items), key=leaves.index)
    for leaf, rank in product(leaves, range(4)):
        mine = [i for i in items if (i.index.fqn, rank_of(i)) == (leaf, rank)]
        assert [i for i in found if (i.index.fqn, rank_of(i)) == (leaf, rank)] == mine
    assert WriteItems.of(found) == columns and WriteItems.of(columns) is columns


@given(item_lists())
def test_columns_are_a_sequence(items):
    columns = WriteItems.of(items)
    found = list(columns)
    for index in range(-len(found), len(found)):
        assert columns[index] == found[index]
    assert columns[1:] == found[1:] and columns[::-2] == found[::-2]
    for index in (len(found), -len(found) - 1):
        with pytest.raises(IndexError):
            columns[index]


@given(item_lists(), plain, plain, st.dictionaries(names, st.sampled_from(["list", "tuple"])))
@example([], None, None, {})
def test_a_save_plan_survives_the_way(items, storage_data, planner_data, containers):
    plan = SavePlan(items, storage_data, planner_data, containers)
    back = decode_plan(encode_plan(plan))
    assert isinstance(back.items, WriteItems) and back.items == WriteItems.of(items)
    assert (back.storage_data, back.planner_data) == (storage_data, planner_data)
    assert back.containers == containers
    assert encode_plan(back) == encode_plan(plan)


def test_a_codec_keeps_plans_apart():
    """It remembers what it has encoded, by identity: equal and short-lived parts must not mix."""
    codec = PlanCodec()
    for number in range(300):
        plan = SavePlan([], storage_data={"rank": number})
        assert codec.decode(codec.encode(plan)).storage_data == {"rank": number}


def test_a_codec_decodes_a_shared_table_once():
    item = WriteItem(MetadataIndex("step"), WriteItemType.BYTE_IO, kind="int")
    codec = PlanCodec()
    one, other = (codec.decode(codec.encode(SavePlan([item]))).items for _ in range(2))
    assert isinstance(one, WriteItems) and isinstance(other, WriteItems)
    assert one.table is other.table and one.table.names == ("step",)


def test_data_that_messagepack_lacks_is_a_type_error():
    for plan in (SavePlan([], planner_data=object()), SavePlan([], storage_data=object())):
        with pytest.raises(TypeError):
            encode_plan(plan)


@st.composite
def read_items(draw: st.DrawFn) -> ReadItem:
    if draw(st.booleans()):
        index = MetadataIndex(draw(names))
        return ReadItem(LoadItemType.BYTE_IO, index, (), index, (), ())
    rank = draw(st.integers(0, 3))
    number = st.one_of(st.none(), st.integers(0, 99))
    return ReadItem(
        LoadItemType.TENSOR,
        MetadataIndex(draw(names), draw(vectors(rank)), draw(number)),
        draw(vectors(rank)),
        MetadataIndex(draw(names), draw(vectors(rank)), draw(number)),
        draw(vectors(rank)),
        draw(vectors(rank)),
    )


@given(
    st.lists(read_items(), max_size=4), plain, plain, st.lists(names).map(tuple),
    st.lists(names).map(tuple),
)  # fmt: skip
def test_a_load_plan_survives_the_way(items, storage_data, planner_data, wanted, problems):
    plan = LoadPlan(items, storage_data, planner_data, wanted, problems)
    data = encode_load_plan(plan)
    back = decode_load_plan(data)
    # A coordinator hands plans on as they are.
    assert encode_load_plan(back) == data
    assert list(back.items) == items and len(back.items) == len(items)
    # The numbers are hints, which equality leaves out.
    for one, other in zip(back.items, items, strict=True):
        assert one.dest_index.index == other.dest_index.index
        assert one.storage_index.index == other.storage_index.index
    assert replace(back, items=items) == plan
    assert encode_load_plan(back) == data


def test_tensor_storage_size_counts_the_bytes_of_the_chunk():
    """Not of the whole tensor, and 0 where the chunk is empty."""
    data = TensorWriteData(
        ChunkStorageMetadata((0, 4), (3, 4)), TensorProperties("bfloat16"), (3, 8)
    )
    assert (
        WriteItem(MetadataIndex("w", (0, 4)), WriteItemType.SHARD, data).tensor_storage_size() == 24
    )
    for sizes, count in (((0, 4), 0), ((3, 8), 48)):
        whole = replace(data, chunk=ChunkStorageMetadata((0, 0), sizes))
        item = WriteItem(MetadataIndex("w"), WriteItemType.TENSOR, whole)
        assert item.tensor_storage_size() == count
    scalar = TensorWriteData(ChunkStorageMetadata((), ()), TensorProperties("float64"), ())
    item = WriteItem(MetadataIndex("x", ()), WriteItemType.TENSOR, scalar)
    assert item.tensor_storage_size() == 8
    assert WriteItem(MetadataIndex("s"), WriteItemType.BYTE_IO).tensor_storage_size() is None


def test_a_table_tells_tensors_from_values():
    table = LeafTable(("w", "step"), ("", "int"))
    assert table.is_tensor(0) and not table.is_tensor(1)


def test_items_are_added_as_lists_are():
    items = [WriteItem(MetadataIndex(n), WriteItemType.BYTE_IO, kind="int") for n in "abc"]
    columns = WriteItems.of(items[:2])
    assert columns + items[2:] == items and items[2:] + columns == [items[2], *items[:2]]
    assert columns + columns == items[:2] * 2
    index = MetadataIndex("a")
    reads = [ReadItem(LoadItemType.BYTE_IO, index, (), index, (), ())]
    sent = decode_load_plan(encode_load_plan(LoadPlan(reads))).items
    assert [*sent, *reads] == sent + reads == reads + sent == reads * 2  # type: ignore[operator]


def test_columns_are_compared_as_items():
    item = WriteItem(MetadataIndex("step"), WriteItemType.BYTE_IO, kind="int")
    columns = WriteItems.of([item])
    assert columns == [item] and columns != [] and columns != 3
    assert columns.blocks[0].leaf.dtype == np.int32
