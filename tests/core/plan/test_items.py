"""What an item says of itself; items and columns are two views of one plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given

from tests.support.plans import item_lists
from xckpt.core.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from xckpt.core.plan.items import TensorWriteData, WriteItem, WriteItems, WriteItemType


def test_an_item_knows_the_bytes_of_its_tensor_and_of_its_box():
    data = TensorWriteData(
        ChunkStorageMetadata((0, 4), (3, 4)), TensorProperties("bfloat16"), (3, 8)
    )
    for sizes, count in (((3, 4), 24), ((0, 4), 0), ((3, 8), 48)):
        part = replace(data, chunk=ChunkStorageMetadata((0, 0), sizes))
        item = WriteItem(MetadataIndex("w"), WriteItemType.SHARD, part)
        assert (item.tensor_storage_size(), item.box_bytes) == (48, count)
    scalar = TensorWriteData(ChunkStorageMetadata((), ()), TensorProperties("float64"), ())
    item = WriteItem(MetadataIndex("x", ()), WriteItemType.TENSOR, scalar)
    assert (item.tensor_storage_size(), item.box_bytes) == (8, 8)
    value = WriteItem(MetadataIndex("s"), WriteItemType.BYTE_IO)
    assert (value.tensor_storage_size(), value.box_bytes) == (None, 0)


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


def test_items_are_added_as_lists_are():
    items = [WriteItem(MetadataIndex(n), WriteItemType.BYTE_IO, kind="int") for n in "abc"]
    columns = WriteItems.of(items[:2])
    assert columns + items[2:] == items and items[2:] + columns == [items[2], *items[:2]]
    assert columns + columns == items[:2] * 2


def test_columns_are_compared_as_items():
    item = WriteItem(MetadataIndex("step"), WriteItemType.BYTE_IO, kind="int")
    columns = WriteItems.of([item])
    assert columns == [item] and columns != [] and columns != 3
    assert columns.blocks[0].leaf.dtype == np.int32


def test_an_item_by_its_number_sorts_the_columns_once(monkeypatch):
    items = [WriteItem(MetadataIndex(f"{n}"), WriteItemType.BYTE_IO, kind="int") for n in range(9)]
    columns, sorts = WriteItems.of(items), []
    argsort = np.argsort
    assert columns[0] == items[0]
    monkeypatch.setattr(np, "argsort", lambda *args, **kw: sorts.append(1) or argsort(*args, **kw))
    assert [columns[number] for number in range(len(columns))] == items
    assert not sorts


@given(item_lists())
def test_sizes_and_chosen_items_are_those_of_the_items(items):
    columns = WriteItems.of(items)
    listed = [columns[number] for number in range(len(columns))]
    sizes = [item.box_bytes for item in listed]
    if max(sizes, default=0) < 1 << 63:  # as of whatever has memory
        assert columns.sizes().tolist() == sizes
    numbers = np.arange(len(listed))[::-2]
    assert list(columns.chosen(numbers)) == [listed[number] for number in numbers.tolist()]
