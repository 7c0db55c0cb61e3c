"""What the suite asks of an implementation: save shards, load boxes, list, delete, verify.

A case is played by several *ranks*. How they come to be (processes, threads, or one process that
plays them in turn) is the implementation's own business: it is given what every rank holds and what
every rank wants, and answers for all of them.

1. An `Array` says what a leaf is: its global shape and its dtype.
2. A `Shard` is a box of it and the elements in that box. A rank may hold none, one or several of a
   leaf; a box that several ranks hold is a replica and has the same elements everywhere.
3. A module is an implementation if it has a name ``IMPLEMENTATION`` bound to an `Implementation`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Array",
    "Box",
    "Even",
    "Fingerprints",
    "Held",
    "Implementation",
    "Refused",
    "Shard",
    "Wanted",
    "Writes",
    "find",
]


@dataclass(frozen=True, slots=True)
class Box:
    """The elements ``[offset, offset + size)`` of an array, per dimension.

    Example:
        >>> Box((2, 0), (1, 3)).region
        (slice(2, 3, None), slice(0, 3, None))
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def region(self) -> tuple[slice, ...]:
        """The box as NumPy slices of the whole array."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Array:
    """What a leaf is."""

    shape: tuple[int, ...]
    """The global shape, in elements."""
    dtype: str
    """NumPy's name of the element type, or ml_dtypes' (``"bfloat16"``)."""


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A box of a leaf and what is in it."""

    box: Box
    data: NDArray[np.generic]
    """The elements, of the box's sizes and the leaf's dtype; any strides, not to be written."""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What one rank holds of one leaf."""

    array: Array
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one rank wants of one leaf."""

    array: Array
    boxes: tuple[Box, ...]


class Refused(Exception):
    """The implementation says that it cannot do this, before it has done anything.

    A case that is refused is counted apart: it is neither passed nor failed. An implementation
    names what it refuses in its table (`Implementation.limits`).
    """


@runtime_checkable
class Implementation(Protocol):
    """Something that saves and loads sharded checkpoints.

    Every method may raise `Refused`. Any other exception is the implementation's error, which the
    suite expects where a checkpoint is damaged or missing and nowhere else.
    """

    @property
    def name(self) -> str:
        """Its name in reports, with its version."""
        ...

    @property
    def limits(self) -> Sequence[str]:
        """What it refuses, a line each; empty if nothing."""
        ...

    def save(
        self, path: Path, ranks: Sequence[Mapping[str, Held]], *, overwrite: bool = False
    ) -> None:
        """Save what all ranks hold; ``ranks[r]`` maps leaf names to what rank r holds of them.

        All ranks name the same leaves, or some of them only where ranks hold nothing of a leaf.
        Without ``overwrite`` a checkpoint that is there is an error, and stays as it is.
        """
        ...

    def load(
        self, path: Path, ranks: Sequence[Mapping[str, Wanted]]
    ) -> list[dict[str, list[NDArray[np.generic]]]]:
        """For each rank and leaf the wanted boxes' elements, in the order of the boxes."""
        ...

    def list(self, path: Path) -> dict[str, Array]:
        """Every leaf of a checkpoint."""
        ...

    def delete(self, path: Path) -> None:
        """Remove a checkpoint; afterwards nothing can be loaded from the path."""
        ...

    def verify(self, path: Path) -> Sequence[str]:
        """A line for everything that is damaged; empty if every byte is what was saved."""
        ...


@runtime_checkable
class Writes(Protocol):
    """An implementation that can tell which rank wrote what."""

    def written(self, path: Path) -> Mapping[str, Sequence[tuple[int, Box]]]:
        """Leaf name -> (rank, box) of everything that the last save to ``path`` wrote."""
        ...


@runtime_checkable
class Fingerprints(Protocol):
    """An implementation whose checkpoints of equal states, saved alike, are equal."""

    def fingerprint(self, path: Path) -> Mapping[str, bytes]:
        """What makes a checkpoint's content, by name (files, or digests); no dates, no paths."""
        ...


@runtime_checkable
class Even(Protocol):
    """An implementation that only meshes of ranks suit, with even cuts; most others it refuses."""

    @property
    def even(self) -> bool:
        """Whether the cases for it shall be such."""
        ...


def find(module: str) -> Implementation:
    """The implementation of a module.

    Raises:
        TypeError: the module has no `Implementation` under the name ``IMPLEMENTATION``.
    """
    found = getattr(importlib.import_module(module), "IMPLEMENTATION", None)
    if not isinstance(found, Implementation):
        raise TypeError(f"{module} has no IMPLEMENTATION that can save, load, list, delete, verify")
    return found
