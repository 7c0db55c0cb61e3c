"""torchtitan's `CheckpointManager`, with its defaults but for when it saves and what it keeps.

A state is the model: a module whose buffers are the arrays. `MANAGERS` has one that saves at once,
as by default, and one that saves in the background.
"""

# torchtitan has an environment of its own; where the types are checked, it isn't installed.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from conformance.implementation import Refused
from conformance.runs.manager import Keep, Restored, Run, State, state_of

import torch.distributed.checkpoint as dcp  # isort: skip
from torch.distributed.checkpoint.api import CheckpointException  # isort: skip
from torchtitan.components.checkpointer import CheckpointManager  # isort: skip

__all__ = ["MANAGERS", "Titan"]


class TitanRun:
    """A manager at work."""

    def __init__(self, root: Path, keep: Keep, mode: str) -> None:
        if keep.best or not keep.latest:
            raise Refused("it keeps the newest steps, or all")
        if keep.latest == 1:
            raise Refused("it refuses to keep one step: the newest may be in the making")
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.model = torch.nn.Module()
        for name, array in state_of(0).items():
            self.model.register_buffer(name, torch.zeros_like(torch.from_numpy(array)))
        config = CheckpointManager.Config(
            enable=True, folder=root.name, interval=1, keep_latest_k=keep.latest, async_mode=mode
        )
        parts: dict[str, Any] = {"dataloader": None, "optimizers": None, "lr_schedulers": None}
        self.manager: Any = config.build(
            model_parts=[self.model],
            states={},
            sd_adapter=None,
            base_folder=str(root.parent),
            **parts,
        )

    def save(self, step: int, state: State, loss: float) -> bool:
        self.model.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
        with _errors():
            return self.manager.save(step)

    def wait(self) -> None:
        with _errors():
            self.manager.maybe_wait_for_saving()
        while not self.manager.purge_queue.empty():
            time.sleep(0.001)

    def latest(self) -> int | None:
        found = self.manager._find_load_step()
        return None if found == -1 else found

    def restore(self) -> Restored | None:
        step = self.latest()
        if step is None:
            return None
        with _errors():
            self.manager.load()
        return Restored(step, _arrays(self.model.state_dict()), {})

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.manager.close()


class Titan:
    """What torchtitan's trainer saves with.

    Args:
        mode: its ``async_mode``.
    """

    fewest = 2

    def __init__(self, mode: str) -> None:
        self._mode = mode
        background = "" if mode == "disabled" else ", in the background"
        self.name = f"torchtitan {version('torchtitan')}{background}"
        logging.disable(logging.WARNING)

    def open(self, root: Path, keep: Keep) -> Run:
        return TitanRun(root, keep, self._mode)

    def begin(self, root: Path, step: int) -> Callable[[], State]:
        reader = dcp.FileSystemReader(root / f"step-{step}")
        found: Any = reader.read_metadata().state_dict_metadata
        like = {
            name: torch.empty(found[name].size, dtype=found[name].properties.dtype)
            for name in state_of(step)
        }

        def rest() -> State:
            with _errors():
                dcp.load(like, storage_reader=reader, no_dist=True)
            return _arrays(like)

        return rest


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Have DCP's exceptions be an `Exception`, which they are not."""
    try:
        yield
    except CheckpointException as error:
        raise RuntimeError(str(error)) from error


def _arrays(tensors: dict[str, torch.Tensor]) -> State:
    return {name: np.array(tensor.numpy()) for name, tensor in tensors.items()}


MANAGERS = {mode: Titan(mode) for mode in ("disabled", "async")}
