"""How a tensor on XLA devices is sharded, in the manifest's words.

1. `mark_sharding` leaves mesh shape and partition spec on the `XLAShardedTensor` that it returns,
   axes by number or by name. The names' sizes are the global mesh's if that fits, else those that
   the numbers of parts allow, if only one choice does (`named_sharding`).
2. Otherwise XLA's own tiling says as much without names: an axis for each dimension that is cut,
   and one for the replicas (`tiled_sharding`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import permutations
from math import prod
from typing import Any

import torch

from xckpt.core.metadata import Sharding
from xckpt.torch.xla.shards import ShardLayout, global_tensor, is_wrapped, tiles_of

Spec = Sequence[int | str | Sequence[int | str] | None]
"""For each tensor dimension the mesh axis, or axes, that cut it."""


def stored_sharding(leaf: torch.Tensor, layout: ShardLayout) -> Sharding | None:
    """The sharding of a tensor; None for one without."""
    if not layout.annotated:
        return None
    tiles, replicas = tiles_of(global_tensor(leaf))
    if is_wrapped(leaf):
        given: Any = leaf
        shape, spec = given.mesh_shape, given.partition_spec
        if shape is not None and (spec is not None or not tiles):
            sharding = named_sharding(tuple(shape), spec or (), tiles, _global_axes(tuple(shape)))
            if sharding is not None:
                return sharding
    return None if layout.whole else tiled_sharding(tiles, replicas)


def named_sharding(
    mesh_shape: Sequence[int], spec: Spec, tiles: Sequence[int], names: Sequence[str] = ()
) -> Sharding | None:
    """A partition spec over a mesh.

    Args:
        mesh_shape: devices along each axis.
        spec: for each dimension an axis, several or None; by number or by name.
        tiles: number of parts of each dimension.
        names: the axes' names if they are known.

    Returns:
        None if the spec has names and several choices of axes give those numbers of parts, or none.

    Example:
        >>> str(named_sharding((2, 4), (("fsdp", "tp"), None), (8, 1), ("fsdp", "tp")))
        'PartitionSpec(fsdp+tp, -) on fsdp=2 x tp=4'
        >>> str(named_sharding((2, 4), ("tp", None), (4, 1)))
        'PartitionSpec(tp, -) on dim0=2 x tp=4'
        >>> str(named_sharding((2, 4), (1, None), (4, 1)))
        'PartitionSpec(dim1, -) on dim0=2 x dim1=4'
    """
    entries = [_axes_of(entry) for entry in spec]
    labels = list(names) or [f"dim{axis}" for axis in range(len(mesh_shape))]
    used = [axis for entry in entries for axis in entry if isinstance(axis, str)]
    if any(name not in labels for name in used):
        choice = _assign(used, mesh_shape, entries, tiles)
        if choice is None:
            return None
        for name, axis in choice.items():
            labels[axis] = name
    return Sharding(
        axes=tuple(zip(labels, map(int, mesh_shape), strict=True)),
        spec=tuple(
            tuple(axis if isinstance(axis, str) else labels[axis] for axis in entry)
            for entry in entries
        ),
    )


def tiled_sharding(tiles: Sequence[int], replicas: int) -> Sharding:
    """A sharding of which only the numbers of parts are known.

    Example:
        >>> str(tiled_sharding((2, 1, 3), 4))
        'PartitionSpec(dim0, -, dim1) on dim0=2 x dim1=3 x dim2=4'
    """
    axes: list[tuple[str, int]] = []
    spec: list[tuple[str, ...]] = []
    for parts in tiles:
        spec.append((f"dim{len(axes)}",) if parts > 1 else ())
        if parts > 1:
            axes.append((f"dim{len(axes)}", parts))
    if replicas > 1:
        axes.append((f"dim{len(axes)}", replicas))
    return Sharding(axes=tuple(axes), spec=tuple(spec))


def _axes_of(entry: int | str | Sequence[int | str] | None) -> tuple[int | str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, int | str) else tuple(entry)


def _global_axes(mesh_shape: tuple[int, ...]) -> tuple[str, ...]:
    """The axis names of torch_xla's global mesh, if one is set and has this shape."""
    mesh = sys.modules["torch_xla.distributed.spmd"].get_global_mesh()
    if mesh is None or mesh.axis_names is None or tuple(mesh.mesh_shape) != mesh_shape:
        return ()
    return tuple(mesh.axis_names)


def _assign(
    names: Sequence[str],
    mesh_shape: Sequence[int],
    entries: Sequence[tuple[int | str, ...]],
    tiles: Sequence[int],
) -> dict[str, int] | None:
    """Mesh axes for names, so that each dimension has its number of parts.

    None if no choice does, or if several do that differ in the size of an axis.
    """
    fitting: dict[tuple[int, ...], dict[str, int]] = {}
    for axes in permutations(range(len(mesh_shape)), len(names)):
        choice = dict(zip(names, axes, strict=True))
        parts = [
            prod(mesh_shape[choice[axis] if isinstance(axis, str) else axis] for axis in entry)
            for entry in entries
        ]
        if parts == list(tiles):
            fitting.setdefault(tuple(mesh_shape[axis] for axis in axes), choice)
    return next(iter(fitting.values())) if len(fitting) == 1 else None
