"""Orders for pieces: over the wire they name the pieces that a look at each would find."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from xckpt.core.geometry.box import Block, Box, Boxes
from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.manifest.entries import TensorEntry, leaf_arrays
from xckpt.core.manifest.pieces import Pieces
from xckpt.core.plan.items import LeafRow, SavePlan, WriteItems
from xckpt.core.storage import BriefData
from xckpt.engine.ranks.wire import SavePlanCodec
from xckpt.storage.chunks import piece_orders
from xckpt.storage.chunks.columns import received
from xckpt.storage.chunks.orders import WriteOrders
from xckpt.storage.chunks.piece_orders import orders_in_columns, with_pieces
from xckpt.storage.location import Location

WHERE = Location.parse("memory://orders-of-pieces")
REGULAR = ZarrArray("even", 0, "float32", (0, 0), (4, 4), (2, 4))


def rows(chance: random.Random, size: int) -> list[tuple[int, int]]:
    """Blocks of rows, of any heights: (first, count)."""
    ends = sorted({size, *(chance.randrange(1, size) for _ in range(chance.randrange(9)))})
    return [(start, end - start) for start, end in zip([0, *ends], ends, strict=False)]


def boxes(blocks: list[tuple[int, int]]) -> Boxes:
    return Boxes.of([((start, 0), (count, 4)) for start, count in blocks], rank=2)


def cut(chance: random.Random, size: int) -> Pieces:
    return Pieces.listed(
        ((start, 0), (count, 4), (chance.randint(1, count), chance.randint(1, 4)))
        for start, count in rows(chance, size)
    )


def brute(entry: TensorEntry, first: int, held: Boxes) -> list[ZarrArray]:
    """The pieces that a rank's boxes of a leaf meet."""
    return [
        array
        for array in leaf_arrays(entry, first)
        if any(array.box.meets(box) is not None for box in held)
    ]


@given(st.randoms(use_true_random=False))
@examples(40, 1000)
def test_each_rank_learns_of_the_pieces_that_it_writes(chance: random.Random) -> None:
    cuts = [(size, cut(chance, size)) for size in (20, 20, 33)]
    entries, firsts = {}, {}
    first = REGULAR.count
    for number in range(chance.randrange(1, 8)):
        size, pieces = chance.choice(cuts)
        name = f"w{number}"
        entries[name] = TensorEntry(name, "float32", (size, 4), pieces=pieces)
        firsts[name] = pieces, first
        first += pieces.chunks
    plans: list[SavePlan] = []
    for _ in range(chance.randint(2, 5)):
        names = chance.sample([*entries], chance.randint(0, len(entries)))
        table = [LeafRow("even", dtype="float32", shape=(4, 4), sharded=True)]
        table += [LeafRow(n, dtype="float32", shape=entries[n].shape, sharded=True) for n in names]
        held = [
            (number, boxes(chance.sample(rows(chance, row.shape[0]), 1)))
            for number, row in enumerate(table)
        ]
        chance.shuffle(held)
        plans.append(SavePlan(WriteItems(tuple(table), [Block.of(held)])))
    common = WriteOrders(WHERE, (), (REGULAR,), draft=b"draft")
    codec = SavePlanCodec()
    for plan, orders in zip(plans, orders_in_columns(plans, common, firsts), strict=True):
        sent = codec.encode(SavePlan(plan.items, orders))
        data = codec.decode(sent).storage_data
        assert isinstance(data, BriefData)
        found = received(data)
        assert (found.location, found.draft) == (WHERE, b"draft")
        expected = [REGULAR]
        items = WriteItems.of(plan.items)
        for leaf in range(1, len(items.table)):
            name, held = items.table[leaf].name, items.blocks[0]
            own = held.boxes.take(held.leaf == leaf)
            expected += brute(entries[name], firsts[name][1], own)
        assert Counter(found.arrays) == Counter(expected)
        assert Counter(with_pieces(plan, common, firsts).arrays) == Counter(expected)


def test_boxes_of_all_ranks_are_looked_up_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One search a cut, however many ranks and leaves there are."""
    searches: list[int] = []
    search = piece_orders.intersect

    def counted(a: Boxes, b: Boxes) -> object:
        searches.append(len(a))
        return search(a, b)

    monkeypatch.setattr(piece_orders, "intersect", counted)
    starts = np.arange(64, dtype=np.int64)
    pieces = Pieces.listed(((n,), (1,), (1,)) for n in starts.tolist())
    names = [f"w{number}" for number in range(50)]
    table = tuple(LeafRow(name, dtype="int8", shape=(64,), sharded=True) for name in names)
    kinds = np.zeros(len(names), np.int32)
    plans = [
        SavePlan(WriteItems(table, [Block.of([(0, Boxes.of([((rank,), (1,))]))])], kinds))
        for rank in range(64)
    ]
    cuts = {name: (pieces, 64 * number) for number, name in enumerate(names)}
    given = orders_in_columns(plans, WriteOrders(WHERE, (), ()), cuts)
    assert searches == [64]
    assert [[len(some.pieces) for some in orders.pieces] for orders in given] == [[1]] * 64
    assert given[3].pieces[0].pieces.grid.arrays[0] == Box((3,), (1,))
