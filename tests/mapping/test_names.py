"""Mapping names: each leaf has one, and two names that mean one leaf are found."""

from __future__ import annotations

from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from xckpt.convert import Mapping, Rule, convert
from xckpt.mapping.names import keys_of, mapping_name, of_one_leaf

KEYS = st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=3)


@given(KEYS)
def test_a_name_means_its_keys(keys: list[str]) -> None:
    assert keys_of(mapping_name(keys)) == tuple(keys)


@given(st.lists(KEYS, min_size=1, max_size=5, unique_by=tuple), st.data())
def test_names_of_one_leaf_are_found(leaves: list[list[str]], data: st.DataObject) -> None:
    names = [mapping_name(keys) for keys in leaves]
    assert of_one_leaf(names) == []
    again = data.draw(st.sampled_from(leaves))
    other = "/".join("".join(f"%{byte:02X}" for byte in key.encode()) for key in again)
    found = of_one_leaf([*names, other])
    assert found == ([] if other in names else [(mapping_name(again), other)])


@pytest.mark.parametrize("leaf, again", [("A", "%41"), ("重み", quote("重み")), ("a.b", "a%2Eb")])
def test_two_rules_make_one_leaf(leaf: str, again: str) -> None:
    """A load gave what the second rule makes, and a conversion ended by a KeyError."""
    xckpt.save("memory://two-of-one-leaf", {"x": np.ones(3), "y": np.zeros(3)}, overwrite=True)
    mapping = Mapping([Rule("x", leaf), Rule("y", again)])
    with pytest.raises(xckpt.MappingError, match=r"are one leaf, which rule x -> .* and rule y ->"):
        convert("memory://two-of-one-leaf", "memory://made-of-it", mapping=mapping)
    with pytest.raises(xckpt.MappingError, match="are one leaf"):
        xckpt.load("memory://two-of-one-leaf", {leaf: np.ones(3)}, mapping=mapping)
