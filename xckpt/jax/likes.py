"""Targets for stored tensors: a `jax.ShapeDtypeStruct` for each.

1. `like` makes one where the caller gives none, `prepared` where the caller gives a sharding alone.
2. A struct without a sharding goes whole to JAX's default device. `warn_of_one_device` warns where
   that is much and there are other devices.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TypeGuard, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from xckpt.core.dtypes import numpy_dtype
from xckpt.core.geometry.cut_axes import cut_axes, refuse_other_axes
from xckpt.core.leaf import TargetPlace
from xckpt.core.metadata import Metadata, TensorStorageMetadata
from xckpt.core.text.arguments import named, named_class
from xckpt.errors import UnsupportedLeafError
from xckpt.jax.shardings import Device, current_mesh, default_sharding
from xckpt.jax.target import KEY_PREFIX


def like(stored: TensorStorageMetadata, name: str, place: TargetPlace) -> jax.ShapeDtypeStruct:
    """A struct of the stored shape and dtype; of typed keys where keys were saved.

    Raises:
        TypeError: ``place`` has no values of JAX.
        ValueError: the mesh lacks an axis by which the tensor was saved, or no such device is here.

    Example:
        >>> from xckpt.core.geometry.box import Boxes
        >>> from xckpt.core.metadata import TensorProperties
        >>> properties = TensorProperties("bfloat16")
        >>> stored = TensorStorageMetadata(properties, (4, 2), Boxes.whole((4, 2)))
        >>> like(stored, "w", TargetPlace())
        ShapeDtypeStruct(shape=(4, 2), dtype=bfloat16)
    """
    dtype = numpy_dtype(stored.properties.dtype)
    if place.cast:
        dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    struct = _keys(jax.ShapeDtypeStruct(tuple(stored.size), dtype), stored.annotation)
    return jax.ShapeDtypeStruct(
        struct.shape, struct.dtype, sharding=_sharding(stored, len(struct.shape), name, place)
    )


def _keys(data: jax.ShapeDtypeStruct, annotation: str) -> jax.ShapeDtypeStruct:
    """The keys that have these data; the data itself if this JAX has no such keys."""
    if not annotation.startswith(KEY_PREFIX):
        return data
    impl = annotation.removeprefix(KEY_PREFIX)
    try:
        keys = jax.eval_shape(lambda array: jax.random.wrap_key_data(array, impl=impl), data)
    except (TypeError, ValueError):
        return data
    return jax.ShapeDtypeStruct(keys.shape, keys.dtype)


def _sharding(
    stored: TensorStorageMetadata, rank: int, name: str, place: TargetPlace
) -> jax.sharding.Sharding | None:
    sharding, mesh = place.sharding, place.mesh
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"mesh= takes a jax.sharding.Mesh, not {named(type(mesh).__name__)}")
    if place.device is not None and (mesh is not None or sharding is not None):
        raise TypeError("give device= or a mesh and sharding, which say on which devices it is")
    if isinstance(sharding, jax.sharding.Sharding):
        return sharding
    if sharding is not None and not isinstance(sharding, PartitionSpec):
        raise TypeError(f"sharding= takes a Sharding or PartitionSpec, got {sharding!r}")
    if mesh is None:
        if sharding is not None:
            raise TypeError("a PartitionSpec needs mesh=, a jax.sharding.Mesh")
        return None if place.device is None else SingleDeviceSharding(_device(place.device))
    if sharding is None:
        cuts = cut_axes(stored.sharding, len(stored.size))[:rank]
        refuse_other_axes(cuts, [str(axis) for axis in mesh.axis_names], name)
        sharding = PartitionSpec(*(axes or None for axes in cuts))
    return NamedSharding(mesh, sharding)


def _device(device: object) -> Device:
    """A device, or the one that a text names: ``"gpu"``, ``"cpu:1"``."""
    if isinstance(device, jax.Device):
        return cast(Device, device)
    if not isinstance(device, str):
        raise TypeError(f"device= takes a jax.Device or its name, not {named_class(device)}")
    platform, _, number = device.partition(":")
    try:
        all_of_them, index = jax.devices(platform), int(number or 0)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"device={device!r}: JAX has no such device here: {error}") from error
    devices = [each for each in all_of_them if each.process_index == jax.process_index()]
    if not 0 <= index < len(devices):
        raise ValueError(f"device={device!r}: there are {len(devices)} such devices here")
    return devices[index]


def prepared(likes: Mapping[str, object], metadata: Metadata) -> Mapping[str, object]:
    """The targets of a load, with a struct of the stored shape in place of each sharding.

    A PartitionSpec is laid over the mesh that is set. If a Python value is stored, or nothing, None
    takes the sharding's place: the value comes back as it was.

    Raises:
        UnsupportedLeafError: no mesh is set for a PartitionSpec, or a sharding is not one for an
            array of these dimensions; names the leaves.
    """
    warn_of_one_device([each for each in likes.values() if _is_unplaced(each)])
    made: dict[str, object] = {}
    problems: list[str] = []
    for name, each in likes.items():
        made[name] = each
        if isinstance(each, jax.sharding.Sharding | PartitionSpec):
            try:
                made[name] = _placed(each, metadata.state_dict_metadata.get(name), name)
            except UnsupportedLeafError as error:
                problems.append(str(error))
            except ValueError as error:
                problems.append(f"{name}: {each} does not fit; JAX says: {error}")
    if problems:
        raise UnsupportedLeafError.leaves("cannot be loaded into", problems)
    return made


def _placed(
    sharding: jax.sharding.Sharding | PartitionSpec, stored: object, name: str
) -> jax.ShapeDtypeStruct | None:
    if not isinstance(stored, TensorStorageMetadata):
        return None
    mesh: Mesh | None = None
    if isinstance(sharding, PartitionSpec):
        mesh = current_mesh()
        if mesh is None:
            raise UnsupportedLeafError(
                f"{name}: a PartitionSpec names no devices; load within jax.set_mesh(mesh), or "
                f"give NamedSharding(mesh, {sharding!r})"
            )
    return like(stored, name, TargetPlace(mesh=mesh, sharding=sharding))


def _is_unplaced(each: object) -> TypeGuard[jax.ShapeDtypeStruct]:
    return isinstance(each, jax.ShapeDtypeStruct) and each.sharding is None


MOST_UNASKED = 1 << 30
"""Bytes that may go to the default device because no sharding was given, before a warning."""


def warn_of_one_device(nowhere: Sequence[jax.ShapeDtypeStruct]) -> None:
    """Warn if many bytes go to one of several devices because structs have no sharding."""
    if not nowhere or jax.device_count() == 1:
        return
    size = sum(each.size * _item_size(each.dtype) for each in nowhere)
    if size > MOST_UNASKED:
        gibibytes = f"{size / (1 << 30):.1f} GiB"
        warnings.warn(
            f"{gibibytes} in {len(nowhere)} jax.ShapeDtypeStruct without a sharding go whole to "
            f"{default_sharding()}; give each a sharding=, or load into a tree of shardings",
            UserWarning,
            stacklevel=2,
        )


def _item_size(dtype: object) -> int:
    return int(getattr(dtype, "itemsize", 1))
