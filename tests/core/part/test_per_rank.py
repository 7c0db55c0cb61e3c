"""What each rank has its own of, whole: on another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xckpt
from conformance.implementations.threads import ThreadGroup, results


def test_all_ranks_values_cannot_be_saved(tmp_path: Path) -> None:
    state = {"step": 3, "data": {"next": xckpt.PerRank.all}}
    for save in (xckpt.save, lambda *state: xckpt.save_async(*state).result()):
        with pytest.raises(xckpt.UnsupportedLeafError, match=r"data/next: PerRank.all stands for"):
            save(tmp_path / "ckpt", state)
    assert not xckpt.exists(tmp_path / "ckpt")


def test_all_ranks_values_on_another_number_of_ranks(tmp_path: Path) -> None:
    def save(group: ThreadGroup) -> None:
        own = {"position": group.rank, "rng": np.full(group.rank + 1, group.rank), "none": None}
        xckpt.save(tmp_path, {"step": 3, "data": xckpt.PerRank(own)}, group=group)

    def load(group: ThreadGroup) -> Any:
        like = {"step": 0, "data": xckpt.PerRank.all}
        return xckpt.load(tmp_path, like, group=group)

    results(4, save)
    for loaded in results(2, load):
        assert loaded["step"] == 3 and list(loaded["data"]) == [f"rank{r}" for r in range(4)]
        for rank, own in enumerate(loaded["data"].values()):
            assert own["position"] == rank and own["none"] is None
            assert own["rng"].tolist() == [rank] * (rank + 1)
    with pytest.raises(TypeError, match=r"PerRank\.all is for xckpt\.load and restore"):
        xckpt.load_into(tmp_path, {"step": 0, "data": xckpt.PerRank.all})


@pytest.mark.parametrize("first", [False, True])
def test_all_ranks_learn_of_a_load_in_place_of_all_values(tmp_path: Path, first: bool) -> None:
    """It was raised where it was asked for alone, once the rest was filled."""

    def save(group: ThreadGroup) -> None:
        xckpt.save(tmp_path, {"w": np.ones(2), "own": xckpt.PerRank(group.rank)}, group=group)

    def load(group: ThreadGroup) -> list[float]:
        own: Any = xckpt.PerRank.all if (group.rank == 0) == first else xckpt.PerRank(-1)
        state = {"w": np.zeros(2), "own": own}
        with pytest.raises(TypeError, match=r"rank [01]: TypeError: own: PerRank\.all is for"):
            xckpt.load_into(tmp_path, state, group=group)
        return state["w"].tolist()

    results(2, save)
    assert results(2, load) == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("stored", [{}, {"other": xckpt.PerRank(1)}])
def test_all_values_of_what_nobody_saved_are_missing(tmp_path: Path, stored: Any) -> None:
    xckpt.save(tmp_path, {"step": 3, "empty": xckpt.PerRank({}), **stored})
    like = {"step": 0, "own": xckpt.PerRank.all}
    by_rule: list[dict[str, Any]] = [{}, {"unexpected": "ignore"}]
    for arguments in by_rule:
        with pytest.raises(xckpt.TreeMismatchError) as caught:
            xckpt.load(tmp_path, like, **arguments)
        assert "own: wanted, but not in the checkpoint" in str(caught.value)
    with pytest.warns(UserWarning, match="1 leaf kept as before, not in the checkpoint: own"):
        loaded = xckpt.load(tmp_path, like, missing="warn", unexpected="ignore")
    assert loaded == {"step": 3, "own": {}}
    like = {"step": 0, "empty": xckpt.PerRank.all}
    assert xckpt.load(tmp_path, like, unexpected="ignore")["empty"] == {"rank0": {}}


@pytest.mark.parametrize("name", ["own", "own/x", "", "x"])
def test_a_side_without_the_mark_is_told_where_to_put_it(tmp_path: Path, name: str) -> None:
    def tree(value: Any, marked: bool) -> Any:
        leaf = {"x": value} if name.endswith("x") else value
        leaf = xckpt.PerRank(leaf) if marked else leaf
        return {"own": leaf} if name.startswith("own") else leaf

    def told(marked: bool) -> str:
        xckpt.save(tmp_path, tree(3, marked), overwrite=True)
        with pytest.raises(xckpt.TreeMismatchError) as caught:
            xckpt.load(tmp_path, tree(0, not marked))
        return str(caught.value)

    assert f"saved as an xckpt.PerRank: give one in the target too ({name})" in told(True)
    assert f"saved without xckpt.PerRank: leave it out in the target ({name})" in told(False)


@pytest.mark.parametrize("plain", [{"x": 1}, {"rank0": 1}, {"x": {}}, {}, [1], (), 1, None])
@pytest.mark.parametrize("first", [False, True])
def test_what_only_some_ranks_have_of_their_own_is_refused(
    tmp_path: Path, plain: Any, first: bool
) -> None:
    """A plain dict, which no plan mentions, was saved beside the others' own."""
    own, shared = ("ranks 1, 3", "rank 2") if first else ("rank 2", "ranks 1, 3")
    text = (
        f"an xckpt.PerRank on {own}, but not on {shared}: save it as one on all ranks, or on none"
    )

    def save(group: ThreadGroup, *keys: str) -> str:
        rank = group.rank
        value: Any = xckpt.PerRank({"x": rank}) if (rank == 2) != first else plain
        for key in keys:
            value = {"b": 1, key: value} if rank else {"b": 1}
        with pytest.raises(xckpt.PlanError, match="trees do not fit together") as caught:
            xckpt.save(tmp_path / "ckpt", value, group=group)
        return str(caught.value)

    errors = set(results(4, lambda group: save(group, "own", "a")))
    assert len(errors) == 1 and f"- a/own: {text}" in errors.pop()
    root = set(results(3, save)).pop()
    assert "- the root: an xckpt.PerRank on " in root and not list(tmp_path.iterdir())
