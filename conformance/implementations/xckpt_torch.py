"""xckpt through torch: a rank's boxes are the shards of a `DTensor`, loaded in place.

1. A `DTensor` may have a local tensor that says itself which shards it has, through the hooks that
   torch's own checkpoints ask (``__create_chunk_list__``, ``__get_tensor_shard__``): any boxes,
   several or none a rank. `Shards` is the smallest such tensor.
2. A rank that holds the whole of an array, alone, has a plain tensor.

A DTensor needs a mesh, and a mesh a process group; here that is torch's fake one, which never
communicates. The ranks are threads that talk through xckpt's own group.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

# It has no public name.
from torch.testing._internal.distributed.fake_pg import FakeStore

import xckpt
from conformance.implementation import Array, Box, Held, Wanted
from conformance.implementations.threads import ThreadGroup
from conformance.implementations.torch_arrays import from_torch, to_torch, torch_dtype, unloaded
from conformance.implementations.xckpt import Xckpt

__all__ = ["IMPLEMENTATION", "XckptTorch"]

Data = NDArray[np.generic]


class Shards(torch.Tensor):
    """A local tensor of some boxes of a global one; it holds no elements itself."""

    array: Array
    boxes: Sequence[Box]
    data_of: Sequence[torch.Tensor]

    @staticmethod
    def __new__(cls, array: Array, boxes: Sequence[Box], data: Sequence[torch.Tensor]):
        made = torch.Tensor._make_wrapper_subclass(cls, array.shape, dtype=torch_dtype(array.dtype))
        made.array, made.boxes, made.data_of = array, boxes, data
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        # Only DTensor itself asks for something: another view of the same.
        return cls(args[0].array, args[0].boxes, args[0].data_of)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in self.boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.index is not None
        return self.data_of[index.index]

    def local_shards(self) -> Sequence[torch.Tensor]:
        return self.data_of


class XckptTorch(Xckpt):
    """xckpt over tensors and DTensors."""

    name = f"{Xckpt.name} through torch {torch.__version__}"
    limits: Sequence[str] = ("dtypes that torch lacks (int4, float4_e2m1fn)",)

    def leaf(self, rank: int, ranks: Sequence[Held]) -> object:
        held = ranks[rank]
        boxes = [shard.box for shard in held.shards]
        data = [to_torch(shard.data, held.array.dtype) for shard in held.shards]
        return _tensor(held.array, boxes, data, len(ranks))

    def like(self, rank: int, ranks: Sequence[Wanted]) -> object:
        wanted = ranks[rank]
        data = [unloaded(wanted.array, box.sizes) for box in wanted.boxes]
        return _tensor(wanted.array, wanted.boxes, data, len(ranks))

    def boxes(self, loaded: object, wanted: Wanted) -> list[Data]:
        assert isinstance(loaded, torch.Tensor)
        local = loaded.to_local() if isinstance(loaded, DTensor) else loaded
        shards = local.data_of if isinstance(local, Shards) else [local]
        return [from_torch(shard, wanted.array.dtype) for shard in shards]

    def load_rank(
        self,
        path: Path | str,
        like: dict[str, object],
        group: ThreadGroup,
        options: xckpt.LoadOptions,
    ) -> Mapping[str, object]:
        xckpt.load_into(path, like, strict=False, group=group, options=options)
        return like


def _tensor(
    array: Array, boxes: Sequence[Box], data: Sequence[torch.Tensor], ranks: int
) -> torch.Tensor:
    """These boxes of an array as a tensor."""
    if ranks == 1 and [box.sizes for box in boxes] == [array.shape]:
        return data[0]
    local = Shards(array, boxes, data)
    stride = torch.empty(array.shape, device="meta").stride()
    shape = torch.Size(array.shape)
    return DTensor.from_local(
        local, _mesh(), [Replicate()], run_check=False, shape=shape, stride=stride
    )


@functools.cache
def _mesh() -> DeviceMesh:
    """A mesh of this process; the group that it is made with is gone again."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        return DeviceMesh("cpu", [0])
    finally:
        dist.destroy_process_group()


IMPLEMENTATION = XckptTorch()
