"""Shards of every kind that DCP knows, saved on one layout and loaded into another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import xckpt
from tests.support.examples import examples
from tests.support.ranks import Ranks
from tests.support.torch_meshes import Case, cases, on_rank_distribute, on_rank_mesh
from tests.torch.sharded.test_dtensor import assert_holds, held_by
from xckpt.torch.adapter import ADAPTER
from xckpt.torch.dcp import XckptStorageReader, XckptStorageWriter


@st.composite
def journeys(draw: st.DrawFn) -> tuple[list[Case], list[Case]]:
    saved = draw(st.lists(cases(), min_size=1, max_size=4))
    return saved, [draw(cases(shape=case.shape, dtype=case.dtype)) for case in saved]


def on_rank_journey(rank: int, path: Path, saved: list[Case], loaded: list[Case]) -> list[Any]:
    state = {"model": {f"w.{i}": on_rank_distribute(case) for i, case in enumerate(saved)}}
    dcp.save(state, storage_writer=XckptStorageWriter(path))
    target = {"model": {f"w.{i}": on_rank_distribute(case) for i, case in enumerate(loaded)}}
    with torch.no_grad():
        for like in target["model"].values():
            like.to_local().zero_()
    dcp.load(target, storage_reader=XckptStorageReader(path))
    held = []
    for like in target["model"].values():
        held.append(held_by(ADAPTER.describe(like, "w")))
    return held


@examples(4, 150)
@given(journey=journeys())
def test_any_dtensors_come_back_on_any_mesh(
    four_ranks: Ranks, folders: Iterator[Path], journey: tuple[list[Case], list[Case]]
):
    saved, loaded = journey
    path = next(folders)
    answers = four_ranks.run(on_rank_journey, path, saved, loaded)
    stored: Any = xckpt.open(path)
    for i, (before, case) in enumerate(zip(saved, loaded, strict=True)):
        assert np.array_equal(stored[f"model/w.{i}"], before.array())
        assert_holds([held[i] for held in answers], case.array())


def on_rank_enumerable(rank: int, seed: int) -> ShardedTensor:
    """Boxes of all sizes: rank 0 has two, rank 1 none, and no grid has chunks in one box each."""
    boxes = {
        0: [((0, 0), (3, 7)), ((7, 2), (4, 5))],
        1: [],
        2: [((3, 0), (4, 7))],
        3: [((7, 0), (4, 2))],
    }[rank]
    full = torch.arange(77.0).reshape(11, 7) + seed
    shards = [
        LocalShard.from_tensor_and_offsets(
            full[a : a + n, b : b + m].clone(), shard_offsets=[a, b], rank=rank
        )
        for (a, b), (n, m) in boxes
    ]
    return init_from_local_shards(shards, 11, 7)


def on_rank_sharded(rank: int, path: Path) -> None:
    state = {"table": on_rank_enumerable(rank, 0)}
    dcp.save(state, storage_writer=XckptStorageWriter(path))
    full = torch.arange(77.0).reshape(11, 7)
    mesh = on_rank_mesh("4")
    spread = distribute_tensor(torch.zeros(11, 7), mesh, [Shard(1)], src_data_rank=None)
    columns: dict[str, Any] = {"table": spread}
    dcp.load(columns, storage_reader=XckptStorageReader(path))
    assert torch.equal(columns["table"].full_tensor(), full)
    again = {"table": on_rank_enumerable(rank, 100)}
    dcp.load(again, storage_reader=XckptStorageReader(path))
    for old, new in zip(state["table"].local_shards(), again["table"].local_shards(), strict=True):
        assert torch.equal(old.tensor, new.tensor)


def test_enumerable_sharding_spec(four_ranks: Ranks, tmp_path: Path):
    four_ranks.run(on_rank_sharded, tmp_path / "ckpt")
    leaf: Any = xckpt.open(tmp_path / "ckpt")["table"]
    assert np.array_equal(leaf, np.arange(77.0).reshape(11, 7))


def on_rank_local_shards(rank: int, path: Path) -> None:
    """Table-wise embeddings: `LocalShardsWrapper` tells DCP of its shards through the hooks."""
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    full = torch.arange(5 * 8.0).reshape(5, 8)
    mesh = on_rank_mesh("4")
    columns = [[0, 3], [3, 1], [4, 0], [4, 4]][rank]

    def wrapped(values: torch.Tensor) -> DTensor:
        start, size = columns
        shards = [values[:, start : start + size].clone()] if size else []
        offsets = [(0, start)] if size else []
        local = LocalShardsWrapper(shards, offsets)
        return DTensor.from_local(
            local, mesh, [Shard(1)], run_check=False, shape=full.shape, stride=(8, 1)
        )

    dcp.save({"tables": wrapped(full)}, storage_writer=XckptStorageWriter(path))
    target = {"tables": wrapped(torch.zeros(5, 8))}
    dcp.load(target, storage_reader=XckptStorageReader(path))
    local: Any = target["tables"].to_local()
    start, size = columns
    for shard in local.local_shards():
        assert torch.equal(shard, full[:, start : start + size])


def test_local_shards_wrapper_tables(four_ranks: Ranks, tmp_path: Path):
    four_ranks.run(on_rank_local_shards, tmp_path / "ckpt")
    leaf: Any = xckpt.open(tmp_path / "ckpt")["tables"]
    assert np.array_equal(leaf, np.arange(40.0).reshape(5, 8))


def on_rank_cases(rank: int, path: Path) -> list[int]:
    """Uneven, empty, 0-d and replicated tensors; how many bytes this rank has written."""
    mesh, hybrid = on_rank_mesh("4"), on_rank_mesh("2x2")

    def spread(full: torch.Tensor, over: Any, *placements: Any) -> DTensor:
        return distribute_tensor(full, over, placements, src_data_rank=None)

    state: dict[str, Any] = {
        "uneven": spread(torch.arange(5.0), mesh, Shard(0)),
        "few": spread(torch.arange(2.0), mesh, Shard(0)),
        "empty": spread(torch.zeros(0, 3), mesh, Shard(0)),
        "scalar": spread(torch.tensor(4.0), mesh, Replicate()),
        "hsdp": spread(torch.arange(8.0).reshape(4, 2), hybrid, Replicate(), Shard(0)),
        "plain": torch.arange(3),
    }
    written = []

    class Counting(XckptStorageWriter):
        def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
            done = super().write_data(plan, planner)
            written.append(done.value()[0].size_in_bytes)
            return done

    dcp.save(state, storage_writer=Counting(path))
    blank = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(blank, storage_reader=XckptStorageReader(path))
    for name, tensor in state.items():
        want = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        got: Any = blank[name]
        assert torch.equal(got.full_tensor() if isinstance(got, DTensor) else got, want), name
    return written


def test_uneven_empty_scalar_and_replicated(four_ranks: Ranks, tmp_path: Path):
    """Each element is written once, by whomever."""
    written = four_ranks.run(on_rank_cases, tmp_path / "ckpt")
    assert sum(itertools.chain(*written)) == 4 * (5 + 2 + 0 + 1 + 8) + 8 * 3
    assert xckpt.open(tmp_path / "ckpt").verify() == []


def on_rank_own_keys(rank: int, path: Path) -> None:
    """Pipeline stages: each rank has leaves of its own."""
    mine = {f"stage.{rank}": torch.full((2,), float(rank)), "same": torch.ones(3)}
    dcp.save({"model": mine}, storage_writer=XckptStorageWriter(path))
    blank = {name: torch.zeros_like(tensor) for name, tensor in mine.items()}
    dcp.load({"model": blank}, storage_reader=XckptStorageReader(path))
    assert all(torch.equal(blank[name], mine[name]) for name in mine)
    dist.barrier()


def test_leaves_that_live_on_one_rank(four_ranks: Ranks, tmp_path: Path):
    four_ranks.run(on_rank_own_keys, tmp_path / "ckpt")
    tree = xckpt.load(tmp_path / "ckpt")["model"]
    assert set(tree) == {"same", *(f"stage.{rank}" for rank in range(4))}
