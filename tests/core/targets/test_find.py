"""What of a target tree is state, and under which name it is stored."""

from __future__ import annotations

import enum
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xckpt
from tests.support.jobs import fresh_path
from xckpt import TreeMismatchError, UnsupportedLeafError


class Mode(enum.Enum):
    TRAIN = 1


@jax.tree_util.register_pytree_with_keys_class
class Layer:
    """As Equinox has them: functions and settings among the leaves."""

    def __init__(self, weight: object, activation: object, mode: object = None) -> None:
        self.weight, self.activation, self.mode = weight, activation, mode

    def tree_flatten_with_keys(self) -> tuple[list[tuple[object, object]], None]:
        names = ("weight", "activation", "mode")
        return [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names], None

    @classmethod
    def tree_unflatten(cls, _: None, parts: tuple[object, ...]) -> Layer:
        return cls(*parts)


def double(x: float) -> float:
    return 2 * x


def save(tree: object) -> str:
    path = fresh_path()
    xckpt.save(path, tree)
    return path


def test_a_function_of_a_class_is_saved_as_none_and_comes_back_untouched() -> None:
    path = save({"layers": [Layer(np.ones(2), double), Layer(np.zeros(1), jnp.tanh)]})
    assert xckpt.load(path)["layers"][0]["activation"] is None
    like = {"layers": [Layer(np.zeros(2), double), Layer(np.ones(1), np.abs)]}
    loaded = xckpt.load(path, like)
    first, second = loaded["layers"]
    assert first.activation is double and second.activation is np.abs
    assert np.array_equal(first.weight, np.ones(2))  # type: ignore[arg-type]


def test_a_function_between_layers_keeps_their_numbers() -> None:
    path = save(Layer([np.ones(2), double, np.zeros(1)], double))
    assert xckpt.load(path)["weight"][1] is None
    loaded = xckpt.load(path, Layer([np.zeros(2), np.tanh, np.ones(1)], np.tanh))
    weight: list[object] = loaded.weight  # type: ignore[assignment]
    assert weight[1] is np.tanh and np.array_equal(weight[2], np.zeros(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("leaf", [double, lambda: 0, Mode, Mode.TRAIN])
def test_elsewhere_a_function_is_refused_by_name(leaf: object) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"fn: an? .* is neither a tensor nor"):
        save({"w": np.ones(2), "fn": leaf})


def test_other_objects_are_refused_in_a_class_too() -> None:
    with pytest.raises(UnsupportedLeafError, match=r"mode: a .*Mode is neither a tensor nor"):
        save(Layer(np.ones(2), None, Mode.TRAIN))
    path = save(Layer(np.ones(2), None, None))
    loaded = xckpt.load(path, Layer(np.zeros(2), double, Mode.TRAIN))
    assert loaded.mode is Mode.TRAIN and loaded.activation is double


def test_a_function_where_an_array_is_stored_is_refused() -> None:
    path = save({"w": np.ones(2), "f": np.ones(2)})
    with pytest.raises(UnsupportedLeafError, match=r"f: a .*function is not a target"):
        xckpt.load(path, {"w": np.zeros(2), "f": double})


def test_a_function_in_a_dict_comes_back_untouched() -> None:
    path = save({"w": np.ones(2)})
    loaded = xckpt.load(path, {"w": np.zeros(2), "f": double})
    assert loaded["f"] is double
    state = {"w": np.zeros(2), "f": double}
    report = xckpt.load_into(path, state)
    assert report == xckpt.LoadReport(("w",)) and state["f"] is double


def test_functions_alone_are_no_target() -> None:
    path = save({"w": np.ones(2)})
    with pytest.raises(TreeMismatchError, match="w: in the checkpoint, but not wanted"):
        xckpt.load(path, {"f": double})
    assert xckpt.load(path, {"f": double}, strict=False)["f"] is double


@pytest.mark.parametrize("call", [xckpt.save, lambda *args: xckpt.save_async(*args).result()])
def test_functions_are_staged(call: Callable[..., object]) -> None:
    path = fresh_path()
    call(path, Layer(np.ones(2), jax.nn.relu))
    assert xckpt.load(path)["activation"] is None


def test_none_and_a_container_without_leaves_are_one() -> None:
    for saved, like in [((), None), (None, ()), ({}, None)]:
        path = save({"w": np.ones(2), "opt": saved})
        assert xckpt.load(path, {"w": np.zeros(2), "opt": like})["opt"] == like


def test_a_value_in_a_tuple_at_the_root_is_refused_before_anything_is_filled() -> None:
    """The caller would keep the old tuple, and so the old value."""
    path = save((np.ones(2), 5, ({"n": 1}, np.float32(2))))
    w = np.zeros(2)
    with pytest.raises(UnsupportedLeafError, match="in a tuple at the root") as caught:
        xckpt.load_into(path, (w, 0, ({"n": 0}, np.float32(0))))
    assert [problem.leaf for problem in caught.value.problems] == ["1", "2/1"]
    assert w.tolist() == [0, 0]

    state = (w, [0], ({"n": 0}, [np.float32(0)]))
    xckpt.save(path, (np.ones(2), [5], ({"n": 1}, [np.float32(2)])), overwrite=True)
    xckpt.load_into(path, state)
    assert w.tolist() == [1, 1] and state[1:] == ([5], ({"n": 1}, [2]))
