"""Orbax's v1: a state that saves and loads itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from xckpt.api.load import load
from xckpt.integrations.bases import bases_of
from xckpt.integrations.orbax.held import Folder, elsewhere, held
from xckpt.options import LoadOptions, SaveOptions

__all__ = ["XckptCheckpointable"]


class XckptCheckpointable:
    """A state to save, or a tree of targets to load, for Orbax's v1.

    ``save_checkpointables({"state": XckptCheckpointable(state)})`` saves it, and
    ``load_checkpointables({"state": XckptCheckpointable(like)})["state"].tree`` is what was loaded.

    An object that is kept for an item, and gets each step's state as its `tree`, shares what did
    not change with what it saved or loaded last. One that is made for a step writes everything.

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
        write = held(self.tree, self._options, bases_of(self))

        async def finish() -> None:
            await asyncio.to_thread(write, await directory.await_creation())

        return finish()

    async def load(self, directory: Folder) -> Awaitable[None]:
        """Load `tree` when the returned coroutine is awaited."""
        group = elsewhere()

        def read(folder: Folder) -> None:
            self.tree = load(folder, self.tree, group=group, options=self._load_options)
            bases_of(self).restored(folder)

        return asyncio.to_thread(read, directory)
