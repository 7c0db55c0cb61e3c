"""The pairs that prefixes explain: groups whose keys are equal without them.

A model of n layers has n prefixes that end in a number, and two models n * n pairs of them. Layers
with equal content are examined once:

1. Prefixes of one length are *alike* if what lies below them has the same rests of keys, the same
   shapes and the same numbers. The first of them stands for all.
2. What two prefixes explain is found for those that stand for others, over the rests of both.
3. Pairs of prefixes come in the order of what they explain, one at a time; those that no longer
   explain a free group are skipped without examining each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod

from xckpt.mapping.infer.layouts import fits
from xckpt.mapping.infer.leaves import Components, LeafGroup

DEEPEST_PREFIX = 3
"""Most components of a prefix that only one of the trees has."""

Prefixes = tuple[Components, Components]
"""What stands before a source's key and before a target's."""

Groups = tuple[LeafGroup, LeafGroup]
"""A source's group and a target's."""

Numbers = frozenset[Components]
"""The numbers of keys that have the same words."""

Cuts = Callable[[Components], Iterable[tuple[Components, Components]]]
"""The ways to cut a key into a prefix and the rest."""


class _Tree:
    """The groups of one tree below each prefix."""

    def __init__(self, groups: Sequence[LeafGroup]) -> None:
        self.numbers = _numbers((group.key for group in groups), _cuts)
        self.below: dict[Components, dict[Components, LeafGroup]] = defaultdict(dict)
        """Prefix -> rest of a key -> the group."""
        self.before: dict[tuple[Components, int], list[Components]] = defaultdict(list)
        """Rest of a key and a prefix's length -> the prefixes before it."""
        for group in _alone(groups):
            for prefix, rest in _cuts(group.key):
                self.below[prefix][rest] = group
                self.before[rest, len(prefix)].append(prefix)
        self.first: dict[Components, Components] = {}
        """Prefix -> the first that is alike."""
        self.alike: dict[Components, list[Components]] = defaultdict(list)
        """The first of some prefixes -> all that are alike."""
        seen: dict[object, Components] = {}
        for prefix in self.below:
            first = seen.setdefault(self._content(prefix), prefix)
            self.first[prefix] = first
            self.alike[first].append(prefix)

    def prefixes(self, rest: Components, longest: int) -> Iterator[Components]:
        """The prefixes before this rest, of at most ``longest`` components."""
        for length in range(min(DEEPEST_PREFIX, longest) + 1):
            yield from self.before.get((rest, length), ())

    def _content(self, prefix: Components) -> object:
        """Equal for prefixes that are alike."""
        return len(prefix), tuple(
            (rest, _kind(group), self.numbers[prefix, _words(rest)])
            for rest, group in self.below[prefix].items()
        )


class Explanations:
    """All pairs of prefixes without which the keys of some groups are equal.

    Args:
        sources: groups of the source; groups that share a key are ignored.
        targets: likewise.
    """

    def __init__(self, sources: Sequence[LeafGroup], targets: Sequence[LeafGroup]) -> None:
        self._sources, self._targets = _Tree(sources), _Tree(targets)
        self._rests = self._explained()

    def _explained(self) -> dict[Prefixes, dict[Components, None]]:
        """Prefixes, the first of those that are alike -> the rests that they explain, in order."""
        here, there = self._sources, self._targets
        holders: dict[tuple[Components, int], list[Components]] = defaultdict(list)
        for before in here.alike:
            for rest, group in here.below[before].items():
                holders[rest, _volume(group)].append(before)
        rests: dict[Prefixes, dict[Components, None]] = defaultdict(dict)
        fitting: dict[object, bool] = {}
        numbered: dict[object, bool] = {}
        for after in there.alike:
            for rest, target in there.below[after].items():
                for before in holders.get((rest, _volume(target)), ()):
                    source = here.below[before][rest]
                    shapes = _kind(source), _kind(target)
                    if shapes not in fitting:
                        fitting[shapes] = bool(fits(source, target))
                    words = _words(rest)
                    places = before, after, words
                    if places not in numbered:
                        one, other = here.numbers[before, words], there.numbers[after, words]
                        numbered[places] = _numbered_alike(one, other)
                    if (before or after) and fitting[shapes] and numbered[places]:
                        rests[before, after][rest] = None
        return rests

    def _rests_of(self, prefixes: Prefixes) -> dict[Components, None]:
        before, after = prefixes
        return self._rests.get((self._sources.first[before], self._targets.first[after]), {})

    def pairs(self, prefixes: Prefixes) -> list[Groups]:
        """The pairs of groups that a pair of prefixes explains, in the target's order."""
        before, after = prefixes
        sources, targets = self._sources.below[before], self._targets.below[after]
        return [(sources[rest], targets[rest]) for rest in self._rests_of(prefixes)]

    def in_order(self, is_free: Callable[[LeafGroup], bool]) -> Iterator[Prefixes]:
        """The pairs of prefixes, those that explain the most and are the shortest first.

        Args:
            is_free: whether a group has no counterpart yet; once False, it stays False.
        """
        ranked: dict[tuple[int, int], dict[Components, list[Components]]] = {}
        for (before, after), rests in self._rests.items():
            of_rank = ranked.setdefault((-len(rests), len(before) + len(after)), {})
            of_rank.setdefault(before, []).append(after)
        for rank in sorted(ranked):
            yield from self._of_rank(ranked[rank], is_free)

    def _of_rank(
        self, firsts: dict[Components, list[Components]], is_free: Callable[[LeafGroup], bool]
    ) -> Iterator[Prefixes]:
        """The pairs of prefixes alike to these that explain free groups, by their spelling."""
        here, there = self._sources, self._targets

        def is_open(tree: _Tree, prefix: Components, prefixes: Prefixes) -> bool:
            return any(is_free(tree.below[prefix][rest]) for rest in self._rests_of(prefixes))

        left = {
            first: sorted((each for after in afters for each in there.alike[after]), key=repr)
            for first, afters in firsts.items()
        }
        for before in sorted((each for first in firsts for each in here.alike[first]), key=repr):
            first = here.first[before]
            if any(is_open(here, before, (before, after)) for after in firsts[first]):
                is_left: list[Components] = []
                for after in left[first]:
                    if is_open(there, after, (before, after)):
                        is_left.append(after)
                        yield before, after
                left[first] = is_left

    def rivals(
        self, prefixes: Prefixes, pairs: Iterable[Groups], is_open: Callable[[LeafGroup], bool]
    ) -> list[list[Groups]]:
        """The pairs that other prefixes with no more components explain, for open groups.

        Args:
            prefixes: the pair that has rivals.
            pairs: what it explains.
            is_open: whether a group has no counterpart yet.
        """
        longest = _length(prefixes)
        found: set[Prefixes] = set()
        for source, target in pairs:
            near = [
                (before, after, rest)
                for before, rest in _cuts(source.key)
                for after in self._targets.prefixes(rest, longest - len(before))
            ]
            near += [
                (before, after, rest)
                for after, rest in _cuts(target.key)
                for before in self._sources.prefixes(rest, longest - len(after))
            ]
            for before, after, rest in near:
                both = self._sources.below[before][rest], self._targets.below[after][rest]
                if rest in self._rests_of((before, after)) and all(map(is_open, both)):
                    found.add((before, after))
        found.discard(prefixes)
        order = sorted(found, key=lambda e: (-len(self._rests_of(e)), _length(e), repr(e)))
        return [self.pairs(each) for each in order]


def equal_keys(sources: Sequence[LeafGroup], targets: Sequence[LeafGroup]) -> Iterator[Groups]:
    """Groups whose whole keys are equal, if equal numbers mean the same in them."""
    here, there = (_numbers((group.key for group in side), _whole) for side in (sources, targets))
    alike = {
        words: _numbered_alike(numbers, there[(), words])
        for (_, words), numbers in here.items()
        if ((), words) in there
    }
    by_key = {source.key: source for source in _alone(sources)}
    for target in _alone(targets):
        source = by_key.get(target.key)
        if source is not None and alike[_words(target.key)]:
            yield source, target


def _length(prefixes: Prefixes) -> int:
    return len(prefixes[0]) + len(prefixes[1])


def _kind(group: LeafGroup) -> object:
    """Groups of one kind fit the same groups."""
    leaf = group.leaves[0]
    return leaf.role, leaf.flavour, leaf.spec, len(group.leaves), group.position is None


def _volume(group: LeafGroup) -> int:
    """Elements of all leaves: equal for groups that fit."""
    return prod(group.leaves[0].shape) * len(group.leaves)


def _cuts(key: Components) -> Iterator[tuple[Components, Components]]:
    """Prefix and rest; besides the role a word is left: numbers alone say nothing."""
    words = [place for place, component in enumerate(key[:-1]) if isinstance(component, str)]
    for length in range(min(DEEPEST_PREFIX, words[-1]) + 1 if words else 0):
        yield key[:length], key[length:]


def _whole(key: Components) -> Iterator[tuple[Components, Components]]:
    """No prefix, and all of the key."""
    yield (), key


def _alone(groups: Iterable[LeafGroup]) -> list[LeafGroup]:
    """The groups that alone have their key."""
    by_key: dict[Components, list[LeafGroup]] = defaultdict(list)
    for group in groups:
        by_key[group.key].append(group)
    return [same_key[0] for same_key in by_key.values() if len(same_key) == 1]


def _words(key: Components) -> Components:
    """A key with all its numbers replaced by 0."""
    return tuple(0 if isinstance(component, int) else component for component in key)


def _numbers(keys: Iterable[Components], cuts: Cuts) -> dict[Prefixes, Numbers]:
    """Prefix and words of a rest -> the numbers of all rests that have these words."""
    numbers: dict[Prefixes, set[Components]] = defaultdict(set)
    for key in keys:
        words = _words(key)
        own = tuple(component for component in key if isinstance(component, int))
        for prefix, _ in cuts(key):
            length = len(prefix)
            numbers[prefix, words[length:]].add(own[words[:length].count(0) :])
    return {place: frozenset(each) for place, each in numbers.items()}


def _numbered_alike(one: Numbers, other: Numbers) -> bool:
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
