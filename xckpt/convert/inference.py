"""Propose the mapping between two models from the names, shapes and dtypes of their leaves.

1. `align` pairs leaves that are called the same, under other prefixes too, or stacked.
2. `match_modules` pairs what is left by structure: modules that alone have their shapes.
3. `decide` keeps the pairs that only one layout fits, or that convention decides.
4. `fold` makes rules of them.

Nothing is chosen between two candidates: both are told. A mapping inferred may so have gaps, which
`Mapping.check` names; what is in it is certain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xckpt.convert.alignment import Alignment, Doubt, align
from xckpt.convert.conventions import Operation
from xckpt.convert.decisions import Decided, decide
from xckpt.convert.folding import Link, Rule, counted, fold, rule
from xckpt.convert.leaf_names import Leaf, leaves_of, specs_of
from xckpt.convert.mapping import Mapping
from xckpt.convert.structure import match_modules

STACKED = "layer"
"""The index of a stack's rule."""

__all__ = ["Ambiguity", "Inference", "Match", "Unmatched", "infer"]


@dataclass(frozen=True, slots=True)
class Match:
    """Leaves that certainly belong together."""

    sources: tuple[str, ...]
    """Mapping names; several for a stack."""
    targets: tuple[str, ...]
    operations: tuple[Operation, ...]
    """What makes the one of the other, as a mapping file spells it."""
    layout: str
    """The layout's name, such as ``"transposed"``."""
    reason: str
    """How they were found."""


@dataclass(frozen=True, slots=True)
class Ambiguity:
    """Leaves that might belong together; nothing was chosen."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Unmatched:
    """Leaves without a counterpart: name -> what is known of it, or ``""``."""

    source: dict[str, str]
    target: dict[str, str]

    def __len__(self) -> int:
        return len(self.source) + len(self.target)


@dataclass(frozen=True, slots=True)
class Inference:
    """What `infer` found."""

    mapping: Mapping
    """The rules for what is certain."""
    certain: tuple[Match, ...]
    """What the mapping's rules say, leaf by leaf."""
    ambiguous: tuple[Ambiguity, ...]
    """What may belong together; the mapping has no rule for it."""
    unmatched: Unmatched
    """What is left over on either side."""


def infer(source: object, target: object) -> Inference:
    """Propose the mapping from one model's leaves to another's.

    What neither names nor shapes show is taken to be the same on both sides: the order of rotary
    channels in a head, a scale that is stored less one, a query that is scaled beforehand.

    Args:
        source: a tree (nested containers, or a flat dict) of anything with ``.shape`` and
            ``.dtype``: torch tensors (``meta`` too), ``jax.ShapeDtypeStruct``, NumPy arrays.
        target: likewise.

    Returns:
        The mapping of what is certain, and what is not.

    Raises:
        MappingError: two leaves of a tree have one mapping name.

    Example:
        >>> import numpy as np
        >>> torch = {f"model.layers.{n}.fc.weight": np.zeros((4, 2)) for n in range(3)}
        >>> torch["model.layers.0.rotary.inv_freq"] = np.zeros(2)
        >>> flax = {"layers": [{"fc": {"kernel": np.zeros((2, 4))}} for _ in range(3)]}
        >>> inference = infer(torch, flax)
        >>> for rule in inference.mapping.to_document()["rule"]:
        ...     print(rule["source"], "->", rule["target"], rule["operations"])
        model.layers.{layer}.fc.weight -> layers/{layer}/fc/kernel [{'transpose': [1, 0]}]
        >>> inference.unmatched.source
        {'model.layers.0.rotary.inv_freq': ''}
    """
    sources, targets = leaves_of(specs_of(source)), leaves_of(specs_of(target))
    alignment = align(sources, targets)
    match_modules(alignment)
    decided, doubts = decide(alignment.pairs)
    doubts += alignment.doubts
    rules = _rules(decided, [leaf.name for leaf in sources], [leaf.name for leaf in targets])
    return Inference(
        mapping=Mapping.from_document({"rule": rules}),
        certain=tuple(_match(each) for each in decided),
        ambiguous=tuple(_ambiguity(doubt) for doubt in doubts),
        unmatched=_unmatched(alignment, decided, doubts),
    )


def _match(decided: Decided) -> Match:
    pair = decided.pair
    return Match(
        tuple(leaf.name for leaf in pair.source.leaves),
        tuple(leaf.name for leaf in pair.target.leaves),
        _operations(decided),
        decided.layout.kind,
        pair.reason,
    )


def _operations(decided: Decided) -> tuple[Operation, ...]:
    pair, operations = decided.pair, decided.layout.operations
    dtypes = [item.leaves[0].spec.dtype for item in (pair.source, pair.target)]
    if dtypes[0] != dtypes[1]:
        cast: Operation = {"cast": dtypes}
        operations = (*operations, cast)
    if pair.source.position is not None:
        return (*operations, {"stack": STACKED, "axis": pair.axis})
    if pair.target.position is not None:
        return ({"unstack": STACKED, "axis": pair.axis}, *operations)
    return operations


def _rules(
    decided: Sequence[Decided], sources: Sequence[str], targets: Sequence[str]
) -> list[Rule]:
    links: list[Link] = []
    rules: list[Rule] = []
    for each in decided:
        one, other = each.pair.source, each.pair.target
        if one.position is None and other.position is None:
            links.append(Link(one.leaves[0].name, other.leaves[0].name, _operations(each)))
        else:
            rules.append(_stack_rule(each))
    return [*fold(links, sources, targets), *rules]


def _stack_rule(decided: Decided) -> Rule:
    """The rule for a stack; the leaves of one are numbered from 0."""
    sides = (decided.pair.source, decided.pair.target)
    names = [counted([leaf.name for leaf in item.leaves], STACKED) for item in sides]
    count = max(len(item.leaves) for item in sides)
    operations = _operations(decided)
    return rule(names[0], names[1], operations, {STACKED: [0, count]})


def _ambiguity(doubt: Doubt) -> Ambiguity:
    return Ambiguity(
        tuple(leaf.name for leaf in doubt.sources),
        tuple(leaf.name for leaf in doubt.targets),
        doubt.reason,
    )


def _unmatched(
    alignment: Alignment, decided: Sequence[Decided], doubts: Sequence[Doubt]
) -> Unmatched:
    """The leaves that neither a pair nor a doubt names."""

    def left(leaves: Sequence[Leaf], named: set[str]) -> dict[str, str]:
        return {
            leaf.name: alignment.misfits.get(leaf.name, "")
            for leaf in leaves
            if leaf.name not in named
        }

    here = {leaf.name for each in decided for leaf in each.pair.source.leaves}
    here |= {leaf.name for doubt in doubts for leaf in doubt.sources}
    there = {leaf.name for each in decided for leaf in each.pair.target.leaves}
    there |= {leaf.name for doubt in doubts for leaf in doubt.targets}
    return Unmatched(left(alignment.sources, here), left(alignment.targets, there))
