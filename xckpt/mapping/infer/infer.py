"""Propose the mapping between two models from the names, shapes and dtypes of their leaves.

1. `taken_apart` makes several leaves of one that holds several tensors, as torch's attention does.
2. `align` pairs leaves that are called the same, under other prefixes too, or stacked.
3. `match_modules` pairs what is left by structure: modules that alone have their shapes.
4. `decide` keeps the pairs that only one layout fits, or that convention decides.
5. `put_together` makes one finding of all parts of a leaf, and `fold` makes rules of findings.

Nothing is chosen between two candidates: both are reported. An inferred mapping may have gaps,
which `LeafMapping.check` names. Its rules are certain, except for the assumptions that they state:
nothing is loaded through such a rule before `LeafMapping.accept`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from xckpt.core.text.arguments import check_function
from xckpt.mapping.infer.align import Doubt, align
from xckpt.mapping.infer.assumptions import Trees
from xckpt.mapping.infer.decide import Finding, decide, put_together
from xckpt.mapping.infer.fold import fold
from xckpt.mapping.infer.leaves import ModelLeaf, leaves_of, taken_apart
from xckpt.mapping.infer.structure import match_modules
from xckpt.mapping.mapping import LeafMapping, part_of
from xckpt.mapping.names import specs_of

NAMED, ALIGNED, DECIDED, PUT_TOGETHER = 0.1, 0.65, 0.8, 0.85
"""How much of the time has usually passed after each step; what is left is the folding."""


@dataclass(frozen=True, slots=True)
class Match:
    """Leaves that belong together."""

    sources: tuple[str, ...]
    """Mapping names; several for a stack, or where one leaf of the other tree holds several."""
    targets: tuple[str, ...]
    operations: tuple[dict[str, Any], ...]
    """The operations from source to target, as a mapping file spells them."""
    layout: str
    """The layout's name, such as ``"transposed"``."""
    reason: str
    """How they were found."""
    assumes: str = ""
    """What the operations assume, since neither names nor shapes show it."""


@dataclass(frozen=True, slots=True)
class Ambiguity:
    """Leaves that might belong together; nothing was chosen."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Unmatched:
    """Leaves without a counterpart: name -> what is known about it, or ``""``.

    Example:
        >>> len(Unmatched({"rotary.inv_freq": ""}, {}))
        1
    """

    source: dict[str, str]
    target: dict[str, str]

    def __len__(self) -> int:
        return len(self.source) + len(self.target)


@dataclass(frozen=True, slots=True)
class Inference:
    """What `infer` found.

    Example:
        >>> import numpy as np
        >>> weight, kernel = np.zeros((4, 2)), np.zeros((2, 4))
        >>> found = infer({"fc.weight": weight, "extra": weight}, {"fc": {"kernel": kernel}})
        >>> [(match.sources, match.targets, match.layout) for match in found.certain]
        [(('fc.weight',), ('fc/kernel',), 'transposed')]
        >>> found.unmatched.source, len(found.assumed), len(found.ambiguous)
        ({'extra': ''}, 0, 0)
    """

    mapping: LeafMapping
    """The rules for certain and for assumed matches; the latter say so in `Rule.assumes`."""
    certain: tuple[Match, ...]
    """The certain matches, leaf by leaf: names and shapes show them."""
    assumed: tuple[Match, ...]
    """The assumed matches: read them, then call `LeafMapping.accept`."""
    ambiguous: tuple[Ambiguity, ...]
    """Leaves that may belong together; the mapping has no rule for them."""
    unmatched: Unmatched
    """The leaves left over on either side."""

    def __repr__(self) -> str:
        parts = "certain", "assumed", "ambiguous", "unmatched"
        counts = ", ".join(f"{len(getattr(self, part)):,} {part}" for part in parts)
        return f"<Inference: {counts}>"


def infer(
    source: object, target: object, *, progress: Callable[[float], None] | None = None
) -> Inference:
    """Propose the mapping from one model's leaves to another's.

    If a match depends on something that neither names nor shapes show, such as the order of rotary
    channels in a head, it is not certain but assumed, and states the assumption.

    Args:
        source: a tree (nested containers, or a flat dict) of anything with ``.shape`` and
            ``.dtype``: torch tensors (``meta`` too), ``jax.ShapeDtypeStruct``, NumPy arrays.
        target: likewise.
        progress: called with the part of the work that is done, from 0 to 1.

    Returns:
        The mapping of certain and assumed matches, and the leaves that are neither.

    Raises:
        MappingError: two leaves of a tree have one mapping name.
        TypeError: ``progress`` is not a function, or something else is no tree of arrays.

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
    check_function("infer", "progress", "a function of the part that is done", progress)
    report = progress or _unwatched
    source_specs, target_specs = specs_of(source), specs_of(target)
    sources, targets = leaves_of(source_specs), leaves_of(target_specs)
    report(NAMED)
    alignment = align(
        taken_apart(sources, targets),
        taken_apart(targets, sources),
        part_of(progress, NAMED, ALIGNED),
    )
    match_modules(alignment)
    report(ALIGNED)
    decided, doubts = decide(alignment.pairs, Trees.of(sources, targets))
    report(DECIDED)
    findings, doubts_of_parts = put_together(decided)
    matches = tuple(map(_match, findings))
    ambiguous = _ambiguities([*doubts, *doubts_of_parts, *alignment.doubts])
    reported = [*matches, *ambiguous]
    report(PUT_TOGETHER)
    rules = fold(findings, source_specs, target_specs)
    report(1.0)
    return Inference(
        LeafMapping(rules),
        tuple(match for match in matches if not match.assumes),
        tuple(match for match in matches if match.assumes),
        ambiguous,
        Unmatched(
            _unmatched(alignment.sources, chain(*(e.sources for e in reported)), alignment.misfits),
            _unmatched(alignment.targets, chain(*(e.targets for e in reported)), alignment.misfits),
        ),
    )


def _unwatched(part: float) -> None:
    """Nothing is shown."""


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
    """The leaves without a match or an ambiguity, and what is known about each."""
    named = set(reported)
    unmatched: dict[str, str] = {}
    for leaf in leaves:
        if leaf.whole not in named:
            unmatched[leaf.whole] = unmatched.get(leaf.whole) or misfits.get(leaf.name, "")
    return unmatched
