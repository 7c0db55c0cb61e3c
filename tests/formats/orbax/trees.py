"""Trees as people save them with Orbax: the same ones for every release that wrote a fixture.

Runs with each of those releases, and so with Python 3.10, JAX 0.4 and Flax 0.8.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

JSON = {"dataset": "c4", "shards": [1, 2, 3]}
METRICS = {"loss": 0.25, "accuracy": 0.5}
CUSTOM = {"run": "a", "seed": 3}


def filled(tree: Any) -> Any:
    """The tree with other elements in each array, so that no two can be taken for each other."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    new = []
    for number, leaf in enumerate(leaves):
        elements = np.arange(leaf.size) + number + 1
        new.append(jnp.asarray(elements.reshape(leaf.shape), leaf.dtype))
    return jax.tree_util.tree_unflatten(structure, new)


def params() -> dict[str, Any]:
    """Nested lists and tuples."""
    return {
        "dense": {"kernel": jnp.zeros((4, 3)), "bias": jnp.zeros(3, jnp.bfloat16)},
        "blocks": [jnp.zeros(2), (jnp.zeros((2, 2), jnp.int8), {"scale": jnp.zeros(())})],
    }


def optimizer() -> optax.GradientTransformation:
    """States of no leaves, in a chain, behind a mask, and a momentum."""
    mask = {
        "dense": {"kernel": True, "bias": False},
        "blocks": [True, (False, {"scale": False})],
    }
    return optax.chain(
        optax.clip(1.0),
        optax.masked(optax.adam(1e-3), mask),
        optax.sgd(1e-2, momentum=0.9),
        optax.adamw(1e-3),
    )


def trees() -> dict[str, Any]:
    """Name -> tree."""
    weights = params()
    state = train_state.TrainState.create(apply_fn=len, params=weights, tx=optimizer())
    state = state.replace(step=jnp.zeros((), jnp.int32))
    everything = {
        "optax": {"params": weights, "opt": optimizer().init(weights)},
        "train_state": state,
        "empty": {"some": jnp.zeros(3), "dict": {}, "list": [], "tuple": (), "none": None},
    }
    return {name: filled(tree) for name, tree in everything.items()}


def keys() -> dict[str, Any]:
    """Random keys with types, which Orbax keeps since 0.11."""
    return {
        "one": jax.random.key(3),
        "many": jax.random.split(jax.random.key(5, impl="rbg"), 3),
        "w": filled(jnp.zeros(4)),
    }
