"""Targets that torch's adapter makes from what is stored, over the ranks of a mesh."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import xckpt
from tests.support.ranks import Ranks
from tests.support.torch_meshes import on_rank_mesh
from xckpt.core.leaf import TargetPlace
from xckpt.torch.adapter import ADAPTER

WEIGHT = torch.arange(35.0).reshape(7, 5)


def on_rank_stored_placements(rank: int, path: str) -> None:
    mesh = on_rank_mesh("2x2")
    saved = distribute_tensor(WEIGHT, mesh, [Shard(0), Shard(1)])
    xckpt.save(path, {"w": saved, "b": torch.ones(3, dtype=torch.bfloat16), "step": 4})
    checkpoint = xckpt.open(path)
    loaded = xckpt.load(path, checkpoint.like("torch", mesh=mesh))
    assert loaded["w"].placements == (Shard(0), Shard(1)) and loaded["step"] == 4
    assert torch.equal(loaded["w"].full_tensor(), WEIGHT)
    assert isinstance(loaded["b"], DTensor) and loaded["b"].placements == (Replicate(),) * 2
    assert loaded["b"].dtype == torch.bfloat16
    rule = {"w": [Replicate(), Shard(0)]}
    other = checkpoint.like("torch", mesh=mesh, sharding=lambda name, stored: rule.get(name))
    loaded = xckpt.load(path, other)
    assert loaded["w"].placements == (Replicate(), Shard(0))
    assert torch.equal(loaded["w"].full_tensor(), WEIGHT)
    with pytest.raises(ValueError, match="along the mesh axes dp, tp, but the mesh has only dim0"):
        checkpoint.like("torch", mesh=on_rank_mesh("4"))


def test_the_stored_placements_on_a_mesh(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(on_rank_stored_placements, str(tmp_path / "ckpt"))


def test_a_target_takes_no_memory(tmp_path: Path) -> None:
    saved = xckpt.save(tmp_path / "c", {"w": torch.ones(1000)}).state_dict_metadata["w"]
    assert not isinstance(saved, xckpt.metadata.BytesStorageMetadata)
    like = ADAPTER.like(saved, "w", TargetPlace())
    assert like.shape == (1000,) and like.untyped_storage().nbytes() == 4
