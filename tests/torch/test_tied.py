"""Models with tied weights, from files that hold the tied tensor once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

import xckpt
from tests.support.ranks import Ranks
from xckpt.errors import TreeMismatchError


class Language(torch.nn.Module):
    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.LayerNorm(3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_a_file_with_one_of_the_names_fills_both(tmp_path: Path, kept: str) -> None:
    """As `safetensors.torch.load_model` does; it was an error, "head.weight wanted"."""
    saved, path = Language(), tmp_path / "model.safetensors"
    state = saved.state_dict()
    safetensors.torch.save_file(
        {
            name: tensor
            for name, tensor in state.items()
            if name in (kept, "norm.weight", "norm.bias")
        },
        path,
    )
    for strict in (True, False):
        whole: Any = Language()
        report = xckpt.load_into(path, whole, strict=strict)
        assert whole.head.weight is whole.embed.weight
        assert torch.equal(whole.embed.weight, saved.embed.weight) and report.complete
    plain = Language().state_dict()
    xckpt.load_into(path, plain)
    assert all(torch.equal(plain[name], state[name]) for name in state)
    untied = Language(tied=False)
    with pytest.raises(TreeMismatchError, match=r"weight: wanted, but not in the checkpoint$"):
        xckpt.load_into(path, untied)


def on_tied_shards(rank: int, path: Path) -> tuple[list[int], bool]:
    """Of two rows rank 2 and 3 have none."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(6.0).reshape(2, 3)
    xckpt.save(path, {"w": distribute_tensor(rows, mesh, [Shard(0)])})
    target = distribute_tensor(torch.zeros(2, 3), mesh, [Shard(0)])
    state: dict[str, DTensor] = {"w": target, "tied": target}
    report = xckpt.load_into(path, state)
    return list(target.to_local().shape), bool((target.full_tensor() == rows).all() and report)


def test_ranks_without_elements_agree(four_ranks: Ranks, tmp_path: Path) -> None:
    found = four_ranks.run(on_tied_shards, tmp_path / "ckpt")
    assert found == [([1, 3], True), ([1, 3], True), ([0, 3], True), ([0, 3], True)]
