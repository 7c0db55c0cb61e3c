"""Which part of a DTensor a rank holds, by mesh and placements.

1. Mesh and placements become a list of cuts for each tensor dimension
   (`xckpt.core.geometry.placements`), in the order in which torch applied them.
2. Each dimension's cuts become intervals of rows; where two readings of ``_StridedShard`` are
   possible, the one that has the local tensor's size.
3. Every combination of the dimensions' intervals is a box; its data are a view of the local tensor.
   Boxes without elements are left out.

Only sizes enter, never elements or offsets one by one, and nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.placements import (
    Cut,
    Interval,
    View,
    combined,
    length,
    nested,
    readings,
)
from xckpt.errors import UnsupportedLeafError


def local_boxes(
    tensor: DTensor, coordinate: tuple[int, ...] | None, local_shape: tuple[int, ...], name: str
) -> tuple[Boxes, Sequence[View]]:
    """The boxes of this rank's local tensor and its view of each; none outside the mesh.

    Raises:
        UnsupportedLeafError: torch does not say which rows are whose, or the local tensor is not of
            the shape that mesh and placements give.
    """
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


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of a mesh's axes; dim0, dim1, ... of a mesh without names."""
    return mesh.mesh_dim_names or tuple(f"dim{axis}" for axis in range(mesh.ndim))


def check_placements(placements: Sequence[Placement], name: str) -> None:
    """Refuse placements that hold no plain rows.

    Raises:
        UnsupportedLeafError: one is ``Partial``, or neither ``Replicate`` nor a ``Shard``.
    """
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


def check_rank(
    tensor: DTensor, coordinate: tuple[int, ...] | None, rank: int | None, name: str
) -> None:
    """Refuse a mesh in which this process has another rank than it has now.

    torch keeps meshes longer than their process groups: what it makes of a DTensor (`zeros_like`)
    may lie on an equal mesh of the groups before.

    Raises:
        UnsupportedLeafError: the mesh is one of those.
    """
    mesh = tensor.device_mesh
    if rank is None:
        return
    found: list[list[int]] = np.argwhere(mesh.mesh.cpu().numpy() == rank).tolist()
    if found != ([] if coordinate is None else [list(coordinate)]):
        raise UnsupportedLeafError(
            f"{name}: a DTensor on an older {mesh}, made before this process became rank {rank}; "
            f"make it by DTensor.from_local on a mesh of the present process group (zeros_like, "
            f"detach and the like may give it an equal, older mesh)"
        )


def _check_order(tensor: DTensor, coordinate: Sequence[int], name: str) -> None:
    """Refuse shards along a mesh axis whose ranks do not ascend.

    torch orders them by mesh coordinate when it cuts locally, but by rank in the axis's process
    group, which ascends, when it scatters and gathers: `distribute_tensor` and `redistribute` leave
    different rows on a rank under one and the same placement.
    """
    mesh = tensor.device_mesh
    numbers = mesh.mesh.cpu().numpy()
    for axis, placement in enumerate(tensor.placements):
        # Of the mesh's numbers: its process groups may be gone, where all groups were made again.
        along = numbers[(*coordinate[:axis], slice(None), *coordinate[axis + 1 :])]
        if _sharded_dim(placement) is None or np.all(np.diff(along) > 0):
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
