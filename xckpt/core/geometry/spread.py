"""Where a tensor's boxes are on all processes, as far as one process knows without asking.

1. `Processes` are those that save together: the framework that numbers them, and the number of each
   rank there.
2. A `Spread` says which boxes each of them holds, and is equal on all processes that know the same.
   `Whole` is everything on every rank; `OnMesh` is cut along the axes of a mesh; `Listed` has each
   box with the process that holds it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Boxes, Int64s, Shape


@dataclass(frozen=True, slots=True, eq=False)
class Processes:
    """The processes of a group, as the framework numbers them whose tensors they hold.

    Example:
        >>> Processes("torch", np.array([4, 6])).ranks(np.array([6, 4, 6]))
        array([1, 0, 1])
        >>> Processes("torch", np.array([4, 6])).ranks(np.array([5])) is None
        True
    """

    framework: str
    """``"torch"``, ``"jax"``; empty where no numbers but those of the group are known."""
    numbers: Int64s
    """The number of each rank in the framework, (ranks,)."""

    def ranks(self, numbers: NDArray[np.integer]) -> Int64s | None:
        """The ranks of processes, (n,); None if one is not in the group."""
        order = np.argsort(self.numbers, kind="stable")
        at = np.searchsorted(self.numbers[order], numbers)
        found = order[np.minimum(at, len(order) - 1)]
        return found if np.array_equal(self.numbers[found], numbers) else None


Held = tuple[Int64s, Boxes]
"""The rank that holds each box, (n,), and the boxes; some may be without elements."""


class Spread(Hashable, Protocol):
    """Which process holds which box of a tensor. Spreads of equal content should compare equal."""

    def says(self) -> bytes:
        """What it says: the same bytes on all processes that know the same."""
        ...

    def held(self, processes: Processes) -> Held | None:
        """All ranks' boxes; None if other processes hold some."""
        ...

    def held_by(self, rank: int, processes: Processes) -> Boxes | None:
        """The boxes of one rank; None if the processes are of another framework."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """All of a tensor, or of a value, on every rank.

    Example:
        >>> Whole((3,)).held(Processes("", np.arange(2)))
        (array([0, 1]), Boxes([0, 3), [0, 3)))
    """

    shape: Shape

    def says(self) -> bytes:
        """The shape."""
        return _column([0, len(self.shape), *self.shape])

    def held(self, processes: Processes) -> Held:
        """A box for each rank."""
        count = len(processes.numbers)
        shape = (count, len(self.shape))
        sizes = np.broadcast_to(np.array(self.shape, np.int64), shape)
        return np.arange(count), Boxes(np.zeros(shape, np.int64), sizes)

    def held_by(self, rank: int, processes: Processes) -> Boxes:
        """The one box."""
        return Boxes.whole(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class MeshProcesses:
    """A mesh: the process at each of its coordinates; a process may have several."""

    framework: str
    numbers: Int64s
    """As many dimensions as the mesh has axes."""
    digest: bytes = field(init=False, repr=False)
    """Of framework, axes and numbers."""

    def __post_init__(self) -> None:
        said = self.framework.encode() + _column(self.numbers.shape) + _column(self.numbers.ravel())
        object.__setattr__(self, "digest", hashlib.blake2b(said, digest_size=32).digest())


@dataclass(frozen=True, slots=True)
class OnMesh:
    """A tensor that is cut along the axes of a mesh, each time by ceiling division.

    Example:
        >>> mesh = MeshProcesses("torch", np.array([[0, 1], [2, 3]]))
        >>> rows = OnMesh((3, 4), mesh, ((0,), ()))
        >>> rows.held(Processes("torch", np.arange(4)))[1]
        Boxes([0, 2) x [0, 4), [0, 2) x [0, 4), [2, 3) x [0, 4), [2, 3) x [0, 4))
        >>> rows.held_by(2, Processes("torch", np.arange(4)))
        Boxes([2, 3) x [0, 4))
    """

    shape: Shape
    mesh: MeshProcesses
    cuts: tuple[tuple[int, ...], ...]
    """For each dimension the mesh axes that cut it, the first cut first."""

    def says(self) -> bytes:
        """Shape, cuts and mesh."""
        cuts = [number for axes in self.cuts for number in (len(axes), *axes)]
        return _column([1, len(self.shape), *self.shape, *cuts]) + self.mesh.digest

    def held(self, processes: Processes) -> Held | None:
        """A box for each coordinate of the mesh."""
        if processes.framework != self.mesh.framework:
            return None
        ranks = processes.ranks(self.mesh.numbers.ravel())
        return None if ranks is None else (ranks, self._boxes(np.arange(len(ranks))))

    def held_by(self, rank: int, processes: Processes) -> Boxes | None:
        """A box for each coordinate that the rank has."""
        if processes.framework != self.mesh.framework:
            return None
        return self._boxes(np.flatnonzero(self.mesh.numbers.ravel() == processes.numbers[rank]))

    def _boxes(self, places: Int64s) -> Boxes:
        """The boxes at these places of the mesh, in C order."""
        axes = self.mesh.numbers.shape
        coordinates = np.unravel_index(places, axes)
        low = np.zeros((len(places), len(self.shape)), np.int64)
        high = low + np.array(self.shape, np.int64)
        for dim, cut in enumerate(self.cuts):
            for axis in cut:
                step = -(-(high[:, dim] - low[:, dim]) // axes[axis])
                start = low[:, dim] + step * coordinates[axis]
                low[:, dim] = np.minimum(start, high[:, dim])
                high[:, dim] = np.minimum(start + step, high[:, dim])
        return Boxes(low, high - low)


@dataclass(frozen=True, slots=True)
class Listed:
    """Boxes of a tensor, each with the process that holds it.

    Example:
        >>> spread = Listed.of("torch", [1, 0], Boxes.of([((0,), (2,)), ((2,), (2,))]))
        >>> spread.held_by(0, Processes("torch", np.arange(2)))
        Boxes([2, 4))
    """

    framework: str
    rank: int
    """Number of dimensions."""
    numbers: bytes
    """The process of each box, int64."""
    offsets: bytes
    sizes: bytes

    @classmethod
    def of(cls, framework: str, numbers: Sequence[int], boxes: Boxes) -> Listed:
        """The spread of boxes, of which process ``numbers[i]`` holds box i."""
        columns = _column(numbers), _column(boxes.offsets), _column(boxes.sizes)
        return cls(framework, boxes.rank, *columns)

    def says(self) -> bytes:
        """All of it."""
        head = _column([2, self.rank, len(self.numbers)]) + self.framework.encode()
        return head + self.numbers + self.offsets + self.sizes

    def held(self, processes: Processes) -> Held | None:
        """The boxes as they are listed."""
        if processes.framework != self.framework:
            return None
        ranks = processes.ranks(np.frombuffer(self.numbers, np.int64))
        return None if ranks is None else (ranks, self._boxes())

    def held_by(self, rank: int, processes: Processes) -> Boxes | None:
        """Those that the rank's process holds."""
        if processes.framework != self.framework:
            return None
        mine = np.frombuffer(self.numbers, np.int64) == processes.numbers[rank]
        return self._boxes().take(mine)

    def _boxes(self) -> Boxes:
        shape = (len(self.numbers) // 8, self.rank)
        offsets, sizes = (np.frombuffer(each, np.int64) for each in (self.offsets, self.sizes))
        return Boxes(offsets.reshape(shape), sizes.reshape(shape))


def _column(numbers: Sequence[int] | NDArray[np.integer]) -> bytes:
    return np.asarray(numbers, np.int64).tobytes()
