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
