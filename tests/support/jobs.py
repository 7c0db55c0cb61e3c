"""Strategies for whole jobs: some ranks save a state, others load it under another sharding.

1. A `Job` holds the global arrays, and for each leaf who has which boxes when saving (`have`) and
   who wants which when loading (`want`): tilings of every kind, with any replication, and besides
   boxes that have nothing to do with how the leaf was saved.
2. `state` and `like` are the trees of one rank. A rank without a box of a leaf does not name it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.sharded_arrays import cut, wish
from tests.support.tilings import Box, Shape, Tiling, holders, shapes, tilings
from xckpt.core.dtypes import DTYPES
from xckpt.options import LoadOptions, SaveOptions

Array = NDArray[np.generic]

_numbers = itertools.count()

ONE_BYTE_RANGES = {"bool": (0, 2), "int2": (-2, 2), "int4": (-8, 8), "float4_e2m1fn": (0, 7)}
"""Types of which not every bit pattern of their bytes is a value."""


def fresh_path() -> str:
    """Where nothing was saved before."""
    return f"memory://jobs/{next(_numbers)}"


def filled(shape: Shape, dtype: str, seed: int) -> Array:
    """An array of random bits: NaNs, infinities and negative zeros among them."""
    rng = np.random.default_rng(seed)
    target = DTYPES[dtype]
    if dtype in ONE_BYTE_RANGES:
        return rng.integers(*ONE_BYTE_RANGES[dtype], size=shape).astype(target)
    raw = rng.integers(0, 256, size=prod(shape) * target.itemsize, dtype=np.uint8)
    return raw.view(target).reshape(shape)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One global array: for each rank of the save, and of the load, its boxes."""

    array: Array
    have: list[Tiling]
    want: list[Tiling]


@dataclass(frozen=True, slots=True)
class Job:
    """A save on some ranks and a load on others."""

    leaves: dict[str, Leaf]
    savers: int
    loaders: int
    save_coordinator: int
    load_coordinator: int
    save_options: SaveOptions
    load_options: LoadOptions
    hosts: int
    """On how many hosts the loaders are, in turns."""
    plain: Array = field(default_factory=lambda: np.arange(6.0).reshape(2, 3))

    def loading(self, rank: int) -> LoadOptions:
        """The options of a rank that loads."""
        return replace(self.load_options, host=f"host {rank % self.hosts}")

    def state(self, rank: int) -> dict[str, Any]:
        """The tree that a rank saves."""
        model = {
            name: cut(leaf.array, leaf.have[rank])
            for name, leaf in self.leaves.items()
            if leaf.have[rank]
        }
        # What only one rank has, and what all have.
        own = {"own": [rank, (f"rank {rank}", None)]}
        return {"model": model, "plain": self.plain, "step": 7, f"rank{rank}": own}

    def like(self, rank: int) -> dict[str, Any]:
        """The tree that a rank wants; rank 0 takes what is left of all savers."""
        model = {
            name: wish(leaf.array, leaf.want[rank])
            for name, leaf in self.leaves.items()
            if leaf.want[rank]
        }
        wanted: dict[str, Any] = {"model": model, "plain": np.empty_like(self.plain)}
        if rank == 0:
            wanted["step"] = 0
            wanted |= {f"rank{r}": {"own": [0, ("", 0)]} for r in range(self.savers)}
        return wanted


@st.composite
def held(draw: st.DrawFn, shape: Shape, ranks: int) -> list[Tiling]:
    """The boxes of each rank that together has a tensor: a tiling of any kind, with replicas."""
    boxes = draw(tilings(shape))
    owners = draw(holders(len(boxes), ranks))
    return [
        [box for box, own in zip(boxes, owners, strict=True) if rank in own]
        for rank in range(ranks)
    ]


@st.composite
def anywhere(draw: st.DrawFn, shape: Shape) -> Box:
    """Any box within a shape."""
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return tuple(a for a, _ in ends), tuple(b - a for a, b in ends)


@st.composite
def wanted(draw: st.DrawFn, shape: Shape, ranks: int) -> list[Tiling]:
    """What each rank wants: its part of another tiling, and at times a box of no tiling."""
    boxes = draw(held(shape, ranks))
    if draw(st.booleans()):
        boxes[draw(st.integers(0, ranks - 1))].append(draw(anywhere(shape)))
    return boxes


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    savers, loaders = (draw(st.sampled_from((2, 3, 4, 1))) for _ in range(2))
    leaves: dict[str, Leaf] = {}
    for number in range(draw(st.integers(1, 3))):
        shape = draw(shapes())
        array = filled(shape, draw(st.sampled_from(list(DTYPES))), draw(st.integers(0, 2**32)))
        leaves[f"w{number}"] = Leaf(array, draw(held(shape, savers)), draw(wanted(shape, loaders)))
    return Job(
        leaves,
        savers,
        loaders,
        draw(st.integers(0, savers - 1)),
        draw(st.integers(0, loaders - 1)),
        SaveOptions(
            chunk_bytes=draw(st.sampled_from([64, 500, 1 << 20])),
            shard_bytes=draw(st.sampled_from([0, 1000, 0, 1 << 20])),
            crc32c=draw(st.booleans()),
            threads=2,
            memory_bytes=draw(st.sampled_from([1, 1000, 1 << 20])),
        ),
        LoadOptions(
            threads=2,
            memory_bytes=draw(st.sampled_from([1, 1000, 1 << 20])),
            share_reads=draw(st.sampled_from([True, False, "job", "host"])),
        ),
        draw(st.integers(1, loaders)),
    )
