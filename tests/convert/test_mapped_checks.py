"""Loads by a mapping into targets that share memory: right, or refused before they are written."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import xckpt
from xckpt.convert import Mapping, Rule
from xckpt.errors import UnsupportedLeafError
from xckpt.mapping.operations import Pad, Tie, Transpose

WORDS = np.arange(12, dtype=np.float32).reshape(4, 3)
TURNED = Mapping([Rule("a", "x", [Transpose((1, 0))]), Rule("b", "y", [Transpose((1, 0))])])


def saved(**state: object) -> str:
    path = f"memory://mapped-checks-{uuid.uuid4()}"
    xckpt.save(path, state)
    return path


def refused(path: str | Path, state: Any, mapping: Mapping) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"x and y share memory, .* different elements"):
        xckpt.load_into(path, state, mapping=mapping)
    assert not any(map(np.any, state.values()))


def test_tied_targets_take_equal_elements_only(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    safetensors.numpy.save_file({"a": WORDS, "b": WORDS}, file)
    for place in (saved(a=WORDS, b=WORDS), file):
        tied = np.zeros((3, 4), np.float32)
        xckpt.load_into(place, {"x": tied, "y": tied}, mapping=TURNED)
        assert np.array_equal(tied, WORDS.T)
    safetensors.numpy.save_file({"a": WORDS, "b": WORDS + 1}, file)
    for place in (saved(a=WORDS, b=WORDS + 1), file):
        tied = np.zeros((3, 4), np.float32)
        refused(place, {"x": tied, "y": tied}, TURNED)


def test_other_steps_may_make_equal_elements() -> None:
    """Of one leaf a transpose and a constant; of the other what is stored."""
    rules = [Rule("a", "x", [Transpose((1, 0)), Pad(2, axis=0, value=5)]), Rule("b", "y")]
    padded = np.concatenate([WORDS.T, np.full((2, 4), 5, np.float32)])
    tied = np.zeros((5, 4), np.float32)
    refused(saved(a=WORDS, b=padded * 2), {"x": tied, "y": tied}, Mapping(rules))
    xckpt.load_into(saved(a=WORDS, b=padded), {"x": tied, "y": tied}, mapping=Mapping(rules))
    assert np.array_equal(tied, padded)


def test_views_are_compared_where_they_overlap() -> None:
    rules = Mapping([Rule("a", "x", [Transpose((0, 1))]), Rule("b", "y")])
    memory = np.zeros((6, 3), np.float32)
    refused(saved(a=WORDS, b=WORDS), {"x": memory[:4], "y": memory[2:]}, rules)
    b = np.concatenate([WORDS[2:], WORDS[:2]])
    xckpt.load_into(saved(a=WORDS, b=b), {"x": memory[:4], "y": memory[2:]}, mapping=rules)
    assert np.array_equal(memory, np.concatenate([WORDS, WORDS[:2]]))


def test_names_of_one_tensor_are_equal_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    from xckpt.convert import mapped_checks

    def read(*_: object) -> None:
        raise AssertionError("equal steps need no reading")

    monkeypatch.setattr(mapped_checks.MadeParts, "read_part", read)
    tied = np.zeros((4, 3), np.float32)
    mapping = Mapping([Rule("a", ["x", "y"], [Tie(2)])])
    xckpt.load_into(saved(a=WORDS), {"x": tied, "y": tied}, mapping=mapping)
    assert np.array_equal(tied, WORDS)
