"""Checkpoints as Orbax itself writes and restores them: v0 and v1, each of its layouts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import orbax.checkpoint as v0
    import orbax.checkpoint.experimental.v1 as v1

LAYOUTS = [
    (version, ocdbt, zarr3)
    for version in ("v0", "v1")
    for ocdbt in (True, False)
    for zarr3 in (True, False)
]


@contextmanager
def quietly() -> Iterator[None]:
    """Orbax warns of its own calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save(
    path: Path, tree: Any, version: str = "v0", ocdbt: bool = True, zarr3: bool = True
) -> Path:
    """A checkpoint in one of `LAYOUTS`."""
    with quietly():
        if version == "v0":
            handler = v0.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
            with v0.Checkpointer(handler) as checkpointer:
                checkpointer.save(path, args=v0.args.PyTreeSave(tree))
            return path
        saving = v1.options.ArrayOptions.Saving(use_ocdbt=ocdbt, use_zarr3=zarr3)
        with v1.Context(array_options=v1.options.ArrayOptions(saving=saving)):
            v1.save_pytree(path, tree)
    return path


def save_steps(root: Path, *steps: int, **items: Any) -> Path:
    """What a `CheckpointManager` leaves behind."""
    with quietly(), v0.CheckpointManager(root) as manager:
        for step in steps:
            named = {name: v0.args.StandardSave(tree) for name, tree in items.items()}
            manager.save(step, args=v0.args.Composite(**named))
        manager.wait_until_finished()
    return root
