"""Which module of one tree is which of the other, where names do not decide.

A module is its leaves: a weight, often a bias, a normalisation's statistics. Only whole modules
that nothing else has paired are looked at, and only the layouts that convention calls for.

1. Modules whose paths differ in numbers alone, and whose roles are the same, are a group: the
   layers of a stack, ``net.0, net.2, net.4``, ``Dense_0, Dense_1, Dense_2``.
2. Two modules fit if each leaf of the one fits the leaf of that role in the other. Where the
   modules around them are paired already, they must lie in the same one. A query is no key, value
   or output, whatever their shapes.
3. Two groups of one size whose members fit in order belong together, if no member of either fits
   any other group. So do two modules that fit each other alone.
4. A module whose leaves all have one axis is paired only if it is a normalisation: its name says
   so, or it has a bias too.
5. Shapes that fit each other alone are not enough where both names mean something, and nothing
   alike: a pooler that one tree lacks is no teacher that the other lacks.

A module that fits several becomes a doubt.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import product

from xckpt.mapping.infer.align import SAME_ORDER, Alignment, Doubt
from xckpt.mapping.infer.layouts import layouts
from xckpt.mapping.infer.leaves import CONCEPTS, LeafGroup, ModelLeaf, Path

ROLES = frozenset(("weight", "bias", "mean", "var"))
IGNORED = frozenset(("numbatchestracked",))
"""Leaves that only one framework's modules have."""
_GENERIC = """
dense linear fc conv embed embedding layernorm rmsnorm norm ln batchnorm bn groupnorm
layers layer blocks block net sequential module
"""
GENERIC = frozenset(_GENERIC.split())
"""Names that frameworks give, or that say no more than a class: they may mean anything."""
ALIKE = 0.6
"""From this similarity on (`difflib`) two names are taken to mean the same."""
OF_ATTENTION = frozenset(("query", "key", "value"))
"""Concepts that are never one another, nor any other concept."""
MOST_COMPARISONS = 4_000_000
"""Pairs of modules beyond which nothing is compared: nothing is alignment rather than late."""


@dataclass(frozen=True, eq=False)
class _Module:
    """Leaves with one path, by role. Modules are compared by identity."""

    path: Path
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
        return named or "bias" in self.leaves or self.leaves["weight"].flavour == "scale"


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
    if sum(map(len, sources)) * sum(map(len, targets)) > MOST_COMPARISONS:
        return
    parents = _parents(alignment)
    _match_groups(alignment, sources, targets, parents)
    sources, targets = (
        [(module,) for group in side for module in group if alignment.are_free(module.all_leaves)]
        for side in (sources, targets)
    )
    _match_alone(alignment, sources, targets, parents)


def _modules(alignment: Alignment, leaves: Iterable[ModelLeaf]) -> list[_Module]:
    """Modules that are left whole."""
    by_path: dict[Path, list[ModelLeaf]] = defaultdict(list)
    for leaf in leaves:
        if leaf.role not in IGNORED:
            by_path[leaf.path].append(leaf)
    modules = [_Module(path, {leaf.role: leaf for leaf in of}) for path, of in by_path.items()]
    return [
        module
        for module in modules
        if "weight" in module.leaves
        and module.leaves.keys() <= ROLES
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


def _parents(alignment: Alignment) -> dict[Path, set[Path]]:
    """Path of a source's module -> the target's that pairs of leaves below them show it to be."""
    parents: dict[Path, set[Path]] = defaultdict(set)
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


def _fit(source: _Module, target: _Module, parents: Mapping[Path, set[Path]]) -> bool:
    """Whether two modules may be one, given what the modules around them are."""
    if source.leaves.keys() != target.leaves.keys() or source.contradicts(target):
        return False
    above = parents.get(source.path[:-1])
    if above and source.path[:-1] and target.path[:-1] not in above:
        return False
    if source.is_vector and not (source.is_norm and target.is_norm):
        return False
    fitting = (layouts(leaf, target.leaves[role]) for role, leaf in source.leaves.items())
    return all(each and each[0].usual for each in fitting)


def _neighbours(
    sources: Sequence[_Group], targets: Sequence[_Group], parents: Mapping[Path, set[Path]]
) -> dict[_Group, list[_Group]]:
    """The groups of the other side of which some module fits one of a group's, for either side."""
    neighbours: dict[_Group, list[_Group]] = defaultdict(list)
    for source, target in product(sources, targets):
        if any(_fit(one, other, parents) for one, other in product(source, target)):
            neighbours[source].append(target)
            neighbours[target].append(source)
    return neighbours


def _match_groups(
    alignment: Alignment,
    sources: Sequence[_Group],
    targets: Sequence[_Group],
    parents: Mapping[Path, set[Path]],
) -> None:
    """Pair, in order, the modules of groups that fit each other alone."""
    neighbours = _neighbours(sources, targets, parents)
    for source in sources:
        for target in neighbours[source]:
            alone = len(neighbours[source]) == len(neighbours[target]) == 1
            if not alone or len(source) != len(target):
                continue
            pairs = list(zip(source, target, strict=True))
            if all(_fit(one, other, parents) and one.is_alike(other) for one, other in pairs):
                reason = "same shapes" if len(pairs) == 1 else _reason(pairs, parents)
                for one, other in pairs:
                    _accept(alignment, one, other, reason)


def _reason(pairs: Sequence[tuple[_Module, _Module]], parents: Mapping[Path, set[Path]]) -> str:
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
    unsure = in_words and sum(_fit(one, other, parents) for one, other in others) > len(pairs)
    return SAME_ORDER if unsure else "same shapes in order"


def _match_alone(
    alignment: Alignment,
    sources: Sequence[_Group],
    targets: Sequence[_Group],
    parents: Mapping[Path, set[Path]],
) -> None:
    """Pair the modules that fit each other alone; what fits several becomes a doubt."""
    neighbours = _neighbours(sources, targets, parents)
    doubted: set[frozenset[_Module]] = set()
    for target in targets:
        others = [module for [module] in neighbours[target]]
        if not others:
            continue
        rivals = [module for [module] in neighbours[others[0],]]
        reason = "their shapes fit, and nothing in their names says which is which"
        if len(others) == len(rivals) == 1:
            if target[0].is_alike(others[0]):
                _accept(alignment, others[0], target[0], "same shapes")
                continue
            reason = "their shapes fit, but their names say other things"
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
