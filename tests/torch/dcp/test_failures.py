"""A rank that fails in any step: all ranks learn of it, nothing is committed, nothing is left."""

from __future__ import annotations

import gc
import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import xckpt
from tests.support.ranks import Ranks
from tests.torch.dcp.states import on_rank_state
from xckpt.torch.dcp import XckptStorageReader, XckptStorageWriter, staged_save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class Faulty(dcp.DefaultSavePlanner):
    """Raises in one hook of one rank."""

    def __init__(self, hook: str, rank: int) -> None:
        super().__init__()
        self.hook = hook if rank == dist.get_rank() else ""

    def create_local_plan(self) -> dcp.SavePlan:
        self.fail("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        self.fail("create_global_plan")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: dcp.SavePlan) -> dcp.SavePlan:
        self.fail("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: dcp.WriteItem) -> Any:
        self.fail("resolve_data")
        return super().resolve_data(write_item)

    def fail(self, hook: str) -> None:
        if hook == self.hook:
            raise ValueError(f"no {hook} today")


def on_rank_fault(rank: int, path: Path, hook: str, faulty: int) -> Any:
    """What this rank learns, and what lies there then, while the writer is still held."""
    writer = XckptStorageWriter(path / "ckpt")
    planner = Faulty(hook, faulty)
    try:
        dcp.save(on_rank_state(seed=1), storage_writer=writer, planner=planner)
    except dcp.CheckpointException as error:
        found = {rank: (type(e), str(e)) for rank, (e, _) in error.failures.items()}
    else:
        found = {}
    dist.barrier()
    held = sorted(os.listdir(path))
    del writer
    gc.collect()
    dist.barrier()
    return found, held, sorted(os.listdir(path))


@pytest.mark.parametrize(
    "hook, faulty",
    [
        ("create_local_plan", 2),
        pytest.param("create_global_plan", 0, marks=pytest.mark.thorough),
        ("finish_plan", 3),
        ("resolve_data", 0),
        pytest.param("resolve_data", 3, marks=pytest.mark.thorough),
    ],
)
def test_a_failure_reaches_all_ranks_and_leaves_the_old_checkpoint(
    four_ranks: Ranks, tmp_path: Path, hook: str, faulty: int
):
    xckpt.save(tmp_path / "ckpt", {"old": 1})
    for found, held, left in four_ranks.run(on_rank_fault, tmp_path, hook, faulty):
        assert found == {faulty: (ValueError, f"no {hook} today")}
        # DCP tells no writer of another rank's finish_plan, so that goes with the writer.
        assert held == ["ckpt"] or hook == "finish_plan"
        assert left == ["ckpt"]
    assert xckpt.load(tmp_path / "ckpt") == {"old": 1}


def test_the_staging_goes_when_all_ranks_have_stopped(monkeypatch: pytest.MonkeyPatch):
    """Before that a rank that still writes would make it again."""
    store = dist.HashStore()
    monkeypatch.setattr(staged_save, "shared_store", lambda: store)
    gone = threading.Event()
    stop = staged_save.watch_failures(store, "a save", 2, gone.set)
    failing = threading.Thread(target=staged_save.note_failed, args=("a save",))
    failing.start()
    assert not gone.wait(0.3)
    staged_save.note_stopped("a save")
    failing.join(10)
    assert gone.is_set() and not failing.is_alive()
    stop()


def test_a_rank_that_fails_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch):
    store = dist.HashStore()
    monkeypatch.setattr(staged_save, "shared_store", lambda: store)
    monkeypatch.setattr(staged_save, "WAIT_SECONDS", 0.1)
    gone = threading.Event()
    stop = staged_save.watch_failures(store, "a save", 2, gone.set)
    staged_save.note_failed("a save")
    stop()
    assert not gone.is_set()


def on_rank_full_disk(rank: int, path: Path) -> Any:
    """A rank that cannot write a file of more than 4 MiB, as if its disk were full.

    The file through which the ranks have met must stay below that: it grows with each test.
    """
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    state = {f"of {rank}": torch.full((1 << 21 if rank == 1 else 1 << 18,), float(rank))}
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 22, old[1]))
    try:
        dcp.save(state, storage_writer=XckptStorageWriter(path / "ckpt"))
    except dcp.CheckpointException as error:
        return {r: (type(e), str(e)) for r, (e, _) in error.failures.items()}, os.listdir(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    return {}, os.listdir(path)


def test_a_writing_thread_that_fails_never_reports_success(four_ranks: Ranks, tmp_path: Path):
    for found, left in four_ranks.run(on_rank_full_disk, tmp_path):
        assert [(rank, kind) for rank, (kind, _) in found.items()] == [(1, xckpt.StorageError)]
        assert "of 1" in found[1][1]
        assert left == []


def on_rank_again(rank: int, path: Path) -> list[str]:
    """One writer: a save that fails, then one that does not."""
    writer = XckptStorageWriter(path)
    with pytest.raises(dcp.CheckpointException):
        dcp.save(on_rank_state(), storage_writer=writer, planner=Faulty("finish_plan", 1))
    dcp.save(on_rank_state(), storage_writer=writer)
    return os.listdir(path.parent)


def test_the_next_save_of_a_writer_removes_what_a_failed_one_left(
    four_ranks: Ranks, tmp_path: Path
):
    assert four_ranks.run(on_rank_again, tmp_path / "ckpt") == [["ckpt"]] * 4


def on_rank_taken(rank: int, path: Path, overwrite: bool) -> str:
    try:
        dcp.save(on_rank_state(), storage_writer=XckptStorageWriter(path, overwrite=overwrite))
    except dcp.CheckpointException as error:
        return "".join(type(e).__name__ for e, _ in error.failures.values())
    return ""


def test_overwrite_is_the_default_and_false_refuses(four_ranks: Ranks, tmp_path: Path):
    xckpt.save(tmp_path / "ckpt", {"old": 1})
    assert four_ranks.run(on_rank_taken, tmp_path / "ckpt", False) == ["CheckpointExistsError"] * 4
    assert xckpt.load(tmp_path / "ckpt") == {"old": 1}
    assert four_ranks.run(on_rank_taken, tmp_path / "ckpt", True) == [""] * 4
    assert "model" in xckpt.load(tmp_path / "ckpt")


@pytest.mark.parametrize("cached", [False, True])
def test_the_files_of_the_user_stay_where_they_are(tmp_path: Path, cached: bool):
    """In a folder that held nothing else, and over a checkpoint; also by a cached plan."""
    (tmp_path / "notes.txt").write_text("mine")
    writer = XckptStorageWriter(tmp_path, overwrite=False)
    with pytest.raises(dcp.CheckpointException, match="holds no checkpoint; nothing there was"):
        dcp.save({"x": torch.ones(2)}, storage_writer=writer)
    assert os.listdir(tmp_path) == ["notes.txt"]
    for number in range(3):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=cached)
        state = {"x": torch.full((2,), number)}
        dcp.save(state, storage_writer=XckptStorageWriter(tmp_path), planner=planner)
        assert (tmp_path / "notes.txt").read_text() == "mine"
        assert xckpt.open(tmp_path).array("x")[:].tolist() == [number, number]
    assert xckpt.open(tmp_path).manifest.root == ""


def on_rank_bad_read(rank: int, path: Path) -> Any:
    class Bad(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, read_item: dcp.ReadItem) -> torch.Tensor:
            if rank == 2:
                raise OSError("nowhere to put it")
            return super().resolve_tensor(read_item)

    try:
        dcp.load(on_rank_state(), storage_reader=XckptStorageReader(path), planner=Bad())
    except dcp.CheckpointException as error:
        return {r: type(e).__name__ for r, (e, _) in error.failures.items()}, str(error)
    return {}, ""


def test_a_planner_that_fails_in_a_load_is_named_on_all_ranks(four_ranks: Ranks, tmp_path: Path):
    xckpt.save(tmp_path / "ckpt", {"model": {"layers.0.weight": torch.ones(11, 6)}})
    four_ranks.run(on_rank_taken, tmp_path / "ckpt", True)
    for found, text in four_ranks.run(on_rank_bad_read, tmp_path / "ckpt"):
        assert found[2] == "OSError" and "nowhere to put it" in text
        # A rank that waits for a chunk from rank 2 fails with it.
        assert set(found.values()) <= {"OSError", "StorageError"}


def test_a_path_without_a_checkpoint(tmp_path: Path):
    with pytest.raises(dcp.CheckpointException, match="holds no committed checkpoint"):
        dcp.load({"x": torch.ones(2)}, storage_reader=XckptStorageReader(tmp_path))
