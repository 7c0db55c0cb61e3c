"""Which leaf of one tree is which of the other, by what they are called.

1. Leaves whose keys are equal belong together, if no other leaf of either tree has that key; first
   by their own words, then by concepts (`leaf_names`).
   Where one tree numbers them 0, 2, 4 and the other 0, 1, 2, equal numbers mean nothing.
2. What is left may lie under other prefixes (``bert.encoder...`` and ``encoder/...``). Each pair of
   prefixes is counted by the leaves that it brings together; one is believed unless another of no
   more components brings the same leaves to others.
3. Leaves that differ in one number alone, counted from 0, may be one leaf of the other tree,
   stacked along an axis: they are aligned like any other, without that number.

Names alone decide here; whether the shapes fit is asked before a pair is believed, and a pair that
does not fit is remembered, to be told.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from xckpt.mapping.infer.conventions import AxisLayout, layouts
from xckpt.mapping.infer.leaf_names import ModelLeaf, Path, concepts

__all__ = ["Alignment", "Doubt", "LeafGroup", "Pair", "align"]

DEEPEST_PREFIX = 3
"""Most components of a prefix that only one of the trees has."""

KEYS: tuple[Callable[[Path], Path], ...] = (lambda key: key, concepts)
"""What leaves are compared by, the strictest first."""


@dataclass(frozen=True)
class LeafGroup:
    """A leaf, or the leaves that one leaf of the other tree may hold in a stack."""

    key: Path
    leaves: tuple[ModelLeaf, ...]
    position: int | None = None
    """Of leaves in a stack: which component of their key counts them."""


@dataclass(frozen=True)
class Pair:
    """What belongs together, and the layouts that its shapes allow."""

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
        found = tuple(_layouts(self.source, self.target, axis))
        return Pair(self.source, self.target, found, axis, (axis,), self.reason)


@dataclass(frozen=True)
class Doubt:
    """Leaves that might belong together, and why that is not certain."""

    sources: tuple[ModelLeaf, ...]
    targets: tuple[ModelLeaf, ...]
    reason: str


@dataclass(slots=True)
class Alignment:
    """What has been found so far."""

    sources: list[ModelLeaf]
    targets: list[ModelLeaf]
    pairs: list[Pair] = field(default_factory=list)
    doubts: list[Doubt] = field(default_factory=list)
    misfits: dict[str, str] = field(default_factory=dict)
    """Name of a leaf -> why its counterpart by name is none."""
    doubted: set[tuple[str, str]] = field(default_factory=set)
    """("source" or "target", name) of every leaf in a doubt."""
    used: set[tuple[str, str]] = field(default_factory=set)
    """("source" or "target", name) of every leaf in a pair."""

    def left(self, side: str) -> list[ModelLeaf]:
        """The leaves of a side that are neither in a pair nor in doubt."""
        leaves = self.sources if side == "source" else self.targets
        taken = self.used | self.doubted
        return [leaf for leaf in leaves if (side, leaf.name) not in taken]

    def is_unpaired(self, source: LeafGroup, target: LeafGroup) -> bool:
        """Whether none of the leaves is in a pair."""
        return self.used.isdisjoint(_named(source, target))

    def is_free(self, source: LeafGroup, target: LeafGroup) -> bool:
        """Whether none of the leaves is in a pair or in doubt."""
        return self.is_unpaired(source, target) and self.doubted.isdisjoint(_named(source, target))

    def doubt(self, doubt: Doubt) -> None:
        """Leave open what belongs to what."""
        self.doubts.append(doubt)
        self.doubted |= {("source", leaf.name) for leaf in doubt.sources}
        self.doubted |= {("target", leaf.name) for leaf in doubt.targets}

    def accept(self, pair: Pair) -> None:
        """Take a pair as found."""
        self.pairs.append(pair)
        self.used |= {("source", leaf.name) for leaf in pair.source.leaves}
        self.used |= {("target", leaf.name) for leaf in pair.target.leaves}

    def offer(self, source: LeafGroup, target: LeafGroup, reason: str) -> bool:
        """Take a pair as found if its leaves are free and their shapes fit."""
        if not self.is_free(source, target):
            return False
        pair = pair_of(source, target, reason)
        if pair is not None:
            self.accept(pair)
            return True
        if source.position is None and target.position is None:
            one, other = source.leaves[0], target.leaves[0]
            why = f"shapes {list(one.shape)} and {list(other.shape)} do not fit"
            self.misfits.setdefault(one.name, f"{other.name} is its name there, but {why}")
            self.misfits.setdefault(other.name, f"{one.name} is its name there, but {why}")
        return False


def _named(source: LeafGroup, target: LeafGroup) -> list[tuple[str, str]]:
    """("source" or "target", name) of every leaf."""
    sides = (("source", source), ("target", target))
    return [(side, leaf.name) for side, item in sides for leaf in item.leaves]


def align(sources: Sequence[ModelLeaf], targets: Sequence[ModelLeaf]) -> Alignment:
    """Pair the leaves of two trees by name.

    Example:
        >>> from xckpt.mapping.infer.leaf_names import leaves_of, specs_of
        >>> import numpy as np
        >>> torch = leaves_of(specs_of({"model.fc.weight": np.zeros((2, 4))}))
        >>> flax = leaves_of(specs_of({"params": {"fc": {"kernel": np.zeros((4, 2))}}}))
        >>> [(pair.layouts[0].kind, pair.reason) for pair in align(torch, flax).pairs]
        [('transposed', 'same name without model')]
    """
    found = Alignment(list(sources), list(targets))
    for key in KEYS:
        why = "same name" if key is KEYS[0] else "same name in other words"
        _by_key(found, _items(found.sources, key), _items(found.targets, key), why)
    for key in KEYS:
        _by_prefix(found, _items(found.left("source"), key), _items(found.left("target"), key))
    for key in KEYS:
        left = found.left("source"), found.left("target")
        _by_key(found, _stacks(left[0], key), _items(left[1], key), "stacked")
        _by_key(found, _items(left[0], key), _stacks(left[1], key), "stacked")
        _by_prefix(found, _stacks(left[0], key), _items(left[1], key))
        _by_prefix(found, _items(left[0], key), _stacks(left[1], key))
    return found


def pair_of(source: LeafGroup, target: LeafGroup, reason: str) -> Pair | None:
    """The pair of two items, if their shapes fit."""
    one, other = source.leaves[0].spec, target.leaves[0].spec
    if _class(one.dtype) != _class(other.dtype):
        return None
    if source.position is None and target.position is None:
        found = tuple(layouts(source.leaves[0], target.leaves[0]))
        return Pair(source, target, found, reason=reason) if found else None
    stack = source if source.position is not None else target
    whole = target if stack is source else source
    shape = whole.leaves[0].shape
    fitting = [
        axis
        for axis, size in enumerate(shape)
        if size == len(stack.leaves) and _layouts(source, target, axis)
    ]
    if not fitting:
        return None
    axis = fitting[0] if len(fitting) == 1 else None
    found = tuple(_layouts(source, target, fitting[0]))
    return Pair(source, target, found, axis, tuple(fitting), reason)


def _layouts(source: LeafGroup, target: LeafGroup, axis: int) -> list[AxisLayout]:
    """The layouts of one of the leaves that are stacked along an axis of the other."""
    one, other = source.leaves[0], target.leaves[0]
    if source.position is not None:
        return layouts(one, other.without_axis(axis))
    return layouts(one.without_axis(axis), other)


def _class(dtype: str) -> str:
    """Numbers that a cast could bring together."""
    return "float" if "float" in dtype else dtype


def _items(leaves: Iterable[ModelLeaf], key: Callable[[Path], Path]) -> list[LeafGroup]:
    return [LeafGroup(key(leaf.key), (leaf,)) for leaf in leaves]


def _stacks(leaves: Iterable[ModelLeaf], key: Callable[[Path], Path]) -> list[LeafGroup]:
    """Leaves of one shape whose keys differ in a number from 0 on."""
    groups: dict[tuple[Path, int], dict[int, ModelLeaf]] = defaultdict(dict)
    for leaf in leaves:
        whole = key(leaf.key)
        for position, component in enumerate(whole):
            if isinstance(component, int):
                rest = (*whole[:position], *whole[position + 1 :])
                groups[rest, position].setdefault(component, leaf)
    found = []
    for (rest, position), members in groups.items():
        inside = [members[number] for number in sorted(members)]
        alike = len({(leaf.spec, leaf.flavour) for leaf in inside}) == 1
        if alike and sorted(members) == list(range(len(members))):
            found.append(LeafGroup(rest, tuple(inside), position))
    return found


def _by_key(
    found: Alignment, sources: Sequence[LeafGroup], targets: Sequence[LeafGroup], reason: str
) -> None:
    """Pair items that alone have their key in their tree, and are numbered as the other's are."""
    here, there = _grouped(sources), _grouped(targets)
    numbers = _numbers(here), _numbers(there)
    alike = {
        words
        for words, other in numbers[1].items()
        if words in numbers[0] and _numbered_alike(numbers[0][words], other)
    }
    for key, items in there.items():
        others = here.get(key, [])
        if len(items) == 1 and len(others) == 1 and _words(key) in alike:
            found.offer(others[0], items[0], reason)


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


def _words(key: Path) -> Path:
    """A key with all its numbers alike."""
    return tuple(0 if isinstance(component, int) else component for component in key)


def _numbers(keys: Iterable[Path]) -> dict[Path, set[Path]]:
    """For keys that differ in numbers alone, these: ``0, 2, 4`` here and ``0, 1, 2`` there."""
    found: dict[Path, set[Path]] = defaultdict(set)
    for key in keys:
        found[_words(key)].add(tuple(each for each in key if isinstance(each, int)))
    return found


def _grouped(items: Iterable[LeafGroup]) -> dict[Path, list[LeafGroup]]:
    groups: dict[Path, list[LeafGroup]] = defaultdict(list)
    for item in items:
        groups[item.key].append(item)
    return groups


Prefixes = tuple[Path, Path]


def _by_prefix(
    found: Alignment, sources: Sequence[LeafGroup], targets: Sequence[LeafGroup]
) -> None:
    """Pair items whose keys are equal without a prefix on either side."""
    together = _brought_together(sources, targets)
    order = sorted(together, key=lambda each: (-len(together[each]), _length(each), repr(each)))
    for prefixes in order:
        rivals = [
            together[each]
            for each in order
            if each != prefixes and _length(each) <= _length(prefixes)
        ]
        free = [pair for pair in together[prefixes] if found.is_free(*pair)]
        words = [".".join(map(str, prefix)) for prefix in prefixes if prefix]
        doubts = _doubts(found, free, rivals)
        for source, target in free:
            if (source.key, target.key) in doubts:
                found.doubt(doubts[source.key, target.key])
            else:
                found.offer(source, target, f"same name without {' and '.join(words)}")


def _length(prefixes: Prefixes) -> int:
    return len(prefixes[0]) + len(prefixes[1])


def _brought_together(
    sources: Sequence[LeafGroup], targets: Sequence[LeafGroup]
) -> dict[Prefixes, list[tuple[LeafGroup, LeafGroup]]]:
    """Prefixes -> the items that they bring together; items that alone have their key."""
    here: dict[Path, list[tuple[Path, LeafGroup]]] = defaultdict(list)
    for item in _alone(sources):
        for prefix, rest in _cuts(item.key):
            here[rest].append((prefix, item))
    alike = _AlikeUnder(sources, targets)
    found: dict[Prefixes, list[tuple[LeafGroup, LeafGroup]]] = defaultdict(list)
    for item in _alone(targets):
        for prefix, rest in _cuts(item.key):
            for other, source in here.get(rest, ()):
                fits = (prefix or other) and alike((other, prefix), _words(rest))
                if fits and pair_of(source, item, "") is not None:
                    found[other, prefix].append((source, item))
    return found


class _AlikeUnder:
    """Whether equal numbers mean the same in what follows two prefixes."""

    def __init__(self, sources: Iterable[LeafGroup], targets: Iterable[LeafGroup]) -> None:
        self._numbers = self._under(sources), self._under(targets)
        self._known: dict[tuple[Prefixes, Path], bool] = {}

    @staticmethod
    def _under(items: Iterable[LeafGroup]) -> dict[Path, dict[Path, set[Path]]]:
        """For each prefix the numbers of the keys that differ in numbers alone."""
        rests: dict[Path, list[Path]] = defaultdict(list)
        for item in items:
            for prefix, rest in _cuts(item.key):
                rests[prefix].append(rest)
        return {prefix: _numbers(keys) for prefix, keys in rests.items()}

    def __call__(self, prefixes: Prefixes, words: Path) -> bool:
        """Whether the numbers of the rests that have these words are alike."""
        if (prefixes, words) not in self._known:
            one, other = (
                numbers[prefix][words]
                for numbers, prefix in zip(self._numbers, prefixes, strict=True)
            )
            self._known[prefixes, words] = _numbered_alike(one, other)
        return self._known[prefixes, words]


def _alone(items: Iterable[LeafGroup]) -> list[LeafGroup]:
    return [group[0] for group in _grouped(items).values() if len(group) == 1]


def _cuts(key: Path) -> Iterator[tuple[Path, Path]]:
    """Prefix and rest; besides the role a word is left: numbers alone say nothing."""
    for length in range(min(DEEPEST_PREFIX, len(key) - 2) + 1):
        if any(isinstance(component, str) for component in key[length:-1]):
            yield key[:length], key[length:]


def _doubts(
    found: Alignment,
    pairs: Sequence[tuple[LeafGroup, LeafGroup]],
    rivals: Iterable[Sequence[tuple[LeafGroup, LeafGroup]]],
) -> dict[tuple[Path, Path], Doubt]:
    """Pairs that rivals contradict which explain no less than a part of them.

    A rival is none where one of its leaves has been found to belong elsewhere.
    """
    mine = {source.key: target for source, target in pairs}
    back = {target.key: source for source, target in pairs}
    sources: dict[Path, list[LeafGroup]] = defaultdict(list)
    targets: dict[Path, list[LeafGroup]] = defaultdict(list)
    for rival in rivals:
        if {one.key for one, _ in rival} < set(mine) or {one.key for _, one in rival} < set(back):
            continue
        for source, target in rival:
            elsewhere = source.key in mine and mine[source.key].key != target.key
            otherwise = target.key in back and back[target.key].key != source.key
            if not (elsewhere or otherwise) or not found.is_unpaired(source, target):
                continue
            if elsewhere:
                targets[source.key].append(target)
            if otherwise:
                sources[target.key].append(source)
    return {
        (source.key, target.key): Doubt(
            _leaves([source, *sources[target.key]]),
            _leaves([target, *targets[source.key]]),
            "named alike without other prefixes too",
        )
        for source, target in pairs
        if sources[target.key] or targets[source.key]
    }


def _leaves(items: Iterable[LeafGroup]) -> tuple[ModelLeaf, ...]:
    return tuple(dict.fromkeys(leaf for item in items for leaf in item.leaves))
