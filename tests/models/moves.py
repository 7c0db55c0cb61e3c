"""Sharded sources and sharded targets, on both sides: what a conversion is made from and into.

On the side of torch two ranks hold a `state_dict` as DTensors, cut along the first dimension; on
the side of JAX eight devices hold the parameters, cut along the last two dimensions that allow it.
Functions named ``on_rank_*`` run in the ranks; the others in the test's process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import xckpt
from xckpt.mapping.mapping import LeafMapping

RANKS = 2
Arrays = Mapping[str, NDArray[Any]]


def on_rank_distribute(tensor: torch.Tensor) -> DTensor:
    """A tensor of which each rank holds some rows; one without rows, which each holds whole."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    placement = Shard(0) if tensor.ndim else Replicate()
    return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)


def on_rank_save(rank: int, path: Path, arrays: Arrays) -> None:
    """Save a `state_dict` as DTensors."""
    state = {
        name: on_rank_distribute(torch.from_numpy(array.copy())) for name, array in arrays.items()
    }
    xckpt.save(path, state)


def on_rank_load(
    rank: int, path: Path, wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype]], mapping: Any
) -> tuple[dict[str, NDArray[Any]], float, int]:
    """Load a `state_dict` through a mapping into DTensors; each tensor whole, and `measured`."""
    like = {
        name: on_rank_distribute(torch.zeros(shape, dtype=dtype))
        for name, (shape, dtype) in wanted.items()
    }
    document = LeafMapping.from_document(mapping)
    state, seconds, peak = measured(lambda: xckpt.load(path, like, mapping=document))
    for name, leaf in state.items():
        assert leaf.placements == like[name].placements, name
    return {name: leaf.full_tensor().numpy() for name, leaf in state.items()}, seconds, peak


def mesh() -> Mesh:
    """All eight devices, four by two."""
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


def sharding_of(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """The last dimensions that a mesh axis divides are cut, one an axis; the others are whole."""
    axes = ["model", "data"]
    spec: list[str | None] = [None] * len(shape)
    for dim in reversed(range(len(shape))):
        if axes and shape[dim] > 0 and shape[dim] % mesh.shape[axes[0]] == 0:
            spec[dim] = axes.pop(0)
    return NamedSharding(mesh, PartitionSpec(*spec))


def targets(params: Any) -> Any:
    """Abstract arrays with shardings, for a tree of arrays."""
    devices = mesh()

    def target(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding_of(leaf.shape, devices)
        )

    return jax.tree.map(target, params)


def placed(params: Any) -> Any:
    """Arrays on the eight devices."""
    devices = mesh()
    return jax.tree.map(
        lambda leaf: jax.device_put(np.asarray(leaf), sharding_of(leaf.shape, devices)), params
    )


def same(left: Arrays, right: Arrays) -> None:
    """Assert that two states have the same names, shapes, types and bits."""
    assert sorted(left) == sorted(right)
    for name, array in left.items():
        other = right[name]
        assert (array.shape, array.dtype) == (other.shape, other.dtype), name
        assert np.ascontiguousarray(array).tobytes() == np.ascontiguousarray(other).tobytes(), name


def measured(function: Callable[[], Any]) -> tuple[Any, float, int]:
    """What a function returns, the seconds it took, and by how many bytes memory rose at most."""
    Path("/proc/self/clear_refs").write_text("5")  # from here on, VmHWM
    before = _memory("VmRSS")
    begin = time.perf_counter()
    result = function()
    seconds = time.perf_counter() - begin
    return result, seconds, max(0, _memory("VmHWM") - before)


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [kilobytes] = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(kilobytes) << 10
