"""Where a sharded tensor's boxes are on all ranks, as far as one rank knows (`Spread`).

1. A DTensor: mesh and placements say it for every rank, where one axis after the other cuts each
   dimension. Two cases are not known: uneven cuts by a ``_StridedShard``, whose meaning only the
   local tensor shows, and hooked local tensors (`LocalShardsWrapper`).
2. A `ShardedTensor`: its metadata lists every rank's shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from math import prod
from typing import Final, cast

import numpy as np
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.placements import Cut, cut_order
from xckpt.core.geometry.spread import Listed, MeshProcesses, OnMesh, Spread
from xckpt.torch.sharded.on_mesh import cut_orders, is_literal, split_factor

_meshes: Final[weakref.WeakKeyDictionary[DeviceMesh, MeshProcesses]] = weakref.WeakKeyDictionary()
"""The ranks of each mesh, read once."""


def of_dtensor(tensor: DTensor) -> Spread | None:
    """Where a DTensor of plain local tensors is; None if mesh and placements do not say it."""
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    if mesh not in _meshes:
        _meshes[mesh] = MeshProcesses("torch", mesh.mesh.cpu().numpy().astype(np.int64))
    factors = [split_factor(placement) for placement in tensor.placements]
    if any(factor > 1 for factor in factors) and is_literal(tensor):
        return None
    cuts: list[tuple[int, ...]] = []
    for size, axes in zip(shape, cut_orders(tensor), strict=True):
        order = _even_order(size, axes, mesh.shape, factors)
        if order is None:
            return None
        cuts.append(order)
    return OnMesh(shape, _meshes[mesh], tuple(cuts))


def _even_order(
    size: int, axes: tuple[int, ...], mesh: Sequence[int], factors: Sequence[int]
) -> tuple[int, ...] | None:
    """The order in which strided shards cut a dimension, where all readings are one."""
    if all(factors[axis] == 1 for axis in axes):
        return axes
    order = cut_order([Cut(mesh[axis], 0, factors[axis]) for axis in axes])
    if order is None or size % prod(mesh[axis] for axis in axes):
        return None
    return tuple(axes[number] for number in order)


def of_sharded_tensor(tensor: ShardedTensor) -> Spread | None:
    """Where a ShardedTensor is; None if its metadata do not say where a shard is."""
    listed = tensor.metadata().shards_metadata
    ranks = [shard.placement.rank() if shard.placement is not None else None for shard in listed]
    if any(rank is None for rank in ranks):
        return None
    pairs = [(tuple(shard.shard_offsets), tuple(shard.shard_sizes)) for shard in listed]
    boxes = Boxes.of(pairs, rank=len(tensor.metadata().size))
    return Listed.of("torch", cast("list[int]", ranks), boxes)
