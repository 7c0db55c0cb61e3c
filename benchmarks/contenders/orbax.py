"""Orbax with its defaults: OCDBT, zstd, the standard checkpointer, waited for."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contender import Contender, Load, State

if TYPE_CHECKING:
    import orbax.checkpoint as ocp


@functools.cache
def _checkpointer() -> ocp.StandardCheckpointer:
    import orbax.checkpoint as ocp

    return ocp.StandardCheckpointer()


def _save(directory: Path, state: State) -> None:
    checkpointer = _checkpointer()
    checkpointer.save(directory / "state", dict(state))
    checkpointer.wait_until_finished()


def _load(directory: Path, like: State) -> State:
    import jax

    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
        dict(like),
    )
    return jax.block_until_ready(_checkpointer().restore(directory / "state", abstract))


ORBAX = Contender("Orbax", "jax", _save, (Load("new arrays", True, _load),))
