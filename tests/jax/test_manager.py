"""A run of checkpoints on JAX processes: one decision, and a signal to one saves on both."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.jax_jobs import run


def train(root: str) -> list[object]:
    import time

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
        step = -1
        for step in range(checkpoints.next_step, 400):
            state = {"w": state["w"] + 1}
            if step in (7, 8) and jax.process_index() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            saved = checkpoints.save(step, state, {"loss": jnp.float32(step)})
            if checkpoints.preempted:
                assert saved
                break
            time.sleep(0.02)  # JAX's service tells all processes within a second
        checkpoints.wait()
        restored = checkpoints.restore(like)["w"]
        latest = checkpoints.latest()
        assert latest is not None and restored.sharding == sharding
        local = {float(value) for shard in restored.addressable_shards for value in shard.data}
        numbers = [record.number for record in checkpoints.steps()]
    assert numbers[-1] == latest.metrics["loss"] == step and local == {step + 1.0}
    return [step, checkpoints.next_step - step, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL]


@pytest.mark.thorough
def test_two_processes_decide_together(tmp_path: Path) -> None:
    """One is signalled, twice: JAX's preemption service tells both, as it has taken SIGTERM."""
    one, other = cast(list[list[Any]], run(train, 2, str(tmp_path)))
    assert one == other and 7 <= one[0] < 399 and one[1:] == [1, True]
