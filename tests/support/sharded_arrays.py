"""An adapter for the tests: arrays of which each rank holds some boxes, in NumPy memory.

It is the smallest framework with sharded arrays: `Sharded` is saved, `Wanted` is loaded, and both
say their boxes outright. A target also checks that planner and storage keep to the protocol.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tests.support.tilings import Box, Shape, region
from xckpt.core.adapter import Adapter
from xckpt.core.dtypes import dtype_name, numpy_dtype
from xckpt.core.geometry.box import Boxes
from xckpt.core.metadata import Sharding
from xckpt.engine.adapters import register_adapter

Array = NDArray[np.generic]

register_adapter("tests.support.sharded_arrays", "tests.support.sharded_arrays")


@dataclass(eq=False, slots=True)
class Sharded:
    """A sharded array as one rank sees it; itself a `SourceLeaf`."""

    shape: Shape
    dtype: str
    boxes: Boxes
    parts: list[Array]
    sharding: Sharding | None = None
    annotation: str = ""
    sharded: bool = True
    array: Array | None = None
    """The whole, where one rank has it."""

    def data(self, index: int) -> Array:
        return self.parts[index]


@dataclass(eq=False, slots=True)
class Wanted:
    """What a rank wants of a stored array."""

    shape: Shape
    dtype: str
    boxes: Boxes
    annotation: str = ""


def cut(array: Array, boxes: Sequence[Box], sharding: Sharding | None = None) -> Sharded:
    """What a rank holds that has these boxes of an array: views of it."""
    name = dtype_name(array.dtype)
    assert name is not None
    held = list(dict.fromkeys(boxes))
    parts = [array[region(box)] if array.ndim else array for box in held]
    boxes_held = Boxes.of(held, rank=array.ndim)
    return Sharded(array.shape, name, boxes_held, parts, sharding, array=array)


def rows(array: Array, *cuts: int) -> Sharded:
    """An array cut into rows at the given numbers."""
    below = array.shape[1:]
    zeros = (0,) * len(below)
    bounds = pairwise([0, *cuts, len(array)])
    return cut(array, [((a, *zeros), (b - a, *below)) for a, b in bounds])


def wish(array: Array, boxes: Sequence[Box]) -> Wanted:
    """A target for these boxes of an array."""
    source = cut(array, boxes)
    return Wanted(source.shape, source.dtype, source.boxes)


@dataclass(eq=False, slots=True)
class Target:
    """Boxes to be loaded, each in memory of its own."""

    shape: Shape
    dtype: str
    boxes: Boxes
    parts: dict[int, Array] = field(default_factory=dict)
    into: Sharded | None = None
    annotation: str = ""
    committed: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def buffer(self, index: int) -> Array:
        with self.lock:
            assert index not in self.committed, "a buffer is asked for after its commit"
            if index not in self.parts:
                self.parts[index] = np.empty(self.boxes[index].sizes, numpy_dtype(self.dtype))
            return self.parts[index]

    def commit(self, index: int) -> None:
        with self.lock:
            assert index not in self.committed, "a box is committed twice"
            self.committed.append(index)
            if index not in self.parts:
                assert 0 in self.boxes[index].sizes, "a box is committed that nobody filled"
                self.parts[index] = np.empty(self.boxes[index].sizes, numpy_dtype(self.dtype))

    def result(self) -> Sharded:
        assert sorted(self.committed) == list(range(len(self.boxes))), "a box was not committed"
        parts = [self.parts[index] for index in range(len(self.boxes))]
        return self.into or Sharded(self.shape, self.dtype, self.boxes, parts)


class ShardedAdapter(Adapter[Sharded | Wanted]):
    leaves = (Sharded, Wanted)

    def describe(self, leaf: Sharded | Wanted, name: str) -> Sharded:
        return leaf if isinstance(leaf, Sharded) else super().describe(leaf, name)  # type: ignore[return-value]

    def target_for(self, like: Sharded | Wanted, name: str, *, in_place: bool) -> Target:
        if in_place and isinstance(like, Sharded):
            return Target(like.shape, like.dtype, like.boxes, dict(enumerate(like.parts)), like)
        return Target(like.shape, like.dtype, like.boxes, annotation=like.annotation)


ADAPTER = ShardedAdapter()


def same_bits(one: Array, other: Array) -> bool:
    """Equal in shape, dtype and every bit (NaN payloads and signs of zero too)."""
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes()


def holds(loaded: object, array: Array) -> bool:
    """Whether every part of a loaded leaf is what the whole array has there."""
    assert isinstance(loaded, Sharded)
    whole = np.asarray(array)
    return loaded.shape == whole.shape and all(
        same_bits(part, np.asarray(whole[region((box.offsets, box.sizes))]))
        for part, box in zip(loaded.parts, loaded.boxes, strict=True)
    )
