"""Training with FSDP2 and tensor parallelism, resumed through DCP on another mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import xckpt
from tests.support.ranks import Ranks
from xckpt.torch.dcp import XckptStorageReader, XckptStorageWriter

STEPS = 3


def on_rank_model(mesh_shape: tuple[int, int]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small network, the same on every mesh: FSDP2 over the first axis, TP over the second."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("fsdp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 6), nn.LayerNorm(6))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["fsdp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def on_rank_train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
    """Losses of some steps; every rank takes the same batch, so that the mesh doesn't matter."""
    losses = []
    for step in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(16, 8, generator=generator)
        loss = (model(batch) - batch[:, :6]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_rank_first(rank: int, path: Path) -> list[float]:
    """Train, save, train on without interruption: the losses after the save."""
    model, optimizer = on_rank_model((2, 2))
    on_rank_train(model, optimizer, 0)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments, "step": STEPS}
    dcp.save(state, storage_writer=XckptStorageWriter(path))
    return on_rank_train(model, optimizer, STEPS)


def on_rank_resumed(rank: int, path: Path, mesh_shape: tuple[int, int]) -> list[float]:
    model, optimizer = on_rank_model(mesh_shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optim": moments, "step": 0}
    dcp.load(state, storage_reader=XckptStorageReader(path))
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    return on_rank_train(model, optimizer, state["step"])


@pytest.mark.parametrize(
    "mesh_shape",
    [
        pytest.param((4, 1), marks=pytest.mark.thorough),
        pytest.param((1, 4), marks=pytest.mark.thorough),
        (2, 2),
    ],
)
def test_training_goes_on_with_the_same_losses(
    four_ranks: Ranks, tmp_path: Path, mesh_shape: tuple[int, int]
):
    went_on = four_ranks.run(on_rank_first, tmp_path / "ckpt")
    resumed = four_ranks.run(on_rank_resumed, tmp_path / "ckpt", mesh_shape)
    assert went_on[0][0] > went_on[0][-1]
    for rank in range(4):
        assert resumed[rank] == pytest.approx(went_on[rank], rel=1e-5)
    tree = xckpt.load(tmp_path / "ckpt")
    assert tree["model"]["0.weight"].shape == (12, 8)
    assert tree["optim"]["state"]["0.weight"]["exp_avg"].any()
