"""torchft's checkpoint transport over a folder: what its own test of transports asks, and more."""

# pyright: reportMissingImports=false

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import xckpt
from xckpt.integrations.torchft import XckptTransport

SOON, LONG = timedelta(seconds=0.3), timedelta(seconds=30)


def state_of(step: int) -> dict[str, Any]:
    torch.manual_seed(step)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    user = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    return {"user": {"default": user}, "torchft": {"step": step, "batches_committed": 2 * step}}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_a_replica_that_waits_gets_the_step(tmp_path: Path) -> None:
    sender, receiver = XckptTransport(tmp_path), XckptTransport(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(receiver.recv_checkpoint, 0, sender.metadata(), 3, LONG)
        state = state_of(3)
        sender.send_checkpoint([1, 2], 3, state, LONG)
        sender.disallow_checkpoint()
        state["user"]["default"]["model"]["weight"].zero_()
        assert same(waiting.result(), state_of(3))
    assert same(receiver.recv_checkpoint(0, sender.metadata(), 3, LONG), state_of(3))
    # The next step takes its place, and another one never comes.
    sender.send_checkpoint([1], 4, state_of(4), LONG)
    assert same(receiver.recv_checkpoint(0, sender.metadata(), 4, LONG), state_of(4))
    for step in (3, 5):
        with pytest.raises(TimeoutError, match=f"rank 0 has sent no step {step}"):
            receiver.recv_checkpoint(0, sender.metadata(), step, SOON)
    sender.shutdown()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_damage_is_refused(tmp_path: Path) -> None:
    sender = XckptTransport(tmp_path)
    sender.send_checkpoint([1], 0, state_of(0), LONG)
    [path] = tmp_path.glob("*/0/user/default/model/weight/c/0/0")
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    with pytest.raises(xckpt.CorruptCheckpointError):
        XckptTransport(tmp_path).recv_checkpoint(0, sender.metadata(), 0, LONG)
