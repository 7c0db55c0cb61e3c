"""What users of JAX's libraries resume: the usual calls, without glue."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import xckpt
from tests.support.jobs import fresh_path


def _train_state() -> TrainState:
    return TrainState.create(
        apply_fn=jnp.tanh, params={"w": jnp.ones(3)}, tx=optax.adam(optax.constant_schedule(1e-3))
    )


@jax.jit
def _stepped(state: TrainState) -> TrainState:
    return state.apply_gradients(grads=state.params)


def test_a_train_state_that_jit_has_stepped_loads_into_a_new_one() -> None:
    path, stepped = fresh_path(), _stepped(_train_state())
    assert isinstance(stepped.step, jax.Array)
    xckpt.save(path, stepped)
    new = _train_state()
    loaded = xckpt.load(path, new)
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
