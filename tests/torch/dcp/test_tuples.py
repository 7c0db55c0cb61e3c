"""A tuple is one object to DCP, which pickles it: what a load says, and how to get leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import xckpt
from xckpt.torch.dcp import (
    XckptStorageReader,
    XckptStorageWriter,
    export_checkpoint,
    import_checkpoint,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {"w": torch.ones(2), "betas": (0.9, 0.999), "deep": {"pair": [1, (torch.ones(3), 2)]}}
    dcp.save(state, storage_writer=XckptStorageWriter(tmp_path / "dcp"), no_dist=True)
    return tmp_path / "dcp"


def test_dcp_gets_its_tuples_back(saved: Path) -> None:
    state = {"betas": (0.0, 0.0), "deep": {"pair": [0, (torch.zeros(3), 0)]}}
    dcp.load(state, storage_reader=XckptStorageReader(saved), no_dist=True)
    assert state["betas"] == (0.9, 0.999)
    assert state["deep"]["pair"][1][0].tolist() == [1, 1, 1]


def test_leaves_inside_of_a_tuple_are_refused_with_the_way_to_them(saved: Path) -> None:
    like = {"w": torch.zeros(2), "deep": {"pair": [0, (torch.zeros(3), 0)]}}
    with pytest.raises(xckpt.TreeMismatchError) as refused:
        xckpt.load(saved, like, unexpected="ignore")
    text = str(refused.value)
    assert "deep/pair/1/0: wanted, but the checkpoint holds deep/pair as one object" in text
    assert "export_checkpoint and import_checkpoint of xckpt.torch.dcp, as leaves" in text


def test_the_default_device_does_not_matter(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "own", {"pair": (torch.ones(3), 2)})
    state = {"pair": (torch.zeros(3), 0)}
    with torch.device("meta"):
        dcp.load(state, storage_reader=XckptStorageReader(tmp_path / "own"), no_dist=True)
    assert state["pair"][0].tolist() == [1, 1, 1]


def test_a_tensor_in_place_of_a_tuple_is_refused(saved: Path) -> None:
    like = {"w": torch.zeros(2), "betas": torch.zeros(2)}
    with pytest.raises(xckpt.TreeMismatchError, match="betas: the checkpoint holds an object that"):
        xckpt.load(saved, like, unexpected="ignore")


def test_through_a_folder_of_dcp_tuples_become_leaves(saved: Path, tmp_path: Path) -> None:
    export_checkpoint(saved, tmp_path / "folder")
    import_checkpoint(tmp_path / "folder", tmp_path / "leaves")
    loaded = xckpt.load(tmp_path / "leaves")
    assert loaded["betas"] == (0.9, 0.999)
    assert loaded["deep"]["pair"][1][0].tolist() == [1, 1, 1]
