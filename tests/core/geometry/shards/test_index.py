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
    crc32c,
    index_bytes,
    shard_index,
)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"", 0),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_the_checksum_is_that_of_rfc_3720(data, value):
    assert crc32c(data) == value


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


def _sealed(entries):
    content = np.ascontiguousarray(entries, "<u8").tobytes()
    return content + crc32c(content).to_bytes(4, "little")


@given(shards())
def test_chunks_lie_back_to_back(about):
    sizes, shard, chunk, item = about
    index, nbytes = shard_index(*about), prod(chunk) * item
    assert (
        len(index) == index_bytes(shard, chunk)
        and _sealed(np.frombuffer(index[:-4], "<u8")) == index
    )
    cells = _cells(sizes, chunk)
    starts = [chunk_start(index, cell, *about, end=len(cells) * nbytes) for cell in cells]
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
        assert chunk_start(_sealed(entries), cell, *about, end=end) == place * (nbytes + gap)


ABOUT = (4, 8), (4, 8), (2, 4), 1


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([(0, 8), (4, 8), (16, 8), (24, 8)], "overlap"),
        ([(0, 8), (0, 8), (16, 8), (24, 8)], "overlap"),
        ([(0, 8), (8, 4), (16, 8), (24, 8)], "no chunk of it"),
        ([(0, 8), (8, 8), (16, 8), (25, 8)], "no chunk of it"),
        ([(0, 8), (8, 8), (16, 8), (MISSING - 3, 8)], "no chunk of it"),
        ([(MISSING, MISSING), (8, 8), (16, 8), (24, 8)], "missing"),
        ([(0, MISSING), (8, 8), (16, 8), (24, 8)], "no chunk of it"),
    ],
)
def test_a_wrong_index_is_refused(entries, says):
    found = chunk_start(_sealed(np.array(entries, np.uint64)), (0, 0), *ABOUT, end=32)
    assert isinstance(found, str) and says in found


@given(st.integers(0, 8 * 68 - 1))
def test_a_flipped_bit_is_noticed(bit):
    index = bytearray(shard_index(*ABOUT))
    index[bit // 8] ^= 1 << bit % 8
    found = chunk_start(bytes(index), (1, 0), *ABOUT, end=32)
    assert found == "the shard's index is damaged"
