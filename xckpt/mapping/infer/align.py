"""Pairing the leaves of two trees by their names.

1. Leaves whose keys are equal belong together, if no other leaf of either tree has that key; first
   by their own words, then by concepts (`xckpt.mapping.infer.leaves`). Where one tree numbers
   them 0, 2, 4 and the other 0, 1, 2, equal numbers mean nothing.
2. The remaining leaves may lie under other prefixes: ``bert.encoder...`` and ``encoder/...``. A
   pair of prefixes *explains* the pairs of leaves whose keys are equal without them; those that
   explain the most leaves are tried first.
3. A rival is another pair of prefixes with no more components. If a rival gives one of the leaves
   another counterpart, the pair is in doubt:

       prefixes          source a.fc  ->  target x.fc
       rival             source a.fc  ->  target y.fc      a.fc in doubt between x.fc and y.fc
       rival             source b.fc  ->  target x.fc      x.fc in doubt between a.fc and b.fc

   A rival that explains only a part of the same leaves is no reason for doubt, nor is one whose
   leaves have counterparts already.
4. Leaves that differ in one number alone, counted from 0, may be one leaf of the other tree,
   stacked along an axis: they are aligned like any other, without that number.

Names alone decide here; a pair is taken only if its shapes fit. A pair that names suggest and
shapes refuse is a misfit, to be reported.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from xckpt.mapping.infer.layouts import AxisLayout, fits
from xckpt.mapping.infer.leaves import (
    STACKED,
    Components,
    LeafGroup,
    ModelLeaf,
    concepts,
    counted,
)
from xckpt.mapping.infer.prefixes import Explanations, Groups, equal_keys

KEYS: dict[str, Callable[[Components], Components]] = {
    "same name": lambda key: key,
    "same name in other words": concepts,
}
"""Reason for a pair -> the key by which leaves are compared, the strictest first."""

SAME_ORDER = "same order"
"""Reason for pairs of modules that their numbers alone tell apart."""


@dataclass(frozen=True)
class Pair:
    """Two groups that belong together, and the layouts that their shapes allow."""

    source: LeafGroup
    target: LeafGroup
    fits: Mapping[int | None, Sequence[AxisLayout]]
    """Axis that a stack may be along -> the layouts of its leaves; None: there is no stack."""
    reason: str
    """How it was found."""
    assumes: str = ""
    """What it assumes; see `xckpt.mapping.infer.assumptions`."""

    @cached_property
    def first(self) -> tuple[ModelLeaf, ModelLeaf]:
        """The first leaf of either side; of one that holds a stack, what it holds of each."""
        one, other = self.source.leaves[0], self.target.leaves[0]
        if self.axis is None:
            return one, other
        if self.source.position is not None:
            return one, other.without_axis(self.axis)
        return one.without_axis(self.axis), other

    @property
    def axis(self) -> int | None:
        """The first axis that fits."""
        return next(iter(self.fits))

    @property
    def layouts(self) -> Sequence[AxisLayout]:
        """The layouts along that axis, the usual one first."""
        return self.fits[self.axis]


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
    progress: Callable[[float], None] | None = None
    """Called with the part of the leaves that are in a pair or in doubt."""
    pairs: list[Pair] = field(default_factory=list[Pair])
    doubts: list[Doubt] = field(default_factory=list[Doubt])
    misfits: dict[str, str] = field(default_factory=dict[str, str])
    """Name of a leaf -> why the leaf of that name in the other tree is not its counterpart."""
    paired: set[ModelLeaf] = field(default_factory=set[ModelLeaf])
    doubted: set[ModelLeaf] = field(default_factory=set[ModelLeaf])

    def are_free(self, leaves: Collection[ModelLeaf]) -> bool:
        """Whether none of the leaves is in a pair or in doubt."""
        return self.paired.isdisjoint(leaves) and self.doubted.isdisjoint(leaves)

    def report(self) -> None:
        """Report the part of the leaves that are in a pair or in doubt."""
        if self.progress is not None:
            leaves = len(self.sources) + len(self.targets)
            self.progress(min(1.0, (len(self.paired) + len(self.doubted)) / max(1, leaves)))

    def doubt(self, doubt: Doubt) -> None:
        """Record a doubt and pair none of these leaves."""
        self.doubts.append(doubt)
        self.doubted.update(doubt.sources, doubt.targets)

    def offer(self, source: LeafGroup, target: LeafGroup, reason: str) -> None:
        """Take a pair if its leaves are free and their shapes fit."""
        if not self.are_free(source.leaves + target.leaves):
            return
        if fitting := fits(source, target):
            self.pairs.append(Pair(source, target, fitting, reason))
            self.paired.update(source.leaves, target.leaves)
        elif source.position is None and target.position is None:
            one, other = source.leaves[0], target.leaves[0]
            why = f"shapes {list(one.shape)} and {list(other.shape)} do not fit"
            self.misfits.setdefault(one.name, f"{other.name} is its name there, but {why}")
            self.misfits.setdefault(other.name, f"{one.name} is its name there, but {why}")


def align(
    sources: Sequence[ModelLeaf],
    targets: Sequence[ModelLeaf],
    progress: Callable[[float], None] | None = None,
) -> Alignment:
    """Pair the leaves of two trees by name.

    Args:
        sources: leaves of the source.
        targets: leaves of the target.
        progress: called with the part of the leaves that have a counterpart.

    Example:
        >>> from xckpt.mapping.infer.leaves import leaves_of
        >>> from xckpt.mapping.spec import TensorSpec
        >>> torch = leaves_of({"model.fc.weight": TensorSpec((2, 4), "int8")})
        >>> flax = leaves_of({"params/fc/kernel": TensorSpec((4, 2), "int8")})
        >>> [(pair.layouts[0].kind, pair.reason) for pair in align(torch, flax).pairs]
        [('transposed', 'same name without model')]
    """
    alignment = Alignment(list(sources), list(targets), progress)
    for reason, key in KEYS.items():
        _pair_by_key(alignment, _singles(sources, key), _singles(targets, key), reason)
    for key in KEYS.values():
        one, other = _free(alignment)
        _pair_by_prefix(alignment, _singles(one, key), _singles(other, key))
    for key in KEYS.values():
        one, other = _free(alignment)
        stacked = _stacks(one, key), _singles(other, key)
        unstacked = _singles(one, key), _stacks(other, key)
        for sides in (stacked, unstacked):
            _pair_by_key(alignment, *sides, "stacked")
        for sides in (stacked, unstacked):
            _pair_by_prefix(alignment, *sides)
    return alignment


def _free(alignment: Alignment) -> tuple[list[ModelLeaf], list[ModelLeaf]]:
    """The source's leaves and the target's that are neither in a pair nor in doubt."""
    sources, targets = (
        [leaf for leaf in side if alignment.are_free((leaf,))]
        for side in (alignment.sources, alignment.targets)
    )
    return sources, targets


def _singles(
    leaves: Iterable[ModelLeaf], key: Callable[[Components], Components]
) -> list[LeafGroup]:
    """Each leaf as a group of its own."""
    return [LeafGroup(key(leaf.key), (leaf,)) for leaf in leaves]


def _stacks(
    leaves: Iterable[ModelLeaf], key: Callable[[Components], Components]
) -> list[LeafGroup]:
    """Leaves of one shape whose keys differ in a number from 0 on."""
    members: dict[tuple[Components, int], dict[int, ModelLeaf]] = defaultdict(dict)
    for leaf in leaves:
        whole = key(leaf.key)
        for position, component in enumerate(whole):
            if isinstance(component, int):
                rest = (*whole[:position], *whole[position + 1 :])
                members[rest, position].setdefault(component, leaf)
    stacks: list[LeafGroup] = []
    for (rest, position), by_number in members.items():
        stacked = [by_number[number] for number in sorted(by_number)]
        alike = len({(leaf.spec, leaf.flavour) for leaf in stacked}) == 1
        names = [leaf.whole for leaf in stacked]
        alone = 0 in by_number and len(names) == 1
        # Some of them may be parts of others; these are put together, or in doubt, later.
        mixed = len({leaf.part for leaf in stacked}) > 1
        if alike and (alone or mixed or counted(names, STACKED)):
            stacks.append(LeafGroup(rest, tuple(stacked), position))
    return stacks


def _pair_by_key(
    alignment: Alignment, sources: Sequence[LeafGroup], targets: Sequence[LeafGroup], reason: str
) -> None:
    """Pair groups whose keys are equal."""
    for source, target in equal_keys(sources, targets):
        alignment.offer(source, target, reason)
    alignment.report()


def _pair_by_prefix(
    alignment: Alignment, sources: Sequence[LeafGroup], targets: Sequence[LeafGroup]
) -> None:
    """Pair groups whose keys are equal without a prefix on either side."""
    explanations = Explanations(sources, targets)

    def is_unpaired(group: LeafGroup) -> bool:
        return alignment.paired.isdisjoint(group.leaves)

    for prefixes in explanations.in_order(lambda group: alignment.are_free(group.leaves)):
        free = [each for each in explanations.pairs(prefixes) if alignment.are_free(_leaves(each))]
        if not free:
            continue
        doubts = _doubts(alignment, free, explanations.rivals(prefixes, free, is_unpaired))
        left_out = " and ".join(".".join(map(str, prefix)) for prefix in prefixes if prefix)
        for source, target in free:
            if (source, target) in doubts:
                alignment.doubt(doubts[source, target])
            else:
                alignment.offer(source, target, f"same name without {left_out}")
        alignment.report()


def _doubts(
    alignment: Alignment, pairs: Sequence[Groups], rivals: Iterable[Sequence[Groups]]
) -> dict[Groups, Doubt]:
    """The doubts that rivals raise about pairs."""
    counterpart = dict(pairs) | {target: source for source, target in pairs}
    others: dict[LeafGroup, list[LeafGroup]] = defaultdict(list)
    for source, target in _contradictions(alignment, pairs, rivals):
        for one, other in ((source, target), (target, source)):
            if counterpart.get(one, other) is not other:
                others[one].append(other)
    return {
        (source, target): Doubt(
            _leaves([source, *others[target]]),
            _leaves([target, *others[source]]),
            "named alike without other prefixes too",
        )
        for source, target in pairs
        if others[source] or others[target]
    }


def _contradictions(
    alignment: Alignment, pairs: Sequence[Groups], rivals: Iterable[Sequence[Groups]]
) -> Iterator[Groups]:
    """Unpaired groups that rivals bring together, of rivals that explain more than a part."""
    sources, targets = {source for source, _ in pairs}, {target for _, target in pairs}
    for rival in rivals:
        if not ({one for one, _ in rival} < sources or {other for _, other in rival} < targets):
            yield from (pair for pair in rival if alignment.paired.isdisjoint(_leaves(pair)))


def _leaves(groups: Iterable[LeafGroup]) -> tuple[ModelLeaf, ...]:
    return tuple(dict.fromkeys(leaf for group in groups for leaf in group.leaves))
