"""torchtitan's `BaseCheckpointManager`, over `xckpt.CheckpointManager`.

1. torchtitan's fields say when to save, how many steps stay, and what a new run begins with; what a
   state is made of is in `xckpt.integrations.torchtitan.state`.
2. A save goes on in the background; the last one is waited for.
"""

# torchtitan has an environment of its own; where the types are checked, it isn't installed.
# pyright: reportMissingImports=false, reportGeneralTypeIssues=false

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from xckpt.integrations.absent import absent
from xckpt.integrations.torchtitan.state import TrainerState
from xckpt.manager import CheckpointManager
from xckpt.options import LoadOptions, SaveOptions
from xckpt.policies import All, Latest

try:
    from torchtitan.components.checkpointer import BaseCheckpointManager
    from torchtitan.tools import filesystem
except ImportError as error:
    BaseCheckpointManager = filesystem = absent("torchtitan", error)
    BaseCheckpointManager.Config = absent("torchtitan", error)

__all__ = ["XckptManager"]


class XckptManager(BaseCheckpointManager):
    """The checkpoint manager of torchtitan's trainer, if its configuration names it.

    ``checkpoint=XckptManager.Config(enable=True, interval=500, keep_latest_k=3)`` in the
    ``Trainer.Config``. ``options`` and ``load_options`` are class attributes: subclass to set them.

    Raises:
        ValueError: the configuration asks for safetensors; `xckpt.convert` writes and reads those.
    """

    options: SaveOptions | None = None
    load_options: LoadOptions | None = None
    save_future: Future[None] | None = Future()
    """Not None: so `maybe_wait_for_saving` asks for `_wait_for_saving`."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's fields, and one more."""

        background: bool = True
        """Go on training while a checkpoint is written. A save that fails is raised by the next."""

    def __init__(self, config: Config, *, base_folder: str = "", **trainer: Any) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        if config.last_save_in_hf or config.initial_load_in_hf:
            raise ValueError("last_save_in_hf, initial_load_in_hf: use xckpt.convert instead")
        self._config = config
        self._state = TrainerState(trainer, config.exclude_from_loading, self.load_options)
        self._run = CheckpointManager(
            filesystem.join(base_folder, config.folder),
            save=(),  # `_save` knows when
            keep=Latest(config.keep_latest_k) if config.keep_latest_k else All(),
            options=self.options,
            load_options=self.load_options,
        )

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self._config
        first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (first or last_step or curr_step % config.interval == 0):
            return False
        alone = last_step and config.last_save_model_only
        state = self._state.weights(config.export_dtype) if alone else self._state.whole()
        self._run.save(curr_step, state, force=True)
        if last_step or not config.background:
            self._wait_for_saving()
        return True

    def _load(self, step: int = -1) -> bool:
        wanted, config = None if step == -1 else step, self._config
        report = self._run.restore_with(self._state.resume, step=wanted)
        if report is None and config.initial_load_path is not None:
            report = self._state.fill(config.initial_load_path, config.initial_load_model_only)
        return report is not None

    def _wait_for_saving(self) -> None:
        self._run.wait()

    def _maybe_wait_for_staging(self) -> None:
        """Return at once: a save copies what it needs when it begins."""

    def _close(self) -> None:
        self._run.wait()
