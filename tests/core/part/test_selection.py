"""A part of a checkpoint: patterns of names, renaming, and the containers that are left."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.core.metadata import BytesStorageMetadata, Metadata
from xckpt.core.part.name_search import NameSearch
from xckpt.core.part.selection import (
    NamePattern,
    Selection,
    _search,
    below_name,
    with_containers,
)
from xckpt.core.tree import flatten, unflatten
from xckpt.errors import TreeMismatchError

keys = st.one_of(st.sampled_from("abc"), st.integers(0, 2), st.just("x/y"))
trees = st.recursive(
    st.integers(0, 9),
    lambda inner: st.one_of(
        st.dictionaries(keys, inner, max_size=3),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=2).map(tuple),
    ),
    max_leaves=8,
)


def described(tree: object) -> tuple[Metadata, dict[str, object]]:
    flat = flatten(tree)
    leaves = dict.fromkeys(flat.leaves, BytesStorageMetadata("int"))
    return Metadata(leaves, flat.containers), flat.leaves


@given(trees)
def test_all_is_the_checkpoint_itself(tree: object) -> None:
    metadata, leaves = described({"root": tree})
    assert Selection().of(metadata) == metadata
    everything = Selection.asked("", "**").of(metadata)
    assert unflatten(leaves, everything.containers) == {"root": tree}


@given(trees)
def test_what_is_below_a_name_is_that_subtree(tree: object) -> None:
    metadata, leaves = described({"other": 1, "root": [tree, 5]})
    part = Selection.asked("root/0")
    inside = part.of(metadata)
    below = {inner: leaves[part.outer(inner)] for inner in inside.state_dict_metadata}
    assert unflatten(below, inside.containers) == tree
    assert all(part.below(part.outer(inner)) == inner for inner in below)


@given(trees, st.sampled_from(["*", "**/a", "a/*", "?", "0/**", "x%2Fy"]))
def test_what_is_picked_can_be_built(tree: object, pattern: str) -> None:
    metadata, leaves = described({"a": tree})
    try:
        inside = Selection.asked("", pattern).of(metadata)
    except TreeMismatchError:
        names = [*leaves, *metadata.containers]
        assert not any(NamePattern(pattern).fits(name) for name in names)
        return
    assert set(inside.state_dict_metadata) == set(filter(NamePattern(pattern).fits, leaves))
    unflatten({name: leaves[name] for name in inside.state_dict_metadata}, inside.containers)


@given(st.lists(st.text("ab/*?", min_size=1, max_size=4), min_size=1), st.text("ab/", max_size=6))
def test_a_leaf_is_picked_if_any_pattern_fits(patterns: list[str], name: str) -> None:
    picks = any(NameSearch(pattern).fits(name) for pattern in patterns)
    assert Selection.asked("", patterns).picks(name) == picks
    assert any(NamePattern(pattern).fits(name) for pattern in patterns) == picks


def test_thousands_of_names_are_looked_up_and_not_searched_for() -> None:
    """500 names took 8 seconds, and 2,000 took four minutes."""
    names = [f"model/{n}/w" for n in range(5_000)]
    metadata = Metadata(dict.fromkeys([*names, "step"], BytesStorageMetadata("int")))
    before = _search.cache_info()
    part = Selection.asked("", names).of(metadata)
    assert [*part.state_dict_metadata] == names
    with pytest.raises(
        TreeMismatchError, match=r"^5,000 patterns of select= fit nothing\n"
    ) as raised:
        Selection.asked("", [f"{name}8" for name in names]).of(metadata)
    assert str(raised.value).endswith("  ... and 4980 more") and len(raised.value.problems) == 5_000
    assert _search.cache_info() == before


@given(st.text("ab.*?", min_size=1, max_size=6), st.text("ab.", max_size=6))
def test_within_a_component_a_pattern_is_a_glob(pattern: str, name: str) -> None:
    assert NamePattern(pattern).fits(name) == fnmatch.fnmatchcase(name, pattern)


@pytest.mark.parametrize(
    "pattern, name, fits",
    [
        ("a/*", "a/b", True),
        ("a/*", "a", False),
        ("a/*/c", "a/b/b/c", False),
        ("a/**/c", "a/b/b/c", True),
        ("**/c", "c", True),
        ("**c", "a/bc", True),
        ("a", "a/b/c", True),
        ("a", "ab", False),
        ("a[0]", "a[0]/w", True),
        ("a[0]", "a0", False),
        ("a\nb", "a\nb", True),
    ],
)
def test_patterns(pattern: str, name: str, fits: bool) -> None:
    assert NamePattern(pattern).fits(name) is fits


def test_a_torn_list_is_a_dict() -> None:
    metadata, leaves = described({"l": [1, 2], "t": (3, 4), "e": [], "n": [[], 5]})
    inside = Selection.asked("", ["l/1", "t", "n"]).of(metadata)
    kept = {name: leaves[name] for name in inside.state_dict_metadata}
    assert unflatten(kept, inside.containers) == {"l": {1: 2}, "t": (3, 4), "n": [[], 5]}


@pytest.mark.parametrize(
    "at, select, message",
    [
        ("modle", None, "at='modle': the checkpoint has no such container or leaf; did you mean"),
        ("model", ["w", "vv"], "select='vv': no leaf below model fits"),
        ("", "stepp", "select='stepp': no leaf fits; did you mean step?"),
    ],
)
def test_what_is_not_there_is_refused(at: str, select: list[str] | None, message: str) -> None:
    metadata, _ = described({"model": {"w": 1}, "step": 2})
    with pytest.raises(TreeMismatchError, match=message.replace("?", "[?]")):
        Selection.asked(at, select).of(metadata)


@pytest.mark.parametrize(
    "at, select, error, message",
    [
        (3, None, TypeError, "at= takes the name of a container or leaf, got 3"),
        ("", 3, TypeError, "select= takes patterns of leaf names, got 3"),
        ("", [3], TypeError, "select= takes patterns of leaf names, got 3"),
        ("", [], ValueError, "at least one pattern"),
        ("", "", ValueError, "has an empty pattern"),
    ],
)
def test_arguments_without_sense(
    at: object, select: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Selection.asked(at, select)


def test_names() -> None:
    assert below_name("a", "a/b") == "b" and below_name("a", "ab") is None
    assert list(with_containers(["a/b", "a/c"])) == ["a/b", "a", "", "a/c"]
    with pytest.raises(KeyError):
        Selection.asked("a").below("b")
