"""What cannot be stored or loaded is refused by name, and nothing is left of the attempt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Partial

import xckpt
from tests.support.ranks import Ranks
from tests.support.torch_meshes import on_rank_mesh
from tests.torch.dcp.folders import save_alone
from xckpt.torch.dcp import XckptStorageReader, XckptStorageWriter

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is", "ignore:.*quantize", "ignore:.*TypedStorage"
)


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def four_bits() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)


@pytest.mark.parametrize(
    "make, complaint",
    [
        (lambda: torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "layout torch.sparse_csr"),
        (lambda: torch.ones(3, dtype=torch.complex32), "dtype torch.complex32 cannot be stored"),
        (lambda: torch.ones(3, device="meta"), "meta device"),
        (quantised, "dtype torch.qint8 cannot be stored"),
        (four_bits, r"float4_e2m1fn_x2 cannot be stored; .* \.view\(torch\.uint8\)"),
        (lambda: torch.zeros((1,) * 33), "33 dimensions, .* at most 32: reshape it first"),
    ],
    ids=["sparse", "csr", "complex32", "meta", "quantised", "float4", "33 dimensions"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_tensor_that_cannot_be_saved(make: Any, complaint: str, tmp_path: Path):
    state = {"model": {"odd": make(), "fine": torch.ones(2)}}
    # From 2.15 on torch itself asks for the strides of a tensor, before xckpt sees it.
    expected = rf"model\.odd: .*{complaint}|Sparse CSR tensors do not have strides"
    with pytest.raises(dcp.CheckpointException, match=expected):
        dcp.save(state, storage_writer=XckptStorageWriter(tmp_path / "a"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "make, complaint",
    [
        (four_bits, r"w: .*float4_e2m1fn_x2 cannot be stored; .* \.view\(torch\.uint8\)"),
        (lambda: torch.zeros((1,) * 33), "w: 33 dimensions, .* at most 32: reshape it first"),
        (lambda: torch.zeros(1).expand(1 << 57), r"w: impossible shape \(144115.* less of it"),
    ],
    ids=["float4", "33 dimensions", "2^57 elements"],
)
def test_a_save_refuses_them_too(make: Any, complaint: str, tmp_path: Path):
    with pytest.raises(xckpt.UnsupportedLeafError, match=complaint):
        xckpt.save(tmp_path / "a", {"w": make()})
    assert list(tmp_path.iterdir()) == []


def test_a_reader_on_a_folder_of_dcp_names_the_import(tmp_path: Path):
    save_alone({"w": torch.ones(2)}, tmp_path / "dcp")
    with pytest.raises(xckpt.NotACheckpointError, match=r"import_checkpoint\('.*dcp', new_path\)"):
        XckptStorageReader(tmp_path / "dcp").read_metadata()


def test_all_that_cannot_be_saved_is_listed(tmp_path: Path):
    state = {"a": torch.eye(3).to_sparse(), "b": torch.ones(3, dtype=torch.complex32)}
    with pytest.raises(dcp.CheckpointException, match="2 leaves cannot be saved") as caught:
        dcp.save(state, storage_writer=XckptStorageWriter(tmp_path / "a"))
    assert "- a: " in str(caught.value) and "- b: " in str(caught.value)


def on_rank_partial(rank: int, path: Path) -> str:
    partial = DTensor.from_local(torch.ones(4), on_rank_mesh("4"), [Partial()])
    try:
        dcp.save({"p": partial}, storage_writer=XckptStorageWriter(path))
    except dcp.CheckpointException as error:
        return ",".join(type(e).__name__ for e, _ in error.failures.values())
    return ""


def test_a_partial_placement(four_ranks: Ranks, tmp_path: Path):
    answers = four_ranks.run(on_rank_partial, tmp_path / "ckpt")
    assert answers == ["ValueError,ValueError,ValueError,ValueError"] * 4
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_that_torch_lacks(tmp_path: Path):
    """Refused when it is asked for; the rest can be loaded."""
    xckpt.save(tmp_path / "a", {"w": np.ones(3), "odd": np.ones(3, ml_dtypes.float8_e3m4)})
    state: dict[str, Any] = {"w": torch.zeros(3, dtype=torch.float64)}
    dcp.load(state, storage_reader=XckptStorageReader(tmp_path / "a"))
    assert state["w"].tolist() == [1, 1, 1]
    with pytest.raises(dcp.CheckpointException, match="odd: torch has no dtype float8_e3m4"):
        dcp.load({"odd": torch.zeros(3)}, storage_reader=XckptStorageReader(tmp_path / "a"))


def test_keys_that_dots_make_one(tmp_path: Path):
    xckpt.save(tmp_path / "a", {"a": {"b": np.ones(1)}, "a.b": np.zeros(1)})
    with pytest.raises(dcp.CheckpointException, match=r"a\.b: both a/b and a\.b"):
        dcp.load({"a.b": torch.zeros(1)}, storage_reader=XckptStorageReader(tmp_path / "a"))


def on_rank_contradict(rank: int, path: Path) -> str:
    """One rank's leaf is another's container."""
    state = {"x": torch.ones(2)} if rank else {"x": {"y": torch.ones(2)}}
    try:
        dcp.save(state, storage_writer=XckptStorageWriter(path))
    except dcp.CheckpointException as error:
        return str(error)
    return ""


def test_a_leaf_that_is_a_container_elsewhere(four_ranks: Ranks, tmp_path: Path):
    for answer in four_ranks.run(on_rank_contradict, tmp_path / "ckpt"):
        assert "a leaf and a container have this name" in answer
    assert list(tmp_path.iterdir()) == []


def test_an_expanded_target_is_refused(tmp_path: Path):
    dcp.save({"w": torch.arange(3.0)}, storage_writer=XckptStorageWriter(tmp_path / "a"))
    with pytest.raises(dcp.CheckpointException, match="single memory location"):
        dcp.load({"w": torch.zeros(1).expand(3)}, storage_reader=XckptStorageReader(tmp_path / "a"))


def test_a_missing_key_is_named_by_torch(tmp_path: Path):
    dcp.save({"w": torch.ones(3)}, storage_writer=XckptStorageWriter(tmp_path / "a"))
    with pytest.raises(dcp.CheckpointException, match="Missing key in checkpoint state_dict: v"):
        dcp.load({"v": torch.ones(3)}, storage_reader=XckptStorageReader(tmp_path / "a"))
