"""A JAX array to be loaded, built from host buffers box by box.

1. `buffer` allocates 64-byte aligned host memory for a box, at the first call (`HostBuffers`).
2. `commit` puts it on each local device that holds the box and releases it. The CPU backend adopts
   memory so aligned instead of copying it, for all replicas on CPU devices alike: such an array
   never donates its memory, so no replica is overwritten through another. Sub-byte types are
   packed, and therefore copied.
3. `result` joins the devices' parts to one array.

A typed PRNG key (`jax.random.key`) is loaded, and saved, as the uint32 array that it wraps
(`KeySpec`): keys of shape S are key data of shape S + K, where K belongs to the implementation
((2,) for threefry2x32). The implementation's name travels as the leaf's annotation,
``prng_key:threefry2x32``. Neither wrapping nor unwrapping moves data.

A worker thread does not inherit a caller's ``with jax.enable_x64():``, and would silently narrow
64-bit data, so `commit` states what it needs.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field
from typing import Final

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from numpy.typing import NDArray

from xckpt.core.dtypes import numpy_dtype
from xckpt.core.host_buffers import HostBuffers
from xckpt.jax.shardings import Device, LocalLayout

KEY_PREFIX: Final = "prng_key:"
"""What the annotation of keys begins with; the implementation's name follows."""


@dataclass(frozen=True, slots=True)
class KeySpec:
    """What an array of keys is made of."""

    impl: object
    """The implementation, as `jax.random.wrap_key_data` takes it."""
    shape: tuple[int, ...]
    """The shape of the key data."""

    @property
    def annotation(self) -> str:
        """The implementation, for the manifest."""
        return f"{KEY_PREFIX}{self.impl}"

    def wrap(self, data: jax.Array) -> jax.Array:
        """The keys whose data these are."""
        return jax.random.wrap_key_data(data, impl=self.impl)  # type: ignore[arg-type]


def is_key(dtype: object) -> bool:
    """Whether a JAX dtype is that of typed PRNG keys.

    Example:
        >>> is_key(jax.random.key(0).dtype), is_key(jax.random.PRNGKey(0).dtype)
        (True, False)
    """
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)  # type: ignore[arg-type]


def key_spec(shape: tuple[int, ...], dtype: object) -> KeySpec | None:
    """What an array of this shape and JAX dtype is made of if it holds keys; touches no array.

    Example:
        >>> spec = key_spec((3,), jax.random.key(0, impl="rbg").dtype)
        >>> spec.annotation, spec.shape
        ('prng_key:rbg', (3, 4))
    """
    if not is_key(dtype):
        return None
    impls: list[object] = []

    def unwrap(keys: jax.Array) -> jax.Array:
        impls.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    # Only a key tells its implementation, so ask an abstract one.
    data = jax.eval_shape(unwrap, jax.ShapeDtypeStruct(shape, dtype))
    return KeySpec(impls[0], tuple(data.shape))


@dataclass(slots=True)
class JaxTarget(HostBuffers):
    """A JAX array to be loaded; its boxes are the distinct ones of the local devices."""

    sharding: jax.sharding.Sharding
    layout: LocalLayout
    committed: bool = True
    """False for an array that is free to follow others to their device."""
    weak_type: bool = False
    key: KeySpec | None = None
    """How to make keys of the data, if they are those of PRNG keys."""
    _parts: dict[Device, jax.Array] = field(default_factory=dict, repr=False)

    @property
    def annotation(self) -> str:
        """What the target is beyond an array."""
        return self.key.annotation if self.key else ""

    def commit(self, index: int) -> None:
        """Put the buffer on the devices that hold its box; returns when it is there."""
        data = self.buffer(index)
        parts = [self._put(data, device) for device in self.layout.devices[index]]
        # Until then a transfer to an accelerator reads the buffer and keeps it alive.
        jax.block_until_ready(parts)
        with self._lock:
            self._parts.update(zip(self.layout.devices[index], parts, strict=True))
        self.release(index)

    def _put(self, data: NDArray[np.generic], device: Device) -> jax.Array:
        with _x64_for(data.dtype):
            if self.committed:
                memory = self.sharding.memory_kind
                return jax.device_put(data, SingleDeviceSharding(device, memory_kind=memory))
            with jax.default_device(device):
                return jax.device_put(data)

    def result(self) -> jax.Array:
        """The array, of the sharding asked for."""
        parts = [self._parts[device] for holders in self.layout.devices for device in holders]
        array = self._joined(parts) if self.committed else parts[0]
        if self.weak_type:
            array = _weaken(array)
        return array if self.key is None else self.key.wrap(array)

    def _joined(self, parts: list[jax.Array]) -> jax.Array:
        # Without a local part only the dtype can say what the array is made of.
        dtype = None if parts else numpy_dtype(self.dtype)
        return jax.make_array_from_single_device_arrays(
            self.shape, self.sharding, parts, dtype=dtype
        )


def _x64_for(dtype: np.dtype[np.generic]) -> contextlib.AbstractContextManager[object]:
    """64-bit types switched on, if the dtype needs them."""
    if jax.dtypes.canonicalize_dtype(dtype) == dtype:
        return contextlib.nullcontext()
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64  # type: ignore[attr-defined]  # before jax 0.8

    return enable_x64()


def _weaken(array: jax.Array) -> jax.Array:
    """The same values with a weak type, which only a compiled function can give an array."""
    sharding = array.sharding if array.committed else None
    return _weak_identity(array.shape, array.dtype, sharding)(array)


@functools.lru_cache(maxsize=256)
def _weak_identity(
    shape: tuple[int, ...],
    dtype: np.dtype[np.generic],
    sharding: jax.sharding.Sharding | None,
) -> jax.stages.Compiled:
    weak = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=True)
    return jax.jit(lambda x: x).lower(weak).compile()
