"""An adapter for xckpt: arrays of which each rank holds some boxes, in NumPy memory.

It is the smallest framework with sharded arrays, and stands for any: `Boxes` is saved, `Wish` is
loaded, and both say their boxes outright.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from conformance.implementation import Box, Held, Wanted
from xckpt.core.adapter import Adapter
from xckpt.core.dtypes import numpy_dtype
from xckpt.core.geometry.box import Boxes as Columns
from xckpt.core.leaf import SourceLeaf, TargetLeaf
from xckpt.core.metadata import Sharding
from xckpt.engine.adapters import register_adapter

__all__ = ["Boxes", "Wish"]

Data = NDArray[np.generic]

register_adapter(__name__, __name__)


def _columns(boxes: Sequence[Box], rank: int) -> Columns:
    return Columns.of([(box.offsets, box.sizes) for box in boxes], rank=rank)


class Boxes:
    """What a rank holds of an array; itself a `SourceLeaf`."""

    sharded = True
    sharding: Sharding | None = None
    annotation = ""

    def __init__(self, held: Held) -> None:
        self.shape = held.array.shape
        self.dtype = held.array.dtype
        self.boxes = _columns([shard.box for shard in held.shards], len(self.shape))
        self._parts = [shard.data for shard in held.shards]

    def data(self, index: int) -> Data:
        return self._parts[index]


@dataclass(frozen=True, slots=True)
class Wish:
    """What a rank wants of an array."""

    wanted: Wanted


@dataclass(eq=False, slots=True)
class Target:
    """Boxes to be loaded, each in separate memory; loaded, they are a list of arrays."""

    shape: tuple[int, ...]
    dtype: str
    boxes: Columns
    annotation: str = ""
    parts: dict[int, Data] = field(default_factory=dict)
    committed: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def buffer(self, index: int) -> Data:
        with self.lock:
            assert index not in self.committed, "a buffer is asked for after its commit"
            if index not in self.parts:
                self.parts[index] = _unloaded(self.boxes[index].sizes, self.dtype)
            return self.parts[index]

    def commit(self, index: int) -> None:
        with self.lock:
            assert index not in self.committed, "a box is committed twice"
            self.committed.add(index)
            if index not in self.parts:
                assert 0 in self.boxes[index].sizes, "a box is committed that was never filled"
                self.parts[index] = np.empty(self.boxes[index].sizes, numpy_dtype(self.dtype))

    def result(self) -> list[Data]:
        assert len(self.committed) == len(self.boxes), "a box was not committed"
        return [self.parts[index] for index in range(len(self.boxes))]


def _unloaded(sizes: tuple[int, ...], dtype: str) -> Data:
    """Memory in which whatever is not loaded shows: it is not zero, as new memory often is."""
    kind = numpy_dtype(dtype)
    made = np.full((*sizes, kind.itemsize), 0x5A if dtype != "bool" else 1, np.uint8)
    return made.view(kind).reshape(sizes)


class BoxesAdapter(Adapter[Boxes | Wish]):
    """Saves `Boxes`, loads into what a `Wish` asks for."""

    leaves = (Boxes, Wish)

    def describe(self, leaf: Boxes | Wish, name: str) -> SourceLeaf:
        """The boxes themselves."""
        return leaf if isinstance(leaf, Boxes) else super().describe(leaf, name)

    def target_for(self, like: Boxes | Wish, name: str, *, in_place: bool) -> TargetLeaf:
        """New memory for each box wanted."""
        if not isinstance(like, Wish):
            return super().target_for(like, name, in_place=in_place)
        array = like.wanted.array
        return Target(array.shape, array.dtype, _columns(like.wanted.boxes, len(array.shape)))


ADAPTER = BoxesAdapter()
