"""Whether read items fill what is wanted exactly once, against counting element by element."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tilings import region
from xckpt.core.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from xckpt.core.plan.items import LoadItemType, ReadItem
from xckpt.core.plan.load_checks import source_problems, target_problems

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


def test_every_target_is_listed():
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
    assert (list(source_problems([item], metadata)) == []) == inside


def test_what_is_not_in_the_checkpoint():
    halves = [ChunkStorageMetadata((0,), (2,)), ChunkStorageMetadata((2,), (3,))]
    metadata = Metadata({"w": stored(*halves, size=(5,)), "step": BytesStorageMetadata("int")})

    def reads(
        index: MetadataIndex, lengths: tuple[int, ...] = (2,), kind: str = "TENSOR"
    ) -> list[str]:
        start = (0,) * len(lengths)
        item = ReadItem(LoadItemType[kind], index, start, index, start, lengths)
        return list(source_problems([item], metadata))

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
    assert reads(MetadataIndex("w"), (2, 1)) == [
        "w: an item reads a tensor of 1 dimensions, but its storage_offsets have 2 "
        "and its lengths 2"
    ]
    assert reads(MetadataIndex("v")) == ["v: an item reads it, but it is not in the checkpoint"]
    assert reads(MetadataIndex("step")) == [
        "step: an item of type TENSOR reads it, but it is a Python value"
    ]
    assert reads(MetadataIndex("w"), (), "BYTE_IO") == [
        "w: an item of type BYTE_IO reads it, but it is a tensor"
    ]


def read_all(size: tuple[int, ...], index: MetadataIndex, start: tuple[int, ...]) -> ReadItem:
    """An item that reads as many elements as the whole tensor has."""
    whole = MetadataIndex("w", (0,) * len(size), 0)
    return ReadItem(LoadItemType.TENSOR, whole, (0,) * len(size), index, start, size)


def test_an_item_as_large_as_its_tensor_is_held_to_the_same():
    """What most items do is seen quickly; nothing else may be taken for it."""
    whole = ChunkStorageMetadata((0, 0), (3, 2))
    halves = [ChunkStorageMetadata((0, 0), (2, 2)), ChunkStorageMetadata((2, 0), (1, 2))]
    one, two = stored(whole, size=(3, 2)), stored(*halves, size=(3, 2))
    nothing = stored(ChunkStorageMetadata((0, 0), (0, 2)), size=(0, 2))
    first = MetadataIndex("w")

    def problems(index: MetadataIndex, start: tuple[int, ...], tensor: TensorStorageMetadata):
        items = [read_all(tensor.size, index, start)]
        return list(source_problems(items, Metadata({"w": tensor})))

    assert problems(first, (0, 0), one) == problems(MetadataIndex("w", (0, 0), 0), (0, 0), one)
    assert problems(first, (0, 0), one) == []
    assert problems(MetadataIndex("w", None, 1), (0, 0), one) == ["w: an item reads array 1 of 1"]
    assert problems(MetadataIndex("w", (0, 1)), (0, 0), one) == [
        "w: an item reads the array at (0, 1), but number 0 is at (0, 0); "
        "storage_index must have the index of its array"
    ]
    for start in ((), (0,), (0, 0, 0)):
        assert problems(first, start, one) == [
            "w: an item reads a tensor of 2 dimensions, but its storage_offsets "
            f"have {len(start)} and its lengths 2"
        ]
    assert problems(first, (0, 1), one) == [
        "w: an item reads [0, 3) x [1, 3), which is not in [0, 3) x [0, 2)"
    ]
    assert problems(first, (0, 0), two) == [
        "w: an item reads [0, 3) x [0, 2), which is not in [0, 2) x [0, 2)"
    ]
    assert problems(first, (0, 0), nothing) == [
        "w: an item reads [0, 0) x [0, 2), which is not in [0, 0) x [0, 2)"
    ]


def test_an_item_as_large_as_its_target_is_held_to_the_same():
    everything = BOX.sizes
    wrong = "w: an item fills a box of 2 dimensions, but its "
    missing = "w: [5, 8) x [2, 4) is wanted, but no item reads it"

    def problems(*items: ReadItem) -> list[str]:
        return target_problems(items, {"w": [BOX]})

    assert problems(fill("w", 0, ((0, 0), everything))) == []
    for number in (1, None, -1):
        assert problems(fill("w", number, ((0, 0), everything))) == [
            missing,
            f"w: an item fills box {number}, but 1 are wanted, numbered from 0",
        ]
    assert problems(fill("w", 0, ((), everything))) == [
        f"{wrong}dest_offsets have 0 and its lengths 2"
    ]
    assert problems(fill("w", 0, ((0, 0), (3,)))) == [
        f"{wrong}dest_offsets have 2 and its lengths 1"
    ]
    assert problems(fill("w", 0, ((1, 0), everything))) == [
        "w: an item fills [6, 9) x [2, 4), beyond the box [5, 8) x [2, 4) wanted"
    ]
    assert problems(*[fill("w", 0, ((0, 0), everything))] * 2) == [
        "w: [5, 8) x [2, 4) is filled by two items"
    ]
