"""Propose the mapping between two models from the names, shapes and dtypes of their leaves.

1. `taken_apart` makes several leaves of one that holds several tensors, as torch's attention does.
2. `align` pairs leaves that are called the same, under other prefixes too, or stacked.
3. `match_modules` pairs what is left by structure: modules that alone have their shapes.
4. `decide` keeps the pairs that only one layout fits, or that convention decides.
5. `put_together` makes one finding of all parts of a leaf, and `fold` makes rules of findings.

Nothing is chosen between two candidates: both are reported. An inferred mapping may have gaps,
which `LeafMapping.check` names. What is in it is certain, but for what a rule says that it assumes:
nothing is loaded through such a rule before `LeafMapping.accept`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from xckpt.mapping.infer.align import Doubt, align
from xckpt.mapping.infer.assumptions import Trees
from xckpt.mapping.infer.decide import Finding, decide, put_together
from xckpt.mapping.infer.fold import fold
from xckpt.mapping.infer.leaves import ModelLeaf, leaves_of, taken_apart
from xckpt.mapping.infer.structure import match_modules
from xckpt.mapping.mapping import LeafMapping
from xckpt.mapping.names import specs_of


@dataclass(frozen=True, slots=True)
class Match:
    """Leaves that belong together."""

    sources: tuple[str, ...]
    """LeafMapping names; several for a stack, or where one leaf of the other tree holds several."""
    targets: tuple[str, ...]
    operations: tuple[dict[str, Any], ...]
    """The operations from source to target, as a mapping file spells them."""
    layout: str
    """The layout's name, such as ``"transposed"``."""
    reason: str
    """How they were found."""
    assumes: str = ""
    """What neither names nor shapes show, and the operations take for granted."""


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

    mapping: LeafMapping
    """The rules for what is certain, and for what is assumed; these say so in `Rule.assumes`."""
    certain: tuple[Match, ...]
    """What the mapping's rules say, leaf by leaf, and names and shapes show."""
    assumed: tuple[Match, ...]
    """The same for what they do not show: read it, then `LeafMapping.accept`."""
    ambiguous: tuple[Ambiguity, ...]
    """What may belong together; the mapping has no rule for it."""
    unmatched: Unmatched
    """The leaves left over on either side."""


def infer(source: object, target: object) -> Inference:
    """Propose the mapping from one model's leaves to another's.

    Where something matters that neither names nor shapes show, such as the order of rotary
    channels in a head, the match is not certain but assumed, and says what it takes for granted.

    Args:
        source: a tree (nested containers, or a flat dict) of anything with ``.shape`` and
            ``.dtype``: torch tensors (``meta`` too), ``jax.ShapeDtypeStruct``, NumPy arrays.
        target: likewise.

    Returns:
        The mapping of what is certain or assumed, and what is neither.

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
    source_specs, target_specs = specs_of(source), specs_of(target)
    sources, targets = leaves_of(source_specs), leaves_of(target_specs)
    alignment = align(taken_apart(sources, targets), taken_apart(targets, sources))
    match_modules(alignment)
    decided, doubts = decide(alignment.pairs, Trees.of(sources, targets))
    findings, doubts_of_parts = put_together(decided)
    matches = tuple(map(_match, findings))
    ambiguous = _ambiguities([*doubts, *doubts_of_parts, *alignment.doubts])
    reported = [*matches, *ambiguous]
    return Inference(
        LeafMapping(fold(findings, source_specs, target_specs)),
        tuple(match for match in matches if not match.assumes),
        tuple(match for match in matches if match.assumes),
        ambiguous,
        Unmatched(
            _unmatched(alignment.sources, chain(*(e.sources for e in reported)), alignment.misfits),
            _unmatched(alignment.targets, chain(*(e.targets for e in reported)), alignment.misfits),
        ),
    )


def _match(finding: Finding) -> Match:
    return Match(
        tuple(chain(*finding.sources)),
        tuple(chain(*finding.targets)),
        tuple(operation.to_document() for operation in finding.operations),
        finding.layout,
        finding.reason,
        finding.assumes,
    )


def _ambiguities(doubts: Sequence[Doubt]) -> tuple[Ambiguity, ...]:
    """The doubts, with whole leaves; those about several parts of the same leaves are one."""
    merged: dict[object, tuple[list[str], list[str], str]] = {}
    for place, doubt in enumerate(doubts):
        key: object = place
        names = [[leaf.whole for leaf in side] for side in (doubt.sources, doubt.targets)]
        for side, leaves in enumerate((doubt.sources, doubt.targets)):
            if any(leaf.part is not None for leaf in leaves):
                key = side, frozenset(names[side]), doubt.reason
        one, other, _ = merged.setdefault(key, ([], [], doubt.reason))
        one += names[0]
        other += names[1]
    return tuple(
        Ambiguity(tuple(dict.fromkeys(one)), tuple(dict.fromkeys(other)), reason)
        for one, other, reason in merged.values()
    )


def _unmatched(
    leaves: Sequence[ModelLeaf], reported: Iterable[str], misfits: Mapping[str, str]
) -> dict[str, str]:
    """The leaves that neither a match nor an ambiguity names, and what is known of each."""
    named = set(reported)
    unmatched: dict[str, str] = {}
    for leaf in leaves:
        if leaf.whole not in named:
            unmatched[leaf.whole] = unmatched.get(leaf.whole) or misfits.get(leaf.name, "")
    return unmatched
