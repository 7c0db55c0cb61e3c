"""torch_xla's own planners, through torch's distributed checkpoints, over our storage."""

# pyright: reportMissingImports=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner, SPMDSavePlanner

import xckpt
from tests.support.jax_meshes import same
from tests.xla.meshes import DEVICES, Layout, assert_holds, device, numbers
from xckpt.torch.dcp import XckptStorageReader, XckptStorageWriter
from xckpt.torch.xla import SPMDSavePlanner as OurSavePlanner

pytestmark = [
    # Theirs: torch about being alone, torch_xla about its own planner and indexing.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:The function definition for SavePlanner:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning"),
]

STRAIGHT = tuple(range(DEVICES))
TILED = Layout(STRAIGHT, (2, 4), (0, 1))
ROWS = Layout(STRAIGHT, (2, 4), ((1, 0), None))
WHOLE = Layout(STRAIGHT, (8,), (None, None))
ARRAY = numbers((7, 5), "float32")


def state(array: Any, layout: Layout) -> dict[str, Any]:
    plain = torch.tensor(array).to(device())
    return {"w": layout.put(array), "replicated": WHOLE.put(array), "plain": plain}


def assert_state(found: dict[str, Any]) -> None:
    assert_holds(found["w"], ARRAY)
    assert_holds(found["replicated"], ARRAY)
    same(found["plain"].cpu().numpy(), ARRAY)


def test_torch_xla_writes_through_xckpt_and_all_adapters_read(tmp_path: Path) -> None:
    writer = XckptStorageWriter(tmp_path / "ckpt")
    dcp.save(state(ARRAY, TILED), storage_writer=writer, planner=SPMDSavePlanner(), no_dist=True)
    for loaded in xckpt.load(tmp_path / "ckpt").values():
        same(loaded, ARRAY)
    target = state(np.zeros_like(ARRAY), ROWS)
    xckpt.load_into(tmp_path / "ckpt", target)
    assert_state(target)


@pytest.mark.parametrize("planner", [None, OurSavePlanner])
def test_torch_xla_reads_what_we_wrote(
    planner: type[OurSavePlanner] | None, tmp_path: Path
) -> None:
    xckpt.save(tmp_path / "ckpt", state(ARRAY, TILED), planner=planner and planner())
    target = state(np.zeros_like(ARRAY), ROWS)
    reader = XckptStorageReader(tmp_path / "ckpt")
    dcp.load(target, storage_reader=reader, planner=SPMDLoadPlanner(), no_dist=True)
    assert_state(target)


def test_what_torch_xla_loses_is_saved_by_us(tmp_path: Path) -> None:
    """A tensor cut along one mesh axis and replicated along the other."""
    target = {"w": Layout(STRAIGHT, (2, 4), (0, None)).put(ARRAY)}
    metadata = xckpt.save(tmp_path / "ckpt", target)
    assert list(metadata.state_dict_metadata) == ["w"]
    same(xckpt.load(tmp_path / "ckpt")["w"], ARRAY)
