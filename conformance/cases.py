"""A case as data: leaves, how the ranks that save hold them, what the ranks that load want.

1. `cases` draws one; a failing one shrinks to few ranks, few boxes, small shapes.
2. `Case.whole`, `Case.held` and `Case.wanted` make what an `Implementation` is given.
3. `to_json` and `from_json` keep one in a file; the elements are in it as a seed.

The elements are random bytes, so that nothing but a copy of the bits passes: not-a-numbers of any
payload, both zeros, infinities and the smallest numbers are sown in besides.
"""

from __future__ import annotations

import functools
import importlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from conformance.implementation import Array, Box, Held, Shard, Wanted
from conformance.tilings import KEPT, Placed, meshes, parts, shapes, tilings

__all__ = [
    "Case",
    "Leaf",
    "cases",
    "checksum",
    "contents",
    "dtypes",
    "from_json",
    "held",
    "numpy_dtype",
    "region",
    "to_json",
]

DTYPES = (
    "float32", "int8", "bfloat16", "bool", "int64", "float16", "float64", "uint8", "complex64",
    "int16", "int32", "uint16", "uint32", "uint64", "complex128", "float8_e4m3fn", "float8_e5m2",
    "int4", "float4_e2m1fn",
)  # fmt: skip
SMALL = {"bool": 1, "int4": 4, "float4_e2m1fn": 4}
"""Types of fewer bits than a byte, which is what NumPy gives an element of them."""

NAMES = ("w", "b", "model/layers.0/w", "model.layers.0.w", "0", "a b", "é", "..", "x~1y", "%2F")

MOST_RANKS = 5
MOST_EVEN_RANKS = 8


@dataclass(frozen=True, slots=True)
class Leaf:
    """An array, how it is held by the ranks that save, and what the ranks that load want of it."""

    name: str
    array: Array
    source: tuple[Placed, ...]
    """Boxes that cover the array exactly once, with the ranks that hold each."""
    target: tuple[Placed, ...]
    """Any boxes, with the ranks that want each."""
    seed: int = 0
    """The seed of the elements."""

    @property
    def values(self) -> NDArray[np.generic]:
        """The whole array; not to be written."""
        return contents(self.array, self.seed)

    def __repr__(self) -> str:
        lines = [f"{self.name!r}: {self.array.dtype}{list(self.array.shape)}, seed {self.seed}"]
        for verb, placed in (("holds", self.source), ("wants", self.target)):
            lines += [f"    {_ranks(each)} {verb} {region(each.box)}" for each in placed]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Case:
    """Leaves, saved by some ranks and loaded by others."""

    savers: int
    loaders: int
    leaves: tuple[Leaf, ...]

    def whole(self) -> dict[str, NDArray[np.generic]]:
        """Every leaf as NumPy has it."""
        return {leaf.name: leaf.values for leaf in self.leaves}

    def held(self) -> list[dict[str, Held]]:
        """What each saving rank holds. A rank without a box names the leaf all the same."""
        return [
            {leaf.name: held(leaf, _of(leaf.source, rank)) for leaf in self.leaves}
            for rank in range(self.savers)
        ]

    def wanted(self) -> list[dict[str, Wanted]]:
        """What each loading rank wants."""
        return [
            {leaf.name: Wanted(leaf.array, _of(leaf.target, rank)) for leaf in self.leaves}
            for rank in range(self.loaders)
        ]

    def with_ranks(self, ranks: Sequence[int]) -> Case:
        """The same case with saving rank r as rank ``ranks[r]``."""
        leaves = [
            replace(leaf, source=tuple(_renumbered(each, ranks) for each in leaf.source))
            for leaf in self.leaves
        ]
        return replace(self, leaves=tuple(leaves))

    def __repr__(self) -> str:
        leaves = "\n".join(f"  {leaf!r}" for leaf in self.leaves)
        return f"Case: {self.savers} rank(s) save, {self.loaders} load\n{leaves}"


def region(box: Box) -> str:
    """A box as people write it: ``[lo, hi)`` per dimension.

    Example:
        >>> region(Box((2, 0), (1, 3)))
        '[2, 3) x [0, 3)'
    """
    ends = zip(box.offsets, box.sizes, strict=True)
    return " x ".join(f"[{low}, {low + size})" for low, size in ends) or "the one element"


def _ranks(placed: Placed) -> str:
    return f"rank{'s' if len(placed.ranks) > 1 else ''} {', '.join(map(str, placed.ranks))}"


def _of(placed: Sequence[Placed], rank: int) -> tuple[Box, ...]:
    return tuple(each.box for each in placed if rank in each.ranks)


def _renumbered(placed: Placed, ranks: Sequence[int]) -> Placed:
    return Placed(placed.box, tuple(sorted(ranks[rank] for rank in placed.ranks)))


def held(leaf: Leaf, boxes: Sequence[Box]) -> Held:
    """These boxes of a leaf, as views of the whole."""
    values = leaf.values
    return Held(leaf.array, tuple(Shard(box, values[(*box.region, ...)]) for box in boxes))


# Contents.


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """A dtype by NumPy's name or ml_dtypes'.

    Raises:
        ImportError: it is one of ml_dtypes', which is not installed.
    """
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(getattr(importlib.import_module("ml_dtypes"), name))


@functools.cache
def dtypes() -> tuple[str, ...]:
    """The dtypes that can be tried here: all, or NumPy's where there is no ml_dtypes."""
    found: list[str] = []
    for name in DTYPES:
        try:
            numpy_dtype(name)
        except ImportError:
            continue
        found.append(name)
    return tuple(found)


@functools.lru_cache(maxsize=64)
def contents(array: Array, seed: int) -> NDArray[np.generic]:
    """An array of random bits, the same for the same seed.

    Example:
        >>> contents(Array((2,), "bool"), 1).dtype, contents(Array((), "int8"), 1).shape
        (dtype('bool'), ())
    """
    dtype = numpy_dtype(array.dtype)
    random = np.random.default_rng(seed)
    size = prod(array.shape) * dtype.itemsize
    bits = random.integers(0, 1 << SMALL.get(array.dtype, 8), size, dtype=np.uint8)
    # ml_dtypes keeps the sign of an int4 in the upper half of its byte.
    signed = array.dtype == "int4"
    values = (bits.astype(np.int8) - 8).astype(dtype) if signed else bits.view(dtype)
    special = _special(dtype)
    if special.size:
        chosen = random.random(values.size) < 0.25
        picked = special[random.integers(0, special.size, values.size)]
        values = np.where(chosen, picked.view(_bits(dtype)), values.view(_bits(dtype))).view(dtype)
    values = values.reshape(array.shape)
    values.flags.writeable = False
    return values


def _bits(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    return np.dtype(f"u{dtype.itemsize}")


def _special(dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    """-0.0, infinity, the smallest number, and not-a-numbers with a payload, quiet or signalling.

    Of NumPy's floats only; in the small ones random bytes hit all of them often enough.
    """
    if not issubclass(dtype.type, np.floating):
        return np.empty(0, dtype)
    finfo = np.finfo(dtype.type)
    bits = _bits(dtype)
    sign = 1 << (finfo.bits - 1)
    infinity = int(np.array(np.inf, dtype).view(bits))
    quiet = 1 << (finfo.nmant - 1)
    found = [0, sign, 1, sign | 1, infinity, sign | infinity]
    found += [infinity | quiet, infinity | 1, sign | infinity | quiet | 5, infinity | quiet - 1]
    return np.array(found, bits).view(dtype)


# Strategies.


@functools.lru_cache(maxsize=KEPT)
def wanted_of(shape: tuple[int, ...], ranks: int) -> st.SearchStrategy[tuple[Placed, ...]]:
    """What ranks that load want of an array."""
    return st.one_of(tilings(shape, ranks), parts(shape, ranks))


@functools.lru_cache(maxsize=KEPT)
@st.composite
def leaves(draw: st.DrawFn, savers: int, loaders: int, even: bool) -> Leaf:
    """A leaf of any name, shape and dtype, held and wanted in any way, or by even meshes."""
    name = draw(st.sampled_from(NAMES))
    array = Array(draw(shapes()), draw(st.sampled_from(dtypes())))
    if even:
        source = draw(meshes(array.shape, savers, even=True))
        target = draw(meshes(array.shape, loaders, even=True))
    else:
        source = draw(tilings(array.shape, savers))
        target = draw(wanted_of(array.shape, loaders))
    return Leaf(name, array, source, target, draw(st.integers(0, 255)))


@functools.lru_cache(maxsize=KEPT)
def some_leaves(savers: int, loaders: int, even: bool, most: int) -> st.SearchStrategy[list[Leaf]]:
    """One or more of different names."""
    one = leaves(savers, loaders, even)
    return st.lists(one, min_size=1, max_size=most, unique_by=lambda leaf: leaf.name)


@st.composite
def cases(
    draw: st.DrawFn, most_ranks: int = 0, most_leaves: int = 2, *, even: bool = False
) -> Case:
    """Any case.

    Args:
        draw: given by Hypothesis.
        most_ranks: how many ranks save, and how many load, at most; 0 for what is usual.
        most_leaves: how many leaves there are, at most.
        even: all is held and wanted by meshes that cut evenly, as a JAX sharding does.
    """
    ranks = st.integers(1, most_ranks or (MOST_EVEN_RANKS if even else MOST_RANKS))
    savers, loaders = draw(ranks), draw(ranks)
    return Case(savers, loaders, tuple(draw(some_leaves(savers, loaders, even, most_leaves))))


# JSON.


def to_json(case: Case) -> dict[str, Any]:
    """A case for a file: ``[offsets, sizes, ranks]`` for each box.

    Example:
        >>> placed = (Placed(Box((0,), (3,)), (0, 1)),)
        >>> leaf = Leaf("w", Array((3,), "int8"), placed, placed, 7)
        >>> to_json(Case(2, 2, (leaf,)))["leaves"][0]["source"]
        [[[0], [3], [0, 1]]]
    """
    return {
        "savers": case.savers,
        "loaders": case.loaders,
        "leaves": [
            {
                "name": leaf.name,
                "shape": list(leaf.array.shape),
                "dtype": leaf.array.dtype,
                "seed": leaf.seed,
                "source": [_placed_to_json(each) for each in leaf.source],
                "target": [_placed_to_json(each) for each in leaf.target],
            }
            for leaf in case.leaves
        ],
    }


def from_json(document: Mapping[str, Any]) -> Case:
    """A case from what `to_json` made."""
    return Case(
        document["savers"],
        document["loaders"],
        tuple(
            Leaf(
                leaf["name"],
                Array(tuple(leaf["shape"]), leaf["dtype"]),
                tuple(_placed_from_json(each) for each in leaf["source"]),
                tuple(_placed_from_json(each) for each in leaf["target"]),
                leaf["seed"],
            )
            for leaf in document["leaves"]
        ),
    )


def checksum(case: Case) -> int:
    """A number that is the same for the same case, on every machine."""
    return zlib.crc32(json.dumps(to_json(case), sort_keys=True).encode())


def _placed_to_json(placed: Placed) -> list[list[int]]:
    return [list(placed.box.offsets), list(placed.box.sizes), list(placed.ranks)]


def _placed_from_json(placed: Sequence[Sequence[int]]) -> Placed:
    offsets, sizes, ranks = placed
    return Placed(Box(tuple(offsets), tuple(sizes)), tuple(ranks))
