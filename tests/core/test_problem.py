"""A problem is its line, and says as values what it is about."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from xckpt.core.geometry.box import Box
from xckpt.core.problem import Problem
from xckpt.engine.ranks.load_plans import LoadPlanCodec
from xckpt.planner import LoadPlan

texts = st.text(max_size=8)
problems = st.builds(
    Problem,
    st.none() | texts,
    st.none() | st.just(Box((1, 2), (3, 4))),
    st.none() | st.integers(0, 9),
    texts,
    texts,
    st.none() | texts,
)


def fields(problem: Problem) -> tuple[object, ...]:
    return (str(problem), problem.leaf, problem.box, problem.rank, problem.kind, problem.text)


@given(problems)
def test_copies_and_pickles_keep_the_fields(problem: Problem) -> None:
    for again in (copy.copy(problem), pickle.loads(pickle.dumps(problem))):
        assert fields(again) == fields(problem)


@given(problems)
def test_the_coordinator_receives_the_fields(problem: Problem) -> None:
    """All but the rank: that is whose plan it is in."""
    codec = LoadPlanCodec()
    (back,) = codec.decode(codec.encode(LoadPlan([], problems=(problem,)))).problems
    assert fields(back.on(7)) == fields(problem.on(7))


@pytest.mark.parametrize(
    "problem, line",
    [
        (Problem("a/b", text="gone"), "a/b: gone"),
        (Problem("", text="gone"), "the root: gone"),
        (Problem("a", rank=1, text="gone"), "a: gone"),
        (Problem(rank=1, kind="OSError", text="full"), "rank 1: OSError: full"),
        (Problem(rank=1, text="full"), "rank 1: full"),
        (Problem("a", text="gone", line="as it was"), "as it was"),
    ],
)
def test_the_line(problem: Problem, line: str) -> None:
    assert problem == str(problem) == line


def save_in_the_background(path: Path, state: object) -> None:
    xckpt.save_async(path, state).result()


@pytest.mark.parametrize("call", [xckpt.save, save_in_the_background])
def test_what_cannot_be_saved_says_its_leaves_as_values(
    call: Callable[[Path, object], object], tmp_path: Path
) -> None:
    state = {"model": {"new\nline": object(), "tags": {1, 2}}, "step": 3}
    with pytest.raises(xckpt.UnsupportedLeafError) as caught:
        call(tmp_path / "ckpt", state)
    found = [Problem.of(line) for line in caught.value.problems]
    assert [(each.leaf, each.kind) for each in found] == [
        ("model/new\nline", "type"),
        ("model/tags", "type"),
    ]
    assert found[1].text.startswith("a builtins.set is neither")


def test_a_key_that_cannot_be_saved_says_its_container_as_a_value(tmp_path: Path) -> None:
    with pytest.raises(xckpt.UnsupportedLeafError) as caught:
        xckpt.save(tmp_path / "ckpt", {"model": {1.5: 0}})
    assert [Problem.of(line).leaf for line in caught.value.problems] == ["model"]


def test_a_target_that_cannot_be_loaded_says_its_leaf_as_a_value(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "ckpt", {"model": {"w": np.zeros(3)}})
    fixed = np.zeros(3)
    fixed.flags.writeable = False
    with pytest.raises(xckpt.UnsupportedLeafError) as caught:
        xckpt.load_into(tmp_path / "ckpt", {"model": {"w": fixed}})
    assert [Problem.of(line).leaf for line in caught.value.problems] == ["model/w"]
