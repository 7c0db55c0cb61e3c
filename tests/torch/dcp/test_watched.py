"""What `dcp.save` and `dcp.load` through us take: a line, the metrics function, a bar."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import xckpt
from tests.api.test_progress_bar import Terminal
from tests.support.ranks import Ranks
from tests.torch.dcp.folders import alone, save_alone
from tests.torch.dcp.states import on_rank_blank, on_rank_state
from xckpt.torch.dcp import (
    XckptStorageReader,
    XckptStorageWriter,
    export_checkpoint,
    import_checkpoint,
)

STATE = {"w": torch.zeros(512, 256), "step": 3}


def test_a_save_and_a_load_are_a_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ckpt"
    with caplog.at_level(logging.INFO, "xckpt"), alone():
        dcp.save(STATE, storage_writer=XckptStorageWriter(path), no_dist=True)
        dcp.load({"w": torch.ones(512, 256)}, storage_reader=XckptStorageReader(path), no_dist=True)
    saved, loaded = (each.getMessage() for each in caplog.records if each.name == "xckpt")
    assert saved.startswith(f"dcp.save {path}: rank 0 of 1 wrote 0.50 MiB in ")
    assert loaded.startswith(f"dcp.load {path}: rank 0 of 1 read 0.50 MiB in ")
    assert saved.endswith(", 0.00 s waiting for other ranks")


def test_failures_have_their_metrics(tmp_path: Path) -> None:
    seen: list[xckpt.Metrics] = []
    options = xckpt.LoadOptions(metrics=seen.append)
    with pytest.raises(xckpt.NotACheckpointError):
        XckptStorageReader(tmp_path / "none", options=options).read_metadata()
    xckpt.save(tmp_path / "ckpt", {"w": 1})
    saving = xckpt.SaveOptions(metrics=seen.append)
    writer = XckptStorageWriter(tmp_path / "ckpt", overwrite=False, options=saving)
    with alone(), pytest.raises(dcp.CheckpointException):
        dcp.save(STATE, storage_writer=writer, no_dist=True)
    assert [took.error for took in seen] == ["NotACheckpointError", "CheckpointExistsError"]


def test_a_bar_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    path, state = tmp_path / "ckpt", {"w": torch.ones(512, 256)}
    with alone():
        writer = XckptStorageWriter(path, options=xckpt.SaveOptions(progress=True))
        dcp.save(STATE, storage_writer=writer, no_dist=True)
        reader = XckptStorageReader(path, options=xckpt.LoadOptions(progress=True))
        dcp.load(state, storage_reader=reader, no_dist=True)
    drawn = terminal.getvalue()
    assert "dcp.save ckpt" in drawn and "dcp.load ckpt" in drawn and "KiB" in drawn


def on_rank_watched(rank: int, path: Path) -> list[xckpt.Metrics]:
    """Save and load; rank 1 comes late to the save's writing. Rank 2 does not listen."""
    seen: list[xckpt.Metrics] = []
    metrics = None if rank == 2 else seen.append

    class Late(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> dcp.SavePlan:
            dist.barrier()
            time.sleep(0.5 if rank == 1 else 0)
            return super().create_local_plan()

    writer = XckptStorageWriter(path, options=xckpt.SaveOptions(metrics=metrics))
    dcp.save(on_rank_state("4"), storage_writer=writer, planner=Late())
    reader = XckptStorageReader(path, options=xckpt.LoadOptions(metrics=metrics))
    dcp.load(on_rank_blank("4"), storage_reader=reader)
    return seen


def test_each_rank_has_its_metrics(four_ranks: Ranks, tmp_path: Path) -> None:
    answers = four_ranks.run(on_rank_watched, tmp_path / "ckpt")
    assert answers[2] == []
    for rank in (0, 1, 3):
        saved, loaded = answers[rank]
        assert (saved.operation, saved.rank, saved.ranks) == ("dcp.save", rank, 4)
        assert (loaded.operation, loaded.rank, loaded.ranks) == ("dcp.load", rank, 4)
        assert saved.bytes > 0 and loaded.bytes > 0 and not saved.error and not loaded.error
        assert 0 < saved.waited_seconds < saved.seconds
        common = ["describe", "plan", "write", "commit"]
        assert list(saved.steps) == (common if rank == 0 else ["describe", "write"])
    first = answers[0][0]  # it begins when rank 1 does, and waits for it
    assert first.waited_seconds + first.steps["describe"] > 0.4


def test_imports_and_exports_are_conversions(tmp_path: Path) -> None:
    seen: list[xckpt.Metrics] = []
    save_alone(STATE, tmp_path / "dcp")
    save_options = xckpt.SaveOptions(metrics=seen.append)
    import_checkpoint(tmp_path / "dcp", tmp_path / "ckpt", options=save_options)
    load_options = xckpt.LoadOptions(metrics=seen.append)
    export_checkpoint(tmp_path / "ckpt", tmp_path / "back", options=load_options)
    paths = [str(tmp_path / name) for name in ("ckpt", "back")]
    assert [(took.operation, took.path, took.bytes) for took in seen] == [
        ("convert", path, 1 << 19) for path in paths
    ]
