"""Lightning's `CheckpointIO`: what a strategy gives one rank to write; a process alone, DDP.

1. In the background `XckptCheckpointIO` begins a save and returns; `ModelCheckpoint` then has older
   checkpoints removed at once, and each waits here until the save begun before it is committed.
2. All ranks load together, so that all take the same one where ``last.ckpt`` is damaged.
"""

# Lightning has an environment of its own; where the types are checked, it isn't installed.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xckpt.api.load import load
from xckpt.api.save import Path, save, save_async
from xckpt.engine.background import SaveFuture
from xckpt.integrations.absent import absent
from xckpt.integrations.bases import bases_of
from xckpt.integrations.lightning.last import make_way, resume
from xckpt.integrations.removal import remove
from xckpt.options import LoadOptions, SaveOptions, check_flags, checked_options

try:
    from lightning.fabric.plugins import CheckpointIO
except ImportError as error:
    CheckpointIO = absent("lightning", error)

__all__ = ["XckptCheckpointIO"]


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

    Raises:
        TypeError: one of them has another type.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from xckpt.integrations.lightning import XckptCheckpointIO
        >>> trainer = Trainer(plugins=[XckptCheckpointIO(background=True)], accelerator="cpu")
    """

    alone: bool = True
    """Whether one rank saves, even if there are others."""

    def __init__(
        self,
        *,
        background: bool = False,
        options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
    ) -> None:
        super().__init__()
        check_flags("XckptCheckpointIO", background=background)
        checked_options(options, SaveOptions, "XckptCheckpointIO")
        checked_options(load_options, LoadOptions, "XckptCheckpointIO", "load_options")
        self.background, self._options, self._load_options = background, options, load_options
        self._saving: SaveFuture | None = None
        self._outdated: list[Path] = []

    def save_checkpoint(
        self, checkpoint: Mapping[str, object], path: Path, storage_options: object = None
    ) -> None:
        """Save, or begin to; Lightning calls it on one rank.

        Raises:
            XckptError: as `xckpt.save`; or the save before has failed.
            TypeError: there are ``storage_options``.
        """
        if storage_options is not None:
            raise TypeError("give options= to XckptCheckpointIO, not storage_options")
        self.teardown()
        make_way(path, alone=self.alone, background=self.background)
        how = {"base": bases_of(self).next(path), "no_dist": self.alone, "options": self._options}
        saving = (save_async if self.background else save)(path, checkpoint, overwrite=True, **how)
        self._saving = saving if isinstance(saving, SaveFuture) else None

    def load_checkpoint(
        self, path: Path, map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint, as tensors on the CPU or the device that ``map_location`` names.

        Lightning calls it on all ranks. Nothing is unpickled, whatever ``weights_only`` says.

        Raises:
            CorruptCheckpointError: it is damaged; if it is the last, those beside it are, too.
            XckptError: as `xckpt.load`.
        """
        self.teardown()
        device = None if callable(map_location) or isinstance(map_location, dict) else map_location
        into = {"framework": "torch", "device": device, "options": self._load_options}
        return resume(path, lambda each: load(each, **into), bases_of(self))

    def remove_checkpoint(self, path: Path) -> None:
        """Remove a checkpoint, once the save that is under way is committed."""
        self._outdated.append(path)
        if self._saving is None:
            self.teardown()

    def teardown(self) -> None:
        """Wait for the save under way, then remove what it has outdated.

        Lightning calls it when a training ends.

        Raises:
            XckptError: the save has failed. What it would have outdated stays.
        """
        saving, outdated = self._saving, self._outdated
        self._saving, self._outdated = None, []
        if saving is not None:
            saving.result()
        for path in outdated:
            remove(path)
