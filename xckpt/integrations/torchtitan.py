"""torchtitan: its trainer's checkpoint manager, over `xckpt.CheckpointManager`.

``XckptManager.Config(...)`` stands where the trainer's configuration has a checkpoint manager's.

1. torchtitan's fields say when to save, how many steps stay, and what a new run begins with.
2. A state is laid out as torchtitan's own manager does it: the model's tensors at the top, beside
   them ``optimizer``, ``lr_scheduler``, ``dataloader`` and ``train_state``. So a run resumes from
   that manager's steps, too.
3. A save goes on in the background; the last one is waited for.

Two screens, for torchtitan's base class has each manager carry out its fields: seeds, what a new
run begins with, what is excluded, the dtype of the last save.
"""

# torchtitan has an environment of its own; where the types are checked, it isn't installed.
# pyright: reportMissingImports=false, reportGeneralTypeIssues=false

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from xckpt.api.load import load_into
from xckpt.integrations.absent import absent
from xckpt.manager import CheckpointManager
from xckpt.options import LoadOptions, SaveOptions
from xckpt.policies import All, Latest

try:
    from torchtitan.components import checkpointer as titan
    from torchtitan.components.checkpointer import BaseCheckpointManager
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.tools import filesystem
except ImportError as error:
    BaseCheckpointManager = titan = filesystem = absent("torchtitan", error)
    BaseCheckpointManager.Config = object
    TORCH_DTYPE_MAP = {}

__all__ = ["XckptManager"]


class XckptManager(BaseCheckpointManager):
    """What torchtitan's trainer saves and loads with, if its configuration says so.

    ``checkpoint=XckptManager.Config(enable=True, interval=500, keep_latest_k=3)`` in the
    ``Trainer.Config``. ``options`` and ``load_options`` are class attributes: subclass to set them.

    Raises:
        ValueError: the configuration asks for safetensors; `xckpt.convert` writes and reads those.
    """

    options: SaveOptions | None = None
    load_options: LoadOptions | None = None

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's fields, and one more."""

        background: bool = True
        """Go on training while a checkpoint is written. A save that fails is raised by the next."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        del sd_adapter
        self.enable = config.enable
        self.save_future: Future[None] | None = None
        if not self.enable:
            return
        if config.last_save_in_hf or config.initial_load_in_hf:
            raise ValueError(
                "XckptManager has no in_hf: xckpt.convert writes and reads those files"
            )
        self._config = config
        self._model = titan.ModelWrapper(model_parts)
        parts = {titan.OPTIMIZER: optimizers, titan.LR_SCHEDULER: lr_schedulers}
        parts |= states | {titan.DATALOADER: dataloader}
        self._parts = {name: part for name, part in parts.items() if part is not None}
        if unknown := [each for each in config.exclude_from_loading if each not in self._parts]:
            raise ValueError(f"exclude_from_loading: {unknown} is not in {sorted(self._parts)}")
        self._run = CheckpointManager(
            filesystem.join(base_folder, config.folder),
            save=lambda moment: False,  # `_save` knows when
            keep=Latest(config.keep_latest_k) if config.keep_latest_k else All(),
            options=self.options,
            load_options=self.load_options,
        )

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self._config
        first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (first or last_step or curr_step % config.interval == 0):
            return False
        weights = self._model.state_dict()
        if last_step and config.last_save_model_only:
            dtype = TORCH_DTYPE_MAP[config.export_dtype]
            state = {
                name: value.to(dtype) if value.is_floating_point() else value
                for name, value in weights.items()
            }
        else:
            state = weights | self._parts
        self.save_future = Future()
        self._run.save(curr_step, state, force=True)
        if last_step or not config.background:
            self._wait_for_saving()
        return True

    def _load(self, step: int = -1) -> bool:
        latest = self._run.latest()
        if step == -1 and latest is None:
            return self._begin()
        # As in torchtitan, step 0 is a seed: an unsharded model, and nothing else.
        is_seed = step == 0 or (step == -1 and latest is not None and latest.number == 0)
        state = self._targets(model_only=is_seed)
        wanted = None if step == -1 else step
        self._run.restore_into(state, step=wanted, unexpected="ignore")
        self._model.load_state_dict(state)
        return True

    def _begin(self) -> bool:
        """Load what a new run begins with, if anything."""
        path = self._config.initial_load_path
        if path is None:
            return False
        state = self._targets(model_only=self._config.initial_load_model_only)
        load_into(path, state, unexpected="ignore", options=self.load_options)
        self._model.load_state_dict(state)
        return True

    def _targets(self, *, model_only: bool) -> dict[str, Any]:
        parts = {} if model_only else self._parts
        excluded = self._config.exclude_from_loading
        return self._model.state_dict() | {
            name: part for name, part in parts.items() if name not in excluded
        }

    def _wait_for_saving(self) -> None:
        self.save_future = None
        self._run.wait()

    def _maybe_wait_for_staging(self) -> None:
        """Return at once: what a save needs is copied when it is begun."""

    def _close(self) -> None:
        self._wait_for_saving()
