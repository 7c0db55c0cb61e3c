"""Save under other names than the state has, and load back under its own.

Both planners rename the state dict's own keys and leave the rest to the defaults, so the new names
are in the metadata, in the storage and in every error message.

Example:
    >>> import torch, xckpt
    >>> state = {"weight": torch.ones(2), "step": 3}
    >>> saved = xckpt.save("memory://renamed", state, planner=RenamingSavePlanner("ema_"))
    >>> list(saved.state_dict_metadata)
    ['ema_weight', 'ema_step']
    >>> state = {"weight": torch.zeros(2), "step": 0}
    >>> _ = xckpt.load_into("memory://renamed", state, planner=RenamingLoadPlanner("ema_"))
    >>> state
    {'weight': tensor([1., 1.]), 'step': 3}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xckpt.metadata import Metadata
from xckpt.planner import DefaultLoadPlanner, DefaultSavePlanner


class RenamingSavePlanner(DefaultSavePlanner):
    """Saves every key of the state dict with a prefix."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def set_up_planner(
        self,
        state_dict: Mapping[str, object],
        storage_meta: object = None,
        is_coordinator: bool = False,
    ) -> None:
        renamed = {self.prefix + key: leaf for key, leaf in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


class RenamingLoadPlanner(DefaultLoadPlanner):
    """Loads keys that were saved with a prefix into a state dict that has none."""

    def __init__(self, prefix: str, *, strict: bool = True, cast: bool = False) -> None:
        super().__init__(strict=strict, cast=cast)
        self.prefix = prefix
        self.original: Any = None

    def set_up_planner(
        self,
        state_dict: Mapping[str, object] | None,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.original = state_dict
        renamed = None
        if state_dict is not None:
            renamed = {self.prefix + key: leaf for key, leaf in state_dict.items()}
        super().set_up_planner(renamed, metadata, is_coordinator)

    def result(self) -> object:
        renamed: Any = super().result()
        loaded = {key.removeprefix(self.prefix): leaf for key, leaf in renamed.items()}
        if not self.in_place:
            return loaded
        # Tensors were filled where they are; Python values have to be put into the caller's dict.
        self.original.update(loaded)
        return self.original
