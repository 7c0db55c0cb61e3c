"""Which leaf of one tree is which of the other, by what they are called.

1. Leaves whose keys are equal belong together, if no other leaf of either tree has that key; first
   by their own words, then by concepts (`xckpt.mapping.infer.leaves`). Where one tree numbers
   them 0, 2, 4 and the other 0, 1, 2, equal numbers mean nothing.
2. What is left may lie under other prefixes: ``bert.encoder...`` and ``encoder/...``. A pair of
   prefixes *explains* the pairs of leaves whose keys are equal without them; those that explain
   the most leaves are tried first.
3. A rival is another pair of prefixes with no more components. Where a rival brings one of the
   leaves to another counterpart, the pair is a doubt:

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

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from xckpt.mapping.infer.layouts import AxisLayout, layouts
from xckpt.mapping.infer.leaves import LeafGroup, ModelLeaf, Path, concepts

KEYS: dict[str, Callable[[Path], Path]] = {
    "same name": lambda key: key,
    "same name in other words": concepts,
}
"""Reason for a pair -> what leaves are compared by, the strictest first."""

SAME_ORDER = "same order"
"""Reason for pairs of modules that their numbers alone tell apart."""

DEEPEST_PREFIX = 3
"""Most components of a prefix that only one of the trees has."""

Prefixes = tuple[Path, Path]
"""What stands before a source's key and before a target's."""

Cuts = Callable[[Path], Iterable[tuple[Path, Path]]]
"""The ways to cut a key into a prefix and the rest."""


Groups = tuple[LeafGroup, LeafGroup]
"""A source's group and a target's."""


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
    """What it takes for granted; see `xckpt.mapping.infer.assumptions`."""

    @property
    def first(self) -> tuple[ModelLeaf, ModelLeaf]:
        """The first leaf of either side."""
        return self.source.leaves[0], self.target.leaves[0]

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
    pairs: list[Pair] = field(default_factory=list[Pair])
    doubts: list[Doubt] = field(default_factory=list[Doubt])
    misfits: dict[str, str] = field(default_factory=dict[str, str])
    """Name of a leaf -> why the leaf of that name in the other tree is not its counterpart."""
    paired: set[ModelLeaf] = field(default_factory=set[ModelLeaf])
    doubted: set[ModelLeaf] = field(default_factory=set[ModelLeaf])

    def are_free(self, leaves: Collection[ModelLeaf]) -> bool:
        """Whether none of the leaves is in a pair or in doubt."""
        return self.paired.isdisjoint(leaves) and self.doubted.isdisjoint(leaves)

    def doubt(self, doubt: Doubt) -> None:
        """Leave open what belongs to what."""
        self.doubts.append(doubt)
        self.doubted.update(doubt.sources, doubt.targets)

    def offer(self, source: LeafGroup, target: LeafGroup, reason: str) -> None:
        """Take a pair if its leaves are free and their shapes fit."""
        if not self.are_free(source.leaves + target.leaves):
            return
        if fits := _fits(source, target):
            self.pairs.append(Pair(source, target, fits, reason))
            self.paired.update(source.leaves, target.leaves)
        elif source.position is None and target.position is None:
            one, other = source.leaves[0], target.leaves[0]
            why = f"shapes {list(one.shape)} and {list(other.shape)} do not fit"
            self.misfits.setdefault(one.name, f"{other.name} is its name there, but {why}")
            self.misfits.setdefault(other.name, f"{one.name} is its name there, but {why}")


def _fits(source: LeafGroup, target: LeafGroup) -> dict[int | None, list[AxisLayout]]:
    """The layouts of two groups, by the axis of a stack; see `Pair`."""
    one, other = source.leaves[0], target.leaves[0]
    options: dict[int | None, list[AxisLayout]] = {}
    if source.position is not None:
        for axis in _axes(other, len(source.leaves)):
            options[axis] = layouts(one, other.without_axis(axis))
    elif target.position is not None:
        for axis in _axes(one, len(target.leaves)):
            options[axis] = layouts(one.without_axis(axis), other)
    else:
        options[None] = layouts(one, other)
    return {axis: fitting for axis, fitting in options.items() if fitting}


def _axes(leaf: ModelLeaf, size: int) -> list[int]:
    return [axis for axis, each in enumerate(leaf.shape) if each == size]


def align(sources: Sequence[ModelLeaf], targets: Sequence[ModelLeaf]) -> Alignment:
    """Pair the leaves of two trees by name.

    Example:
        >>> from xckpt.mapping.infer.leaves import leaves_of
        >>> from xckpt.mapping.spec import TensorSpec
        >>> torch = leaves_of({"model.fc.weight": TensorSpec((2, 4), "int8")})
        >>> flax = leaves_of({"params/fc/kernel": TensorSpec((4, 2), "int8")})
        >>> [(pair.layouts[0].kind, pair.reason) for pair in align(torch, flax).pairs]
        [('transposed', 'same name without model')]
    """
    alignment = Alignment(list(sources), list(targets))
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


def _singles(leaves: Iterable[ModelLeaf], key: Callable[[Path], Path]) -> list[LeafGroup]:
    """Each leaf as a group of its own."""
    return [LeafGroup(key(leaf.key), (leaf,)) for leaf in leaves]


def _stacks(leaves: Iterable[ModelLeaf], key: Callable[[Path], Path]) -> list[LeafGroup]:
    """Leaves of one shape whose keys differ in a number from 0 on."""
    members: dict[tuple[Path, int], dict[int, ModelLeaf]] = defaultdict(dict)
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
        if alike and sorted(by_number) == list(range(len(by_number))):
            stacks.append(LeafGroup(rest, tuple(stacked), position))
    return stacks


def _pair_by_key(
    alignment: Alignment, sources: Sequence[LeafGroup], targets: Sequence[LeafGroup], reason: str
) -> None:
    """Pair groups whose keys are equal."""
    for _, source, target in _equal_rests(sources, targets, lambda key: [((), key)]):
        alignment.offer(source, target, reason)


def _pair_by_prefix(
    alignment: Alignment, sources: Sequence[LeafGroup], targets: Sequence[LeafGroup]
) -> None:
    """Pair groups whose keys are equal without a prefix on either side."""
    explained: dict[Prefixes, list[Groups]] = defaultdict(list)
    for prefixes, source, target in _equal_rests(sources, targets, _cuts):
        if any(prefixes) and _fits(source, target):
            explained[prefixes].append((source, target))
    order = sorted(explained, key=lambda each: (-len(explained[each]), _length(each), repr(each)))
    for prefixes in order:
        free = [pair for pair in explained[prefixes] if alignment.are_free(_leaves(pair))]
        if not free:
            continue
        rivals = [
            explained[each]
            for each in order
            if each != prefixes and _length(each) <= _length(prefixes)
        ]
        doubts = _doubts(alignment, free, rivals)
        left_out = " and ".join(".".join(map(str, prefix)) for prefix in prefixes if prefix)
        for source, target in free:
            if (source, target) in doubts:
                alignment.doubt(doubts[source, target])
            else:
                alignment.offer(source, target, f"same name without {left_out}")


def _length(prefixes: Prefixes) -> int:
    return len(prefixes[0]) + len(prefixes[1])


def _cuts(key: Path) -> Iterator[tuple[Path, Path]]:
    """Prefix and rest; besides the role a word is left: numbers alone say nothing."""
    for length in range(min(DEEPEST_PREFIX, len(key) - 2) + 1):
        if any(isinstance(component, str) for component in key[length:-1]):
            yield key[:length], key[length:]


def _equal_rests(
    sources: Sequence[LeafGroup], targets: Sequence[LeafGroup], cuts: Cuts
) -> Iterator[tuple[Prefixes, LeafGroup, LeafGroup]]:
    """Groups that alone have their key, and the prefixes without which their keys are equal.

    Equal numbers must mean the same in all that follows these prefixes.
    """
    here, there = _numbers(sources, cuts), _numbers(targets, cuts)

    @functools.cache
    def numbered_alike(before: Path, after: Path, words: Path) -> bool:
        return _numbered_alike(here[before, words], there[after, words])

    by_rest: dict[Path, list[tuple[Path, LeafGroup]]] = defaultdict(list)
    for source in _alone(sources):
        for before, rest in cuts(source.key):
            by_rest[rest].append((before, source))
    for target in _alone(targets):
        for after, rest in cuts(target.key):
            for before, source in by_rest.get(rest, ()):
                if numbered_alike(before, after, _words(rest)):
                    yield (before, after), source, target


def _alone(groups: Iterable[LeafGroup]) -> list[LeafGroup]:
    """The groups that alone have their key."""
    by_key: dict[Path, list[LeafGroup]] = defaultdict(list)
    for group in groups:
        by_key[group.key].append(group)
    return [same_key[0] for same_key in by_key.values() if len(same_key) == 1]


def _words(key: Path) -> Path:
    """A key with all its numbers replaced by 0."""
    return tuple(0 if isinstance(component, int) else component for component in key)


def _numbers(groups: Iterable[LeafGroup], cuts: Cuts) -> dict[Prefixes, set[Path]]:
    """Prefix and words of a rest -> the numbers of all rests that have these words."""
    numbers: dict[Prefixes, set[Path]] = defaultdict(set)
    for group in groups:
        for prefix, rest in cuts(group.key):
            own = tuple(component for component in rest if isinstance(component, int))
            numbers[prefix, _words(rest)].add(own)
    return numbers


def _numbered_alike(one: set[Path], other: set[Path]) -> bool:
    """Whether equal numbers mean the same: they are the same, or one has the first of the other's.

    So 0, 1 of 0, 1, 2, 3 are a model with fewer layers, and 0, 2 of 0, 1, 2 are not.
    """
    fewer, more = sorted((one, other), key=len)
    if fewer == more:
        return True
    columns = zip(zip(*fewer, strict=True), zip(*more, strict=True), strict=True)
    return fewer < more and all(
        sorted(set(some)) == sorted(set(every))[: len(set(some))] for some, every in columns
    )


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
