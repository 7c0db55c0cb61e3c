"""Patterns: anchored, typed, affine; a name is matched in one way or refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.errors import MappingError
from xckpt.mapping.pattern import Affine, Pattern, skeleton


@pytest.mark.parametrize(
    "pattern, name, values",
    [
        ("a.{i}.b", "a.0.b", {"i": 0}),
        ("a.{i}.b", "a.12.b", {"i": 12}),
        ("a.{i}.b", "a.012.b", None),
        ("a.{i}.b", "a.-1.b", None),
        ("a.{i}.b", "xa.1.b", None),
        ("a.{i}.b", "a.1.bx", None),
        ("a.{i}.b", "axb", None),
        ("a.{i+1}", "a.3", {"i": 2}),
        ("a.{i+1}", "a.0", None),
        ("a.{6*i+5}", "a.11", {"i": 1}),
        ("a.{i*6 + 5}", "a.11", {"i": 1}),
        ("a.{6*i+5}", "a.12", None),
        ("a.{i}.{i}", "a.3.3", {"i": 3}),
        ("a.{i}.{i}", "a.3.4", None),
        ("a.{i}.{i+1}", "a.3.4", {"i": 3}),
        ("{rest...}", "a/b.c", {"rest": "a/b.c"}),
        ("x.{rest...}", "x.", None),
        ("{a...}.w.{a...}", "q.w.q", {"a": "q"}),
        ("{a...}.w.{a...}", "q.w.r", None),
        ("{{a}}.{i}", "{a}.4", {"i": 4}),
        ("a+b", "a+b", {}),
    ],
)
def test_a_pattern_matches_whole_names(
    pattern: str, name: str, values: dict[str, int | str] | None
) -> None:
    assert Pattern.parse(pattern).match(name, {}) == values


def test_an_index_keeps_to_its_range() -> None:
    pattern = Pattern.parse("a.{i}")
    assert pattern.match("a.4", {"i": range(2, 6, 2)}) == {"i": 4}
    assert pattern.match("a.3", {"i": range(2, 6, 2)}) is None
    assert pattern.match("a.6", {"i": range(2, 6, 2)}) is None


def test_sums_of_indices_are_solved_by_their_ranges() -> None:
    pattern = Pattern.parse("layers.{6*block+local}")
    ranges = {"local": range(5)}
    assert pattern.match("layers.16", ranges) == {"block": 2, "local": 4}
    assert pattern.match("layers.17", ranges) is None
    both = Pattern.parse("x{a+b}.{a+2*b}")
    assert both.match("x5.7", {"a": range(9), "b": range(9)}) == {"a": 3, "b": 2}


@pytest.mark.parametrize(
    "pattern, name, ranges, words",
    [
        ("a.{i+j}", "a.3", {"i": range(4), "j": range(4)}, "'a.3' for .* and for"),
        ("a.{i+j}", "a.3", {}, "state its range"),
        ("{a...}.{b...}", "x.y.z", {}, "in several ways"),
        ("{a...}{b...}", "xyz", {}, "in several ways"),
        # Digits without a separator: which belong to which index would be a guess.
        ("{i}{j}", "123", {}, "in several ways"),
    ],
)
def test_a_name_matched_in_several_ways_is_refused(
    pattern: str, name: str, ranges: dict[str, range], words: str
) -> None:
    with pytest.raises(MappingError, match=words):
        Pattern.parse(pattern).match(name, ranges)


@pytest.mark.parametrize(
    "text, words",
    [
        ("a.{i", "does not close"),
        ("a.i}", "does not close"),
        ("a.{}", "an index is a name"),
        ("a.{i-1}", "an index is a name"),
        ("a.{3}", "no index in it"),
        ("a.{0*i}", "no index in it"),
        ("a.{i}.{i...}", "both a number and a text"),
        ("a.{i..}", "an index is a name"),
    ],
)
def test_a_pattern_that_cannot_be_is_refused(text: str, words: str) -> None:
    with pytest.raises(MappingError, match=words):
        Pattern.parse(text)


affine = st.builds(
    Affine,
    st.lists(
        st.tuples(st.sampled_from(["i", "j", "k"]), st.integers(1, 9)),
        min_size=1,
        max_size=3,
        unique_by=lambda pair: pair[0],
    ).map(tuple),
    st.integers(0, 9),
)


@given(affine)
def test_what_an_affine_index_prints_is_parsed_back(index: Affine) -> None:
    assert Affine.parse(str(index)) == index


@given(
    st.lists(
        st.sampled_from(["a.", "layer_1.", "{i}.", "{2*i+1}/", "{j}.", "{t...}/x."]), min_size=1
    ),
    st.integers(0, 120),
    st.integers(0, 120),
)
def test_the_name_for_some_values_gives_them_back(parts: list[str], i: int, j: int) -> None:
    pattern = Pattern.parse("".join(parts))
    values = {"i": i, "j": j, "t": "deep.text"}
    name = pattern.name(values)
    found = pattern.match(name, {})
    assert found == {index: values[index] for index in pattern.indices}
    if pattern.skeleton is not None:
        text, runs = pattern.skeleton
        shown, digits = skeleton(name)
        assert text == shown
        assert all(run in (None, given) for run, given in zip(runs, digits, strict=True))
