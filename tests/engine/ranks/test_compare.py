"""Ranks that do not save the same are refused, with leaf and ranks; `PerRank` is the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xckpt
from conformance.implementations.threads import ThreadGroup, results, run_ranks
from tests.support.ranks import Ranks
from xckpt.engine.ranks.compare import compare_ranks


def refused(tmp_path: Path, state: Any, size: int = 3, **arguments: Any) -> str:
    """What all ranks raise when rank r saves ``state(r)``; nothing is left behind."""
    outcomes = run_ranks(
        size,
        lambda group: xckpt.save(tmp_path / "a", state(group.rank), group=group, **arguments),
    )
    texts = {str(outcome.error) for outcome in outcomes}
    assert all(isinstance(outcome.error, xckpt.PlanError) for outcome in outcomes), texts
    assert len(texts) == 1 and not list(tmp_path.iterdir())
    return texts.pop()


@pytest.mark.parametrize(
    "leaf",
    [
        lambda rank: rank // 2,
        lambda rank: f"text {rank // 2}",
        lambda rank: np.array([1.0, rank // 2]),
        lambda rank: np.full((1 << 18), rank // 2, np.float32),
    ],
)
def test_small_leaves_that_differ_are_refused(tmp_path: Path, leaf: Any) -> None:
    text = refused(tmp_path, lambda rank: {"same": np.ones(3), "pos": leaf(rank)})
    assert "pos: differs between ranks 0, 1 and rank 2" in text
    assert "xckpt.PerRank(value)" in text and "DTensor" in text
    assert "SaveOptions(compare_replicas=False)" in text
    assert "same" not in text.replace("save the same", "")


def test_every_leaf_that_differs_is_a_problem(tmp_path: Path) -> None:
    def run(group: ThreadGroup) -> Any:
        state = {"a": group.rank, "b": [np.array(group.rank)], "c": 1}
        with pytest.raises(xckpt.PlanError) as caught:
            xckpt.save(tmp_path / "a", state, group=group)
        return [(problem.leaf, problem.kind) for problem in caught.value.problems]

    assert results(2, run) == [[("a", "replica"), ("b/0", "replica")]] * 2


def test_large_leaves_are_compared_when_asked(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        return {"w": np.full((1 << 18) + 1, rank, np.float32)}

    results(2, lambda group: xckpt.save(tmp_path / "b", state(group.rank), group=group))
    options = xckpt.SaveOptions(compare_replicas=True)
    for outcome in run_ranks(
        2, lambda g: xckpt.save(tmp_path / "c", state(g.rank), group=g, options=options)
    ):
        assert isinstance(outcome.error, xckpt.PlanError)


def test_any_one_is_kept_when_asked(tmp_path: Path) -> None:
    options = xckpt.SaveOptions(compare_replicas=False)
    results(2, lambda g: xckpt.save(tmp_path / "a", {"n": g.rank}, group=g, options=options))
    assert xckpt.load(tmp_path / "a")["n"] in (0, 1)


def test_leaves_that_only_some_ranks_have_are_no_fault(tmp_path: Path) -> None:
    results(2, lambda g: xckpt.save(tmp_path / "a", {"n": 1, f"stage{g.rank}": g.rank}, group=g))
    assert xckpt.load(tmp_path / "a") == {"n": 1, "stage0": 0, "stage1": 1}


def test_arguments_that_differ_are_refused(tmp_path: Path) -> None:
    def run(group: ThreadGroup) -> Any:
        path = tmp_path / ("b" if group.rank == 1 else "a")
        options = xckpt.SaveOptions(chunk_bytes=1 << (20 + group.rank))
        xckpt.save(path, {"n": 1}, group=group, options=options)

    for outcome in run_ranks(2, run):
        assert isinstance(outcome.error, xckpt.PlanError)
        text = str(outcome.error)
        assert f"the argument path is '{tmp_path / 'a'}' on rank 0, but '{tmp_path / 'b'}'" in text
        assert "the argument chunk_bytes is 1048576 on rank 0, but 2097152 on rank 1" in text
    assert not list(tmp_path.iterdir())


def test_equal_ranks_send_sixteen_bytes_each() -> None:
    sent: list[int] = []

    class Counting:
        def __init__(self, group: ThreadGroup) -> None:
            self.rank, self.size, self.coordinator = group.rank, group.size, group.coordinator
            self.scatter, self.broadcast, self._gather = (
                group.scatter,
                group.broadcast,
                group.gather,
            )

        def gather(self, data: bytes) -> list[bytes] | None:
            sent.append(len(data))
            return self._gather(data)

    class Planner(xckpt.planner.DefaultSavePlanner):
        def replicas(self) -> Any:
            return [(f"leaf{n}", "", np.arange(9, dtype=np.uint8)) for n in range(1000)]

    def run(group: ThreadGroup) -> None:
        compare_ranks(Counting(group), Planner, {"path": "'a'"})

    results(3, run)
    assert len(sent) == 3 and max(sent) <= 16 + 8  # with what says that it is no failure


def on_rank_round_trip(rank: int, path: Path) -> Any:
    import torch

    torch.manual_seed(rank)
    own = {"rng": torch.get_rng_state(), "pos": torch.tensor([rank]), "seed": rank}
    xckpt.save(path, {"step": 5, "own": xckpt.PerRank(own)}, overwrite=True)
    saving = xckpt.save_async(path, {"step": 5, "own": xckpt.PerRank(own)}, overwrite=True)
    saving.result(30)
    like = {"rng": torch.zeros_like(own["rng"]), "pos": torch.zeros_like(own["pos"]), "seed": 0}
    back = xckpt.load(path, {"step": 0, "own": xckpt.PerRank(like)})["own"].value
    assert torch.equal(back["rng"], own["rng"])
    return back["seed"], int(back["pos"])


def test_each_rank_gets_its_own_again(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        assert ranks.run(on_rank_round_trip, tmp_path / "a") == [(0, 0), (1, 1)]
    assert list(xckpt.load(tmp_path / "a")["own"]) == ["rank0", "rank1"]
    like = {"step": 0, "own": xckpt.PerRank({"seed": 0})}
    with pytest.raises(xckpt.TreeMismatchError, match="own/rank1"):
        xckpt.load(tmp_path / "a", like)
    assert xckpt.load(tmp_path / "a", like, unexpected="ignore")["own"].value == {"seed": 0}
