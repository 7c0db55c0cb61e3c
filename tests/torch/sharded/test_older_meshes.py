"""DTensors on a mesh of process groups that are gone: the processes may have other ranks now."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import xckpt
from tests.support.ranks import Ranks
from xckpt.errors import UnsupportedLeafError

_kept: list[torch.Tensor] = []
"""What a process has from before its group was made again."""


def on_rank_made() -> DTensor:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    local = torch.full((2, 3), float(dist.get_rank()))
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


def on_rank_saves(number: int, path: Path) -> None:
    tensor = on_rank_made()
    _kept[:] = [tensor, torch.zeros_like(tensor)]
    xckpt.save(path / "first", {"w": tensor})


def on_rank_again(number: int, path: Path, swapped: bool) -> list[str]:
    """What is said of tensors on the older mesh, in a group that was made again."""
    dist.barrier()
    dist.destroy_process_group()
    rank, wait = 1 - number if swapped else number, datetime.timedelta(seconds=60)
    store = f"file://{path / 'again'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=wait)
    new = on_rank_made()
    said: list[str] = []
    for tensor in (*_kept, torch.zeros_like(new)):
        try:
            xckpt.save(path / "again-saved", {"w": tensor}, overwrite=True)
            assert torch.equal(_loaded(path / "first", tensor).to_local(), new.to_local())
            said.append("")
        except UnsupportedLeafError as error:
            said.append(str(error))
    xckpt.save(path / "new", {"w": new})
    loaded = _loaded(path / "first", new)
    assert torch.equal(loaded.to_local(), new.to_local()) and loaded.device_mesh is new.device_mesh
    return said


def _loaded(path: Path, like: torch.Tensor) -> DTensor:
    loaded = xckpt.load(path, {"w": like})["w"]
    assert isinstance(loaded, DTensor)
    return loaded


@pytest.mark.parametrize("swapped", [False, True])
def test_a_mesh_of_groups_that_are_gone(tmp_path: Path, swapped: bool) -> None:
    """Rank 1 loaded rank 0's rows into what `zeros_like` had made, and saved them as its own."""
    with Ranks(2) as ranks:
        ranks.run(on_rank_saves, tmp_path)
        answers = ranks.run(on_rank_again, tmp_path, swapped)
    for said in answers:
        assert all(bool(text) == swapped for text in said[:2]), said
        assert all("w: a DTensor on an older DeviceMesh" in text for text in said if text)
    rows = xckpt.load(tmp_path / "new")["w"][:, 0].tolist()
    assert rows == [0.0, 0.0, 1.0, 1.0]
