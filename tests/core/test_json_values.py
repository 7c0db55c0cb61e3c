"""What JSON gives back passes, and nothing else does."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.core.json_values import check_json, json_problems, repeated_name
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
        "metadata/a/1: a builtins.set is not a JSON value",
        "metadata/b: the key 3 is an int; JSON keys are strings",
        "metadata/c/1: inf is not a JSON number",
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


objects = st.recursive(
    st.sampled_from(['"x"', "1", "-2.5e300", "9" * 5000, "null", "true"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda parts: f"[{','.join(parts)}]"),
        st.lists(
            st.tuples(st.sampled_from(["a", "b", "c", "", "\\u0061", '\\"a']), inner), max_size=4
        ).map(lambda pairs: "{" + ", ".join(f'"{name}" : {value}' for name, value in pairs) + "}"),
    ),
    max_leaves=12,
)


def repeats(value: object) -> set[str]:
    """The names that come twice in what `json.loads` makes of objects that are lists of pairs."""
    if not isinstance(value, list):
        return set()
    names = [each[0] for each in value if isinstance(each, tuple)]
    inner = [repeats(each[1] if isinstance(each, tuple) else each) for each in value]
    return {name for name in names if names.count(name) > 1}.union(*inner)


@given(objects)
def test_a_repeated_name_is_found(text: str) -> None:
    whole = json.loads(text, object_pairs_hook=list, parse_int=len)
    found = repeated_name(text.encode())
    assert found in repeats(whole) if repeats(whole) else found is None


def test_what_is_no_json_is_named() -> None:
    with pytest.raises(RecursionError):
        repeated_name(b"[" * 100_000 + b"]" * 100_000)
    with pytest.raises(UnicodeDecodeError):
        repeated_name(b'"\xff"')
    with pytest.raises(ValueError, match="delimiter"):
        repeated_name(b"[1")
