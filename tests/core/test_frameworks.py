"""Adapters are found by the framework that a leaf can only come from if it was imported."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

import tests.support.sharded_arrays
import xckpt.numpy
from tests.support.sharded_arrays import Sharded, Target, Wanted, cut
from xckpt.core import frameworks
from xckpt.core.geometry.boxes import Boxes
from xckpt.core.leaf import SourceLeaf, TargetLeaf

W = np.arange(6.0).reshape(2, 3)


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "_registered", dict(frameworks._registered))


def test_the_first_adapter_that_knows_a_leaf_owns_it():
    source = frameworks.describe(W, "w")
    assert isinstance(source, SourceLeaf) and isinstance(source, xckpt.numpy.ArraySource)
    sharded = cut(W, [((0, 0), (1, 3))])
    assert frameworks.describe(sharded, "w") is sharded and isinstance(sharded, SourceLeaf)
    assert frameworks.describe(object(), "w") is None


def test_the_first_adapter_that_knows_a_target_owns_it():
    target = frameworks.aim(W, "w", in_place=False)
    assert isinstance(target, TargetLeaf) and isinstance(target, xckpt.numpy.ArrayTarget)
    wanted = frameworks.aim(Wanted((2, 3), "float64", Boxes.whole((2, 3))), "w", in_place=False)
    assert isinstance(wanted, Target) and isinstance(wanted, TargetLeaf)
    assert frameworks.aim({}, "w", in_place=True) is None


def test_data_of_an_unknown_type_is_a_type_error():
    assert frameworks.to_numpy(W) is W and frameworks.to_writable_numpy(W) is W
    assert frameworks.to_writable_numpy("text") is None
    buffer = np.zeros_like(W)
    frameworks.copy_into(buffer, W)
    assert np.array_equal(buffer, W)
    with pytest.raises(TypeError, match=r"no adapter can read a builtins\.str"):
        frameworks.to_numpy("text")
    with pytest.raises(TypeError, match=r"no adapter can write a builtins\.str"):
        frameworks.copy_into("text", W)


def test_a_framework_that_was_never_imported_is_not_asked(monkeypatch):
    """Its adapter does not even exist; it is looked for once the framework is there."""
    frameworks.register_adapter("some_framework", "tests.no_such_adapter")
    assert frameworks.describe(object(), "w") is None
    monkeypatch.setitem(sys.modules, "some_framework", ModuleType("some_framework"))
    with pytest.raises(ModuleNotFoundError, match="no_such_adapter"):
        frameworks.describe(object(), "w")


def test_a_registered_container_is_opened_by_its_framework(monkeypatch):
    class Pair:
        def __init__(self, a: object, b: object) -> None:
            self.a, self.b = a, b

    def children(node: object) -> object:
        return ("pytree:Pair", [("a", node.a), ("b", node.b)]) if isinstance(node, Pair) else None

    assert frameworks.children(Pair(1, 2)) is None
    monkeypatch.setattr(tests.support.sharded_arrays, "children", children)
    assert frameworks.children(Pair(1, 2)) == ("pytree:Pair", [("a", 1), ("b", 2)])


def test_adapters_come_in_the_order_of_their_registration():
    found = list(frameworks.adapters())
    assert found.index(xckpt.numpy) < found.index(tests.support.sharded_arrays)  # type: ignore[arg-type]
    assert isinstance(cut(W, []), Sharded)
