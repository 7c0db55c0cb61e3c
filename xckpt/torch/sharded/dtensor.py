"""The boxes of a DTensor: which part of the global tensor each part of the local tensor is.

1. Mesh and placements become a list of cuts for each tensor dimension
   (`xckpt.core.geometry.placements`), in the order in which torch applied them.
2. Each dimension's cuts become intervals of rows; where two readings of ``_StridedShard`` are
   possible, the one that has the local tensor's size.
3. Every combination of the dimensions' intervals is a box; its data are a view of the local tensor.
   Boxes without elements are left out.

A local tensor that can list its own shards is asked instead: a `LocalShardsWrapper`, which holds
embedding tables as TorchRec shards them. Such a table may have several shards on a rank
(column-wise), one (row-wise), or all of it on one rank and nothing on the others (table-wise). Mesh
and placements do not tell which; the tensor's hooks do, which torch's own checkpoints use as well:

1. ``__create_chunk_list__`` gives offsets and sizes of the local shards. A rank without any gives
   one empty chunk, or none. ``__get_tensor_shard__`` gives a shard's tensor.
2. The element type is the shards': a rank without any does not know it (the wrapper itself claims
   torch's default), so it says nothing, and other ranks do.
3. Filled in place, the shards are written. A new one is a wrapper over new shards, in a DTensor of
   the same mesh and placements. Other classes with these hooks can only be filled in place.

Only sizes enter, never elements or offsets one by one, and nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from xckpt.core.geometry.box import Box, Boxes
from xckpt.core.geometry.placements import (
    Cut,
    Interval,
    View,
    combined,
    length,
    nested,
    readings,
)
from xckpt.core.geometry.spread import Spread
from xckpt.core.metadata import Sharding
from xckpt.errors import UnsupportedLeafError
from xckpt.torch.copies import RebuildRecipe, as_parameter
from xckpt.torch.leaf import (
    TensorLeaf,
    awaited,
    check_readable,
    check_writable,
    known_dtype,
    plain,
)
from xckpt.torch.sharded.local_shards import LocalShard, LocalShards
from xckpt.torch.target import Memory, TensorTarget, empty_like


class _Chunk(Protocol):
    @property
    def offsets(self) -> Sequence[int]: ...
    @property
    def sizes(self) -> Sequence[int]: ...


class _Hooked(Protocol):
    def __create_chunk_list__(self) -> Sequence[_Chunk]: ...
    def __get_tensor_shard__(self, index: object) -> torch.Tensor: ...


def describe(leaf: torch.Tensor, name: str) -> TensorLeaf:
    """A DTensor as a source: the boxes of its local tensor, or the shards that this has.

    Raises:
        UnsupportedLeafError: a placement holds no plain rows (``Partial``), torch does not say
            which rows are whose (a mesh in no ascending order), or the local tensor is not of the
            shape that mesh and placements give, or has no plain elements to read.
    """
    tensor = cast(DTensor, leaf)
    _check_placements(tensor.placements, name)
    local = _local_tensor(tensor)
    if _has_hooks(local):
        return _local_shards(tensor, local, name).source()
    local = plain(local, name)
    check_readable(local, name)
    boxes, views = _local_boxes(tensor, tuple(local.shape), name)
    return TensorLeaf(
        tuple(tensor.shape),
        known_dtype(local.dtype, name),
        boxes,
        [local[view] for view in views],
        True,
        _sharding(tensor),
        spread=partial(_spread, tensor),
    )


def target_for(like: torch.Tensor, name: str, *, in_place: bool) -> TensorTarget:
    """A target like a DTensor; a new one has its mesh and placements.

    Raises:
        UnsupportedLeafError: as for `describe`, though a new one may be like one on the meta
            device; or the local tensor cannot be filled in place, or not be made new.
    """
    tensor = cast(DTensor, like)
    _check_placements(tensor.placements, name)
    local = _local_tensor(tensor)
    if _has_hooks(local):
        shards = _local_shards(tensor, local, name)
        return shards.target_in_place(tensor) if in_place else _new_wrapper(tensor, local, shards)
    local = plain(local, name)
    if in_place:
        check_writable(local, name)
    boxes, views = _local_boxes(tensor, tuple(local.shape), name)

    def allocate() -> Memory:
        filled = tensor if in_place else _empty_like(tensor)
        memory = plain(_local_tensor(filled), name)
        parts = [memory[view] for view in views]
        if in_place:
            return Memory(tensor, parts, (tensor,))
        return Memory(filled.requires_grad_(tensor.requires_grad), parts)

    dtype = known_dtype(local.dtype, name)
    return TensorTarget(tuple(tensor.shape), dtype, boxes, allocate, in_place)


def rebuild_recipe(leaf: torch.Tensor) -> RebuildRecipe | None:
    """A DTensor as its local tensor; over another one it keeps mesh, placements and order of cuts.

    None where the local tensor is not a plain one.
    """
    tensor = cast(DTensor, leaf)
    local = awaited(_local_tensor(tensor))
    if type(local) is not torch.Tensor:
        return None

    def rebuild(copies: Sequence[torch.Tensor]) -> torch.Tensor:
        # torch's protocol for wrappers, which knows more of a DTensor than from_local takes.
        inner, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in inner} | {"_local_tensor": copies[0]}
        new = DTensor.__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
        return as_parameter(leaf, new)

    return RebuildRecipe([local.detach()], rebuild)


def _empty_like(like: DTensor) -> DTensor:
    """New memory; torch keeps all that the placements do not say (the order of the cuts)."""
    device = like.device_mesh.device_type if like.is_meta else like.device
    return cast(DTensor, torch.empty_like(like, device=device, requires_grad=False))


def _local_tensor(tensor: DTensor) -> torch.Tensor:
    """This rank's part of a DTensor, outside autograd."""
    with torch.no_grad():
        return tensor.to_local()


def _sharding(tensor: DTensor) -> Sharding:
    """Mesh and placements, for the manifest; a mesh without names calls its axes dim0, dim1, ..."""
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(f"dim{axis}" for axis in range(mesh.ndim))
    return Sharding(
        axes=tuple(zip(names, mesh.shape, strict=True)),
        placements=tuple(repr(placement) for placement in tensor.placements),
    )


def _spread(tensor: DTensor) -> Spread | None:
    """Where the boxes of all ranks are; a save by one process has no need of it."""
    from xckpt.torch.sharded.spread import of_dtensor

    return of_dtensor(tensor)


def _has_hooks(local: torch.Tensor) -> bool:
    """Whether a DTensor's local tensor says itself which shards it has."""
    return hasattr(local, "__create_chunk_list__") and hasattr(local, "__get_tensor_shard__")


def _local_shards(tensor: DTensor, local: torch.Tensor, name: str) -> LocalShards:
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
    return LocalShards(name, tuple(tensor.shape), dtype, shards, _sharding(tensor))


def _new_wrapper(tensor: DTensor, local: torch.Tensor, shards: LocalShards) -> TensorTarget:
    """A DTensor over a `LocalShardsWrapper` of new shards, real where these are on ``meta``."""
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    if not isinstance(local, LocalShardsWrapper):
        raise UnsupportedLeafError(
            f"{shards.name}: a DTensor over a {type(local).__name__} can only be filled in place; "
            f"use load_into"
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


def _local_boxes(
    tensor: DTensor, local_shape: tuple[int, ...], name: str
) -> tuple[Boxes, Sequence[View]]:
    """The boxes of this rank's local tensor and its view of each; none outside the mesh."""
    if not dist.is_initialized():
        raise UnsupportedLeafError(
            f"{name}: a DTensor whose process group was destroyed; save or load before "
            f"destroy_process_group(), or use its to_local()"
        )
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return Boxes.of([], rank=tensor.ndim), ()
    _check_order(tensor, coordinate, name)
    shape = tuple(tensor.shape)
    orders = zip(cut_orders(tensor), shape, strict=True)
    possible = [_readings(tensor, coordinate, axes, size) for axes, size in orders]
    fitting = [
        [rows for rows in of_dim if length(rows) == size]
        for of_dim, size in zip(possible, local_shape, strict=False)
    ]
    if len(local_shape) != len(shape) or not all(fitting):
        raise _misfit(tensor, name, [of_dim[0] for of_dim in possible], local_shape)
    return combined([of_dim[0] for of_dim in fitting])


def _check_placements(placements: Sequence[Placement], name: str) -> None:
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            raise UnsupportedLeafError(
                f"{name}: a DTensor with {placement!r} on mesh axis {axis} holds summands, not "
                f"elements; redistribute it to Replicate() or Shard(dim) first"
            )
        if not placement.is_replicate() and _sharded_dim(placement) is None:
            raise UnsupportedLeafError(
                f"{name}: a DTensor with the unknown placement {placement!r} on mesh axis {axis}; "
                f"redistribute it to Replicate() or Shard(dim) first"
            )


def _check_order(tensor: DTensor, coordinate: Sequence[int], name: str) -> None:
    """Refuse shards along a mesh axis whose ranks do not ascend.

    torch orders them by mesh coordinate when it cuts locally, but by rank in the axis's process
    group, which ascends, when it scatters and gathers: `distribute_tensor` and `redistribute` leave
    different rows on a rank under one and the same placement.
    """
    mesh = tensor.device_mesh
    for axis, placement in enumerate(tensor.placements):
        if _sharded_dim(placement) is None or mesh.get_local_rank(axis) == coordinate[axis]:
            continue
        raise UnsupportedLeafError(
            f"{name}: a DTensor with {placement!r} on mesh axis {axis} of {mesh}, along which the "
            f"ranks do not ascend; which rows are whose is undefined there (distribute_tensor and "
            f"redistribute differ), so make the mesh of ascending ranks"
        )


def _sharded_dim(placement: Placement) -> int | None:
    """The tensor dimension that a Shard or _StridedShard cuts.

    _StridedShard is a subclass of Shard in some versions of torch and not in others.
    """
    is_shard = placement.is_shard() or type(placement).__name__ == "_StridedShard"
    return getattr(placement, "dim", None) if is_shard else None


def split_factor(placement: Placement) -> int:
    """The factor of a _StridedShard; 1 for any other placement."""
    return int(getattr(placement, "split_factor", 1))


def is_literal(tensor: DTensor) -> bool:
    """Whether a _StridedShard stands for itself, and not for an order of cuts."""
    # Absent before torch 2.9 or so, where only the two conventions that `readings` knows exist.
    spec = getattr(tensor, "_spec", None)
    return getattr(spec, "use_strided_shard_as_shard_order", None) is False


def cut_orders(tensor: DTensor) -> list[tuple[int, ...]]:
    """For each dimension the mesh axes that cut it, in the order of the cuts.

    Where a _StridedShard is among them, they ascend, and `readings` finds the order.
    """
    orders: list[tuple[int, ...]] = [()] * tensor.ndim
    for axis, placement in enumerate(tensor.placements):
        dim = _sharded_dim(placement)
        if dim is not None:
            orders[dim] = (*orders[dim], axis)
    for entry in getattr(getattr(tensor, "_spec", None), "shard_order", None) or ():
        if all(split_factor(tensor.placements[axis]) == 1 for axis in entry.mesh_dims):
            orders[entry.tensor_dim] = tuple(entry.mesh_dims)
    return orders


def _readings(
    tensor: DTensor, coordinate: Sequence[int], axes: Sequence[int], size: int
) -> list[tuple[Interval, ...]]:
    """The rows of a dimension cut by ``axes`` that a rank may hold, the likelier first."""
    placements, mesh = tensor.placements, tensor.device_mesh
    cuts = [Cut(mesh.size(n), coordinate[n], split_factor(placements[n])) for n in axes]
    if all(cut.factor == 1 for cut in cuts):
        return [nested(size, cuts)]
    # Few states have a _StridedShard.
    from xckpt.torch.sharded.strided_shard import strided_rows

    if is_literal(tensor):
        return [strided_rows()(size, cuts)]
    return readings(size, cuts, strided_rows())


def _misfit(
    tensor: DTensor, name: str, held: Sequence[tuple[Interval, ...]], local_shape: tuple[int, ...]
) -> UnsupportedLeafError:
    rows = " x ".join("+".join(f"[{lo}, {hi})" for lo, hi in dim) or "nothing" for dim in held)
    placements = ", ".join(repr(placement) for placement in tensor.placements)
    return UnsupportedLeafError(
        f"{name}: a DTensor of shape {tuple(tensor.shape)} with {placements} on a mesh of "
        f"{tuple(tensor.device_mesh.shape)} has rows {rows} at coordinate "
        f"{tuple(tensor.device_mesh.get_coordinate() or ())}, that is shape "
        f"{tuple(length(dim) for dim in held)}, but its local tensor has shape {local_shape}; "
        f"give DTensor.from_local the right shape=, or rows cut as torch.chunk cuts them"
    )
