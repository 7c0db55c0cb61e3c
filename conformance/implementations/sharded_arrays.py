"""An adapter for xckpt: arrays of which each rank holds some boxes, in NumPy memory.

It is the smallest framework with sharded arrays, and stands for any: `Sharded` is saved, `Wanted`
is loaded, and both say their boxes outright. A target also checks that planner and storage keep to
the protocol.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from xckpt.adapters import Adapter, register
from xckpt.core.dtypes import numpy_dtype
from xckpt.core.geometry.box import Boxes
from xckpt.core.metadata import Sharding

__all__ = ["Sharded", "Target", "Wanted"]

Data = NDArray[np.generic]
Shape = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Sharded:
    """A sharded array as one rank sees it; itself a `SourceLeaf`."""

    shape: Shape
    dtype: str
    boxes: Boxes
    parts: list[Data]
    sharding: Sharding | None = None
    annotation: str = ""
    sharded: bool = True
    array: Data | None = None
    """The whole, where one rank has it."""

    def data(self, index: int) -> Data:
        """The elements of a box."""
        return self.parts[index]


@dataclass(eq=False, slots=True)
class Wanted:
    """What a rank wants of a stored array."""

    shape: Shape
    dtype: str
    boxes: Boxes
    annotation: str = ""


@dataclass(eq=False, slots=True)
class Target:
    """Boxes to be loaded, each in separate memory."""

    shape: Shape
    dtype: str
    boxes: Boxes
    parts: dict[int, Data] = field(default_factory=dict)
    into: Sharded | None = None
    annotation: str = ""
    committed: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def buffer(self, index: int) -> Data:
        """The memory of a box."""
        with self.lock:
            assert index not in self.committed, "a buffer is asked for after its commit"
            if index not in self.parts:
                self.parts[index] = _unloaded(self.boxes[index].sizes, self.dtype)
            return self.parts[index]

    def commit(self, index: int) -> None:
        """A box is loaded."""
        with self.lock:
            assert index not in self.committed, "a box is committed twice"
            self.committed.add(index)
            if index not in self.parts:
                assert 0 in self.boxes[index].sizes, "a box is committed that was never filled"
                self.parts[index] = _unloaded(self.boxes[index].sizes, self.dtype)

    def result(self) -> Sharded:
        """The array that was loaded."""
        assert len(self.committed) == len(self.boxes), "a box was not committed"
        parts = [self.parts[index] for index in range(len(self.boxes))]
        return self.into or Sharded(self.shape, self.dtype, self.boxes, parts)


def _unloaded(sizes: Shape, dtype: str) -> Data:
    """Memory in which whatever is not loaded shows: it is not zero, as new memory often is."""
    kind = numpy_dtype(dtype)
    data = np.full((*sizes, kind.itemsize), 0x5A if dtype != "bool" else 1, np.uint8)
    return data.view(kind).reshape(sizes)


class ShardedAdapter(Adapter[Sharded | Wanted]):
    """Saves a `Sharded`; loads into what a `Wanted` asks for, or in place."""

    leaves = (Sharded, Wanted)

    def describe(self, leaf: Sharded | Wanted, name: str) -> Sharded:
        """The array itself."""
        return leaf if isinstance(leaf, Sharded) else super().describe(leaf, name)  # type: ignore[return-value]

    def target_for(self, like: Sharded | Wanted, name: str, *, in_place: bool) -> Target:
        """New memory for each box wanted, or the array's own."""
        if in_place and isinstance(like, Sharded):
            return Target(like.shape, like.dtype, like.boxes, dict(enumerate(like.parts)), like)
        return Target(like.shape, like.dtype, like.boxes, annotation=like.annotation)


ADAPTER = ShardedAdapter()
register(ADAPTER)
