"""Describing JAX arrays: boxes and data against NumPy slicing, memory shared, refusals by name."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from tests.support.jax_meshes import DTYPES, mesh, same, shardings, slices, values
from xckpt.core.adapter import Adapters
from xckpt.core.geometry.cover import cover_fault, unique
from xckpt.core.leaf import SourceLeaf
from xckpt.core.metadata import Sharding
from xckpt.errors import UnsupportedLeafError
from xckpt.jax.adapter import ADAPTER, ArraySource


def source_of(leaf: jax.Array) -> ArraySource:
    return ADAPTER.describe(leaf, "model/w")


def test_a_source_is_a_leaf() -> None:
    assert isinstance(source_of(jnp.zeros(3)), SourceLeaf)


@given(case=shardings(), dtype=st.sampled_from(DTYPES))
def test_the_shards_make_up_the_array(
    case: tuple[NamedSharding, tuple[int, ...]], dtype: str
) -> None:
    sharding, shape = case
    expected = values(shape, dtype)
    source = source_of(jax.device_put(expected, sharding))
    assert (source.shape, source.dtype) == (shape, dtype)
    assert cover_fault(shape, source.boxes) is None
    assert len(unique(source.boxes)[0]) == len(source.boxes)
    assert source.sharded == (not sharding.is_fully_replicated)
    for index in range(len(source.boxes)):
        data = source.data(index)
        found = data if isinstance(data, np.ndarray) else ADAPTER.to_numpy(data)
        same(found, expected[slices(source.boxes, index)])


@given(case=shardings())
def test_the_stored_sharding_says_what_cuts_each_dimension(
    case: tuple[NamedSharding, tuple[int, ...]],
) -> None:
    sharding, shape = case
    stored = source_of(jax.device_put(np.zeros(shape, np.float32), sharding)).sharding
    assert stored is not None
    assert stored.spec is not None
    assert len(stored.spec) == len(shape)
    mesh = sharding.mesh
    again = NamedSharding(mesh, PartitionSpec(*stored.spec))
    assert again.is_equivalent_to(sharding, len(shape))
    assert dict(stored.axes) == dict(mesh.shape)


def test_each_shard_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or 2,500 shards on one process asked three million times for a device."""
    array = jax.device_put(np.arange(8.0), NamedSharding(mesh(2, 4), PartitionSpec(("a", "b"))))
    source, kind, asked = source_of(array), type(array.addressable_shards[0]), list[object]()
    device = kind.device

    def noted(shard: object) -> object:
        asked.append(shard)
        return device.fget(shard)

    monkeypatch.setattr(kind, "device", property(noted))
    shards = [np.asarray(source.data(index)).item() for index in range(8)]
    assert shards == list(range(8)) and len(asked) <= 8


def test_a_replica_on_several_devices_appears_once() -> None:
    array = jax.device_put(np.arange(8.0), NamedSharding(mesh(2, 4), PartitionSpec("a")))
    assert [box.offsets for box in source_of(array).boxes] == [(0,), (4,)]


def test_one_device_has_no_stored_sharding() -> None:
    source = source_of(jax.device_put(np.zeros(3), SingleDeviceSharding(jax.devices()[3])))
    assert source.sharding is None
    assert not source.sharded


def test_named_axes_are_stored() -> None:
    spec = PartitionSpec(None, ("a", "b"))
    array = jax.device_put(np.zeros((3, 8)), NamedSharding(mesh(2, 2), spec))
    assert source_of(array).sharding == Sharding(axes=(("a", 2), ("b", 2)), spec=((), ("a", "b")))


def test_the_result_of_a_compiled_function_is_described() -> None:
    auto = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    given_ = jax.device_put(np.arange(64.0).reshape(8, 8), NamedSharding(auto, PartitionSpec("x")))
    array = jax.jit(lambda x: (x @ x.T).reshape(4, 2, 8))(given_)
    source = source_of(array)
    assert cover_fault((4, 2, 8), source.boxes) is None
    for index in range(len(source.boxes)):
        same(source.data(index), np.asarray(array)[slices(source.boxes, index)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "bool", "complex64"])
def test_a_shard_shares_its_memory_with_numpy(dtype: str) -> None:
    array = jax.device_put(
        values((8, 64), dtype), NamedSharding(mesh(4, 2), PartitionSpec("b", "a"))
    )
    source = source_of(array)
    pointers = {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
    for index in range(len(source.boxes)):
        view = source.data(index)
        assert isinstance(view, np.ndarray)
        assert view.ctypes.data in pointers
        assert not view.flags.writeable


def test_a_shard_that_must_be_copied_is_not_cached_in_the_array() -> None:
    source = source_of(jnp.ones((64, 64), "int4"))
    first, second = source.data(0), source.data(0)
    assert isinstance(first, np.ndarray)
    assert isinstance(second, np.ndarray)
    assert not np.shares_memory(first, second)


def test_a_view_outlives_donation_and_deletion() -> None:
    sharding = NamedSharding(mesh(4), PartitionSpec("a"))
    array = jax.device_put(np.arange(4096.0, dtype=np.float32), sharding)
    view = source_of(array).data(1)
    result = jax.block_until_ready(jax.jit(lambda x: x * 2, donate_argnums=0)(array))
    array.delete()
    del array, result
    gc.collect()
    jax.block_until_ready(jnp.ones(4096) + 1)
    same(view, np.arange(1024, 2048, dtype=np.float32))


def test_an_array_donated_after_it_was_described_is_refused_by_name() -> None:
    array = jnp.arange(16.0) + 1
    source = source_of(array)
    jax.block_until_ready(jax.jit(lambda x: x * 2, donate_argnums=0)(array))
    assert array.is_deleted()
    with pytest.raises(UnsupportedLeafError, match=r"model/w: .*donated"):
        source.data(0)


def test_deleted_arrays_and_keys_are_refused_by_name() -> None:
    for array in (jnp.arange(3), jax.random.key(1)):
        array.delete()
        with pytest.raises(UnsupportedLeafError, match=r"model/w: .*deleted or donated"):
            ADAPTER.describe(array, "model/w")


def test_tracers_are_refused_by_name() -> None:
    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        ADAPTER.describe(x, "model/w")
        return x

    with pytest.raises(UnsupportedLeafError, match="model/w: a tracer"):
        step(jnp.ones(3))


def test_a_shape_without_data_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedLeafError, match=r"model/w: .*no data"):
        ADAPTER.describe(jax.ShapeDtypeStruct((3,), jnp.float32), "model/w")


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedLeafError, match="model/w: JAX dtype uint2 "):
        ADAPTER.describe(jnp.zeros(3, "uint2"), "model/w")


@pytest.mark.skipif(
    jax.__version_info__ < (0, 8), reason="JAX 0.7 makes meshes without explicit axes by default"
)
def test_partial_sums_are_refused_by_name() -> None:
    explicit = jax.make_mesh((2, 2), ("a", "b"))
    with jax.set_mesh(explicit):
        x = jax.device_put(np.ones((4, 4), np.float32), PartitionSpec(None, "a"))
        y = jax.device_put(np.ones((4, 4), np.float32), PartitionSpec("a", None))
        partial = jax.jit(
            lambda x, y: jnp.einsum(
                "ij,jk->ik", x, y, out_sharding=PartitionSpec(unreduced=frozenset("a"))
            )
        )(x, y)
    with pytest.raises(UnsupportedLeafError, match=r"model/w: .*partial sums over mesh axis a"):
        ADAPTER.describe(partial, "model/w")


@pytest.mark.parametrize("leaf", [np.zeros(3), 1.0, None, "text", [jnp.zeros(3)]])
def test_other_leaves_are_not_ours(leaf: object) -> None:
    assert not ADAPTER.owns(leaf)
    assert Adapters((ADAPTER,)).describe(leaf, "model/w") is None
    assert Adapters((ADAPTER,)).copyable(leaf, "model/w") is None


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_are_their_data_and_say_whose(impl: str) -> None:
    keys = jax.random.split(jax.random.key(3, impl=impl), 8)
    sharded = jax.device_put(keys, NamedSharding(mesh(2, 4), PartitionSpec("b")))
    source = source_of(sharded)
    expected = np.asarray(jax.random.key_data(keys))
    assert source.annotation == f"prng_key:{impl}"
    assert (source.dtype, source.shape) == ("uint32", expected.shape)
    assert source.sharding == Sharding(axes=(("a", 2), ("b", 4)), spec=(("b",), ()))
    assert len(source.boxes) == 4
    for index in range(4):
        same(source.data(index), expected[slices(source.boxes, index)])
    assert source_of(jnp.zeros(3)).annotation == ""


def test_a_struct_has_nothing_to_read() -> None:
    with pytest.raises(TypeError, match="no adapter can read a jax"):
        ADAPTER.to_numpy(jax.ShapeDtypeStruct((3,), jnp.float32))


def test_any_array_can_be_read_on_the_host() -> None:
    array = jax.device_put(
        np.arange(8.0, dtype=np.float32), NamedSharding(mesh(4), PartitionSpec("a"))
    )
    same(ADAPTER.to_numpy(array), np.arange(8, dtype=np.float32))
    same(ADAPTER.to_numpy(jax.random.key(5)), jax.random.key_data(jax.random.key(5)))


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
def test_arrays_in_host_memory_are_read(kind: str) -> None:
    sharding = NamedSharding(mesh(2), PartitionSpec("a"), memory_kind=kind)
    source = source_of(jax.device_put(np.arange(4, dtype=np.int32), sharding))
    same(source.data(1), np.array([2, 3], np.int32))
