"""Hugging Face Accelerate: `save_state` and `load_state` of all that an `Accelerator` has prepared.

Accelerate's own hooks see neither optimizers nor sharded models, so these are functions in the
place of its methods. Sharded models (FSDP2) are saved and loaded in their shards.
"""

from __future__ import annotations

import os
from typing import Any

from xckpt.api.load import load, load_into
from xckpt.api.save import save, save_async
from xckpt.core.part.per_rank import PerRank
from xckpt.engine.background import SaveFuture
from xckpt.integrations.random_state import load_random_states, random_states
from xckpt.options import SaveOptions

__all__ = ["load_state", "save_state"]


def save_state(
    accelerator: Any,
    path: str | os.PathLike[str],
    *,
    background: bool = False,
    options: SaveOptions | None = None,
) -> SaveFuture | None:
    """Save what ``Accelerator.save_state`` saves; every process calls it.

    That is the models, optimizers and schedules that were prepared, the scaler, stateful data
    loaders, objects registered with ``register_for_checkpointing``, and random generators. The
    checkpoint at ``path`` is replaced.

    Args:
        accelerator: the `accelerate.Accelerator`.
        path: see `xckpt.save`.
        background: go on while the checkpoint is written; the future that is returned says when it
            is committed.
        options: see `xckpt.save`.

    Raises:
        XckptError: as `xckpt.save`.

    Example:
        >>> from accelerate import Accelerator
        >>> import torch
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(torch.nn.Linear(2, 2))
        >>> save_state(accelerator, "memory://accelerate")
        >>> load_state(accelerator, "memory://accelerate")
    """
    state = _state(accelerator) | random_states(accelerator.num_processes)
    state["step"] = accelerator.step
    if background:
        return save_async(path, state, overwrite=True, options=options)
    save(path, state, overwrite=True, options=options)
    return None


def load_state(accelerator: Any, path: str | os.PathLike[str]) -> None:
    """Load what `save_state` saved into what was prepared; every process calls it.

    The number of processes may be another one, and so may the way of sharding; random generators
    then stay as they are.

    Raises:
        XckptError: as `xckpt.load_into`.
    """
    path = os.fspath(path)
    load_into(path, _state(accelerator), unexpected="ignore")
    load_random_states(path, accelerator.num_processes)
    accelerator.step = load(path, at="step", no_dist=True)


def _state(accelerator: Any) -> dict[str, Any]:
    """What both have, by the order in which it was prepared; each models' weights without wraps."""
    loaders = [
        each for each in accelerator._dataloaders if getattr(each, "use_stateful_dataloader", False)
    ]
    return {
        "models": [accelerator.unwrap_model(model, False) for model in accelerator._models],
        "optimizers": list(accelerator._optimizers),
        "schedulers": list(accelerator._schedulers),
        "scalers": [] if accelerator.scaler is None else [accelerator.scaler],
        "loaders": [PerRank(each) for each in loaders],
        "registered": list(accelerator._custom_objects),
    }
