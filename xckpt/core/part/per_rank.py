"""A leaf or a tree of which each rank has its own: a random number generator's state, a position.

1. A caller marks it with `PerRank`. For the tree it is a container with one child, whose key has
   the rank in it, so that each rank saves under a name of its own, and loads from there again.
2. `PerRankAdapter` opens it; the engine makes one with the rank of the group.
3. `PerRank.all` is an object whose state the checkpoint decides (`xckpt.core.plan.stateful`): all
   that was saved there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final, Generic, TypeVar, cast

from xckpt.core.adapter import Adapter, Children
from xckpt.core.leaf import ObjectState
from xckpt.core.names import KeyPath
from xckpt.core.plan.new_leaves import weightless
from xckpt.errors import UnsupportedLeafError

Value = TypeVar("Value")

KIND: Final = "pytree:xckpt.core.part.per_rank.PerRank"
"""The kind of such a container."""


NOT_IN_PLACE: Final = "PerRank.all is for xckpt.load and restore, which return what they load"


class AllRanks:
    """The state of `PerRank.all`: the checkpoint decides what is in it."""

    tree: Mapping[str | int, object] = MappingProxyType({})
    clears: Collection[str] = ()
    replaces: bool = False
    opaque: Collection[str | int] = ()
    lengths: Mapping[KeyPath, tuple[int, str]] = MappingProxyType({})

    def like(self, keys: KeyPath, shape: tuple[int, ...], dtype: str) -> object:
        """A NumPy array of its own for each tensor."""
        return weightless(shape, dtype)

    def load(self, tree: object) -> None:
        """Refuse a load in place.

        Raises:
            TypeError: always.
        """
        raise TypeError(NOT_IN_PLACE)


@dataclass(frozen=True, slots=True)
class PerRank(Generic[Value]):
    """Marks a leaf, or a tree of leaves, whose content differs from rank to rank.

    Rank 3 saves it under ``NAME/rank3`` and loads it from there: give a `PerRank` in ``like`` too.
    A load on another number of ranks raises `TreeMismatchError`, unless ``missing=`` and
    ``unexpected=`` say otherwise. `PerRank.all` in its place in ``like`` gives every rank a dict
    with all ranks' values, and so does a load without ``like``. Where nothing was saved there, it
    is a missing leaf; `load_into` refuses it. The arrays are NumPy's, unless a load without
    ``like`` names a ``framework=``.

    Example:
        >>> import xckpt
        >>> _ = xckpt.save("memory://example-per-rank", {"step": 3, "seed": xckpt.PerRank(17)})
        >>> xckpt.load("memory://example-per-rank", {"step": 0, "seed": xckpt.PerRank(0)})
        {'step': 3, 'seed': PerRank(value=17)}
        >>> xckpt.load("memory://example-per-rank")
        {'step': 3, 'seed': {'rank0': 17}}
        >>> xckpt.load("memory://example-per-rank", {"step": 0, "seed": xckpt.PerRank.all})
        {'step': 3, 'seed': {'rank0': 17}}
    """

    value: Value
    """This rank's own."""

    all: ClassVar[AllRanks]
    """In ``like``: the values of all ranks that saved, as a dict: ``"rank0"``, ``"rank1"``, ..."""


PerRank.all = AllRanks()


@dataclass(frozen=True)
class PerRankAdapter(Adapter[PerRank[object]]):
    """Opens `PerRank` containers on one rank."""

    rank: int = 0
    saves: bool = False
    """Whether the tree is saved, where `PerRank.all` has no meaning."""

    def children(self, node: object) -> Children | None:
        """One child, named by the rank."""
        if not isinstance(node, PerRank):
            return None
        value = cast(PerRank[object], node).value
        return KIND, [(f"rank{self.rank}", value)]

    def open_object(self, node: object, name: str) -> ObjectState | None:
        """What `PerRank.all` stands for.

        Raises:
            UnsupportedLeafError: the tree is saved.
        """
        if isinstance(node, AllRanks) and self.saves:
            text = "PerRank.all stands for values that were saved; save xckpt.PerRank(value)"
            raise UnsupportedLeafError(f"{name or 'the root'}: {text}")
        return node if isinstance(node, AllRanks) else None

    def rebuild(self, node: object, children: list[object]) -> object | None:
        """A `PerRank` with another value."""
        return PerRank(children[0]) if isinstance(node, PerRank) else None
