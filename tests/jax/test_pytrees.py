"""Registered pytree nodes: Flax, Optax and custom ones, one level at a time, there and back."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import flax.core
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.tree_util import DictKey, GetAttrKey

from xckpt.core.adapter import Children
from xckpt.jax.adapter import ADAPTER


@flax.struct.dataclass
class Train:
    step: int
    params: dict[str, jax.Array]
    name: str = flax.struct.field(pytree_node=False, default="run")


@jax.tree_util.register_pytree_node_class
class Pair:
    """Registered without keys."""

    def __init__(self, left: object, right: object, label: str) -> None:
        self.left, self.right, self.label = left, right, label

    def tree_flatten(self) -> tuple[tuple[object, object], str]:
        return (self.left, self.right), self.label

    @classmethod
    def tree_unflatten(cls, label: str, parts: tuple[object, object]) -> Pair:
        return cls(*parts, label)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Settings:
    rate: float = 0.1


class Odd:
    """Registered with keys that are neither str nor int, or not distinct."""

    def __init__(self, keys: tuple[object, ...], values: tuple[object, ...]) -> None:
        self.keys, self.values = keys, values


jax.tree_util.register_pytree_with_keys(
    Odd,
    lambda odd: (
        [(DictKey(key), value) for key, value in zip(odd.keys, odd.values, strict=True)],
        odd.keys,
    ),
    lambda keys, values: Odd(keys, tuple(values)),
)


class Point(NamedTuple):
    x: float
    y: float


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)])
        self.drop = nnx.Dropout(0.5, rngs=rngs)


def opened(node: object) -> Children:
    found = ADAPTER.children(node)
    assert found is not None
    return found


def through(node: object, change: Callable[[object], object]) -> object:
    """The tree with changed leaves, by `children` and `rebuild` alone."""
    if node is None:
        return None
    if type(node) is dict:
        return {key: through(child, change) for key, child in node.items()}
    if isinstance(node, tuple):
        parts = [through(child, change) for child in node]
        make = getattr(type(node), "_make", tuple)
        return make(parts)
    found = ADAPTER.children(node)
    if found is None:
        return change(node)
    return ADAPTER.rebuild(node, [through(child, change) for _, child in found[1]])


def trees() -> list[object]:
    params = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}
    model = Model(nnx.Rngs(0))
    return [
        Train(3, params, "other"),
        flax.core.freeze({"a": {"b": jnp.arange(2)}}),
        Pair(jnp.ones(2), Pair(1, 2.0, "inner"), "outer"),
        Odd((1.5, 2.5), (jnp.ones(2), 3)),
        Settings(),
        defaultdict(list, a=jnp.ones(1)),
        jax.tree_util.Partial(max, jnp.ones(1), key=abs),
        nnx.state(model),
        model,
        optax.adamw(1e-3).init(params),
        optax.chain(optax.clip(1.0), optax.masked(optax.adam(1e-3), {"w": True, "b": False})).init(
            params
        ),
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.1).init(params),
    ]


def change(leaf: object) -> object:
    if isinstance(leaf, jax.Array):
        return leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf + 1
    return leaf


@pytest.mark.parametrize("number", range(12))
def test_a_tree_comes_back_with_other_leaves(number: int) -> None:
    tree = trees()[number]
    expected = jax.tree_util.tree_map(change, tree)
    found = through(tree, change)
    assert jax.tree_util.tree_structure(found) == jax.tree_util.tree_structure(expected)
    leaves = zip(jax.tree_util.tree_leaves(found), jax.tree_util.tree_leaves(expected), strict=True)
    for a, b in leaves:
        assert jnp.all(a == b)


def test_keys_are_names_and_positions() -> None:
    kind, entries = opened(Train(3, {"w": jnp.ones(1)}))
    assert kind == f"pytree:{Train.__module__}.Train"
    assert [key for key, _ in entries] == ["step", "params"]
    assert [key for key, _ in opened(Pair(1, 2, "p"))[1]] == [0, 1]
    assert [key for key, _ in opened(flax.core.freeze({"a": 1, "b": {}}))[1]] == ["a", "b"]
    assert [key for key, _ in opened(nnx.Param(jnp.ones(2)))[1]] == ["value"]


def test_keys_that_are_no_str_or_int_become_strings() -> None:
    assert [key for key, _ in opened(Odd((1.5, True, "x", 7), (1, 2, 3, 4)))[1]] == [
        "1.5",
        "True",
        "x",
        7,
    ]


@pytest.mark.parametrize("keys", [("a", "a"), (1.5, "1.5"), (0, 0)])
def test_keys_that_are_not_distinct_become_positions(keys: tuple[object, ...]) -> None:
    assert opened(Odd(keys, ("x", "y")))[1] == [(0, "x"), (1, "y")]


def test_the_int_0_and_the_string_0_are_distinct() -> None:
    assert [key for key, _ in opened(Odd((0, "0"), ("x", "y")))[1]] == [0, "0"]


def test_a_static_node_has_no_children() -> None:
    assert opened(Settings())[1] == []
    assert ADAPTER.rebuild(Settings(0.3), []) == Settings(0.3)


@pytest.mark.parametrize(
    "node",
    [
        {"a": 1},
        OrderedDict(a=1),
        [1],
        (1,),
        (),
        Point(1, 2),
        None,
        1,
        "text",
        np.zeros(3),
        jnp.zeros(3),
        jax.random.key(0),
        jax.ShapeDtypeStruct((3,), jnp.float32),
        object(),
    ],
)
def test_builtin_containers_and_leaves_are_not_ours(node: object) -> None:
    assert ADAPTER.children(node) is None
    assert ADAPTER.rebuild(node, []) is None


def test_an_attribute_key_is_its_name() -> None:
    class Named(Odd):
        pass

    jax.tree_util.register_pytree_with_keys(
        Named,
        lambda node: ([(GetAttrKey("left"), node.values[0])], None),
        lambda _, values: Named((), tuple(values)),
    )
    assert opened(Named((), (1,)))[1] == [("left", 1)]
