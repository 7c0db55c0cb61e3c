"""A tensor on an XLA device: what torch_xla says of it, and its way to the host and back.

An XLA device under SPMD is many devices that look like one. A tensor there has one global shape,
and each local device holds a shard: all of it (replicated) or a box of it, padded at the end so
that all shards are equal. `XLAShardedTensor` wraps such a tensor; a plain tensor on the device may
be sharded as well (a parameter that `mark_sharding` was called on, a result of a computation).

1. `ShardLayout.of` asks for replica numbers and indices. No element moves, but what was only
   recorded so far is computed first (`settle`): before that a result has no sharding.
2. A box that several devices hold appears once; shards that are all padding do not appear.
3. `fetch` is the one transfer to the host: for each box the unpadded part of a shard's copy.
4. `publish` is the one transfer back: a padded shard for each local device.

The functions beneath `torch_xla._XLAC` are torch_xla's own and have no public spelling; nothing
else in the package calls them. torch_xla is never imported here: where an XLA tensor exists, it is
already.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch

from xckpt.core.geometry.box import Box, Boxes
from xckpt.errors import UnsupportedLeafError

_REFUSED: Final = {2: "TUPLE", 4: "MANUAL"}
"""Kinds of sharding (`torch_xla.distributed.spmd.ShardingType`) whose shards are not boxes."""

Slices = tuple[slice, ...]


def _xla() -> Any:  # noqa: ANN401  # torch_xla has no type stubs
    return sys.modules["torch_xla"]


def is_wrapped(leaf: object) -> bool:
    """Whether a leaf is an `XLAShardedTensor`."""
    spmd = sys.modules.get("torch_xla.distributed.spmd")
    return spmd is not None and isinstance(leaf, spmd.XLAShardedTensor)


def is_on_xla(leaf: torch.Tensor) -> bool:
    """Whether a tensor is on an XLA device, sharded or not."""
    return "torch_xla" in sys.modules and (leaf.device.type == "xla" or is_wrapped(leaf))


def global_tensor(leaf: torch.Tensor) -> torch.Tensor:
    """The tensor that an `XLAShardedTensor` wraps, or the tensor itself."""
    given: Any = leaf
    return given.global_tensor if is_wrapped(leaf) else leaf


def wrap_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """An `XLAShardedTensor` of the same mesh and partition spec if ``like`` is one."""
    if not is_wrapped(like):
        return tensor.requires_grad_(like.requires_grad)
    given: Any = like
    wrapper = sys.modules["torch_xla.distributed.spmd"].XLAShardedTensor
    return wrapper(
        tensor,
        mesh_shape=given.mesh_shape,
        partition_spec=given.partition_spec,
        requires_grad=like.requires_grad,
    )


def settle(tensor: torch.Tensor) -> None:
    """Have the device compute what was only recorded so far, all tensors at once; wait for it."""
    xla = _xla()
    if xla._XLAC._check_tensor_need_materialization([tensor])[0]:
        xla.sync()
    xla._XLAC._xla_wait_device_ops([])


def tiles_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """Into how many parts each dimension is cut, and how many devices hold each part.

    XLA spells it ``{devices=[2,1,4]0,1,2,... last_tile_dim_replicate}``: a number for each
    dimension, and the number of replicas where there are several.
    """
    text = _xla()._XLAC._get_xla_sharding_spec(tensor)
    devices = re.search(r"devices=\[([\d,]+)\]", text)
    counts = [int(count) for count in devices[1].split(",")] if devices else []
    tiles = tuple(counts[: tensor.ndim]) or (1,) * tensor.ndim
    return tiles, prod(counts[tensor.ndim :])


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The boxes of a tensor that this process's devices hold, each once."""

    boxes: Boxes
    holders: tuple[tuple[int, ...], ...]
    """For each box the numbers of the local devices that hold it."""
    views: tuple[Slices, ...]
    """For each box where it lies in its shard: at the start, the padding comes after it."""
    shard: tuple[int, ...]
    """Shape of each device's shard, padding included."""
    devices: int
    """Number of local devices."""
    whole: bool
    """Whether each device holds the whole tensor."""
    annotated: bool
    """Whether the tensor has a sharding at all; else it is on one device, or on the host."""

    @property
    def padded(self) -> bool:
        """Whether any shard has padding."""
        held = sum(len(devices) for devices in self.holders)
        return held < self.devices or any(box.sizes != self.shard for box in self.boxes)

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str) -> ShardLayout:
        """The layout of a tensor on an XLA device.

        Raises:
            UnsupportedLeafError: its sharding does not cut it into boxes; names the leaf.
        """
        shape = tuple(tensor.shape)
        everything = (slice(None),) * len(shape)
        xla = _xla()._XLAC
        kind = _kind(tensor, name) if tensor.device.type == "xla" else None
        if kind is None:
            return cls(Boxes.whole(shape), ((0,),), (everything,), shape, 1, True, False)
        indices = [index for _, index in xla._get_local_shard_replica_and_indices([tensor])[0]]
        if all(index is Ellipsis for index in indices):
            holders = (tuple(range(len(indices))),)
            return cls(Boxes.whole(shape), holders, (everything,), shape, len(indices), True, True)
        return cls.of_indices(shape, tiles_of(tensor)[0], indices)

    @classmethod
    def of_indices(
        cls,
        shape: tuple[int, ...],
        tiles: Sequence[int],
        indices: Sequence[Sequence[slice]],
    ) -> ShardLayout:
        """The layout of a tensor that is cut into ``tiles`` parts along each dimension.

        ``indices``: what each local device holds, without padding.

        Example:
            >>> rows = [[slice(0, 4)], [slice(0, 4)], [slice(4, 7)], [slice(4, 7)]]
            >>> layout = ShardLayout.of_indices((7,), (2,), rows)
            >>> layout.boxes, layout.holders, layout.shard, layout.padded
            (Boxes([0, 4), [4, 7)), ((0, 1), (2, 3)), (4,), True)
        """
        holders: dict[Box, list[int]] = {}
        for device, index in enumerate(indices):
            starts = tuple(part.start for part in index)
            box = Box(starts, tuple(part.stop - part.start for part in index))
            if box.elements:
                holders.setdefault(box, []).append(device)
        return cls(
            Boxes.of([(box.offsets, box.sizes) for box in holders], rank=len(shape)),
            tuple(tuple(devices) for devices in holders.values()),
            tuple(Box.whole(box.sizes).slices() for box in holders),
            tuple(-(-size // parts) for size, parts in zip(shape, tiles, strict=True)),
            len(indices),
            False,
            True,
        )


def _kind(tensor: torch.Tensor, name: str) -> int | None:
    """The kind of an XLA tensor's sharding; None if it has none.

    Raises:
        UnsupportedLeafError: its shards are not boxes.
    """
    xla = _xla()._XLAC
    kind = xla._get_xla_sharding_type(tensor)
    if kind not in _REFUSED:  # torch_xla would abort where such a tensor is settled
        settle(tensor)
        kind = xla._get_xla_sharding_type(tensor)
    if kind in _REFUSED:
        raise UnsupportedLeafError(
            f"{name}: its XLA sharding is of the kind {_REFUSED[kind]}, whose shards are not boxes "
            f"of the tensor; save it outside of manual sharding (xs.disable_manual_sharding)"
        )
    return kind


def fetch(tensor: torch.Tensor, layout: ShardLayout) -> list[torch.Tensor]:
    """One transfer: for each local device its shard on the host, padding included.

    Where every device holds the whole, it is the whole once.
    """
    if layout.whole:
        return [tensor.detach().cpu()]
    return [data for data, _ in _xla()._XLAC._get_local_shards([tensor])[0]]


def unpadded(shards: Sequence[torch.Tensor], layout: ShardLayout) -> list[torch.Tensor]:
    """The elements of each box; of several devices that hold it, the first one's."""
    if layout.whole:
        return list(shards)
    return [
        shards[devices[0]][view] for devices, view in zip(layout.holders, layout.views, strict=True)
    ]


def publish(leaf: torch.Tensor, layout: ShardLayout, shards: Sequence[torch.Tensor]) -> None:
    """One transfer: replace a tensor's elements by shards from the host, in `fetch`'s form.

    The tensor keeps its sharding.
    """
    tensor = global_tensor(leaf)
    if layout.whole:
        with torch.no_grad():
            tensor.copy_(shards[0])
        return
    spmd = sys.modules["torch_xla.distributed.spmd"]
    wrapped: Any = leaf if is_wrapped(leaf) else spmd.XLAShardedTensor(tensor)
    wrapped.load_local_shards_(
        [
            spmd.XLAShard(shard, Ellipsis, device, 0)
            for shard, device in zip(shards, _local_devices(), strict=True)
        ]
    )


def make(like: torch.Tensor, layout: ShardLayout, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """One transfer: a new tensor with the sharding of ``like``."""
    tensor = global_tensor(like)
    if not layout.annotated:
        return shards[0].to(tensor.device)
    xla = _xla()._XLAC
    spread = list(shards) * layout.devices if layout.whole else list(shards)
    sharding = xla._get_xla_op_sharding(tensor)
    return xla._global_tensor_from_cpu_shards(spread, sharding, list(tensor.shape))


def _local_devices() -> list[str]:
    """The names of this process's devices, in the order of their shards."""
    return _xla()._XLAC._xla_get_runtime_devices()
