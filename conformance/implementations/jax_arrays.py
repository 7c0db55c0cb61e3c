"""Shards as one `jax.Array` over eight host devices, where a `NamedSharding` can say it.

One process plays all ranks: a shard is a device's, whichever rank holds it. Even grids of boxes
with equally many replicas each can be said, of up to eight shards; anything else is refused.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

# Read once, when jax starts.
FLAG = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from conformance.cases import numpy_dtype  # noqa: E402
from conformance.implementation import Array, Box, Held, Refused, Wanted  # noqa: E402
from conformance.implementations.meshes import mesh_of  # noqa: E402

__all__ = ["abstract", "array_of", "boxes_of", "sharding_of", "wide_numbers"]

Data = NDArray[np.generic]


@contextlib.contextmanager
def wide_numbers() -> Iterator[None]:
    """Have jax take numbers of 64 bits as they are, in every thread."""
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def sharding_of(ranks: Sequence[Sequence[Box]]) -> NamedSharding:
    """The sharding in which devices hold what these ranks hold.

    Raises:
        Refused: a `NamedSharding` over eight devices cannot say it.
    """
    shards = [[box] for boxes in ranks for box in boxes]
    devices = jax.devices()
    if not shards:
        return NamedSharding(Mesh(np.array(devices[:1]), ("whole",)), PartitionSpec())
    if len(shards) > len(devices):
        raise Refused(f"more than {len(devices)} shards")
    mesh = mesh_of(shards)
    if mesh is None or not mesh.even:
        raise Refused("boxes that no NamedSharding gives")
    axes = tuple(f"d{dim}" for dim in range(len(mesh.ranges)))
    grid = np.array(devices, dtype=object)[mesh.holders]
    return NamedSharding(Mesh(grid, (*axes, "replica")), PartitionSpec(*axes))


def array_of(ranks: Sequence[Held]) -> jax.Array:
    """What the ranks hold of an array, as one array.

    Raises:
        Refused: see `sharding_of`; or the ranks contradict each other or hold too little, which one
            array of one process cannot.
    """
    array = ranks[0].array
    if any(held.array != array for held in ranks):
        raise Refused("ranks that contradict each other: one process has one array")
    sharding = sharding_of([[shard.box for shard in held.shards] for held in ranks])
    data = {shard.box: shard.data for held in ranks for shard in held.shards}
    try:
        indices = sharding.addressable_devices_indices_map(array.shape)
    except ValueError:
        raise Refused("boxes that no NamedSharding gives") from None
    if {_box(index, array) for index in indices.values()} != set(data):
        raise Refused("boxes that no NamedSharding gives")
    parts = []
    for device, index in indices.items():
        part = np.array(data[_box(index, array)], order="C", copy=True)
        parts.append(jax.device_put(part, device))
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def abstract(ranks: Sequence[Wanted]) -> jax.ShapeDtypeStruct:
    """A target in which devices want what these ranks want.

    Raises:
        Refused: see `sharding_of`; or the boxes do not make up the whole array.
    """
    array = ranks[0].array
    sharding = sharding_of([wanted.boxes for wanted in ranks])
    wanted = {box for each in ranks for box in each.boxes}
    try:
        indices = sharding.addressable_devices_indices_map(array.shape)
    except ValueError:
        raise Refused("boxes that no NamedSharding gives") from None
    if wanted and {_box(index, array) for index in indices.values()} != wanted:
        raise Refused("a part of an array")
    return jax.ShapeDtypeStruct(array.shape, numpy_dtype(array.dtype), sharding=sharding)


def boxes_of(loaded: jax.Array, ranks: Sequence[Wanted]) -> list[list[Data]]:
    """The boxes that each rank wanted, from the devices that have them."""
    array = ranks[0].array
    held = {_box(shard.index, array): np.asarray(shard.data) for shard in loaded.addressable_shards}
    return [[held[box] for box in wanted.boxes] for wanted in ranks]


def _box(index: tuple[slice, ...] | None, array: Array) -> Box:
    assert index is not None, "every device is this process's"
    bounds = [key.indices(size) for key, size in zip(index, array.shape, strict=True)]
    return Box(tuple(low for low, _, _ in bounds), tuple(high - low for low, high, _ in bounds))
