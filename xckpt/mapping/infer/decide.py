"""Which pairs are certain, and why the others are not; the findings that certain pairs make.

`decide`: a pair is certain if one layout is left:

1. the shapes allow no other; or
2. the roles call for it (torch's ``weight`` is Flax's ``kernel`` transposed), and no pair of these
   trees whose shapes do decide goes the other way.

Such a pair assumes what neither names nor shapes show (`xckpt.mapping.infer.assumptions`).
Even then, three things that no shape shows are left open: a transposed convolution's kernel, which
some models flip; the first layer after a flattened convolution, whose inputs are in the order of
the framework's images; a stack that fits along several axes, where no other stack tells which.

`put_together`: a finding is the content of one rule.

1. Pairs of parts of the same fused leaf, or of the same stack of leaves, are one finding.
2. A leaf with parts that are not certain becomes a doubt as a whole.
3. The operations are those of the pair: its layout, a cast where the dtypes differ, a stack. A
   source's parts are split before, a target's concatenated after.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from string import ascii_lowercase

from xckpt.mapping.infer.align import Doubt, Pair
from xckpt.mapping.infer.assumptions import UPWARDS, Trees, assume, assumptions_of, in_torch
from xckpt.mapping.infer.flattened import Images
from xckpt.mapping.infer.leaves import PARTS, STACKED, LeafGroup, ModelLeaf
from xckpt.mapping.operations import Cast, Concatenate, Each, Operation, Rearrange, Split, Stack

TRANSPOSED_CONVOLUTIONS = ("transpose", "deconv", "upconv", "upsample", "convt")


def decide(pairs: Sequence[Pair], trees: Trees) -> tuple[list[Pair], list[Doubt]]:
    """The pairs whose first layout is taken, and doubts about the others.

    Example:
        >>> from xckpt.mapping.infer.align import align
        >>> from xckpt.mapping.infer.leaves import leaves_of
        >>> from xckpt.mapping.spec import TensorSpec
        >>> torch = leaves_of({"fc.weight": TensorSpec((2, 4), "int8")})
        >>> flax = leaves_of({"fc/kernel": TensorSpec((4, 2), "int8")})
        >>> certain, doubts = decide(align(torch, flax).pairs, Trees.of(torch, flax))
        >>> [pair.layouts[0].kind for pair in certain], doubts
        (['transposed'], [])
    """
    alternatives = {pair.source: len(pair.fits) for pair in pairs}
    pairs = _along_one_axis(pairs)
    kinds: dict[object, set[str]] = defaultdict(set)
    for pair in pairs:
        if len(pair.layouts) == 1:
            kinds[_class(pair)].add(pair.layouts[0].kind)
    images = Images(pairs)
    paired = {
        leaf.name for pair in pairs for side in (pair.source, pair.target) for leaf in side.leaves
    }
    certain: list[Pair] = []
    doubts: list[Doubt] = []
    for pair in pairs:
        reason = (
            _scaled(pair, trees, paired) or _doubt(pair, kinds[_class(pair)]) or images.doubt(pair)
        )
        if reason:
            doubts.append(Doubt(pair.source.leaves, pair.target.leaves, reason))
        else:
            kind = kinds[_class(pair)]
            found = assume(pair, trees, kind, alternatives[pair.source])
            certain.append(replace(found, assumes=found.assumes or images.assumption(pair)))
    return certain, doubts


def _along_one_axis(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs; stacks that fit along several axes take the axis that the others share, if any."""
    axes = {pair.axis for pair in pairs if len(pair.fits) == 1} - {None}
    if len(axes) != 1:
        return list(pairs)
    [axis] = axes
    return [
        replace(pair, fits={axis: pair.fits[axis]}) if axis in pair.fits else pair for pair in pairs
    ]


def _class(pair: Pair) -> object:
    """Pairs of one class have one layout, if the model is consistent."""
    source, target = pair.first
    ranks = len(source.shape), len(target.shape)
    return source.flavour, target.flavour, ranks, pair.source.position, pair.target.position


def _doubt(pair: Pair, kinds: set[str]) -> str:
    """Why a pair is not certain; empty if it is."""
    if len(pair.fits) > 1:
        return f"a stack along any of the axes {list(pair.fits)} would fit"
    leaf, _ = pair.first
    if leaf.role == "weight" and len(leaf.shape) > 2 and _is_transposed_convolution(pair):
        return "a transposed convolution: whether its kernel is flipped depends on the model"
    if len(pair.layouts) == 1:
        return ""
    usual, *_ = pair.layouts
    fitting = " and ".join(layout.kind for layout in pair.layouts)
    fits = f"the shape {list(leaf.shape)} fits {fitting}"
    if [layout for layout in pair.layouts if layout.usual] != [usual]:
        return f"{fits}, and no convention says which"
    if others := kinds - {usual.kind}:
        return f"{fits}; others of these trees are {' and '.join(sorted(others))}"
    return ""


def _scaled(pair: Pair, trees: Trees, paired: Collection[str]) -> str:
    """Why a leaf's numbers alone are not the weights; empty if they are.

    Args:
        pair: the leaf and its counterpart.
        trees: what the leaves of both trees say.
        paired: names of the leaves that have a counterpart.
    """
    for leaf in (*pair.source.leaves, *pair.target.leaves):
        scales = trees.scales.get(leaf.name)
        if scales is not None and scales not in paired:
            return f"{leaf.name} is stored with scales, {scales}, which the other side lacks"
    return ""


def _is_transposed_convolution(pair: Pair) -> bool:
    words = [word for leaf in pair.first for word in leaf.path if isinstance(word, str)]
    if any(part in word for word in words for part in TRANSPOSED_CONVOLUTIONS):
        return True
    space = in_torch(pair).shape[2:]
    return not UPWARDS.isdisjoint(words) and all(size % 2 == 0 for size in space)


Places = tuple[tuple[str, ...], ...]
"""The mapping's names at each place of a rule's side: one, or all names of a stack."""


@dataclass(frozen=True)
class Finding:
    """Leaves that certainly belong together: a pair, or those of all parts of a leaf."""

    sources: Places
    targets: Places
    operations: tuple[Operation, ...]
    """The operations from source to target."""
    layout: str = ""
    """The layout's name."""
    reason: str = ""
    """How it was found."""
    assumes: str = ""
    """What it assumes."""

    @property
    def is_stack(self) -> bool:
        """Whether one side's leaves are stacked in the other's."""
        return any(len(names) > 1 for names in self.sources + self.targets)


def put_together(pairs: Sequence[Pair]) -> tuple[list[Finding], list[Doubt]]:
    """The findings of certain pairs, and doubts about leaves with parts that are not certain.

    Example:
        >>> from xckpt.mapping.infer.align import align
        >>> from xckpt.mapping.infer.leaves import leaves_of
        >>> from xckpt.mapping.spec import TensorSpec
        >>> torch = leaves_of({"fc.weight": TensorSpec((2, 4), "int8")})
        >>> flax = leaves_of({"fc/kernel": TensorSpec((4, 2), "int8")})
        >>> [finding], doubts = put_together(align(torch, flax).pairs)
        >>> finding.sources, finding.targets, finding.operations
        ((('fc.weight',),), (('fc/kernel',),), (Transpose(axes=(1, 0)),))
    """
    grouped: dict[tuple[str, tuple[str, ...]] | int, list[Pair]] = defaultdict(list)
    for number, pair in enumerate(pairs):
        sides = (("source", pair.source), ("target", pair.target))
        fused = ((side, _wholes(group)) for side, group in sides if _part(group))
        grouped[next(fused, number)].append(pair)
    findings: list[Finding] = []
    doubts: list[Doubt] = []
    for whole, together in grouped.items():
        if isinstance(whole, int) or len(together) == len(PARTS):
            findings.append(_finding(sorted(together, key=_number)))
            continue
        only = f"only {len(together)} of the {len(PARTS)} tensors in one leaf are certain"
        doubts += [Doubt(pair.source.leaves, pair.target.leaves, only) for pair in together]
    return findings, doubts


def _finding(pairs: Sequence[Pair]) -> Finding:
    """The finding of one pair, or of those of all parts of a leaf."""
    first = pairs[0]
    branches = [_operations(pair) for pair in pairs]
    operations = branches[0] if len(set(branches)) == 1 else (Each(tuple(branches)),)
    if part := _part(first.source):
        operations = (Split(part.shape[:1] * len(PARTS)), *operations)
    elif part := _part(first.target):
        operations = (*operations, Concatenate(part.shape[:1] * len(PARTS)))
    return Finding(
        _places(pair.source for pair in pairs),
        _places(pair.target for pair in pairs),
        operations,
        first.layouts[0].kind,
        first.reason,
        assumptions_of(pairs),
    )


def _operations(pair: Pair) -> tuple[Operation, ...]:
    """The operations of one pair."""
    before, after = (leaf.spec.dtype for leaf in pair.first)
    cast = (Cast((before, after)),) if before != after else ()
    operations = (*pair.layouts[0].operations, *cast)
    if pair.axis is None:
        return operations
    if pair.source.position is not None:
        return (*operations, _stacked(pair.source, pair.target, pair.axis))
    return (_stacked(pair.target, pair.source, pair.axis).inverse(), *operations)


def _stacked(leaves: LeafGroup, whole: LeafGroup, axis: int) -> Operation:
    """The operation that makes one leaf of a stack's leaves; of a single leaf there is no index."""
    if len(leaves.leaves) > 1:
        return Stack(STACKED, axis)
    axes = ascii_lowercase[: len(whole.leaves[0].shape) - 1]
    return Rearrange(f"{' '.join(axes)} -> {' '.join((*axes[:axis], '1', *axes[axis:]))}")


def _part(group: LeafGroup) -> ModelLeaf | None:
    return next((leaf for leaf in group.leaves if leaf.part is not None), None)


def _number(pair: Pair) -> int:
    """Which part of a leaf it is."""
    part = _part(pair.source) or _part(pair.target)
    return part.part or 0 if part else 0


def _wholes(group: LeafGroup) -> tuple[str, ...]:
    return tuple(leaf.whole for leaf in group.leaves)


def _places(groups: Iterable[LeafGroup]) -> Places:
    """Each leaf, or stack of leaves, once."""
    return tuple(dict.fromkeys(map(_wholes, groups)))
