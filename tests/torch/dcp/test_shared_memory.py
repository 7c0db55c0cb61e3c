"""Tensors of `dcp.load` that share memory: right, or refused before anything is written."""

from __future__ import annotations

import uuid

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import xckpt
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
