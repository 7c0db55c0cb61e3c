"""Leaves on their way into a staged state: what of them must be copied, and what they are then.

An adapter looks at a leaf and says, as a `Copyable`, which memory its owner may still change, and
how to build the same leaf over copies of it. What has no wrapper worth keeping becomes a
`StagedLeaf`: the description that the planner wants, over memory that nobody changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.boxes import Boxes
from xckpt.core.metadata import Sharding

__all__ = ["Copyable", "Part", "Remote", "StagedLeaf"]


@dataclass(frozen=True, slots=True, eq=False)
class Remote:
    """Elements that NumPy cannot reach where they are: on an accelerator, say."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    start: Callable[[NDArray[np.generic]], object]
    """Begin to copy the elements into host memory of this shape and dtype, in C order."""
    wait: Callable[[], object]
    """Return when what was begun is there."""


Part = NDArray[np.generic] | Remote
"""Memory that may change: the host's, of any strides, or a device's."""


@dataclass(frozen=True, slots=True, eq=False)
class Copyable:
    """How to get a leaf that no longer changes."""

    parts: Sequence[Part]
    """The memory to copy; none where nothing can change the leaf."""
    rebuild: Callable[[Sequence[NDArray[np.generic]]], object]
    """The same leaf over copies of the parts; on the host a copy may have the part's strides."""


@dataclass(frozen=True, slots=True, eq=False)
class StagedLeaf:
    """A tensor that was described when it was staged, over memory that nobody changes.

    Example:
        >>> leaf = StagedLeaf((3,), "int8", Boxes.whole((3,)), (np.zeros(3, np.int8),))
        >>> leaf.data(0)
        array([0, 0, 0], dtype=int8)
    """

    shape: tuple[int, ...]
    dtype: str
    boxes: Boxes
    shards: Sequence[NDArray[np.generic]]
    """The elements of each box."""
    sharded: bool = False
    sharding: Sharding | None = None
    annotation: str = ""

    def data(self, index: int) -> NDArray[np.generic]:
        """The elements of box ``index``."""
        return self.shards[index]
