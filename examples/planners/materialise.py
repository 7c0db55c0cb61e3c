"""Give a model that was built on the meta device its memory and its weights in one step.

A meta tensor has no memory to load into. The planner allocates each tensor once, when its first
item comes; each item is read into a temporary of just its region; when all is there, the model gets
its new parameters. Until then it stays as it was, so a load that fails leaves no half-filled model.

Example:
    >>> import torch, xckpt
    >>> model = torch.nn.Linear(3, 2)
    >>> _ = xckpt.save("memory://model", model.state_dict())
    >>> with torch.device("meta"):
    ...     empty = torch.nn.Linear(3, 2)
    >>> reader = xckpt.storage.ZarrStorageReader("memory://model")
    >>> _ = xckpt.load_state_dict(empty.state_dict(), reader, planner=MaterialisingPlanner(empty))
    >>> torch.equal(empty.weight, model.weight), empty.weight.requires_grad
    (True, True)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from xckpt.metadata import Metadata
from xckpt.planner import DefaultLoadPlanner, ReadItem


class MaterialisingPlanner(DefaultLoadPlanner):
    """Loads a model's state dict into new tensors and makes them the model's.

    Args:
        model: what has the state dict; its tensors may be on the meta device, DTensors too.
    """

    def __init__(self, model: torch.nn.Module, *, strict: bool = True, cast: bool = False) -> None:
        super().__init__(strict=strict, cast=cast)
        self.model = model

    def set_up_planner(
        self,
        state_dict: Mapping[str, object] | None,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.in_place = False  # new tensors like the targets, on the device of their mesh
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def resolve_tensor(self, read_item: ReadItem) -> object:
        region = super().resolve_tensor(read_item)
        assert isinstance(region, torch.Tensor)
        return torch.empty_like(region)

    def commit_tensor(self, read_item: ReadItem, tensor: object) -> None:
        region = super().resolve_tensor(read_item)  # of the same tensor as before
        assert isinstance(region, torch.Tensor) and isinstance(tensor, torch.Tensor)
        region.copy_(tensor)
        super().commit_tensor(read_item, region)

    def result(self) -> object:
        loaded: Any = super().result()
        self.model.load_state_dict(loaded, assign=True)
        return loaded
