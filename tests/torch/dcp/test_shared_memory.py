"""Tensors of `dcp.load` that share memory: right, or refused before anything is written."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import xckpt
from tests.support.ranks import Ranks
from xckpt.torch.dcp import XckptStorageReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

ONES, NUMBERS = torch.ones(12), torch.arange(12.0)


def load(saved: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    path = f"memory://dcp-shared-memory-{uuid.uuid4()}"
    xckpt.save(path, saved)
    dcp.load(state, storage_reader=XckptStorageReader(path))


def test_tied_tensors_take_equal_elements_only() -> None:
    tied = torch.zeros(12)
    message = "x and y share memory, .* different elements .* untie"
    with pytest.raises(CheckpointException, match=message):
        load({"a": NUMBERS, "x": NUMBERS, "y": ONES}, {"a": torch.ones(12), "x": tied, "y": tied})
    assert not tied.any()
    load({"x": NUMBERS, "y": NUMBERS}, {"x": tied, "y": tied})
    assert torch.equal(tied, NUMBERS)
    load({"x": NUMBERS, "y": ONES}, {"y": tied})
    assert torch.equal(tied, ONES)


def on_rank_of_tied(rank: int, path: str, victim: int, share: bool) -> tuple[dict[int, str], float]:
    """What a rank hears of a load that one rank has to refuse, and what that one has then."""
    tied = torch.zeros(12)
    state = {"x": tied, "y": tied if rank == victim else torch.zeros(12)}
    options = xckpt.LoadOptions(share_reads=share)
    with pytest.raises(CheckpointException) as raised:
        dcp.load(state, storage_reader=XckptStorageReader(path, options=options))
    failures = {number: str(error) for number, (error, _) in raised.value.failures.items()}
    return failures, float(tied.sum()) if rank == victim else 0.0


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_refusal_on_one_rank_is_the_answer_on_all(
    four_ranks: Ranks, tmp_path: Path, victim: int, share: bool
) -> None:
    xckpt.save(tmp_path / "saved", {"x": NUMBERS, "y": ONES}, no_dist=True)
    answers = four_ranks.run(on_rank_of_tied, str(tmp_path / "saved"), victim, share)
    assert answers == [answers[0]] * 4
    failures, written = answers[0]
    assert "x and y share memory" in failures.pop(victim) and not written
    assert all("of this host" in text for text in failures.values())


def test_views_are_compared_where_they_overlap() -> None:
    saved, memory = {"x": NUMBERS[:8], "y": NUMBERS[4:]}, torch.zeros(12)
    with pytest.raises(CheckpointException, match="x and y share memory"):
        load(saved, {"x": memory[:8], "y": memory[3:11]})
    assert not memory.any()
    load(saved, {"x": memory[:8], "y": memory[4:]})
    assert torch.equal(memory, NUMBERS)
    load({"x": ONES[:6], "y": NUMBERS[:6]}, {"x": memory[::2], "y": memory[1::2]})
    assert (memory[::2].tolist(), memory[1::2].tolist()) == ([1.0] * 6, NUMBERS[:6].tolist())


def test_a_planner_that_hands_out_memory_of_its_own_is_not_asked() -> None:
    class Once(dcp.DefaultLoadPlanner):
        asked = 0

        def lookup_tensor(self, index: object) -> torch.Tensor:
            self.asked += 1
            return super().lookup_tensor(index)  # type: ignore[arg-type]

    path, planner = f"memory://dcp-shared-memory-{uuid.uuid4()}", Once()
    xckpt.save(path, {"x": NUMBERS, "y": NUMBERS})
    tied = torch.zeros(12)
    reader = XckptStorageReader(path)
    dcp.load({"x": tied, "y": tied}, storage_reader=reader, planner=planner)
    assert (planner.asked, tied.tolist()) == (2, NUMBERS.tolist())
