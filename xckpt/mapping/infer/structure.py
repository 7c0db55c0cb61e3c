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

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from xckpt.mapping.infer.leaf_names import CONCEPTS, ModelLeaf, Path
from xckpt.mapping.infer.pairs import Alignment, Doubt, LeafGroup, Side, pair_of

ROLES = frozenset(("weight", "bias", "mean", "var"))
IGNORED = frozenset(("numbatchestracked",))
"""Leaves that only one framework's modules have."""
_GENERIC = (
    "dense linear fc conv embed embedding layernorm rmsnorm norm ln batchnorm bn groupnorm",
    "layers layer blocks block net sequential module",
)
GENERIC = frozenset(" ".join(_GENERIC).split())
"""Names that frameworks give, or that say no more than a class: they may mean anything."""
ALIKE = 0.6
"""From this similarity on (`difflib`) two names are taken to mean the same."""
OF_ATTENTION = frozenset(("query", "key", "value"))
"""Concepts that are never one another, nor any other concept."""
MOST_COMPARISONS = 4_000_000
"""Pairs of modules beyond which nothing is compared: nothing is alignment rather than late."""


@dataclass(frozen=True)
class _Module:
    """Leaves with one path, by role."""

    path: Path
    leaves: Mapping[str, ModelLeaf]

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
        one, two = CONCEPTS.get(self.word), CONCEPTS.get(other.word)
        return (
            one is not None
            and two is not None
            and one != two
            and not OF_ATTENTION.isdisjoint((one, two))
        )

    @property
    def is_vector(self) -> bool:
        return all(len(leaf.shape) < 2 for leaf in self.leaves.values())

    @property
    def is_norm(self) -> bool:
        words = [each for each in self.path if isinstance(each, str)]
        named = bool(words) and ("norm" in words[-1] or words[-1] in ("ln", "bn"))
        return named or "bias" in self.leaves or self.leaves["weight"].flavour == "scale"


@dataclass(frozen=True)
class _ModuleGroup:
    """Modules whose paths differ in numbers alone, in the order of these."""

    modules: tuple[_Module, ...]


def match_modules(alignment: Alignment) -> None:
    """Pair, in ``alignment``, the modules that are left, where structure leaves one choice.

    Example:
        >>> import numpy as np
        >>> from xckpt.mapping.infer.align import align
        >>> from xckpt.mapping.infer.leaf_names import leaves_of, specs_of
        >>> torch = {"net.0.weight": np.zeros((5, 3)), "net.2.weight": np.zeros((5, 5))}
        >>> flax = {f"Dense_{n}": {"kernel": np.zeros((3 + 2 * n, 5))} for n in range(2)}
        >>> alignment = align(leaves_of(specs_of(torch)), leaves_of(specs_of(flax)))
        >>> match_modules(alignment)
        >>> [(pair.source.leaves[0].name, pair.target.leaves[0].name) for pair in alignment.pairs]
        [('net.0.weight', 'Dense_0/kernel'), ('net.2.weight', 'Dense_1/kernel')]
    """
    sources = _groups(_modules(alignment, "source"))
    targets = _groups(_modules(alignment, "target"))
    sizes = [sum(len(group.modules) for group in side) for side in (sources, targets)]
    if sizes[0] * sizes[1] > MOST_COMPARISONS:
        return
    fitting = _Fitting(_parents(alignment))
    _match_groups(alignment, fitting, sources, targets)
    left = _unpaired(alignment, "source", sources), _unpaired(alignment, "target", targets)
    _match_alone(alignment, fitting, *left)


def _unpaired(alignment: Alignment, side: Side, groups: Sequence[_ModuleGroup]) -> list[_Module]:
    """The modules that have no leaf in a pair."""
    return [
        module
        for group in groups
        for module in group.modules
        if alignment.paired.isdisjoint((side, leaf.name) for leaf in module.leaves.values())
    ]


def _modules(alignment: Alignment, side: Side) -> list[_Module]:
    """Modules that are left whole."""
    leaves = alignment.sources if side == "source" else alignment.targets
    grouped: dict[Path, dict[str, ModelLeaf]] = defaultdict(dict)
    spoilt: set[Path] = set()
    taken = alignment.paired | alignment.doubted
    for leaf in leaves:
        if leaf.role in IGNORED:
            continue
        if (side, leaf.name) in taken or leaf.role not in ROLES or leaf.role in grouped[leaf.path]:
            spoilt.add(leaf.path)
        grouped[leaf.path][leaf.role] = leaf
    return [
        _Module(path, roles)
        for path, roles in grouped.items()
        if path not in spoilt and "weight" in roles
    ]


def _groups(modules: Iterable[_Module]) -> list[_ModuleGroup]:
    grouped: dict[object, list[_Module]] = defaultdict(list)
    for module in modules:
        words = tuple(each if isinstance(each, str) else None for each in module.path)
        ranks = {role: len(leaf.shape) for role, leaf in module.leaves.items()}
        grouped[words, tuple(sorted(ranks.items()))].append(module)
    return [
        _ModuleGroup(tuple(sorted(group, key=lambda module: _numbers(module.path))))
        for group in grouped.values()
    ]


def _numbers(path: Path) -> tuple[int, ...]:
    return tuple(each for each in path if isinstance(each, int))


def _parents(alignment: Alignment) -> dict[Path, set[Path]]:
    """Path of a source's module -> the target's that pairs of leaves below them show it to be."""
    parents: dict[Path, set[Path]] = defaultdict(set)
    for pair in alignment.pairs:
        if pair.source.position is not None or pair.target.position is not None:
            continue
        one, other = pair.source.leaves[0].path, pair.target.leaves[0].path
        while one and other:
            one, other = one[:-1], other[:-1]
            parents[one].add(other)
            if not (one and other) or one[-1] != other[-1]:
                break
    return parents


@dataclass(frozen=True)
class _Fitting:
    """Whether two modules fit."""

    parents: Mapping[Path, set[Path]]

    def __call__(self, source: _Module, target: _Module) -> bool:
        if source.leaves.keys() != target.leaves.keys() or source.contradicts(target):
            return False
        above = self.parents.get(source.path[:-1])
        if above and source.path[:-1] and target.path[:-1] not in above:
            return False
        if source.is_vector and not (source.is_norm and target.is_norm):
            return False
        return all(_fits(leaf, target.leaves[role]) for role, leaf in source.leaves.items())


def _fits(source: ModelLeaf, target: ModelLeaf) -> bool:
    pair = pair_of(LeafGroup((), (source,)), LeafGroup((), (target,)), "")
    return pair is not None and pair.layouts[0].usual


def _match_groups(
    alignment: Alignment,
    fits: _Fitting,
    sources: Sequence[_ModuleGroup],
    targets: Sequence[_ModuleGroup],
) -> None:
    together: list[tuple[_ModuleGroup, _ModuleGroup]] = []
    touched: dict[int, int] = defaultdict(int)
    for source in sources:
        for target in targets:
            if any(fits(one, other) for one in source.modules for other in target.modules):
                together.append((source, target))
                touched[id(source)] += 1
                touched[id(target)] += 1
    for source, target in together:
        alone = touched[id(source)] == 1 and touched[id(target)] == 1
        if not alone or len(source.modules) != len(target.modules):
            continue
        pairs = list(zip(source.modules, target.modules, strict=True))
        if all(fits(one, other) and one.is_alike(other) for one, other in pairs):
            for one, other in pairs:
                _accept(alignment, one, other, "same shapes" if len(pairs) == 1 else "same order")


def _match_alone(
    alignment: Alignment, fits: _Fitting, sources: Sequence[_Module], targets: Sequence[_Module]
) -> None:
    here: dict[Path, list[_Module]] = defaultdict(list)
    there: dict[Path, list[_Module]] = defaultdict(list)
    for source in sources:
        for target in targets:
            if fits(source, target):
                here[target.path].append(source)
                there[source.path].append(target)
    doubted: set[frozenset[Path]] = set()
    for target in targets:
        others = here[target.path]
        if not others:
            continue
        rivals = there[others[0].path]
        if len(others) == len(rivals) == 1:
            if target.is_alike(others[0]):
                _accept(alignment, others[0], target, "same shapes")
            else:
                _doubt(
                    alignment, others, rivals, "their shapes fit, but their names say other things"
                )
            continue
        paths = frozenset(module.path for module in (*others, *rivals))
        if paths not in doubted:
            doubted.add(paths)
            reason = "their shapes fit, and nothing in their names says which is which"
            _doubt(alignment, others, rivals, reason)


def _accept(alignment: Alignment, source: _Module, target: _Module, reason: str) -> None:
    for role, leaf in source.leaves.items():
        other = target.leaves[role]
        alignment.offer(LeafGroup(leaf.key, (leaf,)), LeafGroup(other.key, (other,)), reason)


def _doubt(
    alignment: Alignment, sources: Sequence[_Module], targets: Sequence[_Module], reason: str
) -> None:
    for role in sources[0].leaves:
        alignment.doubt(
            Doubt(
                tuple(module.leaves[role] for module in sources),
                tuple(module.leaves[role] for module in targets),
                reason,
            )
        )
