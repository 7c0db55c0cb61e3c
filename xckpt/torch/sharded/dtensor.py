"""The boxes of a DTensor: which part of the global tensor each part of the local tensor is.

1. Mesh and placements become a list of cuts for each tensor dimension
   (`xckpt.core.geometry.placements`), in the order in which torch applied them.
2. Each dimension's cuts become intervals of rows; where two readings of ``_StridedShard`` are
   possible, the one that has the local tensor's size.
3. Every combination of the dimensions' intervals is a box; its data are a view of the local tensor.
   Boxes without elements are left out.

A local tensor that can list its own shards is asked instead (`xckpt.torch.sharded.hooked`).

A state has many tensors that lie alike: what follows from mesh, placements and shapes is found once
for all of them (`_Layout`).

Only sizes enter, never elements or offsets one by one, and nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
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
from xckpt.core.geometry.spread import Spread
from xckpt.core.metadata import Sharding
from xckpt.errors import UnsupportedLeafError
from xckpt.torch.copies import RebuildRecipe, as_parameter
from xckpt.torch.leaf import (
    TensorLeaf,
    at_rest,
    awaited,
    check_readable,
    check_writable,
    known_dtype,
    plain,
)
from xckpt.torch.sharded.hooked import local_shards, new_wrapper
from xckpt.torch.target import Memory, TensorTarget

MOST_LAYOUTS: Final = 1 << 10
"""Layouts of a mesh that are kept; a state has a few."""


@dataclass(slots=True, eq=False)
class _Layout:
    """What DTensors have in common that lie alike on a mesh."""

    shape: tuple[int, ...]
    boxes: Boxes
    views: Sequence[View]
    """The local tensor's view of each box."""
    sharding: Sharding
    known: list[Spread | None] = field(default_factory=list["Spread | None"])
    """Where the boxes of all ranks are, once that was asked."""

    def parts(self, local: torch.Tensor) -> list[torch.Tensor]:
        """The elements of each box."""
        if len(self.views) == 1:  # as of most: the box is all that the rank holds
            return [local]
        return [local[view] for view in self.views]

    def spread(self, tensor: DTensor) -> Spread | None:
        """Where the boxes of all ranks are; a save by one process has no need of it."""
        if not self.known:
            from xckpt.torch.sharded.spread import of_dtensor

            self.known.append(of_dtensor(tensor))
        return self.known[0]


_layouts: Final[WeakKeyDictionary[DeviceMesh, dict[Hashable, _Layout]]] = WeakKeyDictionary()


def describe(leaf: torch.Tensor, name: str) -> TensorLeaf:
    """A DTensor as a source: the boxes of its local tensor, or the shards that this has.

    Raises:
        UnsupportedLeafError: a placement holds no plain rows (``Partial``), torch does not say
            which rows are whose (a mesh in no ascending order), or the local tensor is not of the
            shape that mesh and placements give, or has no plain elements to read.
    """
    tensor = cast(DTensor, leaf)
    local = _local_tensor(tensor)
    if _has_hooks(local):
        _check_placements(tensor.placements, name)
        return local_shards(tensor, local, _sharding(tensor), name).source()
    layout = _layout(tensor, local.shape, name)
    local = at_rest(local, name)
    check_readable(local, name)
    spread = partial(layout.spread, tensor)
    held = layout.shape, known_dtype(local.dtype, name), layout.boxes, layout.parts(local)
    return TensorLeaf(*held, True, layout.sharding, spread=spread)


def target_for(like: torch.Tensor, name: str, *, in_place: bool) -> TensorTarget:
    """A target like a DTensor; a new one has its mesh and placements.

    Raises:
        UnsupportedLeafError: as for `describe`, though a new one may be like one on the meta
            device; or the local tensor cannot be filled in place, or not be made new.
    """
    tensor = cast(DTensor, like)
    local = _local_tensor(tensor)
    if _has_hooks(local):
        _check_placements(tensor.placements, name)
        shards = local_shards(tensor, local, _sharding(tensor), name)
        return shards.target_in_place(tensor) if in_place else new_wrapper(tensor, local, shards)
    layout = _layout(tensor, local.shape, name)
    local = at_rest(local, name)
    if in_place:
        check_writable(local, name)

    def allocate() -> Memory:
        filled = tensor if in_place else _empty_like(tensor)
        memory = plain(_local_tensor(filled), name)
        parts = layout.parts(memory)
        if in_place:
            return Memory(tensor, parts, (tensor,))
        return Memory(filled.requires_grad_(tensor.requires_grad), parts)

    dtype = known_dtype(local.dtype, name)
    return TensorTarget(layout.shape, dtype, layout.boxes, allocate, in_place)


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
    local = getattr(tensor, "_local_tensor", None)  # what to_local does, without autograd
    if local is not None:
        return local
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


def _has_hooks(local: torch.Tensor) -> bool:
    """Whether a DTensor's local tensor says itself which shards it has."""
    return hasattr(local, "__create_chunk_list__") and hasattr(local, "__get_tensor_shard__")


def _layout(tensor: DTensor, local_shape: tuple[int, ...], name: str) -> _Layout:
    """How a DTensor lies, found once for all that lie alike."""
    if not dist.is_initialized():
        raise UnsupportedLeafError(
            f"{name}: a DTensor whose process group was destroyed; save or load before "
            f"destroy_process_group(), or use its to_local()"
        )
    coordinate = tensor.device_mesh.get_coordinate()
    place = None if coordinate is None else tuple(coordinate)
    order = getattr(getattr(tensor, "_spec", None), "shard_order", None), is_literal(tensor)
    placements = tensor.placements
    factors = tuple(map(split_factor, placements))  # torch compares placements without them
    key = place, placements, factors, order, tensor.shape, local_shape
    known = _layouts.setdefault(tensor.device_mesh, {})
    layout = known.get(key)
    if layout is None:
        _check_placements(placements, name)
        if len(known) >= MOST_LAYOUTS:
            known.clear()
        boxes, views = _local_boxes(tensor, place, tuple(local_shape), name)
        layout = known[key] = _Layout(tuple(tensor.shape), boxes, views, _sharding(tensor))
    return layout


def _local_boxes(
    tensor: DTensor, coordinate: tuple[int, ...] | None, local_shape: tuple[int, ...], name: str
) -> tuple[Boxes, Sequence[View]]:
    """The boxes of this rank's local tensor and its view of each; none outside the mesh."""
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
