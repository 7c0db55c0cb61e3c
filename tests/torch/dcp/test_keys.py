"""fqns and leaf names, and what planners attach, as pure functions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.core.tree import flatten, unflatten
from xckpt.errors import ManifestError, PlanError, TreeMismatchError
from xckpt.formats.dcp.keys import join_fqn, name_leaves, stored_objects
from xckpt.torch.dcp.planner_data import pack, restore, unpack

KEYS = st.text("abc", min_size=1, max_size=2)
TREES = st.dictionaries(
    KEYS,
    st.recursive(
        st.just("leaf"),
        lambda children: (
            st.dictionaries(KEYS, children, min_size=1, max_size=3)
            | st.lists(children, min_size=1, max_size=3)
        ),
        max_leaves=8,
    ),
    min_size=1,
    max_size=3,
)


def dcp_paths(tree: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The key paths of all leaves, as DCP writes them where every leaf is a tensor."""
    if isinstance(tree, dict):
        return [p for key, child in tree.items() for p in dcp_paths(child, (*path, str(key)))]
    if isinstance(tree, list):
        return [p for index, child in enumerate(tree) for p in dcp_paths(child, (*path, index))]
    return [path]


@given(TREES)
def test_the_tree_comes_back_from_the_fqns(tree: dict[str, Any]):
    paths = dcp_paths(tree)
    leaves = name_leaves(map(join_fqn, paths), [{join_fqn(path): path for path in paths}])
    assert unflatten(dict.fromkeys(leaves.names.values(), "leaf"), leaves.containers) == tree
    assert list(leaves.paths.values()) == paths
    assert leaves.odd == {}


@given(TREES)
def test_the_fqns_come_back_from_the_tree(tree: dict[str, Any]):
    flat = flatten(tree)
    found = stored_objects(flat.leaves, flat.containers, lambda name: True, {})
    assert {fqn: stored.path for fqn, stored in found.items()} == {
        join_fqn(path): path for path in dcp_paths(tree)
    }


def test_a_list_with_gaps_is_a_dict_of_ints():
    """A pipeline stage may have only some entries of a list."""
    paths = {"l.0": ("l", 0), "l.2": ("l", 2)}
    leaves = name_leaves(paths, [paths])
    assert leaves.names == {"l.0": "l/0", "l.2": "l/2"} and leaves.containers == {}


def test_what_ranks_hold_of_a_list_is_joined():
    mappings = [{"l.0": ("l", 0)}, {"l.1": ("l", 1)}]
    assert name_leaves(["l.1", "l.0"], mappings).containers == {"l": "list"}


def test_an_fqn_that_does_not_follow_from_its_path_is_kept():
    leaves = name_leaves(["x"], [{"x": ("a", "b")}])
    assert leaves.odd == {"a/b": "x"}
    found = stored_objects(["a/b"], {}, lambda name: True, leaves.odd)
    assert found["x"].path == ("a", "b")


@pytest.mark.parametrize(
    "mapping, complaint",
    [
        ({"x": ("a",), "y": ("a",)}, "both 'x' and 'y' lead there"),
        ({"x": ("a",), "y": ("a", "b")}, "a leaf and a container have this name"),
    ],
)
def test_keys_that_make_no_tree(mapping: Any, complaint: str):
    with pytest.raises(PlanError, match=complaint):
        name_leaves(mapping, [mapping])


def test_leaves_that_dots_make_one():
    with pytest.raises(TreeMismatchError, match=r"a\.b: both a/b and a\.b"):
        stored_objects(["a/b", "a.b"], {}, lambda name: True, {})
    with pytest.raises(TreeMismatchError, match=r"a\.0: both a/0 and a/%30"):
        stored_objects(["a/0", "a/%30"], {}, lambda name: True, {})


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda children: (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 3), children, max_size=3)
    ),
    max_leaves=8,
)


@given(PLAIN)
def test_plain_planner_data_comes_back(data: Any):
    implied = {"a.b": ("a", "b")}
    given = {**implied, **data} if isinstance(data, dict) else data
    kept, odd = unpack(pack(given, implied, {}))
    assert odd == {}
    expected = {**implied, **data} if isinstance(data, dict) else data
    assert restore(kept, implied) == (implied if data is None else expected)


def test_planner_data_too_deep():
    deep: Any = []
    for _ in range(50):
        deep = [deep]
    with pytest.raises(PlanError, match="more than 32 containers deep"):
        pack(deep, {}, {})


@pytest.mark.parametrize("data", [{"tuple": 3}, {"dict": [[1]]}, {"dict": [[[], 1]]}, {"x": 1}])
def test_planner_data_that_was_not_packed(data: Any):
    with pytest.raises(ManifestError, match="planner data"):
        unpack({"dcp": {"data": data}})
