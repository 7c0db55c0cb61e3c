"""`save_state` and `load_state`, in the place of the methods of an `Accelerator`.

Accelerate's own hooks see neither optimizers nor sharded models, so these are functions. Sharded
models (FSDP2) are saved and loaded in their shards.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, Final

from xckpt.api.load import load
from xckpt.api.save import check_path, save, save_async
from xckpt.engine.background import SaveFuture
from xckpt.integrations.accelerate.names import next_path, restore_newest, was_begun
from xckpt.integrations.accelerate.prepared import check_accelerator, loaders_of, state_of
from xckpt.integrations.bases import bases_of
from xckpt.integrations.newest import is_ours
from xckpt.integrations.parts import load_parts
from xckpt.integrations.random_state import load_random_states, random_states
from xckpt.options import SaveOptions, check_flags

__all__ = ["load_state", "save_state"]

ACCELERATES: Final = "random_states_0.pkl"
"""A file of each checkpoint that Accelerate itself has saved."""


def save_state(
    accelerator: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    background: bool = False,
    options: SaveOptions | None = None,
) -> SaveFuture | None:
    """Save what ``Accelerator.save_state`` saves; every process calls it.

    That is the models, optimizers and schedules that were prepared, the scaler, the places of data
    loaders, objects registered with ``register_for_checkpointing``, and random generators. The
    checkpoint at ``path`` is replaced; one that was named automatically never is.

    Args:
        accelerator: the `accelerate.Accelerator`.
        path: see `xckpt.save`. Without one, ``automatic_checkpoint_naming`` of the accelerator's
            `ProjectConfiguration` gives it; its ``total_limit`` counts committed checkpoints, and
            older ones are deleted once this one is committed, or by the next save if it goes on
            in the background.
        background: go on while the checkpoint is written; the future that is returned says when it
            is committed.
        options: see `xckpt.save`.

    Raises:
        ValueError: there is no path, and no automatic naming; or DeepSpeed or Megatron-LM holds the
            state, or there are hooks to be called before a save.
        CheckpointExistsError: the next automatic name is taken, or comes before one that is there:
            load the newest first.
        TypeError: ``accelerator`` is another object.
        XckptError: as `xckpt.save`.

    Example:
        >>> from accelerate import Accelerator
        >>> import torch
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(torch.nn.Linear(2, 2))
        >>> save_state(accelerator, "memory://accelerate")
        >>> load_state(accelerator, "memory://accelerate")
    """
    check_accelerator("save_state", accelerator)
    check_flags("save_state", background=background)
    own = random_states(accelerator.num_processes) | loaders_of(accelerator)
    named, path = path is None, next_path(accelerator) if path is None else path
    write = save_async if background else save
    state = state_of(accelerator) | own | {"step": accelerator.step}
    base = bases_of(accelerator).next(path)
    saved = write(path, state, overwrite=not named, base=base, options=options)
    if named:
        was_begun(accelerator)
    return saved if isinstance(saved, SaveFuture) else None


def load_state(accelerator: Any, path: str | os.PathLike[str] | None = None) -> None:
    """Load what `save_state` saved into what was prepared; every process calls it.

    The number of processes may be another one, and so may the way of sharding; random generators
    and data loaders then stay as they are. Without a path it is the newest good checkpoint that was
    named automatically: damaged ones are passed over with a warning. The next one is named behind
    all. One that Accelerate itself has saved is loaded by Accelerate.

    A warning names what the checkpoint holds and was not prepared, such as an optimizer.

    Raises:
        NotACheckpointError: there is none.
        CorruptCheckpointError: it is damaged; without a path, all are.
        TreeMismatchError: what was prepared does not fit it.
        TypeError: ``accelerator`` is another object.
        ValueError: there is no path, and no automatic naming.
        XckptError: as `xckpt.load_into`.
    """
    check_accelerator("load_state", accelerator)
    if path is None:
        restore_newest(accelerator, partial(_load, accelerator))
    else:
        check_path(path, "load_state(accelerator, path)")
        _load(accelerator, os.fspath(path))


def _load(accelerator: Any, path: str) -> str:
    if not is_ours(path) and Path(path, ACCELERATES).exists():
        accelerator.load_state(path)
        return path
    load_parts(path, state_of(accelerator))
    load_random_states(path, accelerator.num_processes, **loaders_of(accelerator))
    accelerator.step = load(path, at="step")
    bases_of(accelerator).restored(path)
    return path
