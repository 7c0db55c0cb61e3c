"""A save in the background, while training goes on changing the tensors on the devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import xckpt
from tests.support.jax_meshes import same
from tests.xla.meshes import (
    DEVICES,
    Layout,
    Transfers,
    device,
    inner,
    numbers,
    stager_of_torch_xla,
)
from xckpt.staging import BlockingAsyncStager
from xckpt.torch.xla import CpuShards

STRAIGHT = tuple(range(DEVICES))
ARRAY = numbers((7, 5), "float32")
LAYOUTS = {
    "tiled": Layout(STRAIGHT, (2, 4), (0, 1)),
    "partial": Layout(STRAIGHT, (2, 4), (0, None)),
    "replicated": Layout(STRAIGHT, (8,), (None, None)),
}


@pytest.mark.parametrize("cached", [False, True], ids=["fresh", "cached"])
def test_what_is_changed_after_staging_is_saved_as_it_was(
    cached: bool, tmp_path: Path, transfers: Transfers
) -> None:
    stager = BlockingAsyncStager(cache_staged_state_dict=cached, pin_memory=False)
    for step in range(3):
        state: dict[str, Any] = {name: layout.put(ARRAY) for name, layout in LAYOUTS.items()}
        state["plain"] = torch.tensor(ARRAY).to(device())
        before = transfers.to_host
        saving = xckpt.save_async(tmp_path / str(step), state, stager=stager)
        assert transfers.to_host == before + 2
        for leaf in state.values():
            inner(leaf).zero_()
        metadata = saving.result()
        assert transfers.to_host == before + 2
        for loaded in xckpt.load(tmp_path / str(step)).values():
            same(loaded, ARRAY)
        tiled: Any = metadata.state_dict_metadata["tiled"]
        assert str(tiled.sharding) == "PartitionSpec(dim0, dim1) on dim0=2 x dim1=4"
    stager.close()


def test_shards_that_are_on_the_host_already_are_copied_again(tmp_path: Path) -> None:
    state = {name: layout.put(ARRAY) for name, layout in LAYOUTS.items()}
    ours = {name: CpuShards.of(leaf) for name, leaf in state.items()}
    theirs = stager_of_torch_xla(state)
    saving = xckpt.save_async(tmp_path / "ckpt", {"ours": ours, "theirs": theirs})
    for shards in ours.values():
        for tensor in shards.tensors:
            tensor.zero_()
    for shards in theirs.values():
        for tensor in [shards] if isinstance(shards, torch.Tensor) else shards.shards:
            getattr(tensor, "data", tensor).zero_()
    saving.result()
    for group in xckpt.load(tmp_path / "ckpt").values():
        for loaded in group.values():
            same(loaded, ARRAY)
