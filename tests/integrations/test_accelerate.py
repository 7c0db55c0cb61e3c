"""Accelerate: resumed runs in one process, under DDP and FSDP2, and from one to the other."""

# pyright: reportMissingImports=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import xckpt
from tests.integrations.conftest import torchrun
from tests.support.ranks import Ranks

STEPS = 6


class Counter:
    """An object of the user's."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def trained(
    path: str | None, start: int, end: int, sharded: bool = False, background: bool = False
) -> tuple[int, int, list[torch.Tensor]]:
    """Train from a step to another, loading first and saving at the end."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    from xckpt.integrations.accelerate import load_state, save_state

    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    torch.manual_seed(start)
    accelerator = Accelerator(cpu=True)
    if sharded:
        # Accelerate turns its FSDP2 on for accelerators alone; on a CPU the switch is set by hand.
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        accelerator.state.distributed_type = DistributedType.FSDP
    model = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Dropout(0.1), torch.nn.Linear(7, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if start:
        assert path is not None
        load_state(accelerator, path)
    elif accelerator.process_index:
        torch.manual_seed(100)  # each rank has a generator of its own
    for step in range(start, end):
        batch = torch.sin(torch.arange(16.0) + step + accelerator.process_index).view(4, 4)
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        counter.count += 1
    if path is not None:
        future = save_state(accelerator, path, background=background)
        assert (future is None) is not background
        if future is not None:
            future.result()
    moments = optimizer.state_dict()["state"]
    tensors = [*model.parameters(), *(t for each in moments.values() for t in each.values())]
    assert all(isinstance(t, DTensor) is sharded for t in model.parameters())
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return accelerator.num_processes, counter.count, [t.detach().clone() for t in whole]


@pytest.mark.parametrize("background", [False, True])
def test_one_process_resumes(background: bool, tmp_path: Path) -> None:
    *_, whole = trained(None, 0, STEPS)
    trained(str(tmp_path / "run"), 0, 3, background=background)
    _, count, resumed = trained(str(tmp_path / "run"), 3, STEPS)
    assert count == STEPS and len(whole) == 4 * 4
    assert all(map(torch.equal, whole, resumed))
    assert xckpt.open(tmp_path / "run").verify() == []


def on_rank_train(rank: int, path: str | None, start: int, end: int, sharded: bool) -> Any:
    torchrun(rank)
    return trained(path, start, end, sharded)


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_two_processes_resume(sharded: bool, two_ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    whole = two_ranks.run(on_rank_train, None, 0, STEPS, sharded)
    two_ranks.run(on_rank_train, path, 0, 3, sharded)
    resumed = two_ranks.run(on_rank_train, path, 3, STEPS, sharded)
    for (size, _, once), (_, count, again) in zip(whole, resumed, strict=True):
        assert (size, count) == (2, STEPS)
        assert all(map(torch.equal, once, again))
    # Saved by two, and now loaded whole by one, or in the other way of sharding.
    *_, alone = trained(path, STEPS, STEPS)
    assert all(map(torch.equal, alone, resumed[0][2]))
    for *_, other in two_ranks.run(on_rank_train, path, STEPS, STEPS, not sharded):
        assert all(map(torch.equal, alone, other))
