"""The index of a zarr shard: written as zarr has it, read in any order, refused if it is wrong."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.core.geometry.shards.index import (
    MISSING,
    chunk_start,
    index_bytes,
    shard_entries,
)


@st.composite
def shards(draw):
    """(sizes in the array, shard, chunk, item bytes)."""
    rank = draw(st.integers(1, 3))
    chunk = tuple(draw(st.integers(1, 4)) for _ in range(rank))
    shard = tuple(step * draw(st.integers(1, 3)) for step in chunk)
    sizes = tuple(draw(st.integers(1, size)) for size in shard)
    return sizes, shard, chunk, draw(st.sampled_from([1, 4]))


def _cells(sizes, chunk):
    return list(product(*(range(-(-n // c)) for n, c in zip(sizes, chunk, strict=True))))


@given(shards())
def test_chunks_lie_back_to_back(about):
    sizes, shard, chunk, item = about
    entries, nbytes = shard_entries(*about), prod(chunk) * item
    assert len(entries) + 4 == index_bytes(shard, chunk)
    cells = _cells(sizes, chunk)
    starts = [chunk_start(entries, cell, *about, end=len(cells) * nbytes) for cell in cells]
    assert starts == [number * nbytes for number in range(len(cells))]


@given(shards(), st.randoms(), st.integers(0, 5))
def test_any_order_and_gaps_are_read(about, draw, gap):
    sizes, shard, chunk, item = about
    nbytes, cells = prod(chunk) * item, _cells(sizes, chunk)
    order = draw.sample(range(len(cells)), len(cells))
    entries = np.full((*(n // c for n, c in zip(shard, chunk, strict=True)), 2), MISSING, np.uint64)
    for cell, place in zip(cells, order, strict=True):
        entries[cell] = place * (nbytes + gap), nbytes
    end = len(cells) * (nbytes + gap)
    for cell, place in zip(cells, order, strict=True):
        assert chunk_start(entries.tobytes(), cell, *about, end=end) == place * (nbytes + gap)


ABOUT = (4, 8), (4, 8), (2, 4), 1


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([(0, 8), (4, 8), (16, 8), (24, 8)], "overlap"),
        ([(0, 8), (0, 8), (16, 8), (24, 8)], "overlap"),
        ([(0, 8), (8, 4), (16, 8), (24, 8)], "not one of its chunks"),
        ([(0, 8), (8, 8), (16, 8), (25, 8)], "not one of its chunks"),
        ([(0, 8), (8, 8), (16, 8), (MISSING - 3, 8)], "not one of its chunks"),
        ([(MISSING, MISSING), (8, 8), (16, 8), (24, 8)], "missing"),
        ([(0, MISSING), (8, 8), (16, 8), (24, 8)], "not one of its chunks"),
    ],
)
def test_a_wrong_index_is_refused(entries, says):
    found = chunk_start(np.array(entries, np.uint64).tobytes(), (0, 0), *ABOUT, end=32)
    assert isinstance(found, str) and says in found
