"""JAX's adapter: `jax.Array` to save, `jax.Array` or `jax.ShapeDtypeStruct` to load.

1. `describe` lists the boxes of the local shards (a replica on several local devices once) and
   reads a shard when it is asked for: on the CPU backend a NumPy view of the shard's own memory,
   elsewhere the single-device array, whose bytes `to_numpy` fetches without leaving a host copy
   cached on the caller's array.
2. `target_for` gives a `JaxTarget` of the same shape, dtype and sharding. JAX arrays are
   immutable, so there is no loading in place.
3. Typed PRNG keys are their key data, annotated with the implementation (`xckpt.jax.target`).
4. A container registered with JAX (Flax, Optax, Equinox, custom nodes) is opened one level at a
   time through JAX's default registry. Each key entry becomes a str or an int: a dict key, an
   attribute name or an index; if two children would share a key, all are numbered instead. Dicts,
   lists, tuples, namedtuples and None are left to the core.

A NumPy view pins the memory that it shows: once a save holds it, donating or deleting the array
neither changes nor frees what is being written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jax.tree_util import tree_unflatten
from numpy.typing import NDArray

from xckpt.core.adapter import Adapter, Children
from xckpt.core.dtypes import dtype_name, numpy_dtype
from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.spread import Spread
from xckpt.core.leaf import Copyable, HostSource, TargetPlace
from xckpt.core.metadata import Metadata, Sharding, TensorStorageMetadata
from xckpt.core.text.arguments import named
from xckpt.errors import UnsupportedLeafError
from xckpt.jax.containers import key_of, opened_once
from xckpt.jax.shardings import (
    Device,
    LocalLayout,
    concrete,
    default_sharding,
    everywhere_whole,
    is_apart,
    local_layout,
    spread,
    stored_sharding,
)
from xckpt.jax.target import JaxTarget, is_key, key_spec


@dataclass(frozen=True, slots=True)
class ArraySource:
    """A JAX array to be saved; for PRNG keys, the array of their key data."""

    name: str
    array: jax.Array
    dtype: str
    layout: LocalLayout
    sharded: bool
    sharding: Sharding | None
    annotation: str = ""
    is_apart: bool = False
    """Whether some process has none of its devices, and may hold another array of its name."""
    _numbers: dict[Device, int] = field(
        default_factory=dict[Device, int], init=False, repr=False, compare=False
    )
    """Device -> its shard's number, from the first `data` on: there may be thousands."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.array.shape

    @property
    def boxes(self) -> Boxes:
        """The distinct boxes of this process's shards."""
        return self.layout.boxes

    def spread(self) -> Spread | None:
        """Where the boxes of all processes are; None if the sharding has no mesh."""
        return spread(self.array.sharding, self.shape)

    def data(self, index: int) -> NDArray[np.generic] | jax.Array:
        """Shard ``index``: a NumPy view on the CPU backend, else a single-device array.

        Raises:
            UnsupportedLeafError: the array was donated or deleted since `describe`.
        """
        _refuse_deleted(self.array, self.name)
        device = self.layout.devices[index][0]
        shards = self.array.addressable_shards
        if not self._numbers:
            self._numbers.update({shard.device: number for number, shard in enumerate(shards)})
        shard = shards[self._numbers[device]].data
        return _fetch(shard) if device.platform == "cpu" else shard


_PREPARED: Final = (jax.ShapeDtypeStruct, jax.sharding.Sharding, PartitionSpec)
"""Objects that are examined before targets are made from them."""
Leaf = jax.Array | jax.ShapeDtypeStruct


class JaxAdapter(Adapter[Leaf]):
    """`jax.Array` to save and to load, `jax.ShapeDtypeStruct` to load, registered containers.

    Example:
        >>> source = ADAPTER.describe(jax.numpy.zeros((2, 3)), "w")
        >>> source.dtype, source.boxes, source.sharded
        ('float32', Boxes([0, 2) x [0, 3)), False)
        >>> like = jax.ShapeDtypeStruct((4,), jax.numpy.int32)
        >>> target = ADAPTER.target_for(like, "step", in_place=False)
        >>> target.buffer(0)[:] = [1, 2, 3, 4]
        >>> target.commit(0)
        >>> target.result()
        Array([1, 2, 3, 4], dtype=int32)
    """

    leaves: tuple[type[Leaf], ...] = (jax.Array, jax.ShapeDtypeStruct)
    by_class = True

    def owns(self, leaf: object) -> bool:
        """Whether an object is an array, describes one, or says where one goes."""
        return isinstance(leaf, (*self.leaves, *_PREPARED))

    def describe(self, leaf: Leaf, name: str) -> ArraySource:
        """An array as a source.

        Raises:
            UnsupportedLeafError: it was deleted or donated, is a tracer, has no data, or has a
                dtype or sharding that cannot be stored; names the leaf.
        """
        if not isinstance(leaf, jax.Array):
            raise UnsupportedLeafError(
                f"{name}: {named(type(leaf).__name__)} has no data; save the array itself"
            )
        _refuse_tracer(leaf, name)
        _refuse_deleted(leaf, name)
        key = key_spec(leaf.shape, leaf.dtype)
        array = leaf if key is None else jax.random.key_data(leaf)
        return ArraySource(
            name,
            array,
            _format_dtype(array.dtype, name),
            local_layout(array.sharding, array.shape, name),
            sharded=not everywhere_whole(array.sharding),
            sharding=stored_sharding(array.sharding, array.ndim),
            annotation=key.annotation if key else "",
            is_apart=is_apart(array.sharding),
        )

    def copyable(self, leaf: Leaf, name: str) -> Copyable:
        """Nothing to copy: the shards' own memory on the CPU backend, else what the host fetches.

        An array cannot change, but it can be donated or deleted. NumPy views pin its memory here,
        so that a computation to which it is donated uses other memory.

        Raises:
            UnsupportedLeafError: as for `describe`.
        """
        source = self.describe(leaf, name)
        shards = {shard.device: shard.data for shard in source.array.addressable_shards}
        own = [_asked_for(shards[devices[0]]) for devices in source.layout.devices]

        def rebuild(copies: Sequence[NDArray[np.generic]]) -> HostSource:
            shards = [np.asarray(part) for part in own]
            return HostSource.in_place_of(source, shards, source.spread)

        return Copyable((), rebuild)

    def target_for(self, like: Leaf, name: str, *, in_place: bool) -> JaxTarget:
        """A target like an array or a `jax.ShapeDtypeStruct`; only metadata are read.

        Without a sharding the array goes to the default device. There it stays uncommitted, free
        to follow others to their devices, unless ``like`` is a committed array. A deleted array
        will do.

        Raises:
            UnsupportedLeafError: loading in place, a tracer, a 64-bit dtype while 64-bit types are
                off, or a dtype or sharding that cannot be loaded; names the leaf.
        """
        _refuse_tracer(like, name)
        if in_place:
            raise UnsupportedLeafError(
                f"{name}: JAX arrays are immutable and cannot be loaded into; use load, which "
                f"returns new arrays"
            )
        key = key_spec(tuple(like.shape), like.dtype)
        shape = key.shape if key else tuple(like.shape)
        dtype = "uint32" if key else _format_dtype(like.dtype, name)
        _refuse_narrowing(dtype, name)
        sharding = concrete(like.sharding, name)
        layout = local_layout(sharding, shape, name)
        return JaxTarget(
            shape,
            dtype,
            layout.boxes,
            sharding,
            layout,
            committed=_committed(like, sharding),
            weak_type=bool(getattr(like, "weak_type", False)),
            key=key,
        )

    def like(
        self, stored: TensorStorageMetadata, name: str, place: TargetPlace
    ) -> jax.ShapeDtypeStruct:
        """A target for a stored tensor: a `jax.ShapeDtypeStruct` (`xckpt.jax.likes`)."""
        from xckpt.jax.likes import like

        return like(stored, name, place)

    def prepared(self, likes: Mapping[str, object], metadata: Metadata) -> Mapping[str, object]:
        """The targets of a load, with a struct for each sharding; see `xckpt.jax.likes`.

        Raises:
            UnsupportedLeafError: a PartitionSpec, and no mesh is set; names the leaf.
        """
        if not any(isinstance(each, _PREPARED) for each in likes.values()):
            return likes
        from xckpt.jax.likes import prepared

        return prepared(likes, metadata)

    def to_numpy(self, data: Leaf) -> NDArray[np.generic]:
        """A single-device array on the host; shares memory on the CPU backend.

        Raises:
            TypeError: a `jax.ShapeDtypeStruct`, which has no data.
        """
        return _fetch(data) if isinstance(data, jax.Array) else super().to_numpy(data)

    def children(self, node: object) -> Children | None:
        """What a container registered with JAX holds; None for leaves and builtin containers.

        Example:
            >>> from collections import defaultdict
            >>> ADAPTER.children(defaultdict(list, a=1))
            ('pytree:collections.defaultdict', [('a', 1)])
            >>> ADAPTER.children({"a": 1}) is None, ADAPTER.children(1.5) is None
            (True, True)
        """
        opened = opened_once(node)
        if opened is None:
            return None
        entries, _ = opened
        keys = [key_of(entry) for entry, _ in entries]
        if len({(type(key), key) for key in keys}) < len(keys):
            keys = list(range(len(entries)))
        kind = f"pytree:{type(node).__module__}.{type(node).__qualname__}"
        return kind, [(key, child) for key, (_, child) in zip(keys, entries, strict=True)]

    def rebuild(self, node: object, children: list[object]) -> object | None:
        """A container registered with JAX, with other children, in the order of `children`.

        Example:
            >>> from collections import defaultdict
            >>> ADAPTER.rebuild(defaultdict(list, a=1), [2])
            defaultdict(<class 'list'>, {'a': 2})
        """
        opened = opened_once(node)
        return None if opened is None else tree_unflatten(opened[1], children)


ADAPTER: Final = JaxAdapter()


def _fetch(data: jax.Array) -> NDArray[np.generic]:
    array = jax.random.key_data(data) if is_key(data.dtype) else data
    return np.asarray(_asked_for(array) if len(array.sharding.device_set) == 1 else array)


def _asked_for(array: jax.Array) -> memoryview | jax.Array:
    """What NumPy takes a single-device array from; on its way already if that is a copy.

    JAX keeps what NumPy was given in the object that was asked for it: a copy takes memory, and a
    view pins the array's, for as long as that object lives. So another object is asked.
    """
    is_cpu = next(iter(array.sharding.device_set)).platform == "cpu"
    if is_cpu:
        with contextlib.suppress(BufferError):  # has no bfloat16, and others of `ml_dtypes`
            return memoryview(array)
    another = jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array])
    if not is_cpu:
        another.copy_to_host_async()
    return another


def _refuse_tracer(leaf: object, name: str) -> None:
    if isinstance(leaf, Tracer):
        raise UnsupportedLeafError(
            f"{name}: a tracer, not an array: save and load cannot run inside jit, grad, vmap or "
            f"scan; call them outside"
        )


def _refuse_deleted(array: jax.Array, name: str) -> None:
    if array.is_deleted():
        raise UnsupportedLeafError(
            f"{name}: this jax.Array was deleted or donated (donate_argnums) and has no data any "
            f"more; save the array that the computation returned"
        )


def _refuse_narrowing(dtype: str, name: str) -> None:
    allowed = jax.dtypes.canonicalize_dtype(numpy_dtype(dtype))
    if allowed != numpy_dtype(dtype):
        raise UnsupportedLeafError(
            f"{name}: the target is {dtype}, but 64-bit types are off, so JAX would narrow it to "
            f"{allowed}; switch them on (jax.config.update('jax_enable_x64', True)), or pass "
            f"cast=True, with a target of {allowed} if you give one"
        )


def _format_dtype(dtype: object, name: str) -> str:
    known = dtype_name(np.dtype(dtype))  # type: ignore[arg-type]
    if known is None:
        raise UnsupportedLeafError(
            f"{name}: JAX dtype {dtype} cannot be stored; convert it to another type first"
        )
    return known


def _committed(like: jax.Array | jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> bool:
    """Whether the user has chosen the devices.

    A struct on the default device alone says nothing: ``x.sharding`` gives such a struct also if
    ``x`` is bound to no device, as step counters are.
    """
    if isinstance(like, jax.ShapeDtypeStruct):
        return sharding != default_sharding()
    return bool(getattr(like, "committed", getattr(like, "_committed", True)))
