"""Orbax's managers, v0 and v1, hold items of xckpt: kept, resumed, failing, of two processes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.experimental import v1 as ocp1

import xckpt
from tests.integrations.conftest import damage, own_bytes
from tests.support.jax_jobs import run
from xckpt.integrations.orbax import XckptCheckpointable, XckptRestore, XckptSave

STEPS = 9


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    # What Orbax logs of items that it does not know.
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def new_state() -> dict[str, Any]:
    params = {"w": jnp.arange(12.0).reshape(3, 4) / 12, "b": jnp.zeros(4)}
    return {"params": params, "opt": optax.adamw(1e-2).init(params), "step": 0}


@jax.jit
def stepped(params: Any, moments: Any, step: int) -> tuple[Any, Any]:
    batch = jax.random.normal(jax.random.key(step), (8, 3))
    gradients = jax.grad(lambda p: ((batch @ p["w"] + p["b"]) ** 2).mean())(params)
    updates, moments = optax.adamw(1e-2).update(gradients, moments, params)
    return optax.apply_updates(params, updates), moments


def trained(root: Path, end: int, v1: bool = False, keep: int = 2) -> dict[str, Any]:
    """The state after a loop that resumes from the newest step, and saves each."""
    state = new_state()
    with manager(root, v1, keep) as checkpoints:
        latest = checkpoints.latest_step() if not v1 else checkpoints.latest
        if latest is not None and v1:
            wanted = {"state": XckptCheckpointable(state)}
            state = checkpoints.load_checkpointables(latest, wanted)["state"].tree
        elif latest is not None:
            state = checkpoints.restore(latest, args=XckptRestore(state))
        for step in range(state["step"], end):
            params, moments = stepped(state["params"], state["opt"], step)
            state = {"params": params, "opt": moments, "step": step + 1}
            if v1:
                checkpoints.save_checkpointables_async(step, {"state": XckptCheckpointable(state)})
            else:
                checkpoints.save(step, args=XckptSave(state))
    return state


def manager(root: Path, v1: bool, keep: int) -> Any:
    if v1:
        policy: Any = ocp1.training.preservation_policies.LatestN(keep)
        always: Any = ocp1.training.save_decision_policies.FixedIntervalPolicy(1)
        return ocp1.training.Checkpointer(
            str(root), save_decision_policy=always, preservation_policy=policy
        )
    return ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(max_to_keep=keep))


def steps_in(root: Path) -> list[str]:
    return sorted(each.name for each in root.iterdir() if each.is_dir())


@pytest.mark.parametrize("together", [False, True])
def test_a_frozen_model_is_written_once(together: bool, tmp_path: Path) -> None:
    frozen = jnp.ones((1024, 1024))
    for first in (0, 2):  # the second manager resumes
        with manager(tmp_path / "run", False, 4) as checkpoints:
            if first and together:
                checkpoints.restore(1, args=ocp.args.Composite(a=XckptRestore(), b=XckptRestore()))
            elif first:
                checkpoints.restore(1, args=XckptRestore())
            for step in (first, first + 1):
                item = XckptSave({"frozen": frozen, "adapter": jnp.full(8, step)})
                other = XckptSave({"frozen": frozen + 1, "adapter": jnp.full(8, step)})
                both = ocp.args.Composite(a=item, b=other)
                checkpoints.save(step, args=both if together else item)
    names = ["a", "b"] if together else ["default"]
    places = [tmp_path / "run" / str(step) / name for step in range(4) for name in names]
    assert max(map(own_bytes, places)) < 10_000
    for place in places:
        assert xckpt.open(place).verify() == []
        assert xckpt.load(place)["frozen"][0, 0] == 1 + (place.name == "b")
        assert xckpt.load(place)["adapter"][0] == int(place.parent.name)


def test_a_frozen_model_is_written_once_by_a_checkpointable_that_is_kept(tmp_path: Path) -> None:
    frozen = jnp.ones((1024, 1024))
    for first in (0, 2):  # the second one resumes
        kept = XckptCheckpointable({"frozen": frozen, "adapter": jnp.zeros(8)})
        with manager(tmp_path / "run", True, 4) as checkpoints:
            if first:
                checkpoints.load_checkpointables(1, {"state": kept})
                assert kept.tree["adapter"][0] == 1
            for step in (first, first + 1):
                kept.tree = {"frozen": frozen, "adapter": jnp.full(8, float(step))}
                checkpoints.save_checkpointables_async(step, {"state": kept}).result()
    for step in range(4):
        place = tmp_path / "run" / str(step) / "state"
        assert own_bytes(place) < 10_000
        assert xckpt.open(place).verify() == []
        assert xckpt.load(place)["adapter"][0] == step


@pytest.mark.parametrize("v1", [False, True], ids=["v0", "v1"])
def test_a_resumed_run_is_the_uninterrupted_one(v1: bool, tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", STEPS, v1)
    half = trained(tmp_path / "run", 5, v1)
    assert steps_in(tmp_path / "run") == ["3", "4"]
    item = tmp_path / "run" / "4" / ("state" if v1 else "default")
    assert xckpt.open(item).verify() == []
    resumed = trained(tmp_path / "run", STEPS, v1)
    assert steps_in(tmp_path / "run") == ["7", "8"]
    assert jax.tree.structure(resumed) == jax.tree.structure(whole)
    assert jax.tree.all(jax.tree.map(np.array_equal, resumed, whole))
    assert not jax.tree.all(jax.tree.map(np.array_equal, resumed, half))


@pytest.mark.parametrize("v1", [False, True], ids=["v0", "v1"])
def test_xckpts_manager_passes_a_damaged_step_over(v1: bool, tmp_path: Path) -> None:
    last = trained(tmp_path / "run", 5, v1)
    checkpoints = xckpt.CheckpointManager(tmp_path / "run")
    found = checkpoints.restore(last)
    assert jax.tree.all(jax.tree.map(np.array_equal, found, last))
    damage(tmp_path / "run" / "4" / ("state" if v1 else "default"))
    with pytest.warns(UserWarning, match="step 3 was restored"):
        checkpoints.restore(last)


def test_items_side_by_side(tmp_path: Path) -> None:
    """Two of xckpt, one of Orbax; without arguments a new manager knows how to restore them."""
    weights = np.ones(4)
    with ocp.CheckpointManager(tmp_path / "run") as checkpoints:
        one, other = XckptSave({"w": weights}), XckptSave([b"text", jnp.arange(3)])
        third = ocp.args.JsonSave({"note": 1})
        checkpoints.save(5, args=ocp.args.Composite(one=one, other=other, third=third))
        weights[:] = 7  # it was copied
    with ocp.CheckpointManager(tmp_path / "run") as checkpoints:
        found = checkpoints.restore(5)
        like = [b"", np.zeros(3, np.int32)]
        part = checkpoints.restore(5, args=ocp.args.Composite(other=XckptRestore(like)))
    assert found["one"]["w"].tolist() == [1, 1, 1, 1] and found["third"] == {"note": 1}
    assert found["other"][0] == part["other"][0] == b"text" and part["other"][1].tolist() == [
        0,
        1,
        2,
    ]
    assert xckpt.load(tmp_path / "run" / "5" / "one")["w"].tolist() == [1, 1, 1, 1]
    with pytest.raises(xckpt.NotACheckpointError, match=r"give the path of one of them: .*/5/one"):
        xckpt.load(tmp_path / "run" / "5")


def test_items_side_by_side_in_v1(tmp_path: Path) -> None:
    weights = np.ones(4)
    items = {"one": XckptCheckpointable({"w": weights}), "two": XckptCheckpointable([1, "a"])}
    saving = ocp1.save_checkpointables_async(str(tmp_path / "step"), items)
    weights[:] = 7
    saving.result()
    wanted = {"one": XckptCheckpointable(), "two": XckptCheckpointable([0, ""])}
    found = ocp1.load_checkpointables(str(tmp_path / "step"), wanted)
    assert found["one"].tree["w"].tolist() == [1, 1, 1, 1] and found["two"].tree == [1, "a"]


def test_what_is_stored_is_told_without_reading_it(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(0, args=XckptSave(new_state()))
        checkpoints.wait_until_finished()
        tree = checkpoints.item_metadata(0)
    assert tree["params"]["w"].shape == (3, 4) and tree["step"] == 0


def save_what_cannot_be_saved(root: Path, v1: bool) -> None:
    state: Any = new_state() | {"step": object()}
    with manager(root, v1, 1) as checkpoints:
        if v1:
            checkpoints.save_checkpointables(2, {"state": XckptCheckpointable(state)})
        else:
            checkpoints.save(2, args=XckptSave(state))
            checkpoints.wait_until_finished()


@pytest.mark.parametrize("v1", [False, True], ids=["v0", "v1"])
def test_a_failure_is_raised_and_the_step_before_stays(v1: bool, tmp_path: Path) -> None:
    trained(tmp_path / "run", 2, v1, keep=1)
    with pytest.raises(xckpt.UnsupportedLeafError, match="step"):
        save_what_cannot_be_saved(tmp_path / "run", v1)
    assert trained(tmp_path / "run", 2, v1)["step"] == 2


def on_process(root: str, v1: bool) -> list[float]:
    """Save a sharded state twice, of two items, and restore it sharded otherwise."""
    from jax.sharding import NamedSharding, PartitionSpec

    logging.disable(logging.WARNING)
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    rows, columns = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("x", None), (None, "x"))
    )
    w = jax.make_array_from_callback((8, 8), rows, lambda at: np.arange(64.0).reshape(8, 8)[at])
    like = {"w": jax.ShapeDtypeStruct((8, 8), w.dtype, sharding=columns)}
    with manager(Path(root), v1, 1) as checkpoints:
        for step in (0, 1):
            state = {"w": w + step}
            if v1:
                items = {name: XckptCheckpointable(state) for name in ("state", "again")}
                checkpoints.save_checkpointables_async(step, items)
            else:
                items = {name: XckptSave(state) for name in ("state", "again")}
                checkpoints.save(step, args=ocp.args.Composite(**items))
        if v1:
            checkpoints.wait()
            wanted = {"state": XckptCheckpointable(like)}
            restored = checkpoints.load_checkpointables(1, wanted)["state"].tree["w"]
        else:
            checkpoints.wait_until_finished()
            wanted = ocp.args.Composite(state=XckptRestore(like))
            restored = checkpoints.restore(1, args=wanted)["state"]["w"]
    assert restored.sharding == columns
    return [float(shard.data[0, 0]) for shard in restored.addressable_shards]


@pytest.mark.parametrize("v1", [False, True], ids=["v0", "v1"])
def test_two_processes(v1: bool, tmp_path: Path) -> None:
    one, other = run(on_process, 2, str(tmp_path / "run"), v1)
    assert (one, other) == ([1, 3], [5, 7]) and steps_in(tmp_path / "run") == ["1"]
    for name in ("state", "again"):
        stored = xckpt.load(tmp_path / "run" / "1" / name)
        assert np.array_equal(stored["w"], np.arange(64.0).reshape(8, 8) + 1)
