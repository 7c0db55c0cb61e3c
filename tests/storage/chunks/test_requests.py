"""Which chunks are read, and where their parts go: NumPy's slicing is the oracle."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from xckpt.core.geometry.box import Box
from xckpt.core.manifest.entries import Manifest, TensorEntry
from xckpt.core.manifest.stored_arrays import StoredArrays
from xckpt.storage.chunks.requests import UNPACKED, ChunkRequests


@st.composite
def wanted(draw: st.DrawFn) -> tuple[Manifest, list[tuple[int, Box | None]]]:
    """A manifest, and boxes of its leaves; None for all of a leaf of one chunk."""
    leaves: list[TensorEntry] = []
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 7), max_size=2)))
        chunk = tuple(draw(st.integers(1, size)) for size in shape)
        leaves.append(TensorEntry(f"w{number}", "int16", shape, chunk))
    boxes: list[tuple[int, Box | None]] = []
    for _ in range(draw(st.integers(0, 6))):
        number = draw(st.integers(0, len(leaves) - 1))
        shape = leaves[number].shape
        low = tuple(draw(st.integers(0, size - 1)) for size in shape)
        ends = (draw(st.integers(at + 1, size)) for at, size in zip(low, shape, strict=True))
        box = Box(low, tuple(end - at for at, end in zip(low, ends, strict=True)))
        boxes.append((number, None if shape == leaves[number].chunk else box))
    return Manifest(tuple(leaves), "", pack_bytes=draw(st.sampled_from([0, 8]))), boxes


@given(wanted())
def test_the_parts_of_all_chunks_are_what_is_wanted(
    case: tuple[Manifest, list[tuple[int, Box | None]]],
) -> None:
    manifest, boxes = case
    stored = StoredArrays(manifest)
    requests = ChunkRequests(stored=stored)
    expected: list[NDArray[np.int64]] = []
    whole = {
        n: 1 + np.arange(max(1, int(np.prod(leaf.shape)))).reshape(leaf.shape)
        for n, leaf in enumerate(manifest.leaves)
        if isinstance(leaf, TensorEntry)
    }
    for number, box in boxes:
        (array,) = stored.at(number)
        if box is None:
            requests.add_whole(number)
        else:
            requests.add(array, box)
        expected.append(whole[number] if box is None else whole[number][box.slices()])
    filled = [np.zeros_like(each) for each in expected]
    places = requests.places.tolist()
    for row, (number, request) in enumerate(requests.items()):
        chunk = request.chunk
        assert number == chunk.array.first + chunk.number == requests.numbers[row]
        assert request.nbytes == requests.nbytes[row]
        place = chunk.array.place
        assert places[row] == (UNPACKED if place is None else place + chunk.number)
        data = whole[stored.numbers[chunk.array.leaf]][chunk.box.slices()]
        for part in request.parts:
            into = filled[part.destination][(*part.region, ...)]
            into += data if part.box is None else data[part.box.slices()]
        if requests.alone[row] >= 0:
            assert [part.destination for part in request.parts] == [requests.alone[row]]
            assert request.parts[0].box is None
    for got, want in zip(filled, expected, strict=True):
        np.testing.assert_array_equal(got, want)
    assert {array.leaf for array in requests.unpacked} == {
        each.chunk.array.leaf for each in requests.values() if each.chunk.array.place is None
    }
