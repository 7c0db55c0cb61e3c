"""A DTensor whose local tensor can list its own shards: a `LocalShardsWrapper`.

It holds embedding tables as TorchRec shards them. Such a table may have several shards on a rank
(column-wise), one (row-wise), or all of it on one rank and nothing on the others (table-wise). Mesh
and placements do not tell which; the tensor's hooks do, which torch's own checkpoints use as well:

1. ``__create_chunk_list__`` gives offsets and sizes of the local shards. A rank without any gives
   one empty chunk, or none. ``__get_tensor_shard__`` gives a shard's tensor.
2. The element type is the shards': a rank without any does not know it (the wrapper itself claims
   torch's default), so it says nothing, and other ranks do.
3. Filled in place, the shards are written. A new one is a wrapper over new shards, in a DTensor of
   the same mesh and placements. Other classes with these hooks can only be filled in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch.distributed.tensor import DTensor

from xckpt.core.geometry.box import Box
from xckpt.core.metadata import Sharding
from xckpt.core.text.arguments import named
from xckpt.errors import UnsupportedLeafError
from xckpt.torch.sharded.local_shards import LocalShard, LocalShards
from xckpt.torch.target import TensorTarget, empty_like


class _Chunk(Protocol):
    @property
    def offsets(self) -> Sequence[int]: ...
    @property
    def sizes(self) -> Sequence[int]: ...


class _Hooked(Protocol):
    def __create_chunk_list__(self) -> Sequence[_Chunk]: ...
    def __get_tensor_shard__(self, index: object) -> torch.Tensor: ...


def local_shards(
    tensor: DTensor, local: torch.Tensor, sharding: Sharding, name: str
) -> LocalShards:
    """The shards that a local tensor with hooks says it has."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    hooked = cast(_Hooked, local)
    shards: list[LocalShard] = []
    for number, chunk in enumerate(hooked.__create_chunk_list__()):
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        if box.elements:  # a rank without shards has an empty one in their place
            index = MetadataIndex(name, torch.Size(box.offsets), number)
            shards.append((box, hooked.__get_tensor_shard__(index)))
    listed: Sequence[torch.Tensor] = getattr(local, "local_shards", list)()
    dtype = listed[0].dtype if listed else None
    return LocalShards(name, tuple(tensor.shape), dtype, shards, sharding)


def new_wrapper(tensor: DTensor, local: torch.Tensor, shards: LocalShards) -> TensorTarget:
    """A DTensor over a `LocalShardsWrapper` of new shards, real where these are on ``meta``."""
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    if not isinstance(local, LocalShardsWrapper):
        raise UnsupportedLeafError(
            f"{shards.name}: a DTensor over {named(type(local).__name__)} can only be filled in "
            f"place; use load_into"
        )

    def make() -> tuple[DTensor, Sequence[LocalShard]]:
        new_shards = [(box, empty_like(shard)) for box, shard in shards.shards]
        new = DTensor.from_local(
            LocalShardsWrapper(
                [shard for _, shard in new_shards], [box.offsets for box, _ in new_shards]
            ),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        new.requires_grad_(tensor.requires_grad)
        return new, new_shards

    return shards.new_target(make)
