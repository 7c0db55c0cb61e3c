"""Trees of containers and their leaves by name."""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict, UserDict, namedtuple
from enum import Enum
from http import HTTPStatus
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.examples import examples
from xckpt.core import tree as tree_module
from xckpt.core.targets.assign import assign
from xckpt.core.tree import DEEPEST, FlatTree, flatten, rebuild, unflatten
from xckpt.errors import ManifestError, UnsupportedLeafError


class Moments(NamedTuple):
    mu: object
    nu: object


class Empty(NamedTuple):
    pass


keys = st.one_of(st.integers(-5, 99), st.text(max_size=4), st.sampled_from(["0", "a/b", "%", ""]))
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.binary(max_size=3)
)


def containers(children: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.one_of(
        st.dictionaries(keys, children, max_size=4),
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.builds(Moments, children, children),
        st.just(Empty()),
    )


trees = st.recursive(leaves, containers, max_leaves=15)


def same(a: Any, b: Any) -> bool:
    """Equal in structure and type; a namedtuple's class counts by its name and fields."""
    fields = getattr(a, "_fields", None)
    if fields is not None:
        alike = isinstance(b, tuple) and getattr(b, "_fields", 0) == fields
        return alike and type(a).__name__ == type(b).__name__ and same(list(a), list(b))
    if type(a) is not type(b):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        spelled = {(type(key), key): value for key, value in b.items()}
        return {(type(key), key) for key in a} == set(spelled) and all(
            same(value, spelled[type(key), key]) for key, value in a.items()
        )
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@given(trees)
@example({})
@example([])
@example(())
@example(Empty())
@example({"": {"": {}}})
@example({0: 1, "0": 2})
@example({"a": {"b": 1}, "a.b": 2, "a/b": 3})
@example([[], [[]], {}])
@example({"": None})
@example(None)
def test_unflatten_inverts_flatten(tree):
    flat = flatten(tree)
    assert same(unflatten(flat.leaves, flat.containers), tree)


@given(trees)
def test_rebuild_keeps_containers_and_their_classes(tree):
    names: list[str] = []

    def replace(name: str, leaf: object) -> object:
        names.append(name)
        return (name, leaf)

    new = rebuild(tree, replace)
    assert names == list(flatten(tree).leaves)
    assert same(rebuild_back(new, tree), tree)


def rebuild_back(new: Any, old: Any) -> Any:
    """Undo the replacement, walking the old tree beside the new."""
    if isinstance(old, dict):
        return {key: rebuild_back(new[key], child) for key, child in old.items()}
    if isinstance(old, list | tuple):
        assert type(new) is type(old)
        children = [rebuild_back(x, y) for x, y in zip(new, old, strict=True)]
        if isinstance(old, list):
            return children
        return type(old)(*children) if hasattr(old, "_fields") else tuple(children)
    return new[1]


@given(trees)
@examples(50)
def test_assign_gives_the_leaves_and_keeps_dicts_and_lists(tree):
    changed = {name: ("new", name) for name in flatten(tree).leaves}
    kept = {id(node) for node in mutable_containers(tree)}
    result = assign(tree, changed)
    assert {id(node) for node in mutable_containers(result)} == kept
    expected: list[str] = []

    def check(name: str, leaf: object) -> object:
        expected.append(name)
        return leaf

    # Leaves are tuples here, so their own elements are named too.
    rebuild(result, check)
    assert sorted({name.rpartition("/")[0] for name in expected}) == sorted(changed)


def mutable_containers(tree: object) -> list[object]:
    if not isinstance(tree, dict | list | tuple):
        return []
    children = tree.values() if isinstance(tree, dict) else tree
    below = [node for child in children for node in mutable_containers(child)]
    return below if isinstance(tree, tuple) else [tree, *below]


def test_assign_leaves_untouched_what_does_not_change():
    inner = (1, [2])
    tree = {"a": inner, "b": 3}
    assert assign(tree, {"a/0": 1, "a/1/0": inner[1][0], "b": 4}) is tree
    assert tree == {"a": (1, [2]), "b": 4} and tree["a"] is inner
    assert assign(5, {"": 6}) == 6
    assert assign((1, 2), {"0": 1, "1": 3}) == (1, 3)


def test_keys_come_in_their_order_and_those_of_empty_containers_last() -> None:
    flat = flatten({"z": 1, "none": {}, "b": {"y": [], "x": 2}, "a": 3})
    loaded: Any = unflatten(flat.leaves, flat.containers)
    assert (list(loaded), list(loaded["b"])) == (["z", "b", "a", "none"], ["x", "y"])


def test_ordered_dicts_stay_ordered():
    tree = OrderedDict(b=1, a=2)
    new = rebuild(tree, lambda name, leaf: leaf)
    assert type(new) is OrderedDict and list(new) == ["b", "a"]


class Split(str, Enum):  # noqa: UP042  # a StrEnum has one text
    """Keys with one text for programs and another for people, as many packages have them."""

    TRAIN = "train"


class Layer(int):
    def __repr__(self) -> str:
        return "the layer"


@pytest.mark.parametrize(
    ("key", "value"),
    [(Split.TRAIN, "train"), (np.str_("w"), "w"), (Layer(3), 3), (HTTPStatus.OK, 200)],
)
def test_a_key_of_another_class_is_named_by_its_value(key: Any, value: str | int) -> None:
    tree = {key: 1, "x": [{key: 2}]}
    plain: Any = {value: 1, "x": [{value: 2}]}
    flat = flatten(tree)
    assert flat == flatten(plain) and {type(name) for name in flat.leaves} == {str}
    assert unflatten(flat.leaves, flat.containers) == plain
    rebuilt: Any = rebuild(tree, lambda name, leaf: leaf)
    assert list(rebuilt) == list(tree)


class Named(UserDict):
    """A mapping of its own class, with an attribute."""

    def __init__(self, name: str, **items: object) -> None:
        super().__init__(**items)
        self.name = name


def test_dicts_stay_of_their_class():
    tree = {"named": Named("n", x=1), "counter": Counter("aab")}
    new: Any = rebuild(tree, lambda name, leaf: -leaf)  # type: ignore[operator]
    assert type(new["named"]) is Named and new["named"].name == "n"
    assert new["named"] == {"x": -1} and tree["named"] == {"x": 1}
    assert type(new["counter"]) is Counter and new["counter"] == {"a": -2, "b": -1}


def test_finished_parts_are_not_looked_at():
    tree = {"a": {"b": object(), "c": 1}, "d": 2}
    new = rebuild(tree, lambda name, leaf: name, at=("top",), finished={"top/a/b": [3]})
    assert new == {"a": {"b": [3], "c": "top/a/c"}, "d": "top/d"}
    kept = tree["a"]
    assert assign(tree, {"d": 5}, keep={"a"}) is tree
    assert tree["a"] is kept and tree["d"] == 5


def test_kinds_are_those_of_the_format():
    flat = flatten({"m": Moments(1, []), "t": (), "d": {}, "full": {"x": 1}})
    assert flat == FlatTree(
        {"m/mu": 1, "full/x": 1},
        {"m": "namedtuple:Moments:mu,nu", "m/nu": "list", "t": "tuple", "d": "dict"},
    )


def test_every_bad_key_is_listed():
    tree = {
        "a": {1.5: 0, True: 0},
        None: 1,
        ("x",): 2,
        "fine": 3,
        "\ud800": 4,
        10**30: 5,
    }
    with pytest.raises(UnsupportedLeafError) as caught:
        flatten(tree)
    texts = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 6
    for part in ("a: dict key 1.5 is a float", "a: dict key True", "the root: dict key None",
                 "('x',)", r"'\ud800'", "1000000000"):  # fmt: skip
        assert part in texts


def test_a_tree_that_contains_itself_is_refused():
    for tree in ({}, []):
        if isinstance(tree, dict):
            tree["again"] = tree
        else:
            tree.extend([1, tree, tree])  # twice: walking it to any depth would take for ever
        with pytest.raises(UnsupportedLeafError, match="itself") as caught:
            flatten({"state": tree})
        assert caught.value.problems[0].startswith("state/")


def test_a_container_that_stands_twice_is_no_cycle():
    shared = [1, 2]
    flat = flatten({"a": shared, "b": shared})
    assert list(flat.leaves) == ["a/0", "a/1", "b/0", "b/1"]


def test_the_deepest_tree_and_one_deeper():
    tree: object = 1
    for _ in range(DEEPEST):
        tree = [tree]
    flat = flatten(tree)
    assert same(unflatten(flat.leaves, flat.containers), tree)
    with pytest.raises(UnsupportedLeafError, match="deep"):
        flatten([tree])


def test_namedtuples_of_two_trees_are_of_one_class():
    one, other = (unflatten({"m/mu": n}, {"m": "namedtuple:M:mu"}) for n in (1, 2))
    assert isinstance(one, dict) and isinstance(other, dict)
    assert type(one["m"]) is type(other["m"])


def test_namedtuples_of_two_threads_are_of_one_class(monkeypatch: pytest.MonkeyPatch):
    """The other thread makes the class while this one does, and many others after that."""
    made: list[Any] = []
    make: Any = tree_module.namedtuple

    def of(kind: str) -> Any:
        return unflatten({"mu": 1}, {"": f"namedtuple:{kind}:mu"})

    def namedtuple(*given: Any, **how: Any) -> Any:
        monkeypatch.undo()
        made.append(of("Threads"))
        return make(*given, **how)

    monkeypatch.setattr(tree_module, "namedtuple", namedtuple)
    made.append(of("Threads"))
    assert type(made[0]) is type(made[1])
    for number in range(2 * tree_module.MOST_CLASSES):
        of(f"Other{number}")
    assert len(tree_module._CLASSES) <= tree_module.MOST_CLASSES


@pytest.mark.parametrize(
    "names, kinds",
    [
        (["a", "a/b"], {}),
        (["a/b", "a"], {}),
        (["a/b/c", "a/b"], {}),
        (["a"], {"a": "list"}),
        (["a"], {"a/b": "tuple"}),
        (["", "a"], {}),
        (["a/1"], {"a": "list"}),
        (["a/0", "a/2"], {"a": "tuple"}),
        (["a/0", "a/x"], {"a": "list"}),
        (["a/%30"], {"a": "list"}),
        (["a/x"], {"a": "namedtuple:T:x,y"}),
        (["a/x"], {"a": "namedtuple:T:y"}),
        (["a/x"], {"a": "namedtuple:class:x"}),
        (["a/x"], {"a": "namedtuple:T(object):x"}),
        (["a/class"], {"a": "namedtuple:T:class"}),
        (["a/x"], {"a": "namedtuple"}),
        ([], {"": "namedtuple:T:x"}),
        (["a/x"], {"a": "namedtuple:T:x,x"}),
    ],
)
def test_contradictions_are_refused(names, kinds):
    with pytest.raises(ManifestError):
        unflatten(dict.fromkeys(names), kinds)


@given(
    st.lists(st.text(alphabet="a01/%", max_size=5), max_size=4),
    st.dictionaries(
        st.text(alphabet="a01/%", max_size=5),
        st.sampled_from(
            ["list", "tuple", "dict", "namedtuple:T:a", "namedtuple::", "pytree:m.C", "x", ""]
        ),
        max_size=3,
    ),
)
def test_any_names_make_a_tree_or_are_refused(names, kinds):
    with contextlib.suppress(ManifestError):
        unflatten(dict.fromkeys(names), kinds)


def test_namedtuples_with_made_up_fields_come_back():
    made = namedtuple("made", ["class", "x"], rename=True)(1, 2)
    flat = flatten(made)
    assert unflatten(flat.leaves, flat.containers) == made
