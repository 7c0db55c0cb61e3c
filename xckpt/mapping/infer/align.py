"""Which leaf of one tree is which of the other, by what they are called.

1. Leaves whose keys are equal belong together, if no other leaf of either tree has that key; first
   by their own words, then by concepts (`xckpt.mapping.infer.leaf_names`). Where one tree numbers
   them 0, 2, 4 and the other 0, 1, 2, equal numbers mean nothing.
2. What is left may lie under other prefixes (`xckpt.mapping.infer.prefixes`).
3. Leaves that differ in one number alone, counted from 0, may be one leaf of the other tree,
   stacked along an axis: they are aligned like any other, without that number.

Names alone decide here; a pair is taken only if its shapes fit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from xckpt.mapping.infer.leaf_names import (
    ModelLeaf,
    Path,
    concepts,
    numbered_alike,
    numbers_of,
    words_of,
)
from xckpt.mapping.infer.pairs import Alignment, LeafGroup
from xckpt.mapping.infer.prefixes import by_key, pair_by_prefix

KEYS: tuple[Callable[[Path], Path], ...] = (lambda key: key, concepts)
"""What leaves are compared by, the strictest first."""


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
    alignment = Alignment(list(sources), list(targets))
    for key in KEYS:
        reason = "same name" if key is KEYS[0] else "same name in other words"
        _pair_by_key(alignment, _singles(sources, key), _singles(targets, key), reason)
    for key in KEYS:
        free = alignment.free_leaves("source"), alignment.free_leaves("target")
        pair_by_prefix(alignment, _singles(free[0], key), _singles(free[1], key))
    for key in KEYS:
        free = alignment.free_leaves("source"), alignment.free_leaves("target")
        _pair_by_key(alignment, _stacks(free[0], key), _singles(free[1], key), "stacked")
        _pair_by_key(alignment, _singles(free[0], key), _stacks(free[1], key), "stacked")
        pair_by_prefix(alignment, _stacks(free[0], key), _singles(free[1], key))
        pair_by_prefix(alignment, _singles(free[0], key), _stacks(free[1], key))
    return alignment


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
    """Pair groups that alone have their key in their tree, if both trees number them alike."""
    here, there = by_key(sources), by_key(targets)
    numbers = numbers_of(here)
    alike = {
        words
        for words, other in numbers_of(there).items()
        if words in numbers and numbered_alike(numbers[words], other)
    }
    for key, groups in there.items():
        others = here.get(key, [])
        if len(groups) == 1 and len(others) == 1 and words_of(key) in alike:
            alignment.offer(others[0], groups[0], reason)
