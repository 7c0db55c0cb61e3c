"""Read items in columns: to their user a list of items."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import names, read_items
from xckpt.core.plan.items import LoadItemType, ReadItem
from xckpt.core.plan.reads.items import ReadItems, Row

shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)
rows = st.lists(st.tuples(names, st.none() | shapes | read_items()), max_size=6)


def columns(pairs: list[tuple[str, Row]]) -> ReadItems:
    return ReadItems([name for name, _ in pairs], [row for _, row in pairs])


@given(rows)
def test_columns_are_a_sequence_of_items(pairs: list[tuple[str, Row]]) -> None:
    items = columns(pairs)
    listed = list(items)
    assert items == listed == [items[number] for number in range(len(items))] == items[:]
    assert ReadItems.of(listed) == items == ReadItems.of(items)
    assert items + listed == listed + items == [*listed, *listed]
    assert items != [*listed, *listed[:1], *listed[:1]] or not listed


@given(rows)
def test_each_item_reads_a_tensor_or_a_value(pairs: list[tuple[str, Row]]) -> None:
    items = columns(pairs)
    tensors, values = list(items.tensors()), list(items.values())
    assert tensors == [item for item in items if item.type is LoadItemType.TENSOR]
    assert values == [item for item in items if item.type is LoadItemType.BYTE_IO]


@given(shapes)
def test_a_whole_leaf_is_read_from_its_first_element_on(shape: tuple[int, ...]) -> None:
    (item,) = ReadItems(["w"], [shape])
    assert item.dest_offsets == item.storage_offsets == (0,) * len(shape)
    assert (item.lengths, item.dest_index.index, item.storage_index.index) == (shape, 0, 0)


@given(rows)
def test_a_leaf_may_have_another_name_in_the_checkpoint(pairs: list[tuple[str, Row]]) -> None:
    items = columns(pairs)

    def renamed(item: ReadItem) -> ReadItem:
        return replace(item, storage_index=replace(item.storage_index, fqn="stored"))

    wanted = [renamed(item) for item in items]
    assert items.renamed(dict.fromkeys(items.names, "stored")) == wanted
    assert items.renamed({}) == items
