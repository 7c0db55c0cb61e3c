"""`install`: `dcp.save` and `dcp.load` with nothing but a ``checkpoint_id``, and back again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import xckpt
from tests.support.ranks import Ranks
from tests.torch.dcp.states import on_rank_blank, on_rank_check, on_rank_state
from xckpt.torch.dcp import install, installed, uninstall

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((3, 2), value)}, "step": int(value)}


def loaded(path: Path) -> dict[str, Any]:
    target = state(0)
    dcp.load(target, checkpoint_id=path, no_dist=True)
    return target


def save(path: Path, value: float) -> None:
    dcp.save(state(value), checkpoint_id=path, no_dist=True)


def test_installed_within_a_block_alone(tmp_path: Path) -> None:
    with installed():
        save(tmp_path / "ours", 1)
        assert loaded(tmp_path / "ours")["step"] == 1
        with installed(options=xckpt.SaveOptions(chunk_bytes=8)):
            save(tmp_path / "small", 2)
        future: Any = dcp.async_save(state(3), checkpoint_id=tmp_path / "later", no_dist=True)
        future.result()
    save(tmp_path / "torchs", 4)
    assert xckpt.open(tmp_path / "ours").verify() == []
    grids = [xckpt.open(tmp_path / name).array("model/w").chunks for name in ("ours", "small")]
    assert grids[0] != grids[1]
    assert xckpt.open(tmp_path / "later")["step"] == 3
    assert (tmp_path / "torchs" / ".metadata").exists()


def test_what_torch_wrote_is_read_by_torch(tmp_path: Path) -> None:
    save(tmp_path / "torchs", 5)
    with installed():
        assert loaded(tmp_path / "torchs")["step"] == 5


def test_a_storage_that_is_given_is_used(tmp_path: Path) -> None:
    with installed():
        writer = dcp.FileSystemWriter(tmp_path / "given")
        dcp.save(state(6), storage_writer=writer, no_dist=True)
        with pytest.raises(RuntimeError, match="checkpoint_id"):
            dcp.save(state(6), no_dist=True)
    assert (tmp_path / "given" / ".metadata").exists()


def test_uninstall_undoes_any_number_of_installs(tmp_path: Path) -> None:
    try:
        install()
        install()
        save(tmp_path / "ours", 7)
    finally:
        uninstall()
    save(tmp_path / "torchs", 8)
    assert (tmp_path / "ours" / "xckpt.json").exists()
    assert (tmp_path / "torchs" / ".metadata").exists()


def on_rank_by_path(rank: int, path: Path) -> None:
    with installed():
        dcp.save(on_rank_state("4"), checkpoint_id=path)
        target = on_rank_blank("2x2")
        dcp.load(target, checkpoint_id=path)
    on_rank_check(target)


def test_four_ranks(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(on_rank_by_path, tmp_path / "ckpt")
    assert xckpt.open(tmp_path / "ckpt").verify() == []
