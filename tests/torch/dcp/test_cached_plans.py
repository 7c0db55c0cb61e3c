"""Saves with ``DefaultSavePlanner(enable_plan_caching=True)``: what the ranks write by old plans.

DCP keeps its cache by the name of the planner's class, for as long as the process lives, so that
each test here has a class of its own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import xckpt
from tests.support.ranks import Ranks
from tests.support.torch_meshes import on_rank_mesh
from xckpt.storage.location import Location
from xckpt.torch.dcp import XckptStorageWriter
from xckpt.torch.dcp.staged_save import StagingPlace, forget_place, name_place

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

SHAPE = (10, 6)


def array(step: int) -> np.ndarray:
    return np.arange(60, dtype=np.float32).reshape(SHAPE) + 100 * step


def on_rank_spread(step: int, dim: int = 0) -> DTensor:
    full = torch.from_numpy(array(step))
    return distribute_tensor(full, on_rank_mesh("4"), [Shard(dim)], src_data_rank=None)


def on_rank_planner(name: str) -> dcp.DefaultSavePlanner:
    kind = type(name, (dcp.DefaultSavePlanner,), {})
    return kind(enable_plan_caching=True)


class Watching(XckptStorageWriter):
    """Notes how many of the plans that it was given are usable."""

    usable: int | None = None

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        self.usable = sum(plan.usable for plan in plans)
        return super().prepare_global_plan(plans)


def check(path: Path, step: int, **values: Any) -> None:
    stored = xckpt.open(path)
    assert stored.verify() == []
    tree = xckpt.load(path)
    np.testing.assert_array_equal(tree["w"], array(step))
    np.testing.assert_array_equal(tree["same"], array(step))
    assert {name: tree[name].tolist() for name in values} == values


def on_rank_steps(rank: int, folder: Path, paths: list[str]) -> list[int | None]:
    planner, usable = on_rank_planner("Steps"), []
    for step, path in enumerate(paths):
        writer = Watching(folder / path)
        state = {"w": on_rank_spread(step), "same": torch.from_numpy(array(step)), "step": step}
        dcp.save(state, storage_writer=writer, planner=planner)
        usable.append(writer.usable)
    return usable


def test_several_saves_by_one_plan_to_several_paths(four_ranks: Ranks, tmp_path: Path):
    paths = ["a", "b", "a", "c"]
    answers = four_ranks.run(on_rank_steps, tmp_path, paths)
    assert answers[0] == [4, 0, 0, 0]
    for step, path in ((2, "a"), (1, "b"), (3, "c")):
        check(tmp_path / path, step)
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]


def on_rank_change(rank: int, folder: Path) -> list[int | None]:
    """Rank 2 alone has another leaf in the third save; all cut `w` otherwise in the fourth."""
    usable = []
    for step in range(5):
        writer = Watching(folder / str(step))
        dim = 1 if step >= 3 else 0
        state = {"w": on_rank_spread(step, dim), "same": torch.from_numpy(array(step))}
        if rank == 2 and step >= 2:
            state["mine"] = torch.full((2,), float(step))
        dcp.save(state, storage_writer=writer, planner=on_rank_planner("Change"))
        usable.append(writer.usable)
    return usable


def test_a_plan_that_changes_on_one_rank_gives_all_ranks_new_orders(
    four_ranks: Ranks, tmp_path: Path
):
    usable = four_ranks.run(on_rank_change, tmp_path)[0]
    assert usable[:2] == [4, 0] and usable[2] == 1 and usable[3:] == [4, 0]
    for step in range(5):
        check(tmp_path / str(step), step, **({"mine": [float(step)] * 2} if step >= 2 else {}))


def on_rank_pieces(rank: int, folder: Path) -> bool:
    """Rows of 251, 250, 251, 250: no grid has chunks that lie in one box each."""
    full = torch.arange(1002 * 3).reshape(1002, 3)
    mesh = on_rank_mesh("2x2")
    for step in range(2):
        spread = distribute_tensor(full + step, mesh, [Shard(0), Shard(0)], src_data_rank=None)
        writer = XckptStorageWriter(folder / str(step))
        dcp.save({"w": spread}, storage_writer=writer, planner=on_rank_planner("Pieces"))
    dist.barrier()
    stored: Any = xckpt.open(folder / "1")["w"]
    return len(stored.pieces) == 4 and np.array_equal(stored, (full + 1).numpy())


def test_leaves_in_pieces_are_written_by_old_plans_too(four_ranks: Ranks, tmp_path: Path):
    assert four_ranks.run(on_rank_pieces, tmp_path) == [True] * 4


def on_rank_retry(rank: int, folder: Path, fault: str) -> list[str]:
    """Four saves; one of them fails, before or after the ranks have their plans."""
    for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        getattr(dcp.SavePlanner, f"_cached_{name}").clear()
    if fault == "Several":
        writer = XckptStorageWriter(folder / "other")
        dcp.save({"w": on_rank_spread(0)}, storage_writer=writer, planner=on_rank_planner("Other"))
    faults: list[str] = []
    for step in range(4):
        state = {"w": on_rank_spread(step), "same": torch.from_numpy(array(step))}
        writer = XckptStorageWriter(folder / str(step), overwrite=False)
        if fault == "Write" and step == 0 and rank == 1:
            local = torch.empty(3, 6, device="meta")
            state["w"] = DTensor.from_local(
                local, on_rank_mesh("4"), [Shard(0)], shape=torch.Size(SHAPE), stride=(6, 1)
            )
        if fault in ("Later", "Several") and step >= 1 and rank == 1:
            state["mine"] = torch.ones(2)
        try:
            dcp.save(state, storage_writer=writer, planner=on_rank_planner(f"Retry{fault}"))
        except dcp.CheckpointException as error:
            names = ",".join(type(e).__name__ for e, _ in error.failures.values())
            faults.append(f"{step}: {names}")
    return faults


@pytest.mark.parametrize(
    "fault, taken, faults",
    [
        ("First", "0", ["0: CheckpointExistsError"]),
        ("Write", "", ["0: UnsupportedLeafError"]),
        ("Later", "1", ["1: CheckpointExistsError"]),
        # It is unknown whose plans are missing, so the commit refuses: loudly, not wrongly.
        ("Several", "1", ["1: CheckpointExistsError", "2: PlanError", "3: PlanError"]),
    ],
)
def test_a_failed_save_does_not_spoil_the_next(
    four_ranks: Ranks, tmp_path: Path, fault: str, taken: str, faults: list[str]
):
    if taken:
        xckpt.save(tmp_path / taken, {"taken": 1})
    assert four_ranks.run(on_rank_retry, tmp_path, fault) == [faults] * 4
    failed = {text.split(":")[0] for text in faults}
    for step in range(4):
        if str(step) not in failed:
            check(tmp_path / str(step), step)


def test_another_dtype_under_an_old_plan_is_refused_by_name(tmp_path: Path):
    """DCP's cache looks at shapes only."""
    planner = on_rank_planner("Dtype")
    dcp.save(
        {"w": torch.ones(3)}, storage_writer=XckptStorageWriter(tmp_path / "a"), planner=planner
    )
    with pytest.raises(dcp.CheckpointException, match=r"w: float32 of shape .* was planned"):
        dcp.save(
            {"w": torch.ones(3).half()},
            storage_writer=XckptStorageWriter(tmp_path / "b"),
            planner=planner,
        )
    assert os.listdir(tmp_path) == ["a"]


def test_one_process_saves_by_old_plans(tmp_path: Path):
    planner = on_rank_planner("Alone")
    for step in range(3):
        writer = Watching(tmp_path / str(step))
        dcp.save(
            {"model": {"w": torch.full((3,), float(step))}, "step": step},
            storage_writer=writer,
            planner=planner,
        )
        assert writer.usable == (step == 0)
        assert xckpt.load(tmp_path / str(step))["model"]["w"].tolist() == [float(step)] * 3


def test_two_saves_by_old_plans_to_one_path_at_once_are_refused():
    target = Location.parse("/somewhere")
    there = StagingPlace("first", target)
    name_place(target, there)
    with pytest.raises(xckpt.CheckpointExistsError, match="another save with cached plans"):
        name_place(target, there)
    forget_place(target)
    name_place(target, there)
    forget_place(target)
