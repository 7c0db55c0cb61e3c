"""Typed PRNG keys (`jax.random.key`) as the uint32 arrays that they wrap.

A key array of shape S is stored as its key data: uint32 of shape S + K, where K belongs to the
implementation ((2,) for threefry2x32). The implementation's name travels as the leaf's annotation,
``prng_key:threefry2x32``. Neither wrapping nor unwrapping moves data.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax


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
        return f"prng_key:{self.impl}"

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


def key_spec(shape: tuple[int, ...], dtype: object) -> KeySpec:
    """What keys of this shape and dtype are made of, without touching any.

    Example:
        >>> spec = key_spec((3,), jax.random.key(0, impl="rbg").dtype)
        >>> spec.annotation, spec.shape
        ('prng_key:rbg', (3, 4))
    """
    found: list[object] = []

    def unwrap(keys: jax.Array) -> jax.Array:
        found.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    # Only a key tells its implementation, so ask an abstract one.
    data = jax.eval_shape(unwrap, jax.ShapeDtypeStruct(shape, dtype))
    return KeySpec(found[0], tuple(data.shape))
