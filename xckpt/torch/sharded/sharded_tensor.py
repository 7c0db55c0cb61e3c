"""torch's older sharded tensor: `ShardedTensor`, whose metadata says every rank's box.

1. The boxes are those of the local shards, none, one or several: a ``ChunkShardingSpec`` cuts one
   dimension by ceiling division, an ``EnumerableShardingSpec`` lists any boxes. There are no
   replicas.
2. Filled in place, the local shards are written. A new one has the same metadata, sharding spec and
   process group over new shards, without communication.

Nothing here calls a torch operation on a `ShardedTensor`, not even for its shape: each one warns
that the class is deprecated. Only `local_shards`, `metadata` and `sharding_spec` are asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import ShardedTensor, empty
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec

from xckpt.core.geometry.box import Box
from xckpt.core.geometry.spread import Spread
from xckpt.core.metadata import Sharding
from xckpt.torch.copies import RebuildRecipe
from xckpt.torch.leaf import TensorLeaf
from xckpt.torch.sharded.local_shards import LocalShard, LocalShards
from xckpt.torch.target import TensorTarget


def describe(leaf: torch.Tensor, name: str) -> TensorLeaf:
    """A ShardedTensor as a source: the boxes of its local shards that have elements.

    Raises:
        UnsupportedLeafError: a local shard is sparse, quantised, on the meta device, or has a dtype
            that the format lacks; names leaf and range.
    """
    return _local_shards(cast(ShardedTensor, leaf), name).source()


def target_for(like: torch.Tensor, name: str, *, in_place: bool) -> TensorTarget:
    """A target like a ShardedTensor: its own local shards, or a new one with the same metadata.

    A new one like shards on the meta device has shards on the CPU.

    Raises:
        UnsupportedLeafError: as for `describe`; or a local shard cannot be filled in place.
    """
    tensor = cast(ShardedTensor, like)
    local = _local_shards(tensor, name)
    if in_place:
        return local.target_in_place(tensor)

    def make() -> tuple[ShardedTensor, Sequence[LocalShard]]:
        new = _empty_like(tensor)
        return new, _local_shards(new, name).shards

    return local.new_target(make)


def rebuild_recipe(leaf: torch.Tensor) -> RebuildRecipe | None:
    """A ShardedTensor as the tensors of its local shards; None where they are not on the CPU."""
    tensor = cast(ShardedTensor, leaf)
    locals = [shard.tensor.detach() for shard in tensor.local_shards()]
    if any(local.device.type != "cpu" for local in locals):
        return None

    def rebuild(copies: Sequence[torch.Tensor]) -> torch.Tensor:
        new = _empty_like(tensor)
        for shard, copy in zip(new.local_shards(), copies, strict=True):
            shard.tensor = copy
        return new

    return RebuildRecipe(locals, rebuild)


def _local_shards(tensor: ShardedTensor, name: str) -> LocalShards:
    metadata = tensor.metadata()
    return LocalShards(
        name,
        tuple(metadata.size),
        metadata.tensor_properties.dtype,
        [(_box(shard.metadata), shard.tensor) for shard in tensor.local_shards()],
        _sharding(tensor),
        partial(_spread, tensor),
    )


def _spread(tensor: ShardedTensor) -> Spread | None:
    """Where the shards of all ranks are, for ranks that plan alone."""
    from xckpt.torch.sharded.spread import of_sharded_tensor

    return of_sharded_tensor(tensor)


def _box(shard: ShardMetadata) -> Box:
    return Box(tuple(shard.shard_offsets), tuple(shard.shard_sizes))


def _sharding(tensor: ShardedTensor) -> Sharding:
    """The spec, for the manifest, on a mesh of one axis that counts the shards."""
    spec = tensor.sharding_spec()
    cut = f"(dim={spec.dim})" if isinstance(spec, ChunkShardingSpec) else "()"
    count = len(tensor.metadata().shards_metadata)
    return Sharding(axes=(("shards", count),), placements=(f"{type(spec).__name__}{cut}",))


def _empty_like(tensor: ShardedTensor) -> ShardedTensor:
    """A ShardedTensor with shards of its own, made without communication."""
    metadata, spec = tensor.metadata(), tensor.sharding_spec()
    boxes = [_real(shard) for shard in metadata.shards_metadata]
    if isinstance(spec, ChunkShardingSpec):
        placements = [box.placement for box in boxes if box.placement is not None]
        spec = ChunkShardingSpec(spec.dim, placements)  # type: ignore[arg-type]  # invariant list
    else:
        spec = EnumerableShardingSpec(boxes)
    properties = metadata.tensor_properties
    return empty(
        spec,
        *metadata.size,
        dtype=properties.dtype,
        requires_grad=properties.requires_grad,
        pin_memory=properties.pin_memory,
        process_group=tensor._process_group,
        init_rrefs=tensor._init_rrefs,
    )


def _real(shard: ShardMetadata) -> ShardMetadata:
    """A copy of a shard's metadata, on the CPU if the shard is on the meta device."""
    placement = shard.placement
    if placement is not None and placement.device().type == "meta":
        placement = f"rank:{placement.rank()}/cpu"
    return ShardMetadata(list(shard.shard_offsets), list(shard.shard_sizes), placement)
