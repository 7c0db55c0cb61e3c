"""Objects that DCP has pickled stop no load of tensors, and land in no target of another type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

import xckpt
from xckpt.torch.dcp import XckptStorageReader, XckptStorageWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A plain DCP folder with a set among tensors."""
    path = tmp_path / "plain"
    state = {"model": {"w": torch.arange(6.0)}, "seen": {1, 2}, "step": 7}
    dcp.save(state, checkpoint_id=path)
    return path


def test_a_pickled_object_is_named_and_the_rest_is_loaded(folder: Path) -> None:
    with pytest.warns(UserWarning, match=r"opaque=True.*\n  - seen: .*set"):
        whole = xckpt.load(folder)
    assert set(whole) == {"model", "step"} and whole["step"] == 7
    like = {"model": {"w": torch.zeros(6)}, "step": 0}
    with pytest.warns(UserWarning, match="seen"):
        loaded = xckpt.load(folder, like)
    assert torch.equal(loaded["model"]["w"], torch.arange(6.0))


def test_it_is_refused_where_it_is_asked_for(folder: Path) -> None:
    like = {"model": {"w": torch.zeros(6)}, "step": 0, "seen": 0}
    with (
        pytest.warns(UserWarning, match="seen"),
        pytest.raises(xckpt.TreeMismatchError, match="seen: wanted, but not in the checkpoint"),
    ):
        xckpt.load(folder, like)


@pytest.mark.parametrize("value", [7, 0.5, True, None, "h\u00e9", 1 << 80, b"x", 2j])
def test_a_plain_value_of_dcp_save_is_a_value(tmp_path: Path, value: Any) -> None:
    state = {"w": torch.ones(2), "v": value}
    dcp.save(state, storage_writer=XckptStorageWriter(tmp_path / "ckpt"))
    assert xckpt.open(tmp_path / "ckpt")["v"] == value
    loaded = xckpt.load(tmp_path / "ckpt", {"w": torch.zeros(2), "v": value})
    assert loaded["v"] == value and type(loaded["v"]) is type(value)
    target: dict[str, Any] = {"w": torch.zeros(2), "v": value}
    dcp.load(target, storage_reader=XckptStorageReader(tmp_path / "ckpt"))
    assert target["v"] == value and type(target["v"]) is type(value)


def test_bytes_of_a_pickle_land_in_no_number(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "seen": {1, 2}}
    dcp.save(state, storage_writer=XckptStorageWriter(tmp_path / "ckpt"))
    with pytest.raises(xckpt.TreeMismatchError, match=r"seen: .*serialised, not a Python int"):
        xckpt.load(tmp_path / "ckpt", {"w": torch.zeros(2), "seen": 0})
    loaded = xckpt.load(tmp_path / "ckpt", {"w": torch.zeros(2), "seen": b""})
    assert isinstance(loaded["seen"], bytes)
    target: dict[str, Any] = {"w": torch.zeros(2), "seen": set()}
    dcp.load(target, storage_reader=XckptStorageReader(tmp_path / "ckpt"))
    assert target["seen"] == {1, 2}
