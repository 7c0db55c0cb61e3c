"""A run of checkpoints on JAX processes: one decision, and a signal to one saves on both."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.jax_jobs import run


def train(root: str) -> list[object]:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import xckpt
    from xckpt.policies import EverySteps, Latest, OnPreemption

    mesh = jax.make_mesh((4,), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    like: Any = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)}
    state = {"w": jax.device_put(jnp.zeros(8), sharding)}
    policies = [EverySteps(3), OnPreemption()]
    with xckpt.CheckpointManager(root, save=policies, keep=Latest(2)) as checkpoints:
        for step in range(checkpoints.next_step, 20):
            state = {"w": state["w"] + 1}
            if step == 7 and jax.process_index() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            checkpoints.save(step, state, {"loss": jnp.float32(step)})
            if checkpoints.preempted:
                break
        checkpoints.wait()
        restored = checkpoints.restore(like)["w"]
        latest = checkpoints.latest()
        assert latest is not None and restored.sharding == sharding
        local = {float(value) for shard in restored.addressable_shards for value in shard.data}
        numbers = [record.number for record in checkpoints.steps()]
    return [numbers, latest.metrics["loss"], sorted(local), checkpoints.next_step]


@pytest.mark.thorough
def test_two_processes_decide_together(tmp_path: Path) -> None:
    assert run(train, 2, str(tmp_path)) == [[[6, 7], 7.0, [8.0], 8]] * 2
