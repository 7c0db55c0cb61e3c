"""Orbax: an item of an Orbax checkpoint that is a checkpoint of xckpt.

Orbax decides when to save, what to keep and what to delete; the folder of the item is xckpt's.

1. `XckptSave` and `XckptRestore` are arguments of Orbax's `CheckpointManager` and `Checkpointer`;
   they bring their handler along. `XckptCheckpointable` is the same for Orbax's v1.
2. A save copies the memory that may change and returns; the rest waits, in Orbax's background, for
   the folder. Each save has a group of its own, so that items of one checkpoint may be written side
   by side.
"""

# Orbax has an environment of its own; where the types are checked, it may be another release.
# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from xckpt.api.load import load
from xckpt.api.open import open as open_checkpoint
from xckpt.api.save import save
from xckpt.engine.background import BackgroundGroup
from xckpt.engine.groups import find_group
from xckpt.engine.ranks.group import Group
from xckpt.engine.stager import BlockingAsyncStager
from xckpt.integrations.absent import absent
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


__all__ = ["XckptCheckpointable", "XckptHandler", "XckptRestore", "XckptSave"]

Folder = str | os.PathLike[str]


class XckptHandler(AsyncCheckpointHandler):
    """Saves and restores items for Orbax, which finds it by `XckptSave` and `XckptRestore`."""

    async def async_save(self, directory: Folder, args: XckptSave) -> list[Any]:
        """Begin to save; Orbax calls it on every process, and waits for what it returns."""
        write = _held(args.item, args.options)
        return [CommitFutureAwaitingContractedSignals(asyncio.to_thread(write, directory))]

    def save(self, directory: Folder, args: XckptSave) -> None:
        """Save now."""
        _held(args.item, args.options)(directory)

    def restore(self, directory: Folder, args: XckptRestore | None = None) -> Any:
        """What is in the folder of an item."""
        args = XckptRestore() if args is None else args
        return load(directory, args.item, group=find_group(), options=args.options)

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


class XckptCheckpointable:
    """A state to save, or a tree of targets to load, for Orbax's v1.

    ``save_checkpointables({"state": XckptCheckpointable(state)})`` saves it, and
    ``load_checkpointables({"state": XckptCheckpointable(like)})["state"].tree`` is what was loaded.

    Args:
        tree: a state, as for `xckpt.save`; or targets, as for `xckpt.load`, None for NumPy arrays.
        options: for a save.
        load_options: for a load.
    """

    def __init__(
        self,
        tree: Any = None,
        *,
        options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
    ) -> None:
        self.tree = tree
        self._options, self._load_options = options, load_options

    async def save(self, directory: Any) -> Awaitable[None]:
        """Copy what may change; the returned coroutine waits for the folder and saves."""
        write = _held(self.tree, self._options)

        async def finish() -> None:
            await asyncio.to_thread(write, await directory.await_creation())

        return finish()

    async def load(self, directory: Folder) -> Awaitable[None]:
        """Load `tree` when the returned coroutine is awaited."""
        group = _elsewhere()

        def read(folder: Folder) -> None:
            self.tree = load(folder, self.tree, group=group, options=self._load_options)

        return asyncio.to_thread(read, directory)


def _elsewhere() -> Group:
    """A group for a call in a thread of Orbax: all processes begin such calls in the same order,
    but their threads run in any."""
    group = find_group()
    return group.in_background() if isinstance(group, BackgroundGroup) else group


def _held(state: Any, options: SaveOptions | None) -> Callable[[Folder], None]:
    """Copy what may change of a state; returns a function that saves the copy to a folder."""
    group, staged = _elsewhere(), BlockingAsyncStager().stage(state)

    def write(folder: Folder) -> None:
        # Orbax has made the folder, in a folder that no reader looks into.
        save(folder, staged, overwrite=True, group=group, options=options)

    return write
