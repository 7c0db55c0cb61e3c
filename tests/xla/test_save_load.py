"""Saved from XLA devices, loaded anywhere; saved anywhere, loaded onto XLA devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import zarr
from hypothesis import strategies as st

import xckpt
from tests.jax.meshes import same
from tests.xla.meshes import (
    DTYPES,
    Array,
    Transfers,
    assert_holds,
    device,
    mark,
    numbers,
    shapes,
    sharding,
    spmd,
)
from xckpt.torch.xla import SPMDSavePlanner

MESH = (2, 4)
KINDS = {
    "tiled": (0, 1),
    "replicated": (None, None),
    "partially replicated": (0, None),
    "several axes": ((0, 1), None),
    "several axes backwards": (None, (1, 0)),
    "transposed": (1, 0),
}


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    return numbers(draw(shapes()), draw(st.sampled_from(DTYPES)))


@pytest.mark.parametrize("planner", [None, SPMDSavePlanner])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_sharding_is_saved_and_loaded(
    kind: str, planner: Any, tmp_path: Path, transfers: Transfers
) -> None:
    array = numbers((7, 11), "float32")
    state = {"w": mark(torch.tensor(array).to(device()), MESH, KINDS[kind]), "step": 3}
    xckpt.save(tmp_path / "ckpt", state, planner=planner and planner())
    assert transfers.to_host == (0 if kind == "replicated" else 1)
    group: Any = zarr.open_group(tmp_path / "ckpt", mode="r")
    same(group["w"][:], array)

    loaded = xckpt.load(tmp_path / "ckpt", state)
    assert (transfers.to_host, transfers.to_devices) == (0 if kind == "replicated" else 1, 1)
    assert_holds(loaded["w"], array)
    assert sharding(loaded["w"]) == sharding(state["w"])
    assert type(loaded["w"]) is spmd.XLAShardedTensor
    assert loaded["w"].partition_spec == KINDS[kind]
    assert loaded["step"] == 3
