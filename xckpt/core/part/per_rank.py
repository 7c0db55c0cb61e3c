"""A leaf or a tree that each rank has its own of: a random number generator's state, a position.

1. A caller marks it with `PerRank`. For the tree it is a container with one child, whose key has
   the rank in it, so that each rank saves under a name of its own, and loads from there again.
2. `PerRankAdapter` opens it; the engine makes one with the rank of the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, TypeVar, cast

from xckpt.core.adapter import Adapter, Children

Value = TypeVar("Value")

KIND: Final = "pytree:xckpt.core.part.per_rank.PerRank"
"""The kind of such a container."""


@dataclass(frozen=True, slots=True)
class PerRank(Generic[Value]):
    """Marks a leaf, or a tree of leaves, that each rank has its own of.

    Rank 3 saves it under ``NAME/rank3`` and loads it from there: give a `PerRank` in ``like`` too.
    A load on another number of ranks raises `TreeMismatchError`, unless ``missing=`` and
    ``unexpected=`` say otherwise. Without ``like`` a dict with all ranks' values comes back.

    Example:
        >>> import xckpt
        >>> _ = xckpt.save("memory://example-per-rank", {"step": 3, "seed": xckpt.PerRank(17)})
        >>> xckpt.load("memory://example-per-rank", {"step": 0, "seed": xckpt.PerRank(0)})
        {'step': 3, 'seed': PerRank(value=17)}
        >>> xckpt.load("memory://example-per-rank")
        {'step': 3, 'seed': {'rank0': 17}}
    """

    value: Value
    """This rank's own."""


@dataclass(frozen=True)
class PerRankAdapter(Adapter[PerRank[object]]):
    """Opens `PerRank` containers on one rank."""

    rank: int = 0

    def children(self, node: object) -> Children | None:
        """One child, named by the rank."""
        if not isinstance(node, PerRank):
            return None
        value = cast(PerRank[object], node).value
        return KIND, [(f"rank{self.rank}", value)]

    def rebuild(self, node: object, children: list[object]) -> object | None:
        """A `PerRank` with another value."""
        return PerRank(children[0]) if isinstance(node, PerRank) else None
