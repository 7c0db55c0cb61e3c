"""Strategies of plans: items to write, items to read, and what planners may put beside them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from xckpt.core.metadata import ChunkStorageMetadata, MetadataIndex, Sharding, TensorProperties
from xckpt.core.plan.items import LoadItemType, ReadItem, TensorWriteData, WriteItem, WriteItemType

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
