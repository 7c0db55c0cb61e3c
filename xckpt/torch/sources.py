"""Sources of torch's adapter: what of a tensor of any kind this process holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from xckpt.core.geometry.boxes import Boxes
from xckpt.core.metadata import Sharding

__all__ = ["TensorSource"]


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor of any kind to be saved: boxes of it, and the local elements of each."""

    shape: tuple[int, ...]
    """The global shape, in elements."""
    dtype: str
    """Empty where this rank has no part of the tensor and does not know."""
    boxes: Boxes
    """The whole of a plain tensor; of a sharded one the boxes that this rank holds."""
    parts: Sequence[torch.Tensor]
    """The elements of each box, outside autograd: views of the caller's memory."""
    sharded: bool = False
    sharding: Sharding | None = None
    annotation: str = ""

    def data(self, index: int) -> torch.Tensor:
        """A view of the caller's memory, on its own device."""
        return self.parts[index]
