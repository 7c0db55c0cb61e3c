"""A JAX sharding in the planner's terms: the local boxes, the holders of each, the spec.

1. `local_layout` asks the sharding which slice of the tensor each addressable device holds, and
   groups the devices by box: a box that several local devices hold (a replica) appears once.
2. `stored_sharding` spells a `NamedSharding` for the manifest.
3. `concrete` turns what a target may give as its sharding into one that has devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from numpy.typing import NDArray

from xckpt.core.geometry.box import Box, Boxes
from xckpt.core.geometry.spread import MeshProcesses, OnMesh
from xckpt.core.metadata import Sharding
from xckpt.errors import UnsupportedLeafError


class Device(Protocol):
    """The attributes used of a `jax.Device`, whose own type has no stubs."""

    @property
    def platform(self) -> str:
        """``"cpu"``, ``"gpu"``, ``"tpu"``."""
        ...

    @property
    def process_index(self) -> int:
        """The process that the device belongs to."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class LocalLayout:
    """The boxes that this process's devices hold, each once."""

    boxes: Boxes
    devices: tuple[tuple[Device, ...], ...]
    """For each box the local devices that hold it, in the order of the sharding."""


def local_layout(sharding: jax.sharding.Sharding, shape: tuple[int, ...], name: str) -> LocalLayout:
    """The local part of a sharded shape; no box at all if no local device takes part.

    Raises:
        UnsupportedLeafError: the sharding does not divide the shape evenly, leaves partial sums,
            or cuts dimensions away (as pmap does); names the leaf.

    Example:
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], "x")
        >>> local_layout(NamedSharding(mesh, PartitionSpec("x")), (4, 2), "w").boxes
        Boxes([0, 4) x [0, 2))
    """
    _refuse_unreduced(sharding, name)
    try:
        indices = sharding.addressable_devices_indices_map(shape)
    except ValueError as error:
        raise UnsupportedLeafError(
            f"{name}: {sharding} does not fit the shape {shape}; JAX says: {error}"
        ) from error
    holders: dict[Box, list[Device]] = {}
    for device, index in indices.items():
        holders.setdefault(_box(index, shape, sharding, name), []).append(device)
    pairs = [(box.offsets, box.sizes) for box in holders]
    return LocalLayout(
        Boxes.of(pairs, rank=len(shape)), tuple(tuple(devices) for devices in holders.values())
    )


def _box(
    index: tuple[slice, ...] | None,
    shape: tuple[int, ...],
    sharding: jax.sharding.Sharding,
    name: str,
) -> Box:
    if index is None or not all(isinstance(part, slice) for part in index):
        raise UnsupportedLeafError(
            f"{name}: {type(sharding).__name__} does not cut a tensor into boxes of its own rank; "
            f"use jax.device_put with a NamedSharding first"
        )
    ranges = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return Box(tuple(lo for lo, _, _ in ranges), tuple(max(0, hi - lo) for lo, hi, _ in ranges))


def _refuse_unreduced(sharding: jax.sharding.Sharding, name: str) -> None:
    unreduced = getattr(getattr(sharding, "spec", None), "unreduced", None)
    if unreduced:
        axes = ", ".join(sorted(map(str, unreduced)))
        raise UnsupportedLeafError(
            f"{name}: its shards are partial sums over mesh axis {axes} (unreduced); "
            f"add them up with jax.reshard first"
        )


def everywhere_whole(sharding: jax.sharding.Sharding) -> bool:
    """Whether every process that can name an array of this sharding holds the whole of it.

    An array of one process's devices is that process's own. An array that spans processes is named
    by all of them, even those that hold no part of it.
    """
    if not sharding.is_fully_replicated:
        return False
    return sharding.is_fully_addressable or not is_apart(sharding)


@lru_cache(maxsize=64)
def is_apart(sharding: jax.sharding.Sharding) -> bool:
    """Whether some process has none of the devices: it may hold another array of the same name."""
    processes = jax.process_count()
    if processes == 1 or sharding.is_fully_addressable:
        return processes > 1
    return len({device.process_index for device in sharding.device_set}) < processes


def stored_sharding(sharding: jax.sharding.Sharding, rank: int) -> Sharding | None:
    """The sharding for the manifest, with an entry for each of ``rank`` dimensions.

    None for a single device, and for shardings that have no named axes.

    Example:
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], "x")
        >>> str(stored_sharding(NamedSharding(mesh, PartitionSpec(None, "x")), 3))
        'PartitionSpec(-, x, -) on x=1'
    """
    if not isinstance(sharding, NamedSharding):
        return None
    axes = tuple((str(axis), int(size)) for axis, size in sharding.mesh.shape.items())
    return Sharding(axes=axes, spec=_cuts(sharding.spec, rank))


def spread(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> OnMesh | None:
    """Where the boxes of all processes are; None for a sharding without a mesh of devices.

    Example:
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], "x")
        >>> spread(NamedSharding(mesh, PartitionSpec(None, "x")), (3, 4)).cuts
        ((), (0,))
    """
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    number = {str(axis): place for place, axis in enumerate(sharding.mesh.axis_names)}
    cuts = (tuple(number[axis] for axis in axes) for axes in _cuts(sharding.spec, len(shape)))
    return OnMesh(shape, _processes_of(sharding.mesh), tuple(cuts))


@lru_cache(maxsize=16)
def _processes_of(mesh: Mesh) -> MeshProcesses:
    """The process of each device of a mesh."""
    devices = cast("NDArray[np.object_]", mesh.devices)
    numbers = [cast(Device, device).process_index for device in devices.ravel()]
    return MeshProcesses("jax", np.array(numbers, np.int64).reshape(devices.shape))


def _cuts(spec: PartitionSpec, rank: int) -> tuple[tuple[str, ...], ...]:
    """For each of ``rank`` dimensions the mesh axes that cut it."""
    cuts = [_axes_of(entry) for entry in spec][:rank]
    return (*cuts, *[()] * (rank - len(cuts)))


def _axes_of(entry: object) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(map(str, entry)) if isinstance(entry, tuple | list) else (str(entry),)


def concrete(sharding: object, name: str) -> jax.sharding.Sharding:
    """A target's sharding as one with devices: None means the default device.

    A sharding over an abstract mesh (as `jax.eval_shape` gives under `jax.set_mesh`) takes the
    devices of the mesh that is set.

    Raises:
        UnsupportedLeafError: there are no devices to take; names the leaf.
    """
    if sharding is None:
        return default_sharding()
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        mesh = current_mesh()
        if mesh is None or mesh.abstract_mesh != sharding.mesh:
            raise UnsupportedLeafError(
                f"{name}: its sharding names the abstract mesh {sharding.mesh}, which has no "
                f"devices; load within jax.set_mesh(mesh), or give a NamedSharding over a Mesh"
            )
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    if not isinstance(sharding, jax.sharding.Sharding):
        raise UnsupportedLeafError(
            f"{name}: {sharding!r} is not a jax.sharding.Sharding; give a NamedSharding"
        )
    return sharding


def current_mesh() -> Mesh | None:
    """The mesh of `jax.set_mesh`; None without one, or where JAX is too old to say."""
    mesh: object = getattr(jax.sharding, "get_mesh", lambda: None)()
    return mesh if isinstance(mesh, Mesh) and mesh.axis_names else None


def default_sharding() -> SingleDeviceSharding:
    """Where JAX puts an array that asks for no device."""
    chosen = getattr(jax.config, "jax_default_device", None)
    if chosen is None or isinstance(chosen, str):
        chosen = jax.local_devices(backend=chosen)[0]
    return SingleDeviceSharding(chosen)
