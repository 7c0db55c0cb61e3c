"""Tensors whose local part is a list of shards, each with its own offset.

`ShardedTensor` and DTensors over a `LocalShardsWrapper` both are that. What they share:

1. Only shards that have elements count, as boxes and plain tensors. An empty shard holds nothing
   wherever it lies, and it may lie beyond the tensor.
2. `source` shows them, `target_in_place` fills them, and `new_target` fills those of a new leaf,
   which the module for its class makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from xckpt.core.geometry.box import Box, Boxes
from xckpt.core.geometry.spread import Spread
from xckpt.core.metadata import Sharding
from xckpt.errors import UnsupportedLeafError
from xckpt.torch.leaf import (
    TensorLeaf,
    check_readable,
    check_writable,
    known_dtype,
    plain,
)
from xckpt.torch.target import Memory, TensorTarget

LocalShard = tuple[Box, torch.Tensor]
"""Where in the global tensor a shard belongs, and its elements."""


@dataclass(frozen=True, slots=True)
class LocalShards:
    """The shards that this rank holds of one tensor, empty ones included."""

    name: str
    """The leaf's, for messages."""
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None where this rank has no shard and does not know."""
    shards: Sequence[LocalShard]
    sharding: Sharding
    spread: Callable[[], Spread | None] | None = None
    """Where the shards of all ranks are, if this one knows it."""

    def source(self) -> TensorLeaf:
        """The shards as a source.

        Raises:
            UnsupportedLeafError: a shard has no plain elements to read, or not the tensor's dtype
                or number of dimensions; names its range.
        """
        parts, dtype = self._parts(check_readable), self._dtype()
        held = self.shape, dtype, self._boxes(), parts
        return TensorLeaf(*held, True, self.sharding, spread=self.spread)

    def target_in_place(self, leaf: torch.Tensor) -> TensorTarget:
        """A target that fills the shards themselves; ``leaf`` is what they are shards of.

        Raises:
            UnsupportedLeafError: as for `source`; or a shard cannot be filled in place.
        """
        parts = self._parts(check_writable)
        memory = Memory(leaf, parts, parts)
        return TensorTarget(self.shape, self._dtype(), self._boxes(), lambda: memory, in_place=True)

    def new_target(
        self, make: Callable[[], tuple[torch.Tensor, Sequence[LocalShard]]]
    ) -> TensorTarget:
        """A target that fills new shards; ``make`` gives the new leaf and its shards.

        Raises:
            UnsupportedLeafError: as for `source`, but shards on the meta device are accepted.
        """
        self._parts()
        boxes = self._boxes()

        def allocate() -> Memory:
            leaf, shards = make()
            tensors = dict(shards)
            return Memory(leaf, [tensors[box].detach() for box in boxes])

        return TensorTarget(self.shape, self._dtype(), boxes, allocate)

    def _parts(
        self, check: Callable[[torch.Tensor, str], object] | None = None
    ) -> list[torch.Tensor]:
        """The elements of each shard that has any; ``check`` may refuse a shard."""
        parts: list[torch.Tensor] = []
        dtype = self.dtype
        for box, tensor in self.shards:
            label = f"{self.name}: the shard {box}"
            part = plain(tensor, label)
            dtype = dtype or part.dtype
            if part.dtype != dtype or tuple(part.shape) != box.sizes:
                raise UnsupportedLeafError(
                    f"{label} has a {part.dtype} tensor of shape {tuple(part.shape)}, where a "
                    f"{dtype} of {box.sizes} belongs"
                )
            if check is not None:
                check(part, label)
            if box.elements:
                parts.append(part)
        return parts

    def _dtype(self) -> str:
        """The format's name of the element type; empty if there is no shard."""
        dtype = self.dtype or next((tensor.dtype for _, tensor in self.shards), None)
        return "" if dtype is None else known_dtype(dtype, self.name)

    def _boxes(self) -> Boxes:
        """The boxes of the shards that have elements."""
        pairs = [(box.offsets, box.sizes) for box, _ in self.shards if box.elements]
        return Boxes.of(pairs, rank=len(self.shape))
