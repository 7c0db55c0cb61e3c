"""torchft's checkpoint transport over a folder: what its own test of transports asks, and more."""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import subprocess
import sys
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
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("root", ["~/states", "states", "{}", "file://{}", "memory://torchft-root"])
def test_a_root_is_what_it_is_for_a_save(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    sender = XckptTransport(root.format(tmp_path / "states"))
    monkeypatch.chdir("/")
    sender.send_checkpoint([1], 0, state_of(0), LONG)
    assert (tmp_path / "states").exists() is not root.startswith("memory")
    assert same(sender.recv_checkpoint(0, sender.metadata(), 0, SOON), state_of(0))
    sender.shutdown()


def test_a_root_that_is_no_path_is_refused() -> None:
    wrong: Any = 5
    with pytest.raises(TypeError, match=r"XckptTransport\(root\)"):
        XckptTransport(wrong)


def test_a_frozen_model_is_sent_once(tmp_path: Path) -> None:
    sender, frozen = XckptTransport(tmp_path), torch.ones(1024, 1024)
    written = []
    for step in range(3):
        metrics: list[xckpt.Metrics] = []
        sender._options = xckpt.SaveOptions(metrics=metrics.append)
        sender.send_checkpoint([1], step, {"base": frozen, "adapter": torch.ones(2) * step}, LONG)
        written.append(metrics[0].shared)
    assert written == [0, 1 << 22, 1 << 22]


def test_damage_is_refused(tmp_path: Path) -> None:
    sender = XckptTransport(tmp_path)
    sender.send_checkpoint([1], 0, state_of(0), LONG)
    [path] = tmp_path.glob("*/0/user/default/model/weight/c/0/0")
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    with pytest.raises(xckpt.CorruptCheckpointError):
        XckptTransport(tmp_path).recv_checkpoint(0, sender.metadata(), 0, LONG)


KILLED = """
import os, sys, torch
from datetime import timedelta
from xckpt.integrations.torchft import XckptTransport
sender = XckptTransport(sys.argv[1])
sender.send_checkpoint([1], 3, {"w": torch.ones(2)}, timedelta(seconds=9))
os.kill(os.getpid(), 9)
"""


def test_what_a_killed_replica_has_sent_goes(tmp_path: Path) -> None:
    lives = XckptTransport(tmp_path)
    lives.send_checkpoint([1], 0, state_of(0), LONG)
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    names = ["notes", "7_1-2_elsewhere_" + 32 * "0"]
    for name in (*names, old := "8_1-2_elsewhere_" + 32 * "0"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / old, (0, 0))  # of another host, and nothing was sent for long
    assert len(list(tmp_path.iterdir())) == 5
    sender = XckptTransport(tmp_path)
    sender.send_checkpoint([1], 3, state_of(3), LONG)
    own = [Path(each.metadata()).name for each in (lives, sender)]
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([*names, *own])
    assert same(sender.recv_checkpoint(0, lives.metadata(), 0, SOON), state_of(0))


REPLICAS, STEPS = 2, 5


class Watched(XckptTransport):
    """Notes which steps it has received."""

    def __init__(self, root: Path, received: list[int]) -> None:
        super().__init__(root)
        self.received = received

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        state = super().recv_checkpoint(src_rank, metadata, step, timeout)
        self.received.append(step)
        return state


def life(
    replica: int, lighthouse: str, transport: XckptTransport, seed: int, end: int
) -> dict[str, Any]:
    """Train until a step is reached, from weights of its own; the state at the end."""
    from torch.distributed import TCPStore
    from torchft import Manager, Optimizer, ProcessGroupGloo

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model = torch.nn.Linear(4, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(seed)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.1)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optim": adamw.state_dict()}

    def load(found: dict[str, Any]) -> None:
        model.load_state_dict(found["model"])
        adamw.load_state_dict(found["optim"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=LONG),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=REPLICAS,
        timeout=LONG,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica-{replica}",
        checkpoint_transport=transport,
    )
    try:
        optimizer = Optimizer(manager, adamw)
        while manager.current_step() < end:
            optimizer.zero_grad()
            model(torch.full((2, 4), 1.0 + replica)).sum().backward()
            for parameter in model.parameters():
                manager.allreduce(parameter.grad).wait()
            optimizer.step()
        return state() | {"step": manager.current_step()}
    finally:
        manager.shutdown(wait=False)


@pytest.mark.timeout(240)
def test_a_replica_that_comes_back_is_healed_by_a_manager(tmp_path: Path) -> None:
    """Two replicas of torchft's manager, in threads as its own tests have them; one ends early."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=REPLICAS, join_timeout_ms=100, heartbeat_timeout_ms=1000
    )
    received: list[int] = []
    try:
        with ThreadPoolExecutor(REPLICAS) as threads:
            address = lighthouse.address()
            stays = threads.submit(life, 0, address, Watched(tmp_path, received), 1, STEPS)

            def lives() -> dict[str, Any]:
                life(1, address, Watched(tmp_path, received), 2, 2)
                return life(1, address, Watched(tmp_path, received), 3, STEPS)

            comes_back = threads.submit(lives)
            one, other = stays.result(), comes_back.result()
    finally:
        lighthouse.shutdown()
    assert one["step"] == STEPS and same(one, other)
    # Once for the weights that all begin with, once for the replica that came back.
    assert len(received) >= 2 and max(received) >= 2, received
