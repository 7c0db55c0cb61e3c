"""Orbax's description of a tree, there and back, and as older versions wrote it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from xckpt.formats.orbax.tree import ARRAYS, CONTAINERS, Leaf, encode_tree, parse_tree

KEYS = st.lists(st.one_of(st.text(max_size=5), st.integers(0, 99)), min_size=1, max_size=4)
KINDS = st.sampled_from(sorted({*ARRAYS, *CONTAINERS, "scalar", "string", "None"}))


@given(
    st.lists(st.tuples(KEYS, KINDS), max_size=6, unique_by=lambda leaf: tuple(map(str, leaf[0])))
)
def test_a_tree_there_and_back(leaves: list[tuple[list[str | int], str]]) -> None:
    given_leaves = [Leaf(tuple(keys), kind) for keys, kind in leaves]
    tree = parse_tree(encode_tree(given_leaves, {"by": "me"}))
    assert list(tree.leaves) == given_leaves
    assert (tree.ocdbt, tree.zarr_version, tree.fill_missing) == (False, 3, False)
    assert tree.custom == {"by": "me"}


def test_what_older_versions_do_not_say() -> None:
    document = json.loads(encode_tree([Leaf(("w",), "np.ndarray")]))
    tree = parse_tree(json.dumps({"tree_metadata": document["tree_metadata"]}).encode())
    assert (tree.ocdbt, tree.zarr_version, tree.fill_missing) == (None, 2, True)


@given(st.binary(max_size=60))
def test_any_bytes(text: bytes) -> None:
    with pytest.raises(xckpt.ManifestError):
        parse_tree(text)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["key", "key_type", "key_metadata", "value_metadata", "value_type"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), JSON, max_size=3), JSON)
def test_any_entries(entries: dict[str, object], flag: object) -> None:
    """Leaves or our error."""
    document = {"tree_metadata": entries, "use_ocdbt": flag}
    try:
        tree = parse_tree(json.dumps(document).encode())
    except xckpt.ManifestError:
        return
    assert len(tree.leaves) == len(entries)
