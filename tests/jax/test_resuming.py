"""What users of JAX's libraries resume: the usual calls, without glue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import xckpt
from tests.support.jobs import fresh_path
from xckpt.jax.adapter import ADAPTER


def _train_state() -> TrainState:
    return TrainState.create(
        apply_fn=jnp.tanh, params={"w": jnp.ones(3)}, tx=optax.adam(optax.constant_schedule(1e-3))
    )


@jax.jit
def _stepped(state: TrainState) -> TrainState:
    return state.apply_gradients(grads=state.params)


def test_a_train_state_that_jit_has_stepped_loads_into_a_new_one() -> None:
    path = fresh_path()
    stepped: Any = _stepped(_train_state())
    assert isinstance(stepped.step, jax.Array)
    xckpt.save(path, stepped)
    new = _train_state()
    loaded: Any = xckpt.load(path, new)
    assert loaded.step == 1 and isinstance(loaded.step, int)
    assert loaded.tx is new.tx
    np.testing.assert_array_equal(loaded.params["w"], stepped.params["w"])
    np.testing.assert_array_equal(loaded.opt_state[0].mu["w"], stepped.opt_state[0].mu["w"])
    again = _stepped(loaded)
    np.testing.assert_array_equal(again.params["w"], _stepped(stepped).params["w"])


def test_a_new_train_state_loads_into_an_abstract_one() -> None:
    path, state = fresh_path(), _train_state()
    xckpt.save(path, state)
    abstract = jax.eval_shape(_stepped, state)
    assert isinstance(abstract.step, jax.ShapeDtypeStruct)
    loaded = xckpt.load(path, abstract)
    assert isinstance(loaded.step, jax.Array)
    assert loaded.step.dtype == jnp.int32 and loaded.step == 0


@pytest.mark.parametrize("rate", [0.1, 1e-5])
def test_a_weakly_typed_target_rounds_as_jax_does(rate: float) -> None:
    path = fresh_path()
    xckpt.save(path, {"rate": rate})
    loaded = xckpt.load(path, {"rate": jax.eval_shape(lambda: rate)})["rate"]
    assert loaded == jnp.float32(rate) and loaded.weak_type
    with pytest.raises(xckpt.TreeMismatchError, match="float32 cannot hold exactly; cast=True"):
        xckpt.load(path, {"rate": jax.ShapeDtypeStruct((), jnp.float32)})


def _mlp(seed: int) -> eqx.nn.MLP:
    return eqx.nn.MLP(2, 3, 4, 2, key=jax.random.key(seed))


def test_an_equinox_module_is_saved_and_loaded_as_it_is() -> None:
    path, model = fresh_path(), _mlp(0)
    xckpt.save(path, {"model": model, "step": 1})
    loaded = xckpt.load(path, {"model": _mlp(1), "step": 0})["model"]
    assert isinstance(loaded, eqx.nn.MLP)
    assert jnp.array_equal(loaded(jnp.ones(2)), model(jnp.ones(2)))


@pytest.mark.parametrize(
    "like", [_mlp, lambda seed: eqx.filter_eval_shape(_mlp, seed)], ids=["model", "abstract"]
)
def test_the_arrays_of_a_module_load_into_a_whole_module(
    like: Callable[[int], eqx.nn.MLP],
) -> None:
    path, model = fresh_path(), _mlp(0)
    xckpt.save(path, eqx.filter(model, eqx.is_array))
    loaded = xckpt.load(path, like(1))
    assert jnp.array_equal(loaded(jnp.ones(2)), model(jnp.ones(2)))


def test_a_state_of_nnx_and_its_pure_dict_load_into_each_other() -> None:
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    state = nnx.state(model)
    pure: Any = nnx.to_pure_dict(state)
    boxed, plain = fresh_path(), fresh_path()
    xckpt.save(boxed, state)
    xckpt.save(plain, pure)
    unboxed: Any = xckpt.load(boxed, pure)
    rebuilt: Any = xckpt.load(plain, state)
    assert jnp.array_equal(unboxed["kernel"], pure["kernel"])
    assert jnp.array_equal(rebuilt["kernel"][...], pure["kernel"])
    reports: list[xckpt.LoadReport] = []
    other = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
    loaded = xckpt.load(plain, other, report=reports.append)
    assert jnp.array_equal(loaded(jnp.ones((1, 2))), model(jnp.ones((1, 2))))
    assert reports[0].complete
    with pytest.raises(xckpt.TreeMismatchError, match="kernel/valu: wanted"):
        xckpt.load(plain, {"kernel": {"valu": pure["kernel"]}, "bias": pure["bias"]})


def test_a_tree_of_shardings_is_a_target() -> None:
    path = fresh_path()
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    weights = jnp.arange(8, dtype=jnp.bfloat16)
    xckpt.save(path, {"w": weights, "keys": jax.random.split(jax.random.key(0), 2), "step": 3})
    rows = NamedSharding(mesh, PartitionSpec("x"))
    loaded: Any = xckpt.load(path, {"w": rows, "keys": rows, "step": rows})
    assert loaded["w"].sharding == rows and loaded["w"].dtype == jnp.bfloat16
    assert jnp.array_equal(loaded["w"], weights) and loaded["step"] == 3
    assert jnp.issubdtype(loaded["keys"].dtype, jax.dtypes.prng_key)
    with pytest.raises(xckpt.TreeMismatchError, match="v: wanted, but not in the checkpoint"):
        xckpt.load(path, {"v": rows}, unexpected="ignore")
    with pytest.raises(xckpt.UnsupportedLeafError, match="w: a NamedSharding has no data; save"):
        xckpt.save(path, {"w": rows}, overwrite=True)


def test_a_tree_of_specs_needs_a_mesh() -> None:
    path = fresh_path()
    xckpt.save(path, {"w": jnp.arange(8), "keys": jax.random.split(jax.random.key(0), 2)})
    with pytest.raises(xckpt.UnsupportedLeafError, match=r"w: a PartitionSpec names no devices"):
        xckpt.load(path, {"w": PartitionSpec("x"), "keys": PartitionSpec()})


@pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="JAX 0.7 does not say which mesh is set")
def test_a_tree_of_specs_takes_the_mesh_that_is_set() -> None:
    path = fresh_path()
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    xckpt.save(
        path, {"w": jnp.arange(8), "keys": jax.random.split(jax.random.key(0), 2), "step": 3}
    )
    specs = {"w": PartitionSpec("x"), "keys": PartitionSpec(), "step": PartitionSpec()}
    with jax.set_mesh(mesh):
        loaded: Any = xckpt.load(path, specs)
    assert loaded["w"].sharding == NamedSharding(mesh, PartitionSpec("x"))
    assert loaded["keys"].sharding.is_fully_replicated


def test_much_on_one_device_because_nothing_else_was_said_is_warned_of() -> None:
    big = jax.ShapeDtypeStruct((1 << 28,), jnp.float32)
    likes = {"a": big, "b": jax.ShapeDtypeStruct((1,), jnp.int8), "c": 1}
    assert jax.device_count() > 1
    with pytest.warns(UserWarning, match=r"1\.0 GiB in 2 jax.ShapeDtypeStruct without a sharding"):
        assert ADAPTER.prepared(likes, xckpt.Metadata({})) == likes
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = jax.ShapeDtypeStruct(big.shape, big.dtype, sharding=sharding)
    for quiet in ({"a": placed, "b": likes["b"]}, {"a": big}):
        ADAPTER.prepared(quiet, xckpt.Metadata({}))


def test_shardings_of_more_dimensions_than_the_arrays_are_refused_by_name():
    """JAX's own ValueError came, for the first of them, without its name."""
    xckpt.save("memory://resuming-too-many", {"v": np.ones(8), "w": np.ones((8, 8))})
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("x", "y"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", None, "y"))
    with pytest.raises(xckpt.UnsupportedLeafError, match="2 leaves cannot be loaded") as refused:
        xckpt.load("memory://resuming-too-many", {"v": sharding, "w": sharding})
    assert [problem[:3] for problem in refused.value.problems] == ["v: ", "w: "]
