"""Pairing the modules of two trees by structure, if names do not decide.

A module is its leaves: a weight, often a bias, a normalisation's statistics. Only whole modules
that are not paired yet are examined, and only the conventional layouts.

1. Modules whose paths differ in numbers alone, and whose roles are the same, are a group: the
   layers of a stack, ``net.0, net.2, net.4``, ``Dense_0, Dense_1, Dense_2``.
2. Two modules fit if each leaf of the one fits the leaf of that role in the other. Where the
   modules around them are paired already, they must lie in the same one. A query is never paired
   with a key, value or output, whatever their shapes.
3. Two groups of one size whose members fit in order belong together, if no member of either fits
   any other group. So do two modules that fit each other alone.
4. A module whose leaves all have one axis is paired only if it is a normalisation: its name says
   so, or it has a bias too.
5. A unique fit of shapes is not enough if both names have a meaning and the meanings differ: a
   pooler that one tree lacks is not a teacher that the other lacks.

A module that fits several becomes a doubt.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import chain, product

from xckpt.mapping.infer.align import SAME_ORDER, Alignment, Doubt
from xckpt.mapping.infer.layouts import layouts
from xckpt.mapping.infer.leaves import CONCEPTS, Components, LeafGroup, ModelLeaf

IN_ORDER = "same shapes in order"
"""Why modules are paired: equally many of one shape on both sides, without a contradiction."""

SAME_SHAPES = "same shapes"
"""Why modules are paired: only they have these shapes."""

OF_A_MODULE = frozenset(("weight", "bias", "mean", "var"))
"""Roles that the leaves of a module have."""
IGNORED = frozenset(("numbatchestracked",))
"""Leaves that only one framework's modules have."""
_GENERIC = """
dense linear fc conv embed embedding layernorm rmsnorm norm ln batchnorm bn groupnorm
layers layer blocks block net sequential module
"""
GENERIC = frozenset(_GENERIC.split())
"""Names given by frameworks, or as general as a class name: they may mean anything."""
ALIKE = 0.6
"""Two names of at least this similarity (`difflib`) count as equal in meaning."""
OF_ATTENTION = frozenset(("query", "key", "value"))
"""Concepts that are never paired with any other concept."""
MOST_COMPARISONS = 4_000_000
"""Most pairs of kinds of modules; beyond that nothing is compared, since it would take too long."""


@dataclass(frozen=True, eq=False)
class _Module:
    """Leaves with one path, by role. Modules are compared by identity."""

    path: Components
    leaves: Mapping[str, ModelLeaf]

    @property
    def all_leaves(self) -> Collection[ModelLeaf]:
        return self.leaves.values()

    @property
    def word(self) -> str:
        """The last word of the path; empty where it has none."""
        return next((each for each in reversed(self.path) if isinstance(each, str)), "")

    def is_alike(self, other: _Module) -> bool:
        """Whether the names allow that the two are one."""
        one, two = self.word, other.word
        if not one or not two or one in GENERIC or two in GENERIC:
            return True
        if one in CONCEPTS and CONCEPTS[one] == CONCEPTS.get(two):
            return True
        contained = one in two or two in one
        return contained or SequenceMatcher(None, one, two).ratio() >= ALIKE

    def contradicts(self, other: _Module) -> bool:
        """Whether the names forbid that the two are one."""
        concepts = {CONCEPTS.get(self.word), CONCEPTS.get(other.word)}
        return len(concepts) == 2 and None not in concepts and bool(concepts & OF_ATTENTION)

    @property
    def is_vector(self) -> bool:
        return all(len(leaf.shape) < 2 for leaf in self.leaves.values())

    @property
    def is_norm(self) -> bool:
        named = "norm" in self.word or self.word in ("ln", "bn")
        return named or "bias" in self.leaves or self.leaves["weight"].flavour in ("scale", "gamma")


_Group = tuple[_Module, ...]
"""Modules whose paths differ in numbers alone, in the order of these."""


def match_modules(alignment: Alignment) -> None:
    """Pair, in ``alignment``, the modules that are left, where structure leaves one choice.

    Example:
        >>> from xckpt.mapping.infer.align import align
        >>> from xckpt.mapping.infer.leaves import leaves_of
        >>> from xckpt.mapping.spec import TensorSpec
        >>> torch = {f"net.{2 * n}.weight": TensorSpec((5, 3 + 2 * n), "int8") for n in range(2)}
        >>> flax = {f"Dense_{n}/kernel": TensorSpec((3 + 2 * n, 5), "int8") for n in range(2)}
        >>> alignment = align(leaves_of(torch), leaves_of(flax))
        >>> match_modules(alignment)
        >>> [(pair.source.leaves[0].name, pair.target.leaves[0].name) for pair in alignment.pairs]
        [('net.0.weight', 'Dense_0/kernel'), ('net.2.weight', 'Dense_1/kernel')]
    """
    sources, targets = (
        _groups(_modules(alignment, leaves)) for leaves in (alignment.sources, alignment.targets)
    )
    fit = _Fit(_parents(alignment), chain(*sources), chain(*targets))
    if fit.comparisons > MOST_COMPARISONS:
        return
    _match_groups(alignment, sources, targets, fit)
    sources, targets = (
        [(module,) for group in side for module in group if alignment.are_free(module.all_leaves)]
        for side in (sources, targets)
    )
    _match_alone(alignment, sources, targets, fit)


def _modules(alignment: Alignment, leaves: Iterable[ModelLeaf]) -> list[_Module]:
    """Modules that are left whole."""
    by_path: dict[Components, list[ModelLeaf]] = defaultdict(list)
    for leaf in leaves:
        if leaf.role not in IGNORED:
            by_path[leaf.path].append(leaf)
    modules = [_Module(path, {leaf.role: leaf for leaf in of}) for path, of in by_path.items()]
    return [
        module
        for module in modules
        if "weight" in module.leaves
        and module.leaves.keys() <= OF_A_MODULE
        and len(module.leaves) == len(by_path[module.path])
        and alignment.are_free(module.all_leaves)
    ]


def _groups(modules: Iterable[_Module]) -> list[_Group]:
    grouped: dict[object, list[_Module]] = defaultdict(list)
    for module in modules:
        words = tuple(each if isinstance(each, str) else None for each in module.path)
        ranks = {(role, len(leaf.shape)) for role, leaf in module.leaves.items()}
        grouped[words, frozenset(ranks)].append(module)
    return [tuple(sorted(group, key=_numbers)) for group in grouped.values()]


def _numbers(module: _Module) -> tuple[int, ...]:
    return tuple(each for each in module.path if isinstance(each, int))


def _parents(alignment: Alignment) -> dict[Components, set[Components]]:
    """Path of a source's module -> the target's that pairs of leaves below them show it to be."""
    parents: dict[Components, set[Components]] = defaultdict(set)
    for pair in alignment.pairs:
        if pair.axis is not None:
            continue
        one, other = (leaf.path for leaf in pair.first)
        while one and other:
            one, other = one[:-1], other[:-1]
            parents[one].add(other)
            if not (one and other) or one[-1] != other[-1]:
                break
    return parents


class _Fit:
    """Whether two modules may be one; computed once for modules of the same kinds.

    Args:
        parents: the pairs of enclosing modules; see `_parents`.
        sources: the source's modules.
        targets: the target's.
    """

    def __init__(
        self,
        parents: Mapping[Components, set[Components]],
        sources: Iterable[_Module],
        targets: Iterable[_Module],
    ) -> None:
        self._parents = parents
        named = set[Components]().union(*parents.values())
        above = {path: frozenset(of) for path, of in parents.items() if path}
        self._sources = _kinds({each: above.get(each.path[:-1]) for each in sources})
        parent_paths = ((each, each.path[:-1]) for each in targets)
        self._targets = _kinds({e: path if path in named else None for e, path in parent_paths})
        self._known: dict[tuple[int, int], bool] = {}

    @property
    def comparisons(self) -> int:
        """Number of pairs of kinds to compare."""
        return len({*self._sources.values()}) * len({*self._targets.values()})

    def __call__(self, source: _Module, target: _Module) -> bool:
        """Whether these two may be one."""
        kinds = self._sources[source], self._targets[target]
        if kinds not in self._known:
            self._known[kinds] = self._compare(source, target)
        return self._known[kinds]

    def _compare(self, source: _Module, target: _Module) -> bool:
        if source.leaves.keys() != target.leaves.keys() or source.contradicts(target):
            return False
        above = self._parents.get(source.path[:-1])
        if above and source.path[:-1] and target.path[:-1] not in above:
            return False
        if source.is_vector and not (source.is_norm and target.is_norm):
            return False
        fitting = (layouts(leaf, target.leaves[role]) for role, leaf in source.leaves.items())
        return all(each and each[0].usual for each in fitting)

    def neighbours(
        self, sources: Sequence[_Group], targets: Sequence[_Group]
    ) -> dict[_Group, list[_Group]]:
        """For the groups of either side: the groups of the other side with a module that fits one
        of theirs. Groups of the same kinds share one list.
        """
        here = {group: frozenset(self._sources[each] for each in group) for group in sources}
        there = {group: frozenset(self._targets[each] for each in group) for group in targets}
        some = {here[group]: {self._sources[e]: e for e in group}.values() for group in sources}
        other = {there[group]: {self._targets[e]: e for e in group}.values() for group in targets}
        fitting = {
            (kinds, others)
            for (kinds, modules), (others, counterparts) in product(some.items(), other.items())
            if any(self(*pair) for pair in product(modules, counterparts))
        }
        of_source = {k: [each for each in targets if (k, there[each]) in fitting] for k in some}
        of_target = {k: [each for each in sources if (here[each], k) in fitting] for k in other}
        return {group: of_source[kinds] for group, kinds in here.items()} | {
            group: of_target[kinds] for group, kinds in there.items()
        }


def _kinds(places: Mapping[_Module, object]) -> dict[_Module, int]:
    """A number for each module, equal for those that fit the same modules.

    Args:
        places: the relevant part of each module's position.
    """
    numbers: dict[object, int] = {}
    kinds: dict[_Module, int] = {}
    for module, place in places.items():
        leaves = frozenset((role, e.flavour, e.spec) for role, e in module.leaves.items())
        kind = leaves, CONCEPTS.get(module.word), module.is_norm, place
        kinds[module] = numbers.setdefault(kind, len(numbers))
    return kinds


def _match_groups(
    alignment: Alignment,
    sources: Sequence[_Group],
    targets: Sequence[_Group],
    fit: _Fit,
) -> None:
    """Pair, in order, the modules of groups that fit each other alone."""
    neighbours = fit.neighbours(sources, targets)
    for source in sources:
        for target in neighbours[source] if len(neighbours[source]) == 1 else ():
            if len(neighbours[target]) != 1 or len(source) != len(target):
                continue
            pairs = list(zip(source, target, strict=True))
            if all(fit(one, other) and one.is_alike(other) for one, other in pairs):
                reason = SAME_SHAPES if len(pairs) == 1 else _reason(pairs, fit)
                for one, other in pairs:
                    _accept(alignment, one, other, reason)


def _reason(pairs: Sequence[tuple[_Module, _Module]], fit: _Fit) -> str:
    """Why the modules of two groups are paired in order.

    Numbers count calls on both sides (``net.0``, ``Dense_0``) unless they are part of a word
    (``fc1``); then the order counts only where another one would fit as well.
    """
    in_words = any(
        re.search(r"[A-Za-z]\d+$", leaf.name.replace("/", ".").split(".")[-2])
        for pair in pairs
        for module in pair
        for leaf in module.all_leaves
    )
    others = ((one, other) for (one, _), (_, other) in product(pairs, pairs) if one is not other)
    unsure = in_words and sum(fit(one, other) for one, other in others) > len(pairs)
    return SAME_ORDER if unsure else IN_ORDER


def _match_alone(
    alignment: Alignment,
    sources: Sequence[_Group],
    targets: Sequence[_Group],
    fit: _Fit,
) -> None:
    """Pair the modules that fit only each other; a module that fits several becomes a doubt."""
    neighbours = fit.neighbours(sources, targets)
    doubted: set[frozenset[_Module]] = set()
    # Targets of one kind share their list of neighbours, and so its rivals.
    for shared in {id(each): each for each in map(neighbours.__getitem__, targets)}.values():
        others = [module for [module] in shared]
        if not others:
            continue
        rivals = [module for [module] in neighbours[others[0],]]
        reason = "their shapes fit, and nothing in their names says which is which"
        if len(others) == len(rivals) == 1:
            if rivals[0].is_alike(others[0]):
                _accept(alignment, others[0], rivals[0], SAME_SHAPES)
                continue
            reason = "their shapes fit, but their names have different meanings"
        modules = frozenset((*others, *rivals))
        if modules not in doubted:
            doubted.add(modules)
            _doubt(alignment, others, rivals, reason)


def _accept(alignment: Alignment, source: _Module, target: _Module, reason: str) -> None:
    for role, leaf in source.leaves.items():
        other = target.leaves[role]
        alignment.offer(LeafGroup(leaf.key, (leaf,)), LeafGroup(other.key, (other,)), reason)


def _doubt(
    alignment: Alignment, sources: Sequence[_Module], targets: Sequence[_Module], reason: str
) -> None:
    for role in sources[0].leaves:
        one, other = (tuple(module.leaves[role] for module in side) for side in (sources, targets))
        alignment.doubt(Doubt(one, other, reason))
