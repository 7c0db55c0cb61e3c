"""Tensors of one name on meshes that are parts of the job, as pipeline stages have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import xckpt
from tests.support.ranks import Ranks


def stage_of(rank: int, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A stage on two of four ranks, sharded over them, after a step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    torch.manual_seed(seed)
    model = torch.nn.Linear(64, 64, bias=False)
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 64)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def on_rank_differ(rank: int, path: Path) -> str:
    stage = rank // 2
    model, optimizer = stage_of(rank, stage)
    state = {"model": {f"layers.{stage}": model}, "optimizer": optimizer}
    with pytest.raises(xckpt.PlanError) as caught:
        xckpt.save(path / "a", state)
    return str(caught.value)


def test_moments_of_two_stages_under_one_name_are_refused(
    four_ranks: Ranks, tmp_path: Path
) -> None:
    for text in four_ranks.run(on_rank_differ, tmp_path):
        assert (
            "optimizer/state/0/exp_avg: [0, 32) x [0, 64) differs between rank 0 and rank 2" in text
        )
    assert not list(tmp_path.iterdir())


def on_rank_equal(rank: int, path: Path) -> Any:
    model, optimizer = stage_of(rank, 7)
    xckpt.save(path / "a", {"model": model, "optimizer": optimizer})
    xckpt.save(path / "b", {f"layers.{rank // 2}": model})
    moment: Any = optimizer.state_dict()["state"][0]["exp_avg"]
    return moment.full_tensor().tolist()


def test_equal_ones_and_those_of_other_names_are_saved(four_ranks: Ranks, tmp_path: Path) -> None:
    moments = four_ranks.run(on_rank_equal, tmp_path)
    stored: Any = xckpt.load(tmp_path / "a")
    assert all(stored["optimizer"]["state"][0]["exp_avg"].tolist() == each for each in moments)
    assert list(xckpt.open(tmp_path / "b")) == ["layers.0/weight", "layers.1/weight"]
