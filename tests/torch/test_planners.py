"""The planners to paste (`examples/planners`) on four real ranks, with DTensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

import xckpt
from examples.planners.balance import BalancingPlanner
from examples.planners.extra_data import ExtraDataPlanner
from examples.planners.half_precision import HalfPrecisionPlanner
from examples.planners.materialise import MaterialisingPlanner
from examples.planners.rename import RenamingLoadPlanner, RenamingSavePlanner
from tests.support.ranks import Ranks
from tests.support.torch_meshes import on_rank_mesh
from xckpt.planner import DefaultLoadPlanner, DefaultSavePlanner, ReadItem, SavePlan
from xckpt.storage import ZarrStorageReader, ZarrStorageWriter

WHOLE = torch.arange(65.0).reshape(13, 5) / 7
PLAIN = torch.linspace(-3, 3, 11)


def on_rank_state(placement: Any, filled: bool = True) -> dict[str, Any]:
    whole = WHOLE if filled else torch.zeros_like(WHOLE)
    sharded = distribute_tensor(whole, on_rank_mesh("4"), [placement], src_data_rank=None)
    plain = PLAIN.clone() if filled else torch.zeros_like(PLAIN)
    return {"w": sharded, "plain": plain, "step": 3 if filled else 0}


def on_rank_save(path: Path, planner: DefaultSavePlanner) -> xckpt.Metadata:
    return xckpt.save_state_dict(on_rank_state(Shard(0)), ZarrStorageWriter(path), planner=planner)


def on_rank_rename(rank: int, path: Path) -> list[str]:
    saved = on_rank_save(path, RenamingSavePlanner("ema_"))
    columns = on_rank_state(Shard(1), filled=False)
    own = dict(columns)
    loaded = xckpt.load_state_dict(
        columns, ZarrStorageReader(path), planner=RenamingLoadPlanner("ema_")
    )
    assert loaded == saved and columns["step"] == 3
    assert columns["w"] is own["w"] and torch.equal(columns["w"].full_tensor(), WHOLE)
    assert columns["plain"] is own["plain"] and torch.equal(columns["plain"], PLAIN)
    return list(saved.state_dict_metadata)


def test_keys_are_renamed_both_ways(four_ranks: Ranks, tmp_path: Path):
    names = four_ranks.run(on_rank_rename, tmp_path / "ckpt")
    assert names == [["ema_w", "ema_plain", "ema_step"]] * 4
    assert list(xckpt.open(tmp_path / "ckpt")) == names[0]


class Noting(HalfPrecisionPlanner):
    """Also counts the bytes that this rank is to write."""

    planned = 0

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.planned = sum(item.box_bytes for item in new_plan.items)
        return super().finish_plan(new_plan)


def on_rank_half(rank: int, path: Path) -> int:
    planner, state = Noting(), on_rank_state(Shard(0))
    xckpt.save_state_dict(state, ZarrStorageWriter(path), planner=planner)
    assert state["w"].dtype == state["plain"].dtype == torch.float32
    assert torch.equal(state["w"].full_tensor(), WHOLE) and torch.equal(state["plain"], PLAIN)
    back = on_rank_state(Shard(1), filled=False)
    xckpt.load_into(path, back, cast=True)
    assert torch.equal(back["w"].full_tensor(), WHOLE.half().float()) and back["step"] == 3
    return planner.planned


def test_half_is_stored(four_ranks: Ranks, tmp_path: Path):
    planned = four_ranks.run(on_rank_half, tmp_path / "ckpt")
    assert sum(planned) == 2 * (WHOLE.numel() + PLAIN.numel())
    stored: Any = xckpt.open(tmp_path / "ckpt")
    assert stored["w"].dtype == stored["plain"].dtype == "float16"
    assert np.array_equal(stored["w"][...], WHOLE.half().numpy())
    assert stored.verify() == []


class Dealt(BalancingPlanner):
    """Also notes what this rank is to write."""

    names: list[str]

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.names = [item.index.fqn for item in new_plan.items]
        return super().finish_plan(new_plan)


def on_rank_balance(rank: int, path: Path, count: int) -> list[str]:
    planner = Dealt()
    replicas = {f"t{n}": torch.full((n + 1,), float(n)) for n in range(count)}
    mesh = on_rank_mesh("2x2")
    if count:
        half = distribute_tensor(WHOLE, mesh, [Shard(0), Replicate()], src_data_rank=None)
        replicas["half"] = half
    xckpt.save_state_dict(replicas, ZarrStorageWriter(path), planner=planner)
    return planner.names


def test_replicas_are_dealt_out(four_ranks: Ranks, tmp_path: Path):
    for count in (0, 1, 6):
        path = tmp_path / str(count)
        shares = four_ranks.run(on_rank_balance, path, count)
        written = sorted(name for share in shares for name in share)
        assert written == sorted([f"t{n}" for n in range(count)] + ["half"] * (2 if count else 0))
        if count == 6:
            # Each half of the tensor is on two ranks, and one of them writes it.
            assert ("half" in shares[0]) != ("half" in shares[1])
            assert ("half" in shares[2]) != ("half" in shares[3])
            assert all(shares)
        loaded: Any = xckpt.load(path)
        assert all(loaded[f"t{n}"].tolist() == [n] * (n + 1) for n in range(count))
        assert count == 0 or np.array_equal(loaded["half"], WHOLE.numpy())


def on_rank_odd_shards(rank: int, path: Path) -> tuple[list[str], list[float]]:
    """A tensor without elements, and two shards on the last rank and none on the others."""
    none = distribute_tensor(torch.empty(0, 4), on_rank_mesh("4"), [Shard(0)], src_data_rank=None)
    last = [ShardMetadata([2 * n], [2], "rank:3/cpu") for n in range(2)]
    sharded = sharded_tensor.ones(EnumerableShardingSpec(last), 4)
    state = {"none": none, "sharded": sharded}
    saved = xckpt.save_state_dict(state, ZarrStorageWriter(path), planner=BalancingPlanner())
    state["sharded"] = sharded_tensor.zeros(EnumerableShardingSpec(last), 4)
    xckpt.load_state_dict(state, ZarrStorageReader(path), planner=ReadsElsewhere())
    shards = state["sharded"].local_shards()
    return list(saved.state_dict_metadata), [x for shard in shards for x in shard.tensor.tolist()]


class ReadsElsewhere(DefaultLoadPlanner):
    """Has each item read into memory of its own."""

    def resolve_tensor(self, read_item: ReadItem) -> object:
        region = super().resolve_tensor(read_item)
        assert isinstance(region, torch.Tensor)
        return torch.empty_like(region)


def test_ranks_without_shards_do_as_the_others(four_ranks: Ranks, tmp_path: Path):
    answers = four_ranks.run(on_rank_odd_shards, tmp_path / "ckpt")
    assert answers == [(["none", "sharded"], [1.0] * (4 if rank == 3 else 0)) for rank in range(4)]


def on_rank_own_hook(rank: int, path: Path) -> list[int]:
    planner, ranks = DefaultSavePlanner(), list[int]()
    make = planner.create_global_plan
    planner.create_global_plan = lambda all_plans: (ranks.append(len(all_plans)), make(all_plans))[
        1
    ]
    for step in range(2):
        xckpt.save(path / f"{step}", on_rank_state(Shard(0)), planner=planner)
    return ranks


def test_a_hook_that_one_planner_has_for_itself_is_called(four_ranks: Ranks, tmp_path: Path):
    assert four_ranks.run(on_rank_own_hook, tmp_path) == [[4, 4], [], [], []]


def on_rank_extra(rank: int, path: Path) -> tuple[object, object]:
    saved = on_rank_save(path, ExtraDataPlanner({"rank": rank, "seed": rank * 7}))
    state = on_rank_state(Shard(1), filled=False)
    loaded = xckpt.load_state_dict(state, ZarrStorageReader(path))
    assert torch.equal(state["w"].full_tensor(), WHOLE)
    return saved.planner_data, loaded.planner_data


def test_data_of_every_rank_come_back_in_rank_order(four_ranks: Ranks, tmp_path: Path):
    expected = [{"rank": rank, "seed": rank * 7} for rank in range(4)]
    answers = four_ranks.run(on_rank_extra, tmp_path / "ckpt")
    assert answers == [(expected, expected)] * 4
    assert xckpt.open(tmp_path / "ckpt").metadata.planner_data == expected


def on_rank_model(device: str, dim: int) -> torch.nn.Module:
    torch.manual_seed(3)
    with torch.device(device):
        model = torch.nn.Sequential(torch.nn.Linear(5, 13), torch.nn.Linear(13, 6))

    def shard(name: str, module: torch.nn.Module, mesh: Any) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            place = [Shard(min(dim, parameter.ndim - 1))]
            local = distribute_tensor(parameter.detach(), mesh, place, src_data_rank=None)
            module.register_parameter(key, torch.nn.Parameter(local))

    return distribute_module(model, on_rank_mesh("4"), shard)


def on_rank_materialise(rank: int, path: Path) -> bool:
    """Rows saved, columns of a meta model filled: each column takes a read from every row."""
    source = on_rank_model("cpu", 0)
    xckpt.save_state_dict(source.state_dict(), ZarrStorageWriter(path))
    model = on_rank_model("meta", 1)
    assert all(leaf.is_meta for leaf in model.state_dict().values())
    xckpt.load_state_dict(
        model.state_dict(), ZarrStorageReader(path), planner=MaterialisingPlanner(model)
    )
    equal: list[bool] = []
    for (name, leaf), (other, wanted) in zip(
        model.named_parameters(), source.named_parameters(), strict=True
    ):
        assert name == other and isinstance(leaf.data, DTensor) and isinstance(wanted.data, DTensor)
        assert leaf.data.placements == (Shard(min(1, leaf.ndim - 1)),) and leaf.requires_grad
        equal.append(torch.equal(leaf.data.full_tensor(), wanted.data.full_tensor()))
    return all(equal) and len(equal) == 4


def test_a_sharded_meta_model_is_materialised(four_ranks: Ranks, tmp_path: Path):
    assert four_ranks.run(on_rank_materialise, tmp_path / "ckpt") == [True] * 4
