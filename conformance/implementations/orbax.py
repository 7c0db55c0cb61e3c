"""Orbax, over one `jax.Array` a leaf on eight host devices of one process."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from conformance.implementation import Array, Held, Refused, Wanted
from conformance.implementations.jax_arrays import abstract, array_of, boxes_of, wide_numbers
from conformance.implementations.meshes import by_name

import orbax.checkpoint as ocp  # isort: skip  # after the flag that makes eight devices

__all__ = ["IMPLEMENTATION", "Orbax"]

Data = NDArray[np.generic]


class Orbax:
    """`PyTreeCheckpointHandler` with its defaults."""

    name = f"Orbax {version('orbax-checkpoint')}"
    even = True
    limits: Sequence[str] = (
        "shards that no NamedSharding over eight devices gives",
        "arrays without elements",
        "saying which rank wrote what, or whether two checkpoints are equal",
        "verify: it has none",
    )

    def __init__(self) -> None:
        # A line for each checkpoint that a crash has cut off would bury the table.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self._checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())

    @wide_numbers()
    def save(
        self, path: Path, ranks: Sequence[Mapping[str, Held]], *, overwrite: bool = False
    ) -> None:
        if any(0 in held.array.shape for rank in ranks for held in rank.values()):
            # It says so itself, but only once it has deleted what it was to overwrite.
            raise Refused("arrays without elements")
        state = {name: array_of(held) for name, held in by_name(ranks).items()}
        self._checkpointer.save(path, args=ocp.args.PyTreeSave(state), force=overwrite)

    @wide_numbers()
    def load(
        self, path: Path, ranks: Sequence[Mapping[str, Wanted]]
    ) -> list[dict[str, list[Data]]]:
        wanted = by_name(ranks)
        like = {name: abstract(wishes) for name, wishes in wanted.items()}
        arguments = ocp.args.PyTreeRestore(
            like,
            restore_args=ocp.checkpoint_utils.construct_restore_args(like),
            partial_restore=True,
        )
        loaded = self._checkpointer.restore(path, args=arguments)
        boxes = {name: boxes_of(loaded[name], wishes) for name, wishes in wanted.items()}
        return [{name: boxes[name].pop(0) for name in rank} for rank in ranks]

    def list(self, path: Path) -> dict[str, Array]:
        metadata = self._checkpointer.metadata(path).item_metadata
        assert metadata is not None
        found = metadata.tree
        return {
            name: Array(tuple(leaf.shape), np.dtype(leaf.dtype).name)
            for name, leaf in found.items()
        }

    def delete(self, path: Path) -> None:
        shutil.rmtree(path)

    def verify(self, path: Path) -> Sequence[str]:
        raise Refused("verify: it has none")


IMPLEMENTATION = Orbax()
