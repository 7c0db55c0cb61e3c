"""`save_state_dict` and `load_state_dict` over torch process groups: all ranks, some, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import xckpt
from tests.support.ranks import Ranks
from tests.support.torch_meshes import on_rank_mesh
from xckpt.storage import ZarrStorageReader, ZarrStorageWriter

WHOLE = torch.arange(35.0).reshape(7, 5)


def on_rank_journey(rank: int, path: Path, coordinator: int) -> tuple[xckpt.Metadata, bool]:
    """Save rows on all four ranks, then fill columns; the metadata is that of both."""
    mesh = on_rank_mesh("4")
    rows = distribute_tensor(WHOLE, mesh, [Shard(0)], src_data_rank=None)
    saved = xckpt.save_state_dict(
        {"w": rows, "step": 3}, ZarrStorageWriter(path), coordinator_rank=coordinator
    )
    columns = distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)], src_data_rank=None)
    state: dict[str, Any] = {"w": columns, "step": 0}
    loaded = xckpt.load_state_dict(state, ZarrStorageReader(path), coordinator_rank=coordinator)
    assert loaded == saved and state["w"] is columns and state["step"] == 3
    expected = distribute_tensor(WHOLE, mesh, [Shard(1)], src_data_rank=None)
    return saved, torch.equal(columns.to_local(), expected.to_local())


@pytest.mark.parametrize("coordinator", [0, 3])
def test_all_ranks_get_data_and_metadata(four_ranks: Ranks, tmp_path: Path, coordinator: int):
    answers = four_ranks.run(on_rank_journey, tmp_path / "ckpt", coordinator)
    assert all(equal for _, equal in answers)
    assert all(metadata == answers[0][0] for metadata, _ in answers)
    assert answers[0][0].state_dict_metadata["w"].size == (7, 5)


def on_rank_group(rank: int, path: Path) -> tuple[str, dict[str, int]]:
    """Ranks 1 and 3 are a group, in which 3 is number 1 and coordinates; the others stay out."""
    group = dist.new_group([1, 3])
    state = {f"of {rank}": rank}
    try:
        xckpt.save_state_dict(
            state, ZarrStorageWriter(path), process_group=group, coordinator_rank=1
        )
    except ValueError as error:
        return str(error), {}
    filled = {"of 1": 0, "of 3": 0}
    xckpt.load_state_dict(filled, ZarrStorageReader(path), process_group=group, coordinator_rank=1)
    return "", filled


def test_a_process_group_of_some_ranks(four_ranks: Ranks, tmp_path: Path):
    answers = four_ranks.run(on_rank_group, tmp_path / "ckpt")
    for rank in (1, 3):
        assert answers[rank] == ("", {"of 1": 1, "of 3": 3})
    for rank in (0, 2):
        assert "not part of the process group" in answers[rank][0]
    assert dict(xckpt.open(tmp_path / "ckpt")) == {"of 1": 1, "of 3": 3}


def on_rank_alone(rank: int, folder: Path) -> int:
    """Only odd ranks save, so any collective would hang."""
    if rank % 2 == 0:
        return -1
    xckpt.save_state_dict({"rank": rank}, ZarrStorageWriter(folder / str(rank)), no_dist=True)
    state = {"rank": -1}
    xckpt.load_state_dict(state, ZarrStorageReader(folder / str(rank)), no_dist=True)
    return state["rank"]


def test_no_dist_runs_all_phases_locally(four_ranks: Ranks, tmp_path: Path):
    assert four_ranks.run(on_rank_alone, tmp_path) == [-1, 1, -1, 3]


def on_rank_failure(rank: int, path: Path) -> list[tuple[int, str]]:
    state: dict[str, Any] = {"w": torch.ones(2), "bad": object() if rank in (1, 2) else 0}
    with pytest.raises(xckpt.UnsupportedLeafError) as caught:
        xckpt.save_state_dict(state, ZarrStorageWriter(path))
    return [(failure.rank, failure.message) for failure in caught.value.failures]


def test_failures_of_any_rank_are_raised_on_all(four_ranks: Ranks, tmp_path: Path):
    for failures in four_ranks.run(on_rank_failure, tmp_path / "ckpt"):
        assert [rank for rank, _ in failures] == [1, 2]
        assert all("bad: a builtins.object" in message for _, message in failures)
    assert list(tmp_path.iterdir()) == []


def on_rank_coordinator(rank: int, path: Path) -> str:
    with pytest.raises(ValueError, match="not one of the ranks") as caught:
        xckpt.save_state_dict({}, ZarrStorageWriter(path), coordinator_rank=4)
    return str(caught.value)


def test_a_coordinator_that_is_no_rank_is_refused(four_ranks: Ranks, tmp_path: Path):
    for message in four_ranks.run(on_rank_coordinator, tmp_path / "ckpt"):
        assert "coordinator_rank 4 is not one of the ranks [0, 4)" in message
