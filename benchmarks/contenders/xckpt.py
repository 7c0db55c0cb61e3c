"""xckpt with its defaults: digests taken on save and verified on load.

The same code path fills torch tensors in place and makes new JAX arrays, from one checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.contender import Contender, Load, State


def _save(directory: Path, state: State) -> None:
    import xckpt

    xckpt.save(directory / "state", dict(state))


def _load_into(directory: Path, target: State) -> State:
    import xckpt

    xckpt.load_into(directory / "state", dict(target))
    return target


def _load_numpy(directory: Path, like: State) -> State:
    import xckpt

    return xckpt.load(directory / "state")


def _load_jax(directory: Path, like: State) -> State:
    import jax

    import xckpt

    abstract = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for name, leaf in like.items()
    }
    return jax.block_until_ready(xckpt.load(directory / "state", abstract))


WITH_TORCH = Contender(
    "xckpt, torch",
    "torch",
    _save,
    (Load("into memory", False, _load_into), Load("new arrays", True, _load_numpy)),
)
WITH_JAX = Contender("xckpt, JAX", "jax", _save, (Load("new arrays", True, _load_jax),))
