"""`dcp.save` in one of several processes that nothing joins says so, once, by name."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import xckpt
from xckpt.torch.dcp import XckptStorageWriter

STATE = {"w": torch.ones(2)}


def said(path: Path, times: int = 1) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(times):
            dcp.save(STATE, storage_writer=XckptStorageWriter(path), no_dist=True)
    assert xckpt.load(path, no_dist=True)["w"].tolist() == [1, 1]
    return [text for each in caught if "processes" in (text := str(each.message))]


def test_a_process_that_a_launcher_started_with_others_is_warned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    (text,) = said(tmp_path / "a", times=2)
    assert text == (
        "WORLD_SIZE says that there are 4 processes (torchrun), but no process group joins them: "
        f"dcp.save takes this process alone, and each that saves to {tmp_path / 'a'} replaces what "
        "another has saved there. Call torch.distributed.init_process_group() first; "
        "no_dist=True on one of them is fine"
    )


def test_one_process_or_a_group_is_not_warned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said(tmp_path / "a") == []
    monkeypatch.setenv("WORLD_SIZE", "4")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert said(tmp_path / "b") == []
    finally:
        dist.destroy_process_group()
