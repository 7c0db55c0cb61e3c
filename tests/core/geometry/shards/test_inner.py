"""Chunks inside a shard: they divide it, are not tiny, and suit readers that cut otherwise."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tilings import chunk_edges
from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.grid import GridOptions, choose_grid
from xckpt.core.geometry.shards.inner import (
    LEAST_CHUNK,
    LEAST_ROW,
    LEAST_SHARD,
    MOST_CHUNKS,
    inner_chunk,
)

sides = st.lists(
    st.sampled_from([1, 2, 3, 24, 64, 100, 512, 1000, 4099, 8192]), min_size=1, max_size=4
)
readers = st.sampled_from([1, 2, 3, 8, 64, 1 << 20])
items = st.sampled_from([1, 2, 4, 16])


@given(sides, st.integers(1, 8), items, readers)
def test_chunks_divide_the_shard_and_are_not_tiny(shard, times, item, parts):
    shape = [size * times for size in shard]
    chunk = inner_chunk(shape, tuple(shard), item, parts)
    assert all(size % step == 0 for size, step in zip(shard, chunk, strict=True))
    count, nbytes = prod(shard) // prod(chunk), prod(chunk) * item
    assert count <= MOST_CHUNKS
    if chunk != tuple(shard):
        assert nbytes >= LEAST_CHUNK and prod(shard) * item > LEAST_SHARD
        assert sum(size > 1 for size in shape) > 1
        last = max(d for d, size in enumerate(shard) if size > 1)
        assert chunk[last] == shard[last] or chunk[last] * item >= LEAST_ROW


@given(sides, st.integers(1, 8), items)
def test_more_readers_never_read_more(shard, times, item):
    """The largest part of a dimension that a chunk takes does not grow with the readers."""
    shape = [size * times for size in shard]
    counts = [prod(inner_chunk(shape, tuple(shard), item, parts)) for parts in (1, 2, 8, 64)]
    assert counts == sorted(counts, reverse=True)


@given(sides, items)
def test_one_reader_needs_no_smaller_chunks(shard, item):
    assert inner_chunk(shard, tuple(shard), item, 1) == tuple(shard)


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((1 << 24,), 8),  # a vector
        ((64, 512), 4),  # small shards
        ((1, 1 << 24), 1),  # a vector by another name
    ],
)
def test_what_stays_as_it_is(shape, boxes):
    edges = chunk_edges(shape[0], boxes)
    pairs = [((a, *(0,) * (len(shape) - 1)), (b - a, *shape[1:])) for a, b in pairwise(edges)]
    before, after = (
        choose_grid(shape, 4, Boxes.of(pairs), GridOptions(readers=n)) for n in (0, 64)
    )
    assert before == after and after.shards is None


def test_ragged_boxes_stay_pieces_without_shards():
    pairs = [((0, 0), (701, 4096)), ((701, 0), (323, 4096)), ((1024, 0), (1024, 4096))]
    grid = choose_grid((2048, 4096), 4, Boxes.of(pairs), GridOptions(readers=8))
    assert len(grid.arrays) == 3 and grid.shards is None


@pytest.mark.parametrize(("shard_bytes", "chunk"), [(0, (256, 1024)), (16 << 20, (512, 1024))])
def test_objects_and_writers_are_those_without_readers(shard_bytes, chunk):
    """The shard is what was the chunk, or the shard, before."""
    boxes = Boxes.of([((row * 512, 0), (512, 8192)) for row in range(8)])
    before, after = (
        choose_grid((4096, 8192), 4, boxes, GridOptions(8 << 20, shard_bytes, readers=readers))
        for readers in (0, 8)
    )
    assert before.units.tolist() == after.units.tolist()
    assert after.shards is not None and after.chunks.tolist() == [list(chunk)]
