"""A NumPy array that is saved in given boxes, as if it were sharded: a framework of its own."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from xckpt.core.adapter import Adapter
from xckpt.core.dtypes import dtype_name
from xckpt.core.geometry.boxes import Boxes
from xckpt.core.metadata import Sharding
from xckpt.engine.adapters import register_adapter


@dataclass(frozen=True)
class Boxed:
    """An array and the boxes that it is saved in."""

    array: NDArray[np.generic]
    boxes: Boxes
    sharded: bool = True
    sharding: Sharding | None = None
    annotation: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> str:
        return dtype_name(self.array.dtype) or "unknown"

    def data(self, index: int) -> NDArray[np.generic]:
        box = self.boxes[index]
        ranges = zip(box.offsets, box.sizes, strict=True)
        return self.array[tuple(slice(a, a + n) for a, n in ranges)]


def rows(array: NDArray[np.generic], *cuts: int) -> Boxed:
    """An array cut into rows at the given numbers."""
    bounds = [0, *cuts, len(array)]
    below = array.shape[1:]
    zeros = (0,) * len(below)
    pairs = [((a, *zeros), (b - a, *below)) for a, b in pairwise(bounds)]
    return Boxed(array, Boxes.of(pairs))


class BoxedAdapter(Adapter[Boxed]):
    leaves = (Boxed,)

    def describe(self, leaf: Boxed, name: str) -> Boxed:
        return leaf


ADAPTER = BoxedAdapter()
register_adapter("tests.support.boxed", __name__)
