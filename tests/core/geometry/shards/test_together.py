"""Chunks that one request brings have one number, and others do not."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.geometry.shards.together import together


@st.composite
def arrays_in_shards(draw: st.DrawFn) -> list[ZarrArray]:
    """Arrays one behind the other, some without shards; a shard may reach over the end."""
    found: list[ZarrArray] = []
    first = draw(st.integers(0, 5))
    for number in range(draw(st.integers(1, 3))):
        rank = draw(st.integers(1, 3))
        shape, chunk, inner = (
            tuple(draw(st.lists(st.integers(1, most), min_size=rank, max_size=rank)))
            for most in (9, 3, 3)
        )
        shard = tuple(c * n for c, n in zip(chunk, inner, strict=True))
        own = shard if draw(st.booleans()) else None
        dtype = draw(st.sampled_from(["int8", "float32"]))
        array = ZarrArray(f"w{number}", 0, dtype, (0,) * rank, shape, chunk, own, first)
        found.append(array)
        first += array.count
    return found


@given(arrays_in_shards(), st.integers(1, 64), st.data())
def test_chunks_of_one_run_have_the_number_of_one_of_them(
    arrays: list[ZarrArray], most: int, data: st.DataObject
) -> None:
    expected: dict[int, tuple[object, ...]] = {}
    """Chunk -> what it is read with, found cell by cell."""
    for array in arrays:
        counts = [-(-n // c) for n, c in zip(array.shape, array.chunk, strict=True)]
        inner = [u // c for u, c in zip(array.unit, array.chunk, strict=True)]
        nbytes = int(np.prod(array.chunk)) * np.dtype(array.dtype).itemsize
        for number, cell in enumerate(itertools.product(*map(range, counts))):
            place = 0
            for at, each in zip(cell, inner, strict=True):
                place = place * each + at % each
            offsets = tuple(at * c for at, c in zip(cell, array.chunk, strict=True))
            run = place // max(1, most // nbytes)
            alone = number if array.shard is None else None
            expected[array.first + number] = array.key(offsets), run, alone
    chunks = data.draw(st.lists(st.sampled_from(sorted(expected)), unique=True))
    sharded = [array for array in arrays if array.shard is not None]
    found = together(sharded, most)(np.array(chunks, np.int64)).tolist()
    assert set(found) <= set(chunks)
    pairs = zip(chunks, found, strict=True)
    for (one, first), (other, second) in itertools.combinations(pairs, 2):
        assert (first == second) == (expected[one] == expected[other])
