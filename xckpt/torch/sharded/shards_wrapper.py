"""DTensors whose local tensor is a `LocalShardsWrapper`: embedding tables, as TorchRec shards them.

Such a table may have several shards on a rank (column-wise), one (row-wise), or all of it on one
rank and nothing on the others (table-wise). Mesh and placements do not tell which; the wrapper
does, through the hooks that torch's own checkpoints use:

1. ``__create_chunk_list__`` gives offsets and sizes of the local shards. A rank without any gives
   one empty chunk, or none.
2. ``__get_tensor_shard__`` gives a shard's tensor.
3. The element type is the shards': a rank without any does not know it (the wrapper itself claims
   torch's default), so it says nothing, and other ranks do.
4. Filled in place, the shards are written. A new one is a wrapper over new shards, in a DTensor of
   the same mesh and placements. Other classes with these hooks can only be filled in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch.distributed.tensor import DTensor

from xckpt.core.metadata import Sharding
from xckpt.errors import UnsupportedLeafError
from xckpt.torch.leaf import TensorLeaf, TensorTarget
from xckpt.torch.sharded.local_shards import LocalShard, LocalShards


class _Chunk(Protocol):
    @property
    def offsets(self) -> Sequence[int]: ...
    @property
    def sizes(self) -> Sequence[int]: ...


class _Hooked(Protocol):
    def __create_chunk_list__(self) -> Sequence[_Chunk]: ...
    def __get_tensor_shard__(self, index: object) -> torch.Tensor: ...


def has_hooks(local: torch.Tensor) -> bool:
    """Whether a DTensor's local tensor says itself which shards it has."""
    return hasattr(local, "__create_chunk_list__") and hasattr(local, "__get_tensor_shard__")


def describe(
    tensor: DTensor, local: torch.Tensor, name: str, sharding: Sharding | None
) -> TensorLeaf:
    """A DTensor as a source: the shards that its local tensor has.

    Raises:
        UnsupportedLeafError: a shard is sparse, quantised, on the meta device, or has a dtype that
            the format lacks; names leaf and range.
    """
    return _local_shards(tensor, local, name, sharding).source()


def target_for(tensor: DTensor, local: torch.Tensor, name: str, *, in_place: bool) -> TensorTarget:
    """A target like a DTensor: its own local shards, or new ones.

    Raises:
        UnsupportedLeafError: as for `describe`, though a new one may be like shards on the meta
            device; or a shard cannot be filled in place, or the local tensor cannot be made new.
    """
    shards = _local_shards(tensor, local, name, None)
    if in_place:
        return shards.target_in_place(tensor)
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    if not isinstance(local, LocalShardsWrapper):
        raise UnsupportedLeafError(
            f"{name}: a DTensor over a {type(local).__name__} can only be filled in place; "
            f"use load_into"
        )

    def make() -> tuple[DTensor, Sequence[LocalShard]]:
        new_shards = [
            LocalShard(shard.offsets, shard.sizes, _new(shard.tensor)) for shard in shards.shards
        ]
        wrapper = LocalShardsWrapper(
            [shard.tensor for shard in new_shards], [shard.offsets for shard in new_shards]
        )
        new = DTensor.from_local(
            wrapper,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        new.requires_grad_(tensor.requires_grad)
        return new, new_shards

    return shards.new_target(make)


def _local_shards(
    tensor: DTensor, local: torch.Tensor, name: str, sharding: Sharding | None
) -> LocalShards:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    hooked = cast(_Hooked, local)
    shards: list[LocalShard] = []
    for number, chunk in enumerate(hooked.__create_chunk_list__()):
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        if 0 in sizes:
            continue  # what a rank without shards has in their place
        shard = hooked.__get_tensor_shard__(MetadataIndex(name, torch.Size(offsets), number))
        shards.append(LocalShard(offsets, sizes, shard))
    listed: Sequence[torch.Tensor] = getattr(local, "local_shards", list)()
    dtype = listed[0].dtype if listed else None
    return LocalShards(name, tuple(tensor.shape), dtype, shards, sharding)


def _new(like: torch.Tensor) -> torch.Tensor:
    """Memory like a shard's, real even where the shard is on the meta device."""
    device = torch.device("cpu") if like.is_meta else like.device
    return torch.empty_like(like, device=device, requires_grad=False)
