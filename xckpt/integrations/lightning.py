"""Lightning: checkpoints of a `Trainer` are checkpoints of xckpt.

1. `XckptCheckpointIO` writes what a strategy gives one rank to write: a process alone, DDP.
2. In the background it begins a save and returns; `ModelCheckpoint` then has older checkpoints
   removed at once, and each waits here until the save that was begun before it is committed.
3. `XckptModelParallelStrategy` has every rank write its shards, and load those of any sharding.

Two screens, for Lightning asks in two ways: a plugin for one rank, and a strategy for all of them.
"""

# Lightning has an environment of its own; where the types are checked, it isn't installed.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

from xckpt.api.load import load, load_into
from xckpt.api.open import open as open_checkpoint
from xckpt.api.places import delete, exists
from xckpt.api.save import Path, save, save_async
from xckpt.engine.background import SaveFuture
from xckpt.integrations.absent import absent
from xckpt.options import LoadOptions, SaveOptions

try:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch.strategies import ModelParallelStrategy
except ImportError as error:
    CheckpointIO = ModelParallelStrategy = absent("lightning", error)

__all__ = ["XckptCheckpointIO", "XckptModelParallelStrategy"]


class XckptCheckpointIO(CheckpointIO):
    """Saves and loads the checkpoints of a Lightning `Trainer`: ``Trainer(plugins=[...])``.

    What the keep rules of `ModelCheckpoint` remove is removed once its successor is committed.
    Hyperparameters and the states of callbacks are saved as well, so they have to be tensors,
    Python values and containers of them; ``options`` can name a serialiser for others.

    Args:
        background: go on training while a checkpoint is written. A save that fails is then raised
            by the next one, or at the end of the training.
        options: for each save.
        load_options: for each load.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from xckpt.integrations.lightning import XckptCheckpointIO
        >>> trainer = Trainer(plugins=[XckptCheckpointIO(background=True)], accelerator="cpu")
    """

    alone: bool = True
    """Whether one rank saves, whatever others there are."""

    def __init__(
        self,
        *,
        background: bool = False,
        options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
    ) -> None:
        super().__init__()
        self.background = background
        self._options, self._load_options = options, load_options
        self._saving: SaveFuture | None = None
        self._outdated: list[Path] = []

    def save_checkpoint(
        self,
        checkpoint: Mapping[str, object],
        path: Path,
        storage_options: object = None,
    ) -> None:
        """Save, or begin to; Lightning calls it on one rank.

        Raises:
            XckptError: as `xckpt.save`; or the save before has failed.
            TypeError: there are ``storage_options``.
        """
        if storage_options is not None:
            raise TypeError("storage_options are not taken: give XckptCheckpointIO options")
        self._settle()
        if "://" not in os.fspath(path):
            # `ModelCheckpoint` may put a link beside it before the save in the background does.
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        write = save_async if self.background else save
        saving = write(path, checkpoint, overwrite=True, no_dist=self.alone, options=self._options)
        self._saving = saving if isinstance(saving, SaveFuture) else None

    def load_checkpoint(
        self, path: Path, map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint, as tensors on the CPU or the device that ``map_location`` names.

        Nothing is unpickled, whatever ``weights_only`` says.
        """
        self._settle()
        device = None if callable(map_location) or isinstance(map_location, dict) else map_location
        return load(
            path, framework="torch", device=device, no_dist=True, options=self._load_options
        )

    def remove_checkpoint(self, path: Path) -> None:
        """Remove a checkpoint, once the save that is under way is committed."""
        self._outdated.append(path)
        if self._saving is None:
            self._settle()

    def teardown(self) -> None:
        """Wait for the last save; Lightning calls it when a training ends."""
        self._settle()

    def _settle(self) -> None:
        """Wait for the save under way, then remove what it has outdated.

        Raises:
            XckptError: the save has failed. What it would have outdated stays.
        """
        saving, outdated = self._saving, self._outdated
        self._saving, self._outdated = None, []
        if saving is not None:
            saving.result()
        for path in outdated:
            if os.path.islink(path):
                os.remove(path)
            elif exists(path):
                delete(path)


class XckptModelParallelStrategy(ModelParallelStrategy):
    """Lightning's `ModelParallelStrategy` (FSDP2, tensor parallel), over checkpoints of xckpt.

    Every rank writes its shards, and loads what it needs, whatever the sharding was. All else is as
    with `XckptCheckpointIO`.

    Args:
        background: see `XckptCheckpointIO`.
        options: for each save.
        load_options: for each load.
        arguments: those of `ModelParallelStrategy`.

    Example:
        >>> from xckpt.integrations.lightning import XckptModelParallelStrategy
        >>> strategy = XckptModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=2)
    """

    def __init__(
        self,
        *,
        background: bool = False,
        options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self._load_options = load_options
        self._io = XckptCheckpointIO(
            background=background, options=options, load_options=load_options
        )
        self._io.alone = False
        self.checkpoint_io = self._io

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Path, storage_options: object = None
    ) -> None:
        """Save, or begin to; Lightning calls it on every rank."""
        self._io.save_checkpoint(checkpoint, self.broadcast(filepath), storage_options)

    def load_checkpoint(
        self, checkpoint_path: Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the model and the optimizers; what else there is, is returned."""
        from torch.distributed.checkpoint import state_dict as states

        self._io.teardown()
        path, model = self.broadcast(checkpoint_path), self.model
        weights = states.get_model_state_dict(model)
        moments = [states.get_optimizer_state_dict(model, each) for each in self.optimizers]
        target = {"state_dict": weights, "optimizer_states": moments}
        load_into(path, target, unexpected="ignore", options=self._load_options)
        states.set_model_state_dict(model, weights)
        for optimizer, found in zip(self.optimizers, moments, strict=True):
            states.set_optimizer_state_dict(model, optimizer, found)
        stored = cast(Mapping[str, object], open_checkpoint(path).tree)
        others = [name for name in stored if name not in target]
        return load(path, framework="torch", select=others, options=self._load_options)

    def teardown(self) -> None:
        """Wait for the last save, and let go of the processes."""
        self._io.teardown()
        super().teardown()
