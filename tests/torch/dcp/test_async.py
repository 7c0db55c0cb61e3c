"""`dcp.async_save` through us: in a thread, in a process, and several at a time."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import xckpt
from tests.support.ranks import Ranks
from tests.torch.dcp.states import on_rank_blank, on_rank_check, on_rank_state
from xckpt.torch.dcp import XckptStorageReader, XckptStorageWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

SECONDS = 60


def on_rank_thread(rank: int, path: Path) -> None:
    state = on_rank_state()
    upload: Any = dcp.async_save(state, storage_writer=XckptStorageWriter(path))
    with torch.no_grad():
        state["model"]["layers.0.weight"].to_local().fill_(-1)  # after staging: must not be seen
    metadata = upload.result(SECONDS)
    assert metadata.storage_meta.checkpoint_id == path
    dist.barrier()
    back = on_rank_blank()
    dcp.load(back, storage_reader=XckptStorageReader(path))
    on_rank_check(back)


def test_in_a_thread(four_ranks: Ranks, tmp_path: Path):
    four_ranks.run(on_rank_thread, tmp_path / "ckpt")
    assert os.listdir(tmp_path) == ["ckpt"]


def on_rank_failing(rank: int, path: Path) -> str:
    state = on_rank_state()
    if rank == 2:
        state["mine"] = torch.eye(2).to_sparse()
    upload: Any = dcp.async_save(state, storage_writer=XckptStorageWriter(path), async_stager=Own())
    error = upload.exception(SECONDS)
    return f"{type(error).__name__} {error}"


class Own:
    """A stager that copies nothing, since sparse tensors cannot be staged."""

    should_synchronize_after_execute = False
    _synchronize_after_execute = False  # torch's protocol has it

    def stage(self, state_dict: Any) -> Any:
        return state_dict

    def synchronize_staging(self) -> None: ...

    def close(self) -> None: ...


def test_a_failure_is_the_futures(four_ranks: Ranks, tmp_path: Path):
    for answer in four_ranks.run(on_rank_failing, tmp_path / "ckpt"):
        assert (
            answer.startswith("CheckpointException") and "mine: a tensor with the layout" in answer
        )
    assert os.listdir(tmp_path) == []


def test_one_writer_serves_several_saves_at_a_time(tmp_path: Path):
    """All are under way at once; each goes where its id says."""
    writer = XckptStorageWriter(tmp_path / "unused")
    meeting = threading.Barrier(3)

    class Meeting(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: dcp.WriteItem) -> Any:
            if write_item.index.fqn == "w":
                meeting.wait(SECONDS)
            return super().resolve_data(write_item)

    uploads: list[Any] = [
        dcp.async_save(
            {"w": torch.full((3,), float(n)), "n": n},
            storage_writer=writer,
            checkpoint_id=tmp_path / str(n),
            planner=Meeting(),
            no_dist=True,
        )
        for n in range(3)
    ]
    for n, upload in enumerate(uploads):
        assert upload.result(SECONDS).storage_meta.checkpoint_id == tmp_path / str(n)
    for n in range(3):
        assert xckpt.load(tmp_path / str(n))["w"].tolist() == [float(n)] * 3


def test_two_saves_to_one_path_at_once_never_mix(tmp_path: Path):
    meeting = threading.Barrier(2)

    class Meeting(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: dcp.WriteItem) -> Any:
            meeting.wait(SECONDS)
            return super().resolve_data(write_item)

    uploads: list[Any] = [
        dcp.async_save(
            {"a": torch.full((3,), n), "b": torch.full((4,), n)},
            storage_writer=XckptStorageWriter(tmp_path / "ckpt"),
            planner=Meeting(),
            no_dist=True,
        )
        for n in (1, 2)
    ]
    errors = [upload.exception(SECONDS) for upload in uploads]
    assert None in errors
    for error in errors:
        assert error is None or "CheckpointExistsError" in str(error)
    tree = xckpt.load(tmp_path / "ckpt")
    assert {*tree["a"].tolist(), *tree["b"].tolist()} in ({1}, {2})
    assert os.listdir(tmp_path) == ["ckpt"]


def test_writers_and_readers_can_be_pickled_before_use(tmp_path: Path):
    writer = XckptStorageWriter(
        tmp_path / "a", overwrite=False, options=xckpt.SaveOptions(chunk_bytes=1024)
    )
    copy = pickle.loads(pickle.dumps(writer))
    assert (copy.checkpoint_id, copy.overwrite, copy.options) == (
        tmp_path / "a",
        False,
        xckpt.SaveOptions(chunk_bytes=1024),
    )
    dcp.save({"w": torch.ones(3)}, storage_writer=copy)
    reader = pickle.loads(pickle.dumps(XckptStorageReader(tmp_path / "a")))
    state = {"w": torch.zeros(3)}
    dcp.load(state, storage_reader=reader)
    assert state["w"].tolist() == [1, 1, 1]


IN_A_PROCESS = """
    import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
    from xckpt.torch.dcp import XckptStorageReader, XckptStorageWriter

    def main():
        store, path = sys.argv[1:]
        dist.init_process_group("gloo", store=dist.FileStore(store, 1), rank=0, world_size=1)
        for step in (1, 2):
            state = {"model": {"w": torch.full((5,), float(step))}, "step": step}
            upload = dcp.async_save(
                state,
                storage_writer=XckptStorageWriter(f"{path}/{step}"),
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
            state["model"]["w"].zero_()
            print(type(upload.result()).__name__, flush=True)
        dist.destroy_process_group()

    if __name__ == "__main__":
        main()
"""


@pytest.mark.thorough
def test_in_a_process(tmp_path: Path):
    """DCP spawns a daemon, to which it sends writer and planner."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(IN_A_PROCESS))
    command = [sys.executable, str(script), str(tmp_path / "store"), str(tmp_path)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MASTER_ADDR": "localhost",
    }
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=150, env=environment, check=False
    )
    assert done.stdout.split() == ["Metadata", "Metadata"], done.stderr
    for step in (1, 2):
        assert xckpt.load(tmp_path / str(step))["model"]["w"].tolist() == [float(step)] * 5
