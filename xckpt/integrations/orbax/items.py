"""Items of Orbax's managers of v0: arguments of `CheckpointManager` and `Checkpointer`.

They bring their handler along. A save copies the memory that may change and returns; the rest
waits, in Orbax's background, for the folder.
"""

# Orbax has an environment of its own; where the types are checked, it may be another release.
# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from xckpt.api.load import load
from xckpt.api.open import open as open_checkpoint
from xckpt.engine.groups import find_group
from xckpt.integrations.absent import absent
from xckpt.integrations.bases import bases_of
from xckpt.integrations.orbax.held import Folder, held
from xckpt.options import LoadOptions, SaveOptions

try:
    from orbax.checkpoint import AsyncCheckpointHandler
    from orbax.checkpoint.args import CheckpointArgs, register_with_handler
    from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals
except ImportError as error:
    AsyncCheckpointHandler = CheckpointArgs = absent("orbax-checkpoint", error)
    CommitFutureAwaitingContractedSignals = AsyncCheckpointHandler

    def register_with_handler(*_: Any, **__: Any) -> Any:
        """Do nothing: there is no registry."""
        return lambda arguments: arguments


__all__ = ["XckptHandler", "XckptRestore", "XckptSave"]


class XckptHandler(AsyncCheckpointHandler):
    """Saves and restores items for Orbax, which finds it by `XckptSave` and `XckptRestore`."""

    async def async_save(self, directory: Folder, args: XckptSave) -> list[Any]:
        """Begin to save; Orbax calls it on every process, and waits for what it returns."""
        write = held(args.item, args.options, bases_of(self))
        return [CommitFutureAwaitingContractedSignals(asyncio.to_thread(write, directory))]

    def save(self, directory: Folder, args: XckptSave) -> None:
        """Save now."""
        held(args.item, args.options, bases_of(self))(directory)

    def restore(self, directory: Folder, args: XckptRestore | None = None) -> Any:
        """What is in the folder of an item."""
        args = XckptRestore() if args is None else args
        found = load(directory, args.item, group=find_group(), options=args.options)
        bases_of(self).restored(directory)
        return found

    def metadata(self, directory: Folder) -> Any:
        """The tree, with an `xckpt.StoredArray` for each array; no data is read."""
        return open_checkpoint(directory).tree


@register_with_handler(XckptHandler, for_save=True)
@dataclass
class XckptSave(CheckpointArgs):
    """What ``args=`` of Orbax's ``save`` takes; in an ``ocp.args.Composite``, one item.

    Args:
        item: a state, as for `xckpt.save`.
        options: see `xckpt.save`.

    Example:
        >>> import orbax.checkpoint as ocp, jax.numpy as jnp, os
        >>> from xckpt.integrations.orbax import XckptRestore, XckptSave
        >>> state = {"w": jnp.ones(3), "step": 7}
        >>> with ocp.CheckpointManager(os.path.abspath("run")) as manager:
        ...     _ = manager.save(7, args=XckptSave(state))
        ...     manager.restore(7, args=XckptRestore(state))
        {'w': Array([1., 1., 1.], dtype=float32), 'step': 7}
    """

    item: Any
    options: SaveOptions | None = None


@register_with_handler(XckptHandler, for_restore=True)
@dataclass
class XckptRestore(CheckpointArgs):
    """What ``args=`` of Orbax's ``restore`` takes.

    Args:
        item: the tree of targets, see `xckpt.load`; None for NumPy arrays.
        options: see `xckpt.load`.
    """

    item: Any = None
    options: LoadOptions | None = None
