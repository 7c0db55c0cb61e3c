"""What JSON gives back passes, and nothing else does."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.core.json_values import check_json, json_problems
from xckpt.errors import ManifestError

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(max_size=3),
    st.characters(categories=["Cs"]),
)
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.text(), st.integers()), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(trees)
def test_what_passes_comes_back_and_what_does_not_pass_does_not(value: object) -> None:
    try:
        data = msgspec.json.encode(value)
        back = [msgspec.json.decode(data), json.loads(data)]
        comes_back = all(repr(one) == repr(value) for one in back)
    except (TypeError, UnicodeEncodeError):
        comes_back = False
    assert (list(json_problems(value, "metadata")) == []) is comes_back


def test_every_problem_is_listed_with_its_place() -> None:
    with pytest.raises(ManifestError) as caught:
        check_json({"a": [1, {2}], "b": {3: 4}, "c": (1.5, float("inf"))}, "metadata")
    assert caught.value.problems == (
        "metadata/a/1: a builtins.set is no JSON value",
        "metadata/b: the key 3 is a int; JSON keys are strings",
        "metadata/c/1: inf is no JSON number",
    )


def test_depth_is_bounded() -> None:
    deep: object = 1
    for _ in range(64):
        deep = [deep]
    check_json(deep, "metadata")
    with pytest.raises(ManifestError, match="64 containers deep"):
        check_json([deep], "metadata")


def test_what_contains_itself_is_refused_at_once() -> None:
    endless: list[object] = [1]
    endless.extend([endless, endless])  # twice: looking to any depth would take for ever
    with pytest.raises(ManifestError) as caught:
        check_json({"a": endless}, "metadata")
    assert caught.value.problems == (
        "metadata/a/1: contains itself",
        "metadata/a/2: contains itself",
    )
