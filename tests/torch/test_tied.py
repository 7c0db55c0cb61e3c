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
    def __init__(self, *, tied: bool = True, device: str = "cpu") -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3, device=device)
        self.norm = torch.nn.LayerNorm(3, device=device)
        self.head = torch.nn.Linear(3, 5, bias=False, device=device)
        if tied:
            self.head.weight = self.embed.weight


def saved_once(model: Language, kept: str, path: Path) -> dict[str, torch.Tensor]:
    """Save a model's state with one of the names of its tied weight; return all of it."""
    state = model.state_dict()
    names = (kept, "norm.weight", "norm.bias")
    safetensors.torch.save_file({name: state[name] for name in names}, path)
    return state


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_load_makes_one_tensor_for_both_names(
    tmp_path: Path, kept: str, strict: bool, device: str
) -> None:
    """It was an error; with ``strict=False`` the other name came back unfilled."""
    path = tmp_path / "model.safetensors"
    state = saved_once(Language(), kept, path)
    for like in (Language(device=device), Language(device=device).state_dict()):
        reports: list[xckpt.LoadReport] = []
        loaded: Any = xckpt.load(path, like, strict=strict, report=reports.append)
        assert sorted(reports[0].loaded) == sorted(state) and reports[0].complete
        assert loaded.keys() == state.keys()
        assert all(torch.equal(loaded[name], state[name]) for name in state)
        assert loaded["head.weight"] is loaded["embed.weight"]
    with pytest.raises(TreeMismatchError, match=r"weight: wanted, but not in the checkpoint$"):
        xckpt.load(path, Language(tied=False, device=device))


def test_one_object_under_two_names_is_a_pattern_for_two_leaves(tmp_path: Path) -> None:
    """As are a part of the memory, and the same memory in another dict."""
    xckpt.save(tmp_path / "ckpt", {"a": torch.ones(2, 2)})
    like = torch.empty(2, 2, device="meta")
    for other in ({"b": like}, {"b": like[:1]}, {"b": like.T}, {"in": {"b": like.detach()}}):
        with pytest.raises(TreeMismatchError, match=r"b: wanted, but not in the checkpoint$"):
            xckpt.load(tmp_path / "ckpt", {"a": like, **other})
    tied = xckpt.load(tmp_path / "ckpt", {"a": like, "b": like.detach()})
    reports: list[xckpt.LoadReport] = []
    half = {"b": like.half(), "c": 0}
    half["a"] = half["b"].detach()
    xckpt.load(tmp_path / "ckpt", half, cast=True, missing="ignore", report=reports.append)
    pair = ("float32", "float16")
    assert reports == [xckpt.LoadReport(("a", "b"), {"a": pair, "b": pair}, kept=("c",))]
    assert tied["a"] is tied["b"] and torch.equal(tied["a"], torch.ones(2, 2))


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_a_file_with_one_of_the_names_fills_both(tmp_path: Path, kept: str) -> None:
    """As `safetensors.torch.load_model` does; it was an error, "head.weight wanted"."""
    saved, path = Language(), tmp_path / "model.safetensors"
    state = saved_once(saved, kept, path)
    for strict in (True, False):
        whole: Any = Language()
        report = xckpt.load_into(path, whole, strict=strict)
        assert sorted(report.loaded) == sorted(state) and not report.kept
        assert whole.head.weight is whole.embed.weight
        assert torch.equal(whole.embed.weight, saved.embed.weight) and report.complete
    plain = Language().state_dict()
    xckpt.load_into(path, plain)
    assert all(torch.equal(plain[name], state[name]) for name in state)
    untied = Language(tied=False)
    with pytest.raises(TreeMismatchError, match=r"weight: wanted, but not in the checkpoint$"):
        xckpt.load_into(path, untied)


def on_tied_shards(rank: int, path: Path) -> tuple[list[int], bool]:
    """Of two rows rank 2 and 3 have none. Filled in place, then made anew."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(6.0).reshape(2, 3)
    xckpt.save(path, {"w": distribute_tensor(rows, mesh, [Shard(0)])})
    target = distribute_tensor(torch.zeros(2, 3), mesh, [Shard(0)])
    state: dict[str, DTensor] = {"w": target, "tied": target}
    report = xckpt.load_into(path, state)
    new = xckpt.load(path, {"w": target, "tied": target.detach()})
    made = new["w"] is new["tied"] and bool((new["w"].full_tensor() == rows).all())
    filled = bool((target.full_tensor() == rows).all()) and report.complete
    return list(target.to_local().shape), filled and made


def test_ranks_without_elements_agree(four_ranks: Ranks, tmp_path: Path) -> None:
    found = four_ranks.run(on_tied_shards, tmp_path / "ckpt")
    assert found == [([1, 3], True), ([1, 3], True), ([0, 3], True), ([0, 3], True)]
