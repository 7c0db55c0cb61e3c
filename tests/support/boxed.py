"""A NumPy array that is saved in given boxes, as if it were sharded: a framework of its own."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import dtype_name
from xckpt.core.frameworks import as_described, register_adapter
from xckpt.core.geometry.boxes import Boxes
from xckpt.core.metadata import Sharding
from xckpt.core.staged import Copyable


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


def describe(leaf: object, name: str) -> Boxed | None:
    return leaf if isinstance(leaf, Boxed) else None


def aim(like: object, name: str, *, in_place: bool) -> None:
    return None


def copyable(leaf: object, name: str) -> Copyable | None:
    return as_described(leaf) if isinstance(leaf, Boxed) else None


def pinned_memory(size: int) -> None:
    return None


def to_numpy(data: object) -> None:
    return None


def to_writable_numpy(buffer: object) -> None:
    return None


def copy_into(buffer: object, data: NDArray[np.generic]) -> bool:
    return False


def open_object(node: object, name: str) -> None:
    return None


def children(node: object) -> None:
    return None


def rebuild(node: object, children: list[object]) -> None:
    return None


register_adapter("xckpt", __name__)
