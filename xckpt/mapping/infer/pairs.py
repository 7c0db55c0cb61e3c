"""Pairs of leaves, doubts about others, and the alignment that collects both.

1. A `LeafGroup` is one leaf, or the leaves that one leaf of the other tree may hold in a stack.
2. `pair_of` makes a `Pair` of two groups if their dtypes and shapes allow a layout.
3. An `Alignment` takes pairs and doubts, and knows which leaves are still free. A pair that names
   suggest and shapes refuse is remembered as a misfit, to be reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from xckpt.mapping.infer.conventions import AxisLayout, layouts
from xckpt.mapping.infer.leaf_names import ModelLeaf, Path

Side = Literal["source", "target"]


@dataclass(frozen=True)
class LeafGroup:
    """A leaf, or the leaves that one leaf of the other tree may hold in a stack."""

    key: Path
    """What it is compared by."""
    leaves: tuple[ModelLeaf, ...]
    position: int | None = None
    """Of leaves in a stack: which component of their key counts them."""


@dataclass(frozen=True)
class Pair:
    """Two groups that belong together, and the layouts that their shapes allow."""

    source: LeafGroup
    target: LeafGroup
    layouts: tuple[AxisLayout, ...]
    axis: int | None = None
    """Of a stack: the axis of the leaf that holds it; None if there is none, or several fit."""
    axes: tuple[int, ...] = ()
    """Of a stack: all axes that fit."""
    reason: str = ""
    """How it was found."""

    def at(self, axis: int) -> Pair:
        """The pair of a stack along one of the axes."""
        fitting = tuple(_stack_layouts(self.source, self.target, axis))
        return Pair(self.source, self.target, fitting, axis, (axis,), self.reason)


@dataclass(frozen=True)
class Doubt:
    """Leaves that might belong together, and why that is not certain."""

    sources: tuple[ModelLeaf, ...]
    targets: tuple[ModelLeaf, ...]
    reason: str


@dataclass(slots=True)
class Alignment:
    """The pairs and doubts found so far."""

    sources: list[ModelLeaf]
    targets: list[ModelLeaf]
    pairs: list[Pair] = field(default_factory=list[Pair])
    doubts: list[Doubt] = field(default_factory=list[Doubt])
    misfits: dict[str, str] = field(default_factory=dict[str, str])
    """Name of a leaf -> why the leaf of that name in the other tree is not its counterpart."""
    doubted: set[tuple[Side, str]] = field(default_factory=set[tuple[Side, str]])
    """(side, name) of every leaf in a doubt."""
    paired: set[tuple[Side, str]] = field(default_factory=set[tuple[Side, str]])
    """(side, name) of every leaf in a pair."""

    def free_leaves(self, side: Side) -> list[ModelLeaf]:
        """The leaves of a side that are neither in a pair nor in doubt."""
        leaves = self.sources if side == "source" else self.targets
        taken = self.paired | self.doubted
        return [leaf for leaf in leaves if (side, leaf.name) not in taken]

    def is_unpaired(self, source: LeafGroup, target: LeafGroup) -> bool:
        """Whether none of the leaves is in a pair."""
        return self.paired.isdisjoint(_named(source.leaves, target.leaves))

    def is_free(self, source: LeafGroup, target: LeafGroup) -> bool:
        """Whether none of the leaves is in a pair or in doubt."""
        names = _named(source.leaves, target.leaves)
        return self.paired.isdisjoint(names) and self.doubted.isdisjoint(names)

    def doubt(self, doubt: Doubt) -> None:
        """Leave open what belongs to what."""
        self.doubts.append(doubt)
        self.doubted |= _named(doubt.sources, doubt.targets)

    def offer(self, source: LeafGroup, target: LeafGroup, reason: str) -> bool:
        """Take a pair as found if its leaves are free and their shapes fit."""
        if not self.is_free(source, target):
            return False
        pair = pair_of(source, target, reason)
        if pair is not None:
            self.pairs.append(pair)
            self.paired |= _named(source.leaves, target.leaves)
            return True
        if source.position is None and target.position is None:
            one, other = source.leaves[0], target.leaves[0]
            why = f"shapes {list(one.shape)} and {list(other.shape)} do not fit"
            self.misfits.setdefault(one.name, f"{other.name} is its name there, but {why}")
            self.misfits.setdefault(other.name, f"{one.name} is its name there, but {why}")
        return False


def _named(sources: tuple[ModelLeaf, ...], targets: tuple[ModelLeaf, ...]) -> set[tuple[Side, str]]:
    """(side, name) of every leaf."""
    names: set[tuple[Side, str]] = {("source", leaf.name) for leaf in sources}
    names.update(("target", leaf.name) for leaf in targets)
    return names


def pair_of(source: LeafGroup, target: LeafGroup, reason: str) -> Pair | None:
    """The pair of two groups, if their dtypes and shapes fit."""
    one, other = source.leaves[0], target.leaves[0]
    if _dtype_class(one.spec.dtype) != _dtype_class(other.spec.dtype):
        return None
    if source.position is None and target.position is None:
        fitting = tuple(layouts(one, other))
        return Pair(source, target, fitting, reason=reason) if fitting else None
    stack, whole = (source, other) if source.position is not None else (target, one)
    axes = tuple(
        axis
        for axis, size in enumerate(whole.shape)
        if size == len(stack.leaves) and _stack_layouts(source, target, axis)
    )
    if not axes:
        return None
    axis = axes[0] if len(axes) == 1 else None
    fitting = tuple(_stack_layouts(source, target, axes[0]))
    return Pair(source, target, fitting, axis, axes, reason)


def _stack_layouts(source: LeafGroup, target: LeafGroup, axis: int) -> list[AxisLayout]:
    """The layouts of one leaf of a stack along an axis of the other side's leaf."""
    one, other = source.leaves[0], target.leaves[0]
    if source.position is not None:
        return layouts(one, other.without_axis(axis))
    return layouts(one.without_axis(axis), other)


def _dtype_class(dtype: str) -> str:
    """One word for the dtypes that a cast may bring together."""
    return "float" if "float" in dtype else dtype
