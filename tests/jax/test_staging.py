"""JAX arrays while they are saved: held, not copied, and out of reach of donation and deletion."""

from __future__ import annotations

import gc
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import xckpt
from tests.support import jax_jobs
from tests.support.examples import examples
from tests.support.jax_meshes import DTYPES, same, shardings, slices, values
from xckpt.core.leaf import HostSource
from xckpt.core.plan.save import DefaultSavePlanner
from xckpt.errors import UnsupportedLeafError
from xckpt.jax.adapter import ADAPTER
from xckpt.staging import BlockingAsyncStager

SECONDS = 60


@partial(jax.jit, donate_argnums=0)
def step(state: Any) -> Any:
    """A training step that is given its state away."""
    return jax.tree.map(lambda leaf: leaf + 1, state)


def addresses(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def sharded(array: Any, *spec: str | None) -> jax.Array:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))


def stage(state: Any) -> Any:
    return BlockingAsyncStager().stage(state)


@examples(50)
@given(shardings(), st.sampled_from(DTYPES))
def test_nothing_is_copied_and_the_description_is_kept(
    case: tuple[NamedSharding, tuple[int, ...]], dtype: str
) -> None:
    sharding, shape = case
    full = values(shape, dtype)
    array = jax.device_put(full, sharding)
    staged, source = stage({"w": array})["w"], ADAPTER.describe(array, "w")
    assert isinstance(staged, HostSource) and source is not None
    assert (staged.shape, staged.dtype, staged.boxes) == (source.shape, source.dtype, source.boxes)
    assert (staged.sharded, staged.sharding) == (source.sharded, source.sharding)
    for index in range(len(staged.boxes)):
        same(staged.data(index), full[slices(staged.boxes, index)])
        if dtype not in ("int4",):
            assert not full.size or staged.data(index).ctypes.data in addresses(array)


def test_donation_takes_other_memory_while_a_save_holds_it() -> None:
    array = sharded(jnp.arange(4096.0).reshape(64, 64), "data", "model")
    before = addresses(array)
    staged = stage({"w": array})["w"]
    after = step(array)
    assert not set(addresses(after)) & set(before)
    full = np.arange(4096.0, dtype=np.float32).reshape(64, 64)
    for index in range(8):
        same(staged.data(index), full[slices(staged.boxes, index)])
    same(after, full + 1)


@pytest.mark.parametrize("dtype", ["int32", "bfloat16"])
@pytest.mark.parametrize("kind", ["save", "save_async"])
def test_donation_is_free_again_when_the_save_is_over(
    tmp_path: Path, dtype: str, kind: str
) -> None:
    array = jnp.arange(1 << 16, dtype=dtype)
    if kind == "save":
        xckpt.save(tmp_path / "a", {"w": array})
    else:
        xckpt.save_async(tmp_path / "a", {"w": array}).result(SECONDS)
    gc.collect()
    before = addresses(array)
    assert addresses(step(array)) == before


def test_a_deleted_array_is_saved_all_the_same(tmp_path: Path) -> None:
    array = sharded(jnp.arange(64), "data")
    staged = stage({"w": array})
    array.delete()
    with pytest.raises(UnsupportedLeafError, match="deleted or donated"):
        stage({"w": array})
    xckpt.save(tmp_path / "a", staged)
    assert np.array_equal(xckpt.load(tmp_path / "a")["w"], np.arange(64))


class Slow(DefaultSavePlanner):
    """Lets training steps overtake the save."""

    def finish_plan(self, new_plan: Any) -> Any:
        time.sleep(0.05)
        return super().finish_plan(new_plan)


def test_every_step_of_a_training_that_donates_is_saved_as_it_was(tmp_path: Path) -> None:
    state = {
        "params": {"w": sharded(jnp.zeros((64, 32)), "data", "model"), "b": jnp.zeros(7)},
        "half": sharded(jnp.zeros((16,), jnp.bfloat16), ("model")),
        "count": jnp.int32(0),
    }
    for number in range(6):
        xckpt.save_async(tmp_path / str(number), {"state": state, "n": number}, planner=Slow())
        state = step(step(state))
        state = jax.tree.map(lambda leaf: leaf - 1, state)
    xckpt.save(tmp_path / "last", {"state": state})
    for number in range(6):
        loaded = xckpt.load(tmp_path / str(number))
        leaves = jax.tree.leaves(loaded["state"])
        assert loaded["n"] == number and len(leaves) == 4
        assert all((np.asarray(leaf).astype(int) == number).all() for leaf in leaves)


def test_keys_and_optimizer_states_keep_their_kinds(tmp_path: Path) -> None:
    params = {"w": jnp.ones((4, 3))}
    state = {"opt": optax.adam(1e-3).init(params), "key": jax.random.key(5), "host": np.ones(2)}
    saved = {}
    for name, save in (("now", xckpt.save), ("later", xckpt.save_async)):
        done = save(tmp_path / name, state)
        saved[name] = done.result(SECONDS) if isinstance(done, xckpt.SaveFuture) else done
    assert saved["now"] == saved["later"]
    like = jax.tree.map(lambda leaf: leaf, state)
    loaded = xckpt.load(tmp_path / "later", like)
    assert type(loaded["opt"][0]) is type(state["opt"][0])
    assert jnp.array_equal(jax.random.key_data(loaded["key"]), jax.random.key_data(state["key"]))


def on_process_train(folder: str) -> list[int]:
    """Saves in flight while all processes step; the answer is what this one finds saved."""
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), "data")
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    full = np.zeros(8 * len(devices), np.float32)
    array = jax.make_array_from_callback(full.shape, sharding, lambda index: full[index])
    for number in range(4):
        xckpt.save_async(f"{folder}/{number}", {"w": array, "n": number}, planner=Slow())
        array = step(array)
    xckpt.save(f"{folder}/last", {"n": -1})
    found = []
    for number in range(4):
        loaded = xckpt.load(f"{folder}/{number}")
        assert (loaded["w"] == loaded["n"]).all() and loaded["w"].shape == full.shape
        found.append(loaded["n"])
    return found


def test_processes_that_train_while_they_save(tmp_path: Path) -> None:
    answers = jax_jobs.run(on_process_train, 2, str(tmp_path))
    assert answers == [[0, 1, 2, 3]] * 2
