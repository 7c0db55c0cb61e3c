"""Whether read items fill what is wanted exactly once, against counting element by element."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.core.tilings import region
from xckpt.core.load_checks import source_problems, target_problems
from xckpt.core.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from xckpt.core.plan import LoadItemType, ReadItem

BOX = ChunkStorageMetadata((5, 2), (3, 2))
Region = tuple[tuple[int, ...], tuple[int, ...]]

regions = st.lists(
    st.tuples(
        st.tuples(st.integers(-1, 3), st.integers(-1, 2)),
        st.tuples(st.integers(0, 4), st.integers(0, 3)),
    ),
    max_size=4,
)
tilings = st.sampled_from(
    [
        [((0, 0), (3, 2))],
        [((0, 0), (1, 2)), ((1, 0), (2, 2))],
        [((0, 0), (3, 1)), ((0, 1), (1, 1)), ((1, 1), (2, 1))],
    ]
)


def fill(name: str, number: int | None, place: Region) -> ReadItem:
    offsets, lengths = place
    index = MetadataIndex(name, BOX.offsets, number)
    return ReadItem(LoadItemType.TENSOR, index, offsets, index, offsets, lengths)


@given(regions | tilings | st.builds(lambda a, b: a + b, tilings, regions))
def test_each_element_is_to_be_filled_once(places: list[Region]):
    times = np.zeros(BOX.sizes, int)
    inside = True
    for offsets, lengths in places:
        if all(lengths):
            ends = [a + n for a, n in zip(offsets, lengths, strict=True)]
            fits = min(offsets) >= 0 and ends[0] <= BOX.sizes[0] and ends[1] <= BOX.sizes[1]
            inside = inside and fits
            if fits:
                times[region((offsets, lengths))] += 1
    found = target_problems([fill("w", 0, place) for place in places], {"w": [BOX]})
    assert (found == []) == (inside and bool((times == 1).all()))
    assert all(text.startswith("w: ") for text in found)


def test_the_range_is_that_of_the_tensor():
    items = [fill("w", 0, ((0, 0), (2, 2)))]
    assert target_problems(items, {"w": [BOX]}) == [
        "w: [7, 8) x [2, 4) is wanted, but no item reads it"
    ]


def test_every_target_is_told():
    value = MetadataIndex("step")
    items = [ReadItem(LoadItemType.BYTE_IO, value, (), value, (), ())] * 2
    wanted = {"w": [BOX, BOX], "step": None, "note": None, "empty": []}
    items += [fill("w", 1, ((0, 0), (3, 2))), fill("w", 2, ((0, 0), (3, 2)))]
    # Leaves that the default planner knows nothing of are a planner's own affair.
    items += [fill("own", 0, ((0, 0), (3, 2)))]
    assert target_problems(items, wanted) == [
        "w: [5, 8) x [2, 4) is wanted, but no item reads it",
        "w: an item fills box 2, but 2 are wanted, numbered from 0",
        "step: 2 items read it",
        "note: wanted, but no item reads it",
    ]


def test_boxes_without_elements_need_no_item():
    empty = ChunkStorageMetadata((0, 0), (0, 4))
    scalar = ChunkStorageMetadata((), ())
    assert target_problems([], {"w": [empty]}) == []
    assert target_problems([], {"w": [scalar]}) == ["w: the scalar is wanted, but no item reads it"]
    assert target_problems([fill("w", 0, ((), ()))], {"w": [scalar]}) == []


def stored(*boxes: ChunkStorageMetadata, size: tuple[int, ...]) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties("int8"), size, boxes)


@given(
    st.tuples(st.integers(-1, 4), st.integers(-1, 3)),
    st.tuples(st.integers(0, 4), st.integers(0, 3)),
)
def test_an_item_lies_in_its_array(start, lengths):
    whole = ChunkStorageMetadata((0, 0), (3, 2))
    metadata = Metadata({"w": stored(whole, size=(3, 2))})
    ends = [a + n for a, n in zip(start, lengths, strict=True)]
    inside = min(start) >= 0 and all(lengths) and ends[0] <= 3 and ends[1] <= 2
    index = MetadataIndex("w", (0, 0), 0)
    item = ReadItem(LoadItemType.TENSOR, index, start, index, start, lengths)
    assert (source_problems([item], metadata) == []) == inside


def test_what_is_not_in_the_checkpoint():
    halves = [ChunkStorageMetadata((0,), (2,)), ChunkStorageMetadata((2,), (3,))]
    metadata = Metadata({"w": stored(*halves, size=(5,)), "step": BytesStorageMetadata("int")})

    def reads(
        index: MetadataIndex, lengths: tuple[int, ...] = (2,), kind: str = "TENSOR"
    ) -> list[str]:
        start = (0,) * len(lengths)
        item = ReadItem(LoadItemType[kind], index, start, index, start, lengths)
        return source_problems([item], metadata)

    assert reads(MetadataIndex("w", (2,), 1), (3,)) == reads(MetadataIndex("w")) == []
    assert reads(MetadataIndex("step"), (), "BYTE_IO") == []
    assert reads(MetadataIndex("w", (2,), 1), (4,)) == [
        "w: an item reads [2, 6), which is not in [2, 5)"
    ]
    # Without the number of its array an item would read another.
    assert reads(MetadataIndex("w", (2,))) == [
        "w: an item reads the array at (2,), but number 0 is at (0,); "
        "storage_index must have the index of its array"
    ]
    assert reads(MetadataIndex("w", None, 2)) == ["w: an item reads array 2 of 2"]
    assert reads(MetadataIndex("w"), (2, 1)) == ["w: an item of 2 dimensions reads a tensor of 1"]
    assert reads(MetadataIndex("v")) == ["v: an item reads it, but it is not in the checkpoint"]
    assert reads(MetadataIndex("step")) == [
        "step: an item of type TENSOR reads it, but it is a Python value"
    ]
    assert reads(MetadataIndex("w"), (), "BYTE_IO") == [
        "w: an item of type BYTE_IO reads it, but it is a tensor"
    ]
