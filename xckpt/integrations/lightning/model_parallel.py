"""Lightning's model-parallel strategy: every rank writes its shards, and loads of any sharding.

Models and optimizers are loaded in place; what else a checkpoint has is given to Lightning.
"""

# Lightning has an environment of its own; where the types are checked, it isn't installed.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from xckpt.api.load import load
from xckpt.api.open import open as open_checkpoint
from xckpt.api.save import Path
from xckpt.integrations.absent import absent
from xckpt.integrations.bases import bases_of
from xckpt.integrations.lightning.checkpoint_io import XckptCheckpointIO
from xckpt.integrations.lightning.last import resume
from xckpt.integrations.parts import load_parts
from xckpt.options import LoadOptions, SaveOptions

try:
    from lightning.pytorch.strategies import ModelParallelStrategy
except ImportError as error:
    ModelParallelStrategy = absent("lightning", error)

__all__ = ["XckptModelParallelStrategy"]


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
        self.checkpoint_io: XckptCheckpointIO = self._io

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Path, storage_options: object = None
    ) -> None:
        """Save, or begin to; Lightning calls it on every rank."""
        self._io.save_checkpoint(checkpoint, self.broadcast(filepath), storage_options)

    def load_checkpoint(
        self, checkpoint_path: Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the model and the optimizers; what else there is, is returned.

        Raises:
            CorruptCheckpointError: as `XckptCheckpointIO.load_checkpoint`.
            TreeMismatchError: the model or an optimizer does not fit it.
            XckptError: as `xckpt.load_into`.
        """
        self._io.teardown()
        return resume(self.broadcast(checkpoint_path), self._loaded, bases_of(self._io))

    def _loaded(self, path: str) -> dict[str, Any]:
        from torch.distributed.checkpoint import state_dict as states

        model = self.model
        weights = states.get_model_state_dict(model)
        moments = [states.get_optimizer_state_dict(model, each) for each in self.optimizers]
        target = {"state_dict": weights, "optimizer_states": moments}
        load_parts(path, target, options=self._load_options)
        stored = cast(Mapping[str, object], open_checkpoint(path).tree)
        names = [name for name in stored if name not in target]
        others = load(path, framework="torch", select=names, options=self._load_options)
        states.set_model_state_dict(model, weights)
        for optimizer, found in zip(self.optimizers, moments, strict=True):
            states.set_optimizer_state_dict(model, optimizer, found)
        return others

    def teardown(self) -> None:
        """Wait for the last save, and let go of the processes."""
        self._io.teardown()
        super().teardown()
