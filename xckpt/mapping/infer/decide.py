"""Which pairs are certain, and why the others are not.

A pair is certain if one layout is left:

1. the shapes allow no other; or
2. the roles call for it (torch's ``weight`` is Flax's ``kernel`` transposed), and no pair of these
   trees whose shapes do decide goes the other way.

Even then, three things that no shape shows are left open: a transposed convolution's kernel, which
some models flip; the first layer after a flattened convolution, whose inputs are in the order of
the framework's images; a stack that fits along several axes, where no other stack tells which.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from xckpt.mapping.infer.conventions import AxisLayout
from xckpt.mapping.infer.leaf_names import ModelLeaf
from xckpt.mapping.infer.pairs import Doubt, Pair

TRANSPOSED_CONVOLUTIONS = ("transpose", "deconv", "upconv", "upsample", "convt")


@dataclass(frozen=True)
class Decided:
    """A pair and the layout that it has."""

    pair: Pair
    layout: AxisLayout


def decide(pairs: Sequence[Pair]) -> tuple[list[Decided], list[Doubt]]:
    """The pairs that are certain, and doubts about the others."""
    axes = {pair.axis for pair in pairs if pair.axis is not None}
    axis = axes.pop() if len(axes) == 1 else None
    pairs = [pair.at(axis) if pair.axis is None and axis in pair.axes else pair for pair in pairs]
    kinds: dict[object, set[str]] = defaultdict(set)
    for pair in pairs:
        if len(pair.layouts) == 1:
            kinds[_class(pair)].add(pair.layouts[0].kind)
    flattened = _Flattened.of(pairs)
    decided: list[Decided] = []
    doubts: list[Doubt] = []
    for pair in pairs:
        reason = _doubt(pair, kinds[_class(pair)]) or flattened.doubt(pair)
        if reason:
            doubts.append(Doubt(pair.source.leaves, pair.target.leaves, reason))
        else:
            decided.append(Decided(pair, pair.layouts[0]))
    return decided, doubts


def _class(pair: Pair) -> object:
    """Pairs of one class have one layout, if the model is consistent."""
    source, target = pair.source.leaves[0], pair.target.leaves[0]
    ranks = len(source.shape), len(target.shape)
    return source.flavour, target.flavour, ranks, pair.source.position, pair.target.position


def _doubt(pair: Pair, kinds: set[str]) -> str:
    """Why a pair is not certain; empty if it is."""
    if len(pair.axes) > 1 and pair.axis is None:
        return f"a stack along any of the axes {list(pair.axes)} would fit"
    first = pair.layouts[0]
    leaf = pair.source.leaves[0]
    if leaf.role == "weight" and len(leaf.shape) > 2 and _is_transposed_convolution(pair):
        return "a transposed convolution: whether its kernel is flipped depends on the model"
    if len(pair.layouts) == 1:
        return ""
    named = " and ".join(layout.kind for layout in pair.layouts)
    shape = list(leaf.shape)
    if sum(layout.usual for layout in pair.layouts) != 1 or not first.usual:
        return f"the shape {shape} fits {named}, and no convention says which"
    others = kinds - {first.kind}
    if others:
        return f"the shape {shape} fits {named}; others of these trees are {' and '.join(others)}"
    return ""


def _is_transposed_convolution(pair: Pair) -> bool:
    words = [
        word
        for leaf in (pair.source.leaves[0], pair.target.leaves[0])
        for word in leaf.path
        if isinstance(word, str)
    ]
    return any(part in word for word in words for part in TRANSPOSED_CONVOLUTIONS)


@dataclass(frozen=True)
class _Flattened:
    """Sizes that show whether a layer follows a flattened convolution."""

    channels: frozenset[int]
    """Output channels of the convolutions."""
    widths: frozenset[int]
    """Sizes that some layer gives."""

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> _Flattened:
        channels: set[int] = set()
        widths: set[int] = set()
        for pair in pairs:
            leaf = _in_torch(pair)
            if len(leaf.shape) == 1:
                widths.add(leaf.shape[0])
            elif leaf.shape and "embedding" in (pair.source.leaves[0].flavour, leaf.flavour):
                widths.add(leaf.shape[-1])
            elif leaf.shape:
                widths.add(leaf.shape[0])
            if pair.layouts[0].kind == "convolution":
                channels.add(leaf.shape[0])
        return cls(frozenset(channels), frozenset(widths))

    def doubt(self, pair: Pair) -> str:
        """Why a layer's inputs may be in another order; empty if they are not."""
        if pair.layouts[0].kind != "transposed":
            return ""
        inputs = _in_torch(pair).shape[-1]
        channels = [each for each in self.channels if inputs % each == 0 and inputs > each]
        if not channels or inputs in self.widths:
            return ""
        return (
            f"its {inputs} inputs may be a convolution's flattened output, "
            f"channels first in torch and last in Flax"
        )


def _in_torch(pair: Pair) -> ModelLeaf:
    """The leaf of the pair that is laid out as torch does."""
    source, target = pair.source.leaves[0], pair.target.leaves[0]
    return target if target.flavour == "weight" and source.flavour != "weight" else source
