"""What prefixes explain: against a look at every pair, and without one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.steps import steps
from xckpt.mapping.infer.align import align
from xckpt.mapping.infer.layouts import fits
from xckpt.mapping.infer.leaves import LeafGroup, ModelLeaf, leaves_of
from xckpt.mapping.infer.prefixes import DEEPEST_PREFIX, Components, Explanations, Prefixes
from xckpt.mapping.spec import TensorSpec

Names = tuple[str, str]
Ranked = list[tuple[Prefixes, list[Names]]]

COMPONENTS = st.sampled_from(["a", "b", "0", "1", "2"])
SHAPES = st.sampled_from([(2,), (2, 3), (3, 2), (6,)])
TREES = st.dictionaries(
    st.lists(COMPONENTS, max_size=4).map(lambda parts: ".".join([*parts, "weight"])),
    SHAPES.map(lambda shape: TensorSpec(shape, "int8")),
    max_size=12,
)
LAYERS = 20


def groups(specs: dict[str, TensorSpec]) -> list[LeafGroup]:
    return [LeafGroup(leaf.key, (leaf,)) for leaf in leaves_of(specs)]


def numbers(key: Components) -> tuple[int, ...]:
    return tuple(each for each in key if isinstance(each, int))


def words(key: Components) -> Components:
    return tuple(0 if isinstance(each, int) else each for each in key)


def numbers_agree(one: set[tuple[int, ...]], other: set[tuple[int, ...]]) -> bool:
    fewer, more = sorted((one, other), key=len)
    places = range(len(next(iter(fewer))))
    return fewer == more or (
        fewer < more
        and all(
            max(key[place] for key in fewer)
            < min({key[place] for key in more} - {key[place] for key in fewer}, default=9)
            for place in places
        )
    )


def compared(sources: list[LeafGroup], targets: list[LeafGroup]) -> Ranked:
    """What `Explanations` gives, by a look at every pair of groups and of prefixes."""

    def below(side: list[LeafGroup], prefix: Components, rest: Components) -> set[tuple[int, ...]]:
        ends = [each.key[len(prefix) :] for each in side if each.key[: len(prefix)] == prefix]
        return {numbers(end) for end in ends if words(end) == words(rest)}

    explained: dict[Prefixes, list[Names]] = defaultdict(list)
    lengths = range(DEEPEST_PREFIX + 1)
    for target, source, cut, other_cut in product(targets, sources, lengths, lengths):
        rest, other = source.key[cut:], target.key[other_cut:]
        if rest != other or len(numbers(rest)) == len(rest[:-1]) or not cut + other_cut:
            continue
        before, after = source.key[:cut], target.key[:other_cut]
        agree = numbers_agree(below(sources, before, rest), below(targets, after, rest))
        if agree and fits(source, target):
            explained[before, after].append((source.leaves[0].name, target.leaves[0].name))
    order = sorted(explained, key=lambda e: (-len(explained[e]), len(e[0]) + len(e[1]), repr(e)))
    return [(each, explained[each]) for each in order]


@given(TREES, TREES)
def test_what_prefixes_explain_is_what_a_look_at_every_pair_finds(
    source: dict[str, TensorSpec], target: dict[str, TensorSpec]
) -> None:
    sources, targets = groups(source), groups(target)
    explanations = Explanations(sources, targets)
    found: Ranked = [
        (each, [(a.leaves[0].name, b.leaves[0].name) for a, b in explanations.pairs(each)])
        for each in explanations.in_order(lambda group: True)
    ]
    assert found == compared(sources, targets)


def renamed(layers: int) -> tuple[list[ModelLeaf], list[ModelLeaf]]:
    """Layers of four leaves, under another prefix in the other tree."""
    return tree("model.layers.{}", layers), tree("net.layers.{}", layers)


def of_any_layer(layers: int) -> tuple[list[ModelLeaf], list[ModelLeaf]]:
    """Layers of four leaves, each of which may be any of the other tree's."""
    return tree("layers.{}.inner", layers), tree("stages.{}.core", layers)


def tree(prefix: str, layers: int) -> list[ModelLeaf]:
    return leaves_of(
        {
            f"{prefix.format(layer)}.{word}.weight": TensorSpec((8, 4), "int8")
            for layer in range(layers)
            for word in ("alpha", "beta", "gamma", "delta")
        }
    )


@pytest.mark.parametrize("trees", [renamed, of_any_layer])
def test_a_leaf_costs_the_same_in_a_model_of_many_layers(
    trees: Callable[[int], tuple[list[ModelLeaf], list[ModelLeaf]]],
) -> None:
    few, many = trees(LAYERS), trees(5 * LAYERS)
    each = steps(lambda: align(*few)) / LAYERS
    assert steps(lambda: align(*many)) / (5 * LAYERS) < 1.2 * each
