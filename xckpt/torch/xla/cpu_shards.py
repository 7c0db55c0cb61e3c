"""The shards of a tensor on an XLA device as tensors on the host: what a stager keeps of it.

`CpuShards` are a leaf of their own, made here or from what torch_xla's own stager makes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from xckpt.core.geometry.box import Boxes
from xckpt.core.metadata import Sharding
from xckpt.torch.xla.shards import ShardLayout, fetch, global_tensor
from xckpt.torch.xla.spec import stored_sharding


class Shard(Protocol):
    """What is used of torch_xla's `XLAShard`."""

    data: torch.Tensor
    """On the host, padding included."""
    indices: object
    """A slice for each dimension, without padding; Ellipsis for the whole."""


@dataclass(frozen=True, slots=True, eq=False)
class CpuShards:
    """The shards of a tensor on an XLA device, copied to the host: what a stager keeps of it.

    A leaf like any tensor: it is saved as the tensor would have been.
    """

    shape: tuple[int, ...]
    """The global shape."""
    dtype: torch.dtype
    boxes: Boxes
    """The distinct boxes."""
    tensors: tuple[torch.Tensor, ...]
    """The elements of each box, on the host, without padding."""
    sharded: bool
    """False if every process holds the whole tensor."""
    sharding: Sharding | None

    @classmethod
    def of(cls, leaf: torch.Tensor, name: str = "") -> CpuShards:
        """Copy a tensor's shards to the host, in one transfer.

        Raises:
            UnsupportedLeafError: its shards are no boxes; names the leaf.
        """
        layout = ShardLayout.of(global_tensor(leaf), name)
        tensors = unpadded(fetch(global_tensor(leaf), layout), layout)
        if not layout.annotated and leaf.device.type == "cpu":
            tensors = [tensor.clone() for tensor in tensors]
        return cls(
            tuple(leaf.shape),
            leaf.dtype,
            layout.boxes,
            # A part of a shard would keep the padding alive.
            tuple(tensor.contiguous() for tensor in tensors),
            not layout.whole,
            stored_sharding(leaf, layout),
        )

    @classmethod
    def from_shards(cls, shards: Sequence[Shard], shape: Sequence[int]) -> CpuShards:
        """From what `XLAShardedTensor.local_shards` returned, and the global shape.

        Example:
            >>> from types import SimpleNamespace as Shard
            >>> rows = [torch.arange(4).reshape(2, 2), torch.tensor([[4, 5], [0, 0]])]
            >>> indices = [[slice(0, 2), slice(0, 2)], [slice(2, 3), slice(0, 2)]]
            >>> shards = [Shard(data=d, indices=i) for d, i in zip(rows, indices)]
            >>> staged = CpuShards.from_shards(shards, (3, 2))
            >>> staged.boxes, staged.tensors[1]
            (Boxes([0, 2) x [0, 2), [2, 3) x [0, 2)), tensor([[4, 5]]))
        """
        size = tuple(shape)
        data = [shard.data for shard in shards]
        if shards[0].indices is Ellipsis:
            return cls(size, data[0].dtype, Boxes.whole(size), (data[0],), False, None)
        indices = [cast("Sequence[slice]", shard.indices) for shard in shards]
        layout = ShardLayout.of_indices(size, (1,) * len(size), indices)
        tensors = tuple(unpadded(data, layout))
        return cls(size, data[0].dtype, layout.boxes, tensors, True, None)


def is_staged(leaf: object) -> bool:
    """Whether a leaf is shards on the host: `CpuShards`, or those that torch_xla's stager makes."""
    if isinstance(leaf, CpuShards):
        return True
    helpers = sys.modules.get("torch_xla.experimental.distributed_checkpoint._helpers")
    return helpers is not None and isinstance(leaf, helpers._CpuShards)


def staged_shards(leaf: object) -> CpuShards:
    """Shards on the host (`is_staged`) as `CpuShards`."""
    if isinstance(leaf, CpuShards):
        return leaf
    shards: Any = leaf
    return CpuShards.from_shards(shards.shards, shards.global_shape)


def unpadded(shards: Sequence[torch.Tensor], layout: ShardLayout) -> list[torch.Tensor]:
    """The elements of each box; of several devices that hold it, the first one's."""
    if layout.whole:
        return list(shards)
    return [
        shards[devices[0]][view] for devices, view in zip(layout.holders, layout.views, strict=True)
    ]
