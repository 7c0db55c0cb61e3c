"""Whether what ranks hold of an array is what a mesh of them would hold, and which mesh.

1. The distinct boxes must be a grid: every combination of one range a dimension.
2. Every box must have equally many holders. Then the holders stand in a mesh of one axis for each
   dimension of the array, which cuts it, and one more axis of replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from conformance.implementation import Box

__all__ = ["Mesh", "by_name", "mesh_of"]

Said = TypeVar("Said")


def by_name(ranks: Sequence[Mapping[str, Said]]) -> dict[str, list[Said]]:
    """What the ranks that name a leaf say of it, in the order of the ranks."""
    found: dict[str, list[Said]] = {}
    for rank in ranks:
        for name, said in rank.items():
            found.setdefault(name, []).append(said)
    return found


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranges per dimension, and who holds what."""

    ranges: tuple[tuple[tuple[int, int], ...], ...]
    """(offset, size) of the parts of each dimension, ascending."""
    holders: NDArray[np.int64]
    """Rank, by the number of the part in each dimension and of the replica."""

    @property
    def even(self) -> bool:
        """Whether every dimension is cut into equal parts."""
        return all(len({size for _, size in parts}) == 1 for parts in self.ranges)


def mesh_of(ranks: Sequence[Sequence[Box]]) -> Mesh | None:
    """The mesh of ranks that hold these boxes; None if there is none.

    Example:
        >>> mesh = mesh_of([[Box((0,), (2,))], [Box((2,), (2,))], []])
        >>> mesh.ranges, mesh.holders.tolist(), mesh.even
        ((((0, 2), (2, 2)),), [[0], [1]], True)
    """
    held: dict[Box, list[int]] = {}
    for rank, boxes in enumerate(ranks):
        for box in boxes:
            held.setdefault(box, []).append(rank)
    if not held or len({len(holders) for holders in held.values()}) > 1:
        return None
    pairs = [tuple(zip(box.offsets, box.sizes, strict=True)) for box in held]
    ranges = tuple(tuple(sorted(set(column))) for column in zip(*pairs, strict=True))
    grid = [
        Box(tuple(low for low, _ in parts), tuple(size for _, size in parts))
        for parts in product(*ranges)
    ]
    if set(grid) != set(held):
        return None
    shape = (*(len(parts) for parts in ranges), -1)
    return Mesh(ranges, np.array([held[box] for box in grid], np.int64).reshape(shape))
