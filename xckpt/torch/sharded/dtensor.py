"""A DTensor as a source or as a target: boxes of the global tensor, and views of the local one.

1. Mesh and placements say which boxes the local tensor holds (`xckpt.torch.sharded.on_mesh`).
2. A local tensor that can list its own shards is asked instead (`xckpt.torch.sharded.hooked`).
3. A state has many tensors that lie alike: what follows from mesh, placements and shapes is found
   once for all of them (`_Layout`).
4. The next save of a tensor finds its layout by torch's own description of it, without a look into
   that (`_Seen`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.placements import View
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
from xckpt.torch.sharded.on_mesh import (
    axis_names,
    check_placements,
    check_rank,
    is_literal,
    local_boxes,
    split_factor,
)
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
    is_apart: bool
    """Whether the mesh lacks some processes."""
    known: list[Spread | None] = field(default_factory=list["Spread | None"])
    """Where the boxes of all ranks are, once that was asked."""

    def parts(self, local: torch.Tensor) -> list[torch.Tensor]:
        """The elements of each box."""
        if len(self.views) == 1:  # as of most: the box is all that the rank holds
            return [local]
        return [local[view] for view in self.views]

    def spread(self, tensor: DTensor) -> Spread | None:
        """Where the boxes of all ranks are, for ranks that plan alone."""
        if not self.known:
            from xckpt.torch.sharded.spread import of_dtensor

            self.known.append(of_dtensor(tensor))
        return self.known[0]


_layouts: Final[WeakKeyDictionary[DeviceMesh, dict[Hashable, _Layout]]] = WeakKeyDictionary()


class _Seen(NamedTuple):
    """The layout that was found for a DTensor."""

    spec: weakref.ref[object]
    """torch's description of the tensor. No key: to hash and compare it takes most of the time."""
    placements: Sequence[Placement]
    local_shape: tuple[int, ...]
    layout: _Layout
    rank: int | None
    """Of this process, which may become another when the process group is made again."""

    def still(self, spec: object, tensor: DTensor, local_shape: tuple[int, ...]) -> bool:
        """Whether the layout is that of a tensor with this description."""
        same = self.spec() is spec and self.placements is tensor.placements
        same = same and self.rank == _this_rank()
        return same and self.local_shape == local_shape and self.layout.shape == tensor.shape


_seen: Final[dict[int, _Seen]] = {}
"""By the id of the description, for as long as it lives."""
MOST_SEEN: Final = 1 << 13
"""Descriptions whose layouts are kept; with more tensors the keys of `_layouts` are as quick."""


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
        check_placements(tensor.placements, name)
        return local_shards(tensor, local, _sharding(tensor), name).source()
    layout = _layout(tensor, local.shape, name)
    local = at_rest(local, name)
    check_readable(local, name)
    spread = partial(layout.spread, tensor)
    held = layout.shape, known_dtype(local.dtype, name), layout.boxes, layout.parts(local)
    return TensorLeaf(*held, True, layout.sharding, spread=spread, is_apart=layout.is_apart)


def target_for(like: torch.Tensor, name: str, *, in_place: bool) -> TensorTarget:
    """A target like a DTensor; a new one has its mesh and placements.

    Raises:
        UnsupportedLeafError: as for `describe`, though a new one may be like one on the meta
            device; or the local tensor cannot be filled in place, or not be made new.
    """
    tensor = cast(DTensor, like)
    local = _local_tensor(tensor)
    if _has_hooks(local):
        check_placements(tensor.placements, name)
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
        return as_parameter(leaf, _over(tensor, copies[0]))

    return RebuildRecipe([local.detach()], rebuild)


def _empty_like(like: DTensor) -> DTensor:
    """New memory for a DTensor that is the same in all else."""
    device = like.device_mesh.device_type if like.is_meta else like.device
    local = awaited(_local_tensor(like))
    return _over(like, torch.empty_like(local, device=device, requires_grad=False))


def _over(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor over a local tensor that has all else of another one, the order of cuts too.

    Made as torch makes its own. What `empty_like` makes may lie on an older mesh (`check_rank`),
    and torch's protocol for wrappers refuses some that have a _StridedShard.
    """
    made: Callable[..., DTensor] = DTensor
    return made(local, tensor._spec, requires_grad=False)


def _local_tensor(tensor: DTensor) -> torch.Tensor:
    """This rank's part of a DTensor, outside autograd."""
    local = getattr(tensor, "_local_tensor", None)  # what to_local does, without autograd
    if local is not None:
        return local
    with torch.no_grad():
        return tensor.to_local()


def _sharding(tensor: DTensor) -> Sharding:
    """Mesh and placements, for the manifest."""
    mesh = tensor.device_mesh
    return Sharding(
        axes=tuple(zip(axis_names(mesh), mesh.shape, strict=True)),
        placements=tuple(repr(placement) for placement in tensor.placements),
    )


def _has_hooks(local: torch.Tensor) -> bool:
    """Whether a DTensor's local tensor says itself which shards it has."""
    return hasattr(local, "__create_chunk_list__") and hasattr(local, "__get_tensor_shard__")


def _layout(tensor: DTensor, local_shape: tuple[int, ...], name: str) -> _Layout:
    """How a DTensor lies."""
    if not dist.is_initialized():
        raise UnsupportedLeafError(
            f"{name}: a DTensor whose process group was destroyed; save or load before "
            f"destroy_process_group(), or use its to_local()"
        )
    spec = getattr(tensor, "_spec", None)
    seen = _seen.get(id(spec))
    if seen is not None and seen.still(spec, tensor, local_shape):
        return seen.layout
    layout = _found(tensor, local_shape, name)
    if spec is not None and len(_seen) < MOST_SEEN:
        gone = partial(_forget, id(spec))
        about = tensor.placements, local_shape, layout, _this_rank()
        _seen[id(spec)] = _Seen(weakref.ref(spec, gone), *about)
    return layout


def _this_rank() -> int | None:
    """This process's number among all; None where torch has not numbered them."""
    world = dist.group.WORLD  # quicker than get_rank, for each tensor of a save
    return None if world is None else world.rank()


def _forget(number: int, _: object) -> None:
    """A description is gone, and its id is free for another."""
    _seen.pop(number, None)


def _found(tensor: DTensor, local_shape: tuple[int, ...], name: str) -> _Layout:
    """The layout of all that lie like a DTensor, by mesh, placements and shapes."""
    coordinate = tensor.device_mesh.get_coordinate()
    place = None if coordinate is None else tuple(coordinate)
    check_rank(tensor, place, _this_rank(), name)
    order = getattr(getattr(tensor, "_spec", None), "shard_order", None), is_literal(tensor)
    placements = tensor.placements
    factors = tuple(map(split_factor, placements))  # torch compares placements without them
    key = place, placements, factors, order, tensor.shape, local_shape
    known = _layouts.setdefault(tensor.device_mesh, {})
    layout = known.get(key)
    if layout is None:
        check_placements(placements, name)
        if len(known) >= MOST_LAYOUTS:
            known.clear()
        boxes, views = local_boxes(tensor, place, tuple(local_shape), name)
        is_apart = tensor.device_mesh.size() < dist.get_world_size()
        about = _sharding(tensor), is_apart
        layout = known[key] = _Layout(tuple(tensor.shape), boxes, views, *about)
    return layout
