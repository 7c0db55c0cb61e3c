"""Tensors whose local part is a list of shards, each with its own offset.

`ShardedTensor` and `LocalShardsWrapper` both are that. What they share:

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
from xckpt.core.metadata import Sharding
from xckpt.errors import UnsupportedLeafError
from xckpt.torch.leaf import Memory, TensorLeaf, TensorTarget, mark_changed
from xckpt.torch.plain import check_readable, check_writable, known_dtype, plain


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A tensor, and where in the global tensor it belongs."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class LocalShards:
    """The shards that this rank holds of one tensor, empty ones included."""

    name: str
    """The leaf's, for messages."""
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None where this rank has no shard and does not know."""
    shards: Sequence[LocalShard]
    sharding: Sharding | None = None

    def source(self) -> TensorLeaf:
        """The shards as a source.

        Raises:
            UnsupportedLeafError: a shard has no plain elements to read, or not the tensor's dtype
                or number of dimensions; names its range.
        """
        parts, dtype = self._plain(), self._dtype()
        for part, label in parts:
            check_readable(part, label)
        boxes, kept = self._boxes()
        local = [parts[index][0] for index in kept]
        return TensorLeaf(self.shape, dtype, boxes, local, True, self.sharding)

    def target_in_place(self, leaf: torch.Tensor) -> TensorTarget:
        """A target that fills the shards themselves; ``leaf`` is what they are shards of.

        Raises:
            UnsupportedLeafError: as for `source`; or a shard cannot be filled in place.
        """
        parts, dtype = self._plain(), self._dtype()
        for part, label in parts:
            check_writable(part, label)
        boxes, kept = self._boxes()
        local = [parts[index][0] for index in kept]

        def finish() -> torch.Tensor:
            mark_changed(local)
            return leaf

        return TensorTarget(self.shape, dtype, boxes, lambda: Memory(local, finish))

    def new_target(
        self, make: Callable[[], tuple[torch.Tensor, Sequence[LocalShard]]]
    ) -> TensorTarget:
        """A target that fills new shards; ``make`` gives the new leaf and its shards.

        Raises:
            UnsupportedLeafError: as for `source`, but shards on the meta device are accepted.
        """
        _, dtype = self._plain(), self._dtype()
        boxes, _ = self._boxes()

        def allocate() -> Memory:
            leaf, shards = make()
            places = {(shard.offsets, shard.sizes): shard.tensor for shard in shards}
            memory = [places[box.offsets, box.sizes].detach() for box in boxes]
            return Memory(memory, lambda: leaf)

        return TensorTarget(self.shape, dtype, boxes, allocate)

    def _dtype(self) -> str:
        """The format's name of the element type; empty if there is no shard."""
        dtype = self.dtype
        for shard in self.shards:
            dtype = dtype or shard.tensor.dtype
            if shard.tensor.dtype != dtype or tuple(shard.tensor.shape) != shard.sizes:
                raise UnsupportedLeafError(
                    f"{self._label(shard)} has a {shard.tensor.dtype} tensor of shape "
                    f"{tuple(shard.tensor.shape)}, where a {dtype} of {shard.sizes} belongs"
                )
        return "" if dtype is None else known_dtype(dtype, self.name)

    def _plain(self) -> list[tuple[torch.Tensor, str]]:
        """Each shard's elements, and what to call the shard in a message."""
        labels = [self._label(shard) for shard in self.shards]
        return [
            (plain(shard.tensor, label), label)
            for shard, label in zip(self.shards, labels, strict=True)
        ]

    def _label(self, shard: LocalShard) -> str:
        return f"{self.name}: the shard {Box(shard.offsets, shard.sizes)}"

    def _boxes(self) -> tuple[Boxes, list[int]]:
        """The boxes of the shards that have elements, and which shards those are."""
        kept = [index for index, shard in enumerate(self.shards) if 0 not in shard.sizes]
        pairs = [(self.shards[index].offsets, self.shards[index].sizes) for index in kept]
        return Boxes.of(pairs, rank=len(self.shape)), kept
