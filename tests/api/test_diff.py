"""`xckpt.diff`: structure, types, and contents by digests or by reading."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from tests.support.examples import examples
from xckpt import Difference, SaveOptions

PLACES = count()
STATE: Mapping[str, object] = {
    "model": {"w": np.arange(64.0).reshape(8, 8), "layers": [1, float("nan")]},
    "step": 7,
    "scalar": np.float32(1) * np.ones((), np.float32),
    "none": np.zeros((0, 3)),
}


def saved(state: object, chunk_bytes: int = 128, **options: object) -> str:
    path = f"memory://differing/{next(PLACES)}"
    xckpt.save(path, state, options=SaveOptions(chunk_bytes=chunk_bytes), **options)  # type: ignore[arg-type]
    return path


def found(first: object, second: object, *, values: bool = False) -> list[str]:
    differing = xckpt.diff(saved(first), saved(second), values=values)
    return [str(each) for each in differing]


@pytest.mark.parametrize("chunk_bytes", [128, 256])
def test_equal_states_have_no_differences(chunk_bytes: int) -> None:
    assert xckpt.diff(saved(STATE), saved(STATE, chunk_bytes), values=True) == []


def test_structure_and_types() -> None:
    second = {
        "model": {"w": np.zeros((8, 4), np.float32), "layers": (1, 2.0)},
        "step": "7",
        "scalar": 1.0,
        "new": np.zeros(3, np.int8),
    }
    assert found(STATE, second) == [
        "model/w: dtype float64 in the first, float32 in the second",
        "model/w: shape [8, 8] in the first, [8, 4] in the second",
        "step: type int in the first, str in the second",
        "scalar: type tensor in the first, float in the second",
        "none: only in the first (float64 [0, 3])",
        "new: only in the second (int8 [3])",
        "model/layers: container list in the first, tuple in the second",
    ]


def test_empty_containers_and_roots() -> None:
    assert found({"a": {}, "b": 1}, {"b": 1}) == ["a: only in the first (dict)"]
    assert found({"b": 1}, {"a": (), "b": 1}) == ["a: only in the second (tuple)"]
    assert found({"a": {}}, {"a": {"x": 1}}) == ["a/x: only in the second (int)"]
    assert found({"a": []}, {"a": {"x": 1}}) == [
        "a/x: only in the second (int)",
        "a: container list in the first, dict in the second",
    ]
    assert found(1, 1.5) == ["the root: type int in the first, float in the second"]


def test_contents_only_on_request() -> None:
    other = {**STATE, "step": 8, "scalar": np.zeros((), np.float32)}
    assert found(STATE, other) == []
    assert found(STATE, other, values=True) == [
        "step: 7 in the first, 8 in the second",
        "scalar: other elements in its one element",
    ]
    first, second = saved(STATE, metadata={"run": 1}), saved(STATE, metadata={"run": 2})
    assert xckpt.diff(first, second) == []
    assert xckpt.diff(first, second, values=True) == [
        Difference("", "metadata", "{'run': 1}", "{'run': 2}")
    ]


@examples(25)
@given(
    at=st.sets(st.integers(0, 63), max_size=3),
    grids=st.tuples(st.sampled_from([64, 128, 512]), st.sampled_from([64, 128, 512])),
)
def test_elements_that_differ_are_found(at: set[int], grids: tuple[int, int]) -> None:
    w = np.arange(64.0).reshape(8, 8)
    other = w.copy()
    other.reshape(-1)[list(at)] += 0.5
    paths = [saved({"w": each}, grid) for each, grid in zip((w, other), grids, strict=True)]
    differing = xckpt.diff(*paths, values=True)
    assert [(each.name, each.kind) for each in differing] == ([("w", "content")] if at else [])
    if at and grids[0] != grids[1]:
        assert differing[0].first == f"from [{min(at) // 8}, {min(at) % 8}] on" or len(at) > 1


def test_digests_tell_without_reading(tmp_path: Path) -> None:
    other = np.arange(64.0).reshape(8, 8)
    other[5, 3] = -1
    for name, w in (("a", np.arange(64.0).reshape(8, 8)), ("b", other)):
        xckpt.save(tmp_path / name, {"w": w}, options=SaveOptions(chunk_bytes=128))
        for chunk in (tmp_path / name / "w" / "c").rglob("*"):
            if chunk.is_file():
                chunk.unlink()
    assert [str(each) for each in xckpt.diff(tmp_path / "a", tmp_path / "b", values=True)] == [
        "w: other elements in 1 of 4 chunks, first in [4, 6) x [0, 8)"
    ]


def test_zeros_and_nans_are_compared_as_bytes() -> None:
    assert found({"w": np.array([0.0])}, {"w": np.array([-0.0])}, values=True)
    assert not found({"w": np.array([np.nan])}, {"w": np.array([np.nan])}, values=True)
