"""Targets for stored tensors where the caller gives none: plain tensors, or DTensors on a mesh.

1. A plain one is a single element, expanded to the shape: it has a device and takes no memory.
2. On a mesh it is a DTensor over the ``meta`` device. Its placements are the caller's, or those by
   which the tensor was saved, axis by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from xckpt.core.geometry.cut_axes import cut_axes, refuse_other_axes
from xckpt.core.leaf import TargetPlace
from xckpt.core.metadata import Sharding, TensorStorageMetadata
from xckpt.core.text.arguments import named
from xckpt.errors import UnsupportedLeafError
from xckpt.torch.leaf import torch_dtype

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


def like(stored: TensorStorageMetadata, name: str, place: TargetPlace) -> torch.Tensor:
    """A tensor of the stored shape and dtype, without memory of its own.

    Raises:
        UnsupportedLeafError: torch has no such dtype; names the leaf.
        TypeError: ``place`` is not said in torch's words.
        ValueError: the mesh lacks an axis by which the tensor was saved, or no such device is here.

    Example:
        >>> from xckpt.core.geometry.box import Boxes
        >>> from xckpt.core.metadata import TensorProperties
        >>> properties = TensorProperties("bfloat16")
        >>> stored = TensorStorageMetadata(properties, (4, 2), Boxes.whole((4, 2)))
        >>> like(stored, "w", TargetPlace()).shape
        torch.Size([4, 2])
    """
    dtype, shape = torch_dtype(stored.properties.dtype), tuple(stored.size)
    if dtype is None:
        raise UnsupportedLeafError(
            f"{name}: torch has no dtype {stored.properties.dtype}; load it with "
            f"framework='numpy', or give a target of another dtype and cast=True"
        )
    if place.mesh is not None:
        return _on_mesh(torch.empty(shape, dtype=dtype, device="meta"), stored, name, place)
    if place.sharding is not None:
        raise TypeError("sharding= takes placements of torch, which need mesh=, a DeviceMesh")
    device = "cpu" if place.device is None else place.device
    if not isinstance(device, str | int | torch.device):
        raise TypeError(
            f"device= takes a torch.device or its name, not {named(type(device).__name__)}"
        )
    try:
        element = torch.empty((), dtype=dtype, device=device)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"device={device!r}: torch has no such device here: {error}") from error
    return element.expand(shape)


def _on_mesh(
    tensor: torch.Tensor, stored: TensorStorageMetadata, name: str, place: TargetPlace
) -> torch.Tensor:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.placement_types import Placement

    mesh, placements = place.mesh, place.sharding
    if not isinstance(mesh, DeviceMesh) or place.device is not None:
        raise TypeError("mesh= takes a DeviceMesh, which says on which devices a tensor is")
    if placements is None:
        placements = _stored_placements(stored.sharding, tensor.ndim, mesh, name)
    one = isinstance(placements, Placement)
    listed = [placements] if one else list(cast(Sequence[Placement], placements))
    return distribute_tensor(tensor, mesh, listed)


def _stored_placements(
    sharding: Sharding | None, rank: int, mesh: DeviceMesh, name: str
) -> list[Placement]:
    """A placement for each axis of a mesh."""
    from torch.distributed.tensor import Replicate, Shard

    from xckpt.torch.sharded.on_mesh import axis_names

    axes = axis_names(mesh)
    cuts = cut_axes(sharding, rank)
    refuse_other_axes(cuts, axes, name)
    dimensions = {axis: d for d, of_dimension in enumerate(cuts) for axis in of_dimension}
    return [Shard(dimensions[axis]) if axis in dimensions else Replicate() for axis in axes]
