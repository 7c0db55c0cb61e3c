"""Saved by `dcp.save` through us, loaded by `dcp.load` through us, and the other ways round."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zarr
from jax.sharding import NamedSharding, PartitionSpec

import xckpt
from tests.support.ranks import Ranks
from tests.torch.dcp.states import on_rank_blank, on_rank_check, on_rank_state, whole
from xckpt.torch.dcp import XckptStorageReader, XckptStorageWriter


def on_rank_journey(rank: int, path: Path, saved: str, loaded: str) -> list[str]:
    """Save on one mesh and load on another; the mesh "2x2" has a replicated axis."""
    metadata = dcp.save(on_rank_state(saved), storage_writer=XckptStorageWriter(path))
    assert metadata.storage_meta is not None
    assert metadata.storage_meta.checkpoint_id == path
    state = on_rank_blank(loaded)
    dcp.load(state, storage_reader=XckptStorageReader(path))
    on_rank_check(state)
    return list(metadata.state_dict_metadata)


def test_resharding_from_rows_to_columns(four_ranks: Ranks, tmp_path: Path):
    answers = four_ranks.run(on_rank_journey, tmp_path / "ckpt", "4", "2x2")
    assert answers[0] == answers[3]
    assert set(answers[0]) >= {"model.layers.0.weight", "opt.0", "opt.1.empty", "args.betas"}
    assert os.listdir(tmp_path) == ["ckpt"]


def test_what_dcp_wrote_xckpt_reads_as_a_tree(four_ranks: Ranks, tmp_path: Path):
    four_ranks.run(on_rank_journey, tmp_path / "ckpt", "2x2", "4")
    stored = xckpt.open(tmp_path / "ckpt")
    leaf = stored["model/layers.0.weight"]
    assert isinstance(leaf, xckpt.StoredArray)
    np.testing.assert_array_equal(leaf[2:5], whole()[2:5])
    tree = xckpt.load(tmp_path / "ckpt")
    np.testing.assert_array_equal(tree["model"]["same"], whole())
    assert tree["opt"][0] == 3.0
    assert tree["opt"][1]["empty"].shape == (0, 3)
    assert stored.verify() == []


def on_rank_load_own(rank: int, path: Path) -> None:
    state: dict[str, Any] = on_rank_blank("4")
    dcp.load(state, storage_reader=XckptStorageReader(path))
    on_rank_check(state)


def on_rank_save_own(rank: int, path: Path) -> None:
    xckpt.save(path, on_rank_state("2x2"))
    dist.barrier()


def test_what_xckpt_wrote_dcp_loads(four_ranks: Ranks, tmp_path: Path):
    four_ranks.run(on_rank_save_own, tmp_path / "ckpt")
    four_ranks.run(on_rank_load_own, tmp_path / "ckpt")


def test_what_dcp_wrote_jax_loads_in_its_own_sharding(four_ranks: Ranks, tmp_path: Path):
    four_ranks.run(on_rank_journey, tmp_path / "ckpt", "2x2", "4")
    mesh = jax.make_mesh((2, 3), ("data", "model"), devices=jax.devices()[:6])
    sharding = NamedSharding(mesh, PartitionSpec(None, "model"))
    like: Any = jax.ShapeDtypeStruct((11, 6), "float32", sharding=sharding)
    loaded = xckpt.load(tmp_path / "ckpt", {"model": {"layers.0.weight": like}}, strict=False)
    leaf = loaded["model"]["layers.0.weight"]
    assert leaf.sharding == sharding and len(leaf.addressable_shards) == 6
    for shard in leaf.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole()[shard.index])


def test_what_dcp_wrote_zarr_python_opens(four_ranks: Ranks, tmp_path: Path):
    four_ranks.run(on_rank_journey, tmp_path / "ckpt", "4", "4")
    group: Any = zarr.open_group(tmp_path / "ckpt", mode="r")
    np.testing.assert_array_equal(group["model/layers.0.weight"][3:7], whole()[3:7])
    np.testing.assert_array_equal(group["model/same"], whole())
    assert "step" not in group  # a plain Python value, so it is in the manifest
