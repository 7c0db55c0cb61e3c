"""Each question goes to the adapter whose leaf it is about."""

from __future__ import annotations

import numpy as np
import pytest

import xckpt.numpy
from conformance.implementations import sharded_arrays
from tests.support.sharded_arrays import Target, Wanted, cut
from tests.support.steps import steps
from xckpt.core.adapter import NO_ADAPTERS, Adapter, Adapters, Children
from xckpt.core.geometry.box import Boxes
from xckpt.core.leaf import HostSource, LazySource, SourceLeaf, TargetLeaf
from xckpt.errors import UnsupportedLeafError

W = np.arange(6.0).reshape(2, 3)
WHOLE = Boxes.whole((2, 3))
ADAPTERS = Adapters((xckpt.numpy.ADAPTER, sharded_arrays.ADAPTER))


class Pair:
    def __init__(self, a: object, b: object) -> None:
        self.a, self.b = a, b


class Machine:
    """An object that an adapter knows, but that cannot be a leaf."""


class PairAdapter(Adapter[object]):
    def children(self, node: object) -> Children | None:
        return ("pytree:Pair", [("a", node.a), ("b", node.b)]) if isinstance(node, Pair) else None

    def rebuild(self, node: object, children: list[object]) -> object | None:
        return Pair(*children) if isinstance(node, Pair) else None

    def refuse(self, leaf: object, name: str) -> None:
        if isinstance(leaf, Machine):
            raise UnsupportedLeafError(f"{name}: a machine")


def test_the_first_adapter_that_knows_a_leaf_owns_it():
    source = ADAPTERS.describe(W, "w")
    assert isinstance(source, SourceLeaf) and isinstance(source, HostSource)
    assert source.data(0) is W
    sharded = cut(W, [((0, 0), (1, 3))])
    assert ADAPTERS.describe(sharded, "w") is sharded and isinstance(sharded, SourceLeaf)
    assert ADAPTERS.describe(object(), "w") is None
    claims_all = type("All", (Adapter,), {"leaves": (object,), "describe": lambda *_: sharded})()
    assert Adapters((claims_all, *ADAPTERS.known)).describe(W, "w") is sharded
    assert Adapters((*ADAPTERS.known, claims_all)).owner(W) is xckpt.numpy.ADAPTER


def test_the_first_adapter_that_knows_a_target_owns_it():
    target = ADAPTERS.target_for(W, "w", in_place=False)
    assert isinstance(target, TargetLeaf) and isinstance(target, xckpt.numpy.ArrayTarget)
    wanted = ADAPTERS.target_for(Wanted((2, 3), "float64", WHOLE), "w", in_place=False)
    assert isinstance(wanted, Target) and isinstance(wanted, TargetLeaf)
    assert ADAPTERS.target_for({}, "w", in_place=True) is None


@pytest.mark.parametrize(
    "source",
    [HostSource((2, 3), "float64", WHOLE, (W,)), LazySource((2, 3), "float64", WHOLE, lambda _: W)],
)
def test_a_source_of_the_core_needs_no_adapter(source: SourceLeaf):
    assert NO_ADAPTERS.is_leaf(source)
    assert NO_ADAPTERS.describe(source, "w") is source
    copyable = NO_ADAPTERS.copyable(source, "w")
    assert copyable is not None and not copyable.parts and copyable.rebuild([]) is source


def test_data_of_an_unknown_type_is_a_type_error():
    assert ADAPTERS.to_numpy(W, "w") is W and ADAPTERS.writable_numpy(W) is W
    assert ADAPTERS.writable_numpy("text") is None
    with pytest.raises(TypeError, match=r"no adapter can read a builtins\.str"):
        ADAPTERS.to_numpy("text", "t")
    with pytest.raises(TypeError, match=r"no adapter can write a builtins\.str"):
        ADAPTERS.copy_into("text", W)


def test_an_adapter_can_do_nothing_by_default():
    thing, adapters = Pair(1, 2), Adapters((type("One", (Adapter,), {"leaves": (Pair,)})(),))
    with pytest.raises(UnsupportedLeafError, match=r"^w: a tests.*Pair cannot be saved"):
        adapters.describe(thing, "w")
    with pytest.raises(UnsupportedLeafError, match=r"^w: a tests.*Pair cannot be saved"):
        adapters.copyable(thing, "w")
    with pytest.raises(UnsupportedLeafError, match=r"^w: a tests.*Pair cannot be loaded"):
        adapters.target_for(thing, "w", in_place=False)
    with pytest.raises(TypeError, match=r"no adapter can read a tests.*Pair"):
        adapters.to_numpy(thing, "w")
    with pytest.raises(TypeError, match=r"no adapter can write a tests.*Pair"):
        adapters.copy_into(thing, W)
    assert adapters.writable_numpy(thing) is adapters.pinned_memory(8) is None
    assert adapters.open_object(thing, "w") is adapters.open_container(thing) is None


def test_a_copy_is_made_of_the_description_by_default():
    sharded = cut(W, [((0, 0), (1, 3)), ((1, 0), (1, 3))])
    copyable = ADAPTERS.copyable(sharded, "w")
    assert copyable is not None and len(copyable.parts) == 2
    copy = copyable.rebuild([np.array(part) for part in copyable.parts])  # type: ignore[arg-type]
    assert isinstance(copy, HostSource) and copy.boxes == sharded.boxes and copy.sharded
    assert np.array_equal(np.concatenate(copy.shards), W)


def test_a_registered_container_is_opened_by_its_framework():
    adapters = Adapters((*ADAPTERS.known, PairAdapter()))
    assert ADAPTERS.open_container(Pair(1, 2)) is None
    assert adapters.open_container(Pair(1, 2)) == ("pytree:Pair", [("a", 1), ("b", 2)])
    again = adapters.rebuild(Pair(1, 2), [3, 4])
    assert isinstance(again, Pair) and (again.a, again.b) == (3, 4)
    assert ADAPTERS.rebuild(Pair(1, 2), [3, 4]) is None


def test_what_no_adapter_owns_may_be_refused_with_a_reason():
    adapters = Adapters((PairAdapter(), *ADAPTERS.known))
    for ask in (
        lambda: adapters.describe(Machine(), "m"),
        lambda: adapters.copyable(Machine(), "m"),
        lambda: adapters.target_for(Machine(), "m", in_place=True),
    ):
        with pytest.raises(UnsupportedLeafError, match="m: a machine"):
            ask()
    assert ADAPTERS.describe(Machine(), "m") is None


class Thing:
    """A leaf of `Counting`."""


class Counting(Adapter[Thing]):
    leaves = (Thing,)
    by_class = True

    def __init__(self) -> None:
        self.asked = 0

    def owns(self, leaf: object) -> bool:
        self.asked += 1
        return isinstance(leaf, self.leaves)


class Choosing(Adapter[Thing]):
    """Owns some instances of a class."""

    def owns(self, leaf: object) -> bool:
        return hasattr(leaf, "chosen")


def test_the_owner_of_a_class_is_asked_about_one_instance():
    counting = Counting()
    adapters = Adapters((counting,))
    assert all(adapters.owner(Thing()) is counting for _ in range(9))
    assert counting.asked == 1


class Named(type):
    """The class of classes that have some instances of others."""

    def __instancecheck__(cls, instance: object) -> bool:
        return hasattr(instance, "chosen")


class ByName(metaclass=Named):
    """A leaf of any class, with a mark."""


def test_an_adapter_that_names_classes_is_not_asked_about_each_instance() -> None:
    adapter = Adapter[Thing]()
    adapter.leaves = (Thing,)
    source = HostSource((2, 3), "float64", WHOLE, (W,))
    adapters = Adapters((adapter,))
    for leaf in (Thing(), source):
        assert adapters.owner(leaf) is adapters.owner(leaf)
        assert steps(lambda leaf=leaf: adapters.owner(leaf)) == steps(lambda: None) + 1


def test_a_class_that_has_instances_of_others_is_asked_about_each() -> None:
    adapter = Adapter[ByName]()
    adapter.leaves = (ByName,)
    chosen, adapters = Thing(), Adapters((adapter,))
    vars(chosen)["chosen"] = True
    assert adapters.owner(chosen) is adapter
    assert adapters.owner(Thing()) is None


def test_an_adapter_of_some_instances_is_asked_about_each():
    chosen, counting, choosing = Thing(), Counting(), Choosing()
    vars(chosen)["chosen"] = True
    adapters = Adapters((choosing, counting))
    for _ in range(2):
        assert adapters.owner(Thing()) is counting and adapters.owner(chosen) is choosing
