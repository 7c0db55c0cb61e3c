"""Tied leaves that the checkpoint has under one name: filled right, or missing by name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import xckpt
from tests.support.examples import examples
from xckpt.errors import TreeMismatchError

Array = NDArray[np.int64]
PLACE = "memory://tied"

VIEWS = [
    lambda memory: memory,
    lambda memory: memory[:],
    lambda memory: memory.T,
    lambda memory: memory[::-1],
    lambda memory: memory[:1],
    lambda memory: memory.view(np.uint64),
]
names = st.builds("{}/{}".format, st.sampled_from("ab"), st.sampled_from("wxyz"))
leaves = st.dictionaries(names, st.tuples(st.integers(0, 1), st.integers(0, 5)), min_size=1)


@given(leaves=leaves, data=st.data())
@examples(60, 1500)
def test_a_load_fills_each_leaf_or_names_it(
    leaves: dict[str, tuple[int, int]], data: st.DataObject
) -> None:
    """A leaf that is missing has to be all of a stored one's memory, in the same dict."""
    memories = np.zeros((2, 3, 3), np.int64)
    state: dict[str, dict[str, Array]] = {"a": {}, "b": {}}
    for name, (memory, view) in leaves.items():
        state[name[0]][name[2]] = VIEWS[view](memories[memory])
    kept = data.draw(st.sets(st.sampled_from(sorted(leaves)), min_size=1))
    stored: dict[str, dict[str, Array]] = {"a": {}, "b": {}}
    for name in kept:  # equal numbers, so that any two of one memory may be filled
        leaf = state[name[0]][name[2]]
        stored[name[0]][name[2]] = np.full_like(leaf, 1 + leaves[name][0])
    xckpt.save(PLACE, stored, overwrite=True)
    same = [{0, 1}, {2}, {3}, {4}, {5}]
    missing = {
        name
        for name, (memory, view) in leaves.items()
        if name not in kept
        and not any(
            other[0] == name[0]
            and leaves[other][0] == memory
            and any({view, leaves[other][1]} <= those for those in same)
            for other in kept
        )
    }
    target = {part: tree for part, tree in state.items() if tree}
    if missing:
        with pytest.raises(TreeMismatchError) as caught:
            xckpt.load_into(PLACE, target)
        assert {problem.leaf for problem in caught.value.problems} == missing
        assert not memories.any()
    else:
        assert xckpt.load_into(PLACE, target).complete
        for name, (memory, _) in leaves.items():
            assert (state[name[0]][name[2]] == 1 + memory).all()


def test_what_is_shared_by_other_dicts_or_in_part_is_missing() -> None:
    weights = np.zeros(4)
    xckpt.save(PLACE, {"model": {"w": np.arange(4.0)}, "ema": {"steps": 1}}, overwrite=True)
    state = {"model": {"w": weights}, "ema": {"steps": 0, "w": weights}}
    words = (
        r"ema/w: wanted, but not in the checkpoint; it shares the memory of model/w, which is: "
        r'missing="ignore" loads that one for both'
    )
    with pytest.raises(TreeMismatchError, match=words):
        xckpt.load_into(PLACE, state)
    assert not weights.any()
    xckpt.load_into(PLACE, state, missing="ignore")
    assert weights.tolist() == [0, 1, 2, 3]
    with pytest.raises(TreeMismatchError, match=r"model/part: wanted, but not in the checkpoint$"):
        xckpt.load_into(PLACE, {"model": {"w": weights, "part": weights[1:]}, "ema": {"steps": 0}})


def test_a_leaf_that_is_not_selected_fills_no_other() -> None:
    weights = np.zeros(4)
    xckpt.save(PLACE, {"w": np.arange(4.0), "step": 3}, overwrite=True)
    state = {"w": weights, "tied": weights, "step": 0}
    report = xckpt.load_into(PLACE, state, select="step")
    assert (state["step"], weights.any(), report.loaded) == (3, False, ("step",))


def test_a_planner_with_hooks_of_its_own_misses_the_leaf() -> None:
    """It may put what is read elsewhere: then the other name would keep its old numbers."""

    class Elsewhere(xckpt.planner.DefaultLoadPlanner):
        def commit_tensor(self, read_item: xckpt.planner.ReadItem, tensor: object) -> None:
            super().commit_tensor(read_item, tensor)

    weights = np.zeros(4)
    xckpt.save(PLACE, {"w": np.arange(4.0)}, overwrite=True)
    with pytest.raises(TreeMismatchError, match="tied: wanted, but not in the checkpoint; it sha"):
        xckpt.load_into(PLACE, {"w": weights, "tied": weights}, planner=Elsewhere())
