"""Pairing leaves that lie under other prefixes: ``bert.encoder...`` and ``encoder/...``.

1. A pair of prefixes *explains* the pairs of leaves whose keys are equal without them.
2. Pairs of prefixes are tried in order: those that explain the most leaves first.
3. A rival is another pair of prefixes with no more components. Where a rival brings one of the
   leaves to another counterpart, the pair is a doubt:

       prefixes          source a.fc  ->  target x.fc
       rival             source a.fc  ->  target y.fc      a.fc in doubt between x.fc and y.fc
       rival             source b.fc  ->  target x.fc      x.fc in doubt between a.fc and b.fc

   A rival that explains only a part of the same leaves is no reason for doubt, nor is one whose
   leaves have counterparts already.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from xckpt.mapping.infer.leaf_names import ModelLeaf, Path, numbered_alike, numbers_of, words_of
from xckpt.mapping.infer.pairs import Alignment, Doubt, LeafGroup, pair_of

DEEPEST_PREFIX = 3
"""Most components of a prefix that only one of the trees has."""

Prefixes = tuple[Path, Path]
"""What stands before a source's key and before a target's."""

Groups = tuple[LeafGroup, LeafGroup]
"""A source's group and a target's."""


def by_key(groups: Iterable[LeafGroup]) -> dict[Path, list[LeafGroup]]:
    """Key -> the groups that have it."""
    found: dict[Path, list[LeafGroup]] = defaultdict(list)
    for group in groups:
        found[group.key].append(group)
    return found


def pair_by_prefix(
    alignment: Alignment, sources: Sequence[LeafGroup], targets: Sequence[LeafGroup]
) -> None:
    """Pair groups whose keys are equal without a prefix on either side."""
    explained = _explained(sources, targets)
    order = sorted(explained, key=lambda each: (-len(explained[each]), _length(each), repr(each)))
    for prefixes in order:
        rivals = [
            explained[each]
            for each in order
            if each != prefixes and _length(each) <= _length(prefixes)
        ]
        free = [pair for pair in explained[prefixes] if alignment.is_free(*pair)]
        left_out = " and ".join(".".join(map(str, prefix)) for prefix in prefixes if prefix)
        doubts = _doubts(alignment, free, rivals)
        for source, target in free:
            if (source.key, target.key) in doubts:
                alignment.doubt(doubts[source.key, target.key])
            else:
                alignment.offer(source, target, f"same name without {left_out}")


def _length(prefixes: Prefixes) -> int:
    return len(prefixes[0]) + len(prefixes[1])


def _explained(
    sources: Sequence[LeafGroup], targets: Sequence[LeafGroup]
) -> dict[Prefixes, list[Groups]]:
    """Prefixes -> the pairs that they explain, of groups that alone have their key."""
    here: dict[Path, list[tuple[Path, LeafGroup]]] = defaultdict(list)
    for source in _alone(sources):
        for prefix, rest in _cuts(source.key):
            here[rest].append((prefix, source))
    alike = _NumberedAlike(sources, targets)
    explained: dict[Prefixes, list[Groups]] = defaultdict(list)
    for target in _alone(targets):
        for prefix, rest in _cuts(target.key):
            for other, source in here.get(rest, ()):
                fits = (prefix or other) and alike((other, prefix), words_of(rest))
                if fits and pair_of(source, target, "") is not None:
                    explained[other, prefix].append((source, target))
    return explained


class _NumberedAlike:
    """Whether equal numbers mean the same in what follows two prefixes."""

    def __init__(self, sources: Iterable[LeafGroup], targets: Iterable[LeafGroup]) -> None:
        self._sources, self._targets = self._under(sources), self._under(targets)
        self._known: dict[tuple[Prefixes, Path], bool] = {}

    @staticmethod
    def _under(groups: Iterable[LeafGroup]) -> dict[Path, dict[Path, set[Path]]]:
        """Prefix -> `numbers_of` what follows it."""
        rests: dict[Path, list[Path]] = defaultdict(list)
        for group in groups:
            for prefix, rest in _cuts(group.key):
                rests[prefix].append(rest)
        return {prefix: numbers_of(keys) for prefix, keys in rests.items()}

    def __call__(self, prefixes: Prefixes, words: Path) -> bool:
        """Whether the numbers of the rests that have these words are alike."""
        if (prefixes, words) not in self._known:
            one, other = self._sources[prefixes[0]], self._targets[prefixes[1]]
            self._known[prefixes, words] = numbered_alike(one[words], other[words])
        return self._known[prefixes, words]


def _alone(groups: Iterable[LeafGroup]) -> list[LeafGroup]:
    """The groups that alone have their key."""
    return [same_key[0] for same_key in by_key(groups).values() if len(same_key) == 1]


def _cuts(key: Path) -> Iterator[tuple[Path, Path]]:
    """Prefix and rest; besides the role a word is left: numbers alone say nothing."""
    for length in range(min(DEEPEST_PREFIX, len(key) - 2) + 1):
        if any(isinstance(component, str) for component in key[length:-1]):
            yield key[:length], key[length:]


def _doubts(
    alignment: Alignment, pairs: Sequence[Groups], rivals: Iterable[Sequence[Groups]]
) -> dict[tuple[Path, Path], Doubt]:
    """(source key, target key) of a pair -> the doubt that its rivals raise."""
    other_sources: dict[Path, list[LeafGroup]] = defaultdict(list)
    other_targets: dict[Path, list[LeafGroup]] = defaultdict(list)
    target_of = {source.key: target.key for source, target in pairs}
    source_of = {target.key: source.key for source, target in pairs}
    for source, target in _contradictions(alignment, target_of, source_of, rivals):
        if target_of.get(source.key, target.key) != target.key:
            other_targets[source.key].append(target)
        if source_of.get(target.key, source.key) != source.key:
            other_sources[target.key].append(source)
    return {
        (source.key, target.key): Doubt(
            _leaves([source, *other_sources[target.key]]),
            _leaves([target, *other_targets[source.key]]),
            "named alike without other prefixes too",
        )
        for source, target in pairs
        if other_sources[target.key] or other_targets[source.key]
    }


def _contradictions(
    alignment: Alignment,
    target_of: dict[Path, Path],
    source_of: dict[Path, Path],
    rivals: Iterable[Sequence[Groups]],
) -> Iterator[Groups]:
    """Unpaired groups that rivals bring together, of rivals that explain more than a part."""
    for rival in rivals:
        sources, targets = {one.key for one, _ in rival}, {other.key for _, other in rival}
        if not (sources < target_of.keys() or targets < source_of.keys()):
            yield from (pair for pair in rival if alignment.is_unpaired(*pair))


def _leaves(groups: Iterable[LeafGroup]) -> tuple[ModelLeaf, ...]:
    return tuple(dict.fromkeys(leaf for group in groups for leaf in group.leaves))
