"""The boxes of a DTensor: which part of the global tensor each part of the local tensor is.

1. Mesh and placements become a list of cuts for each tensor dimension
   (`xckpt.torch.sharded.placements`), in the order in which torch applied them.
2. Each dimension's cuts become intervals of rows; where two readings of ``_StridedShard`` are
   possible, the one that has the local tensor's size.
3. Every combination of the dimensions' intervals is a box; its data are a view of the local tensor.
   Boxes without elements are left out.

A local tensor that says itself which shards it has is asked instead
(`xckpt.torch.sharded.shards_wrapper`).

Only sizes enter, never elements or offsets one by one, and nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from xckpt.core.geometry.box import Boxes
from xckpt.core.metadata import Sharding
from xckpt.errors import UnsupportedLeafError
from xckpt.torch.copies import RebuildRecipe, as_parameter
from xckpt.torch.leaf import Memory, TensorLeaf, TensorTarget, mark_changed
from xckpt.torch.plain import check_readable, check_writable, known_dtype, plain
from xckpt.torch.sharded import shards_wrapper
from xckpt.torch.sharded.placements import (
    Cut,
    Interval,
    LocalBoxes,
    length,
    literal,
    nested,
    readings,
)


def describe(leaf: torch.Tensor, name: str) -> TensorLeaf:
    """A DTensor as a source: the boxes of its local tensor.

    Raises:
        UnsupportedLeafError: see `local_boxes`; or the local tensor has no plain elements to read.
    """
    tensor = cast(DTensor, leaf)
    local = local_tensor(tensor)
    if shards_wrapper.has_hooks(local):
        _check_placements(tensor.placements, name)
        return shards_wrapper.describe(tensor, local, name, sharding(tensor))
    local = plain(local, name)
    check_readable(local, name)
    local_part = local_boxes(tensor, name)
    return TensorLeaf(
        tuple(tensor.shape),
        known_dtype(local.dtype, name),
        local_part.boxes,
        [local[view] for view in local_part.views],
        True,
        sharding(tensor),
    )


def target_for(like: torch.Tensor, name: str, *, in_place: bool) -> TensorTarget:
    """A target like a DTensor; a new one has its mesh and placements.

    Raises:
        UnsupportedLeafError: see `local_boxes`; or the local tensor cannot be filled in place.
    """
    tensor = cast(DTensor, like)
    local = local_tensor(tensor)
    if shards_wrapper.has_hooks(local):
        _check_placements(tensor.placements, name)
        return shards_wrapper.target_for(tensor, local, name, in_place=in_place)
    local = plain(local, name)
    if in_place:
        check_writable(local, name)
    local_part = local_boxes(tensor, name)

    def allocate() -> Memory:
        filled = tensor if in_place else _empty_like(tensor)
        memory = plain(local_tensor(filled), name)

        def finish() -> torch.Tensor:
            if not in_place:
                return filled.requires_grad_(tensor.requires_grad)
            mark_changed([filled])
            return filled

        return Memory([memory[view] for view in local_part.views], finish)

    dtype = known_dtype(local.dtype, name)
    return TensorTarget(tuple(tensor.shape), dtype, local_part.boxes, allocate)


def rebuild_recipe(leaf: torch.Tensor) -> RebuildRecipe | None:
    """A DTensor as its local tensor; over another one it keeps mesh, placements and order of cuts.

    None where the local tensor is no plain one.
    """
    tensor = cast(DTensor, leaf)
    local = local_tensor(tensor)
    wait = getattr(local, "wait", None)  # an AsyncCollectiveTensor has it, a tensor has not
    local = local if wait is None else wait()
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


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """This rank's part of a DTensor, outside autograd."""
    with torch.no_grad():
        return tensor.to_local()


def sharding(tensor: DTensor) -> Sharding:
    """Mesh and placements, for the manifest; a mesh without names calls its axes dim0, dim1, ..."""
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(f"dim{axis}" for axis in range(mesh.ndim))
    return Sharding(
        axes=tuple(zip(names, mesh.shape, strict=True)),
        placements=tuple(repr(placement) for placement in tensor.placements),
    )


def local_boxes(tensor: DTensor, name: str) -> LocalBoxes:
    """The boxes of this rank's local tensor; none if the rank is not part of the mesh.

    Raises:
        UnsupportedLeafError: a placement holds no plain rows (``Partial``), torch does not say
            which rows are whose (a mesh in no ascending order), or the local tensor is not of
            the shape that mesh and placements give.
    """
    _check_placements(tensor.placements, name)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return LocalBoxes(Boxes.of([], rank=tensor.ndim), ())  # this rank is outside the mesh
    _check_order(tensor, coordinate, name)
    shape = tuple(tensor.shape)
    local_shape = tuple(local_tensor(tensor).shape)
    possible = [_readings(tensor, coordinate, dim, size) for dim, size in enumerate(shape)]
    if len(local_shape) != len(shape):
        raise _misfit(tensor, name, [rows[0] for rows in possible], local_shape)
    chosen: list[tuple[Interval, ...]] = []
    for rows, size in zip(possible, local_shape, strict=True):
        fitting = [intervals for intervals in rows if length(intervals) == size]
        if not fitting:
            raise _misfit(tensor, name, [rows[0] for rows in possible], local_shape)
        chosen.append(fitting[0])
    return LocalBoxes.of(chosen)


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


def _readings(
    tensor: DTensor, coordinate: Sequence[int], dim: int, size: int
) -> list[tuple[Interval, ...]]:
    """The rows of dimension ``dim`` that the rank at ``coordinate`` may hold, likelier first."""
    placements, mesh = tensor.placements, tensor.device_mesh
    axes = [axis for axis, placement in enumerate(placements) if _sharded_dim(placement) == dim]
    cuts = {axis: _cut(placements[axis], mesh, coordinate, axis) for axis in axes}
    if not axes:
        return [((0, size),) if size else ()]
    # What torch keeps beside the placements; absent before 2.9 or so, where only the two
    # conventions that `readings` knows exist.
    spec = getattr(tensor, "_spec", None)
    if any(cut.factor > 1 for cut in cuts.values()):
        if getattr(spec, "use_strided_shard_as_shard_order", None) is False:
            return [literal(size, [cuts[axis] for axis in axes])]
        return readings(size, [cuts[axis] for axis in axes])
    for entry in getattr(spec, "shard_order", None) or ():
        if entry.tensor_dim == dim:
            axes = list(entry.mesh_dims)
    return [nested(size, [cuts[axis] for axis in axes])]


def _cut(placement: Placement, mesh: DeviceMesh, coordinate: Sequence[int], axis: int) -> Cut:
    factor = int(getattr(placement, "split_factor", 1))
    return Cut(parts=mesh.size(axis), part=coordinate[axis], factor=factor)


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
