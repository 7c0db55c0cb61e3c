"""Planners for states on XLA devices, and their shards on the host.

`xckpt.save`, `load` and `load_into` need none of these planners for tensors on XLA devices. They
are for code that names a planner, as torch_xla's own examples do, or overrides a step; and they
list the sharded leaves apart from the others. A stager keeps a tensor as `CpuShards`. What a leaf
is and how its elements move is in `xckpt.torch.xla.adapter`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from xckpt.core.geometry.box import Boxes
from xckpt.core.leaf import SourceLeaf
from xckpt.core.metadata import Sharding
from xckpt.core.plan.load import DefaultLoadPlanner
from xckpt.core.plan.save import DefaultSavePlanner
from xckpt.torch.xla.shards import ShardLayout, fetch, global_tensor, unpadded
from xckpt.torch.xla.spec import stored_sharding

__all__ = ["CpuShards", "SPMDLoadPlanner", "SPMDSavePlanner"]


class SPMDSavePlanner(DefaultSavePlanner):
    """Saves a state whose tensors live on XLA devices, sharded or not.

    Each local shard is an item, replicas once; a tensor is transferred to the host once, and each
    shard is dropped after its last use. ``resolve_data`` may be called again: then it transfers
    again. Takes `CpuShards`, the shards of a staged state, as well.

    Example:
        >>> import xckpt
        >>> planner = SPMDSavePlanner()
        >>> _ = xckpt.save("memory://spmd", {"step": 3}, planner=planner)
        >>> sorted(planner.sharded_state_dict), sorted(planner.unsharded_state_dict)
        ([], ['step'])
    """

    @property
    def sharded_state_dict(self) -> Mapping[str, SourceLeaf]:
        """Leaf name -> leaf, for the leaves that a device holds only in part."""
        sources = {
            name: leaf for name, leaf in self._leaves.items() if isinstance(leaf, SourceLeaf)
        }
        return {name: leaf for name, leaf in sources.items() if leaf.sharded}

    @property
    def unsharded_state_dict(self) -> Mapping[str, object]:
        """Leaf name -> the rest: replicated tensors, plain tensors and values."""
        sharded = self.sharded_state_dict
        return {name: leaf for name, leaf in self._leaves.items() if name not in sharded}


class SPMDLoadPlanner(DefaultLoadPlanner):
    """Loads into a state whose tensors are on XLA devices and sharded already, in place.

    A tensor's shards are collected on the host and go to its devices together, when the last
    element has come; until then the tensor is as it was. Padding is kept.

    Args:
        strict: refuse missing and unexpected leaves; otherwise load what is shared.
        cast: allow another dtype than the stored one.

    Example:
        >>> import xckpt
        >>> _ = xckpt.save("memory://spmd-load", {"step": 3})
        >>> xckpt.load("memory://spmd-load", {"step": 0}, planner=SPMDLoadPlanner())
        {'step': 3}
    """

    def __init__(self, *, strict: bool = True, cast: bool = False) -> None:
        super().__init__(strict=strict, cast=cast, in_place=True)


class Shard(Protocol):
    """The attributes used of torch_xla's `XLAShard`."""

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
            UnsupportedLeafError: its shards are not boxes; names the leaf.
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
