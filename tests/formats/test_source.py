"""User metadata become texts, which other formats carry, and come back as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from tests.support.examples import examples
from xckpt.convert import convert
from xckpt.formats.source import metadata_texts, user_of

SINGLE = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text()
JSON = st.recursive(
    SINGLE, lambda each: st.lists(each) | st.dictionaries(st.text(), each), max_leaves=9
)


@given(JSON | st.dictionaries(st.text() | st.sampled_from(["xckpt.user", "xckpt.v"]), st.text()))
@examples(200)
def test_user_metadata_come_back(user: Any) -> None:
    texts = metadata_texts(user)
    assert all(isinstance(text, str) for text in texts.values())
    assert repr(user_of(texts)) == repr(user)


@pytest.mark.parametrize("to", ["xckpt", "safetensors", "orbax"])
def test_keys_of_xckpt_itself_are_the_users_too(tmp_path: Path, to: str) -> None:
    """They were read as xckpt's own: an error, which for Orbax was one of json."""
    user: Any = {"xckpt.user": "me", "xckpt.values": "[1]"}
    xckpt.save(tmp_path / "saved", {"w": np.zeros(3), "step": 1}, metadata=user)
    made = tmp_path / f"made.{to}" if to == "safetensors" else tmp_path / "made"
    convert(tmp_path / "saved", made, format=to)
    convert(made, tmp_path / "again")
    assert xckpt.open(tmp_path / "again").metadata.user_metadata == user


@pytest.mark.parametrize("between", ["between", "between.safetensors"])
def test_a_conversion_keeps_what_is_empty(tmp_path: Path, between: str) -> None:
    xckpt.save(tmp_path / "saved", {"w": np.zeros(3)}, metadata={})
    convert(tmp_path / "saved", tmp_path / between)
    convert(tmp_path / between, tmp_path / "again")
    assert xckpt.open(tmp_path / "again").metadata.user_metadata == {}
