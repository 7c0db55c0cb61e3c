"""Loading into JAX shapes: content, sharding, memory adopted without a copy, refusals by name."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from numpy.typing import NDArray

from tests.support.examples import examples
from tests.support.jax_meshes import DTYPES, mesh, same, shardings, slices, values, with_64_bits
from xckpt.core.adapter import Adapters
from xckpt.core.leaf import TargetLeaf
from xckpt.errors import UnsupportedLeafError
from xckpt.jax.adapter import ADAPTER
from xckpt.jax.target import JaxTarget


def target_of(like: Any) -> JaxTarget:
    return ADAPTER.target_for(like, "model/w", in_place=False)


def fill(target: JaxTarget, content: NDArray[np.generic]) -> jax.Array:
    for index in range(len(target.boxes)):
        target.buffer(index)[...] = content[slices(target.boxes, index)]
        target.commit(index)
    return target.result()


def loaded(like: object, content: NDArray[np.generic]) -> jax.Array:
    return fill(target_of(like), content)


@given(case=shardings(), dtype=st.sampled_from(DTYPES), concrete=st.booleans())
@examples(50, 1000)
def test_a_loaded_array_has_content_and_sharding_of_its_target(
    case: tuple[NamedSharding, tuple[int, ...]], dtype: str, concrete: bool
) -> None:
    sharding, shape = case
    expected = values(shape, dtype, seed=1)
    like: object = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
    if concrete:
        like = jax.device_put(values(shape, dtype, seed=2), sharding)
    target = target_of(like)
    assert isinstance(target, TargetLeaf)
    assert (target.shape, target.dtype) == (shape, dtype)
    array = fill(target, expected)
    same(array, expected)
    assert array.sharding == sharding
    assert array.committed


def test_boxes_are_committed_from_any_thread_in_any_order() -> None:
    expected = values((16, 8), "float32")
    sharding = NamedSharding(mesh(4, 2), PartitionSpec("a", "b"))
    target = target_of(jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=sharding))

    def one(index: int) -> None:
        target.buffer(index)[...] = expected[slices(target.boxes, index)]
        target.commit(index)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, reversed(range(8))))
    same(target.result(), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "bool", "complex64"])
@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (512, 64)])
def test_cpu_devices_adopt_the_buffer(shape: tuple[int, ...], dtype: str) -> None:
    sharding = NamedSharding(mesh(2, 2), PartitionSpec())
    target = target_of(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding))
    buffer = target.buffer(0)
    assert target.buffer(0) is buffer
    buffer[...] = values(shape, dtype)
    pointer = buffer.ctypes.data
    assert pointer % 64 == 0
    target.commit(0)
    shards = target.result().addressable_shards
    assert len(shards) == 4
    assert {shard.data.unsafe_buffer_pointer() for shard in shards} == {pointer}


def test_a_donated_replica_does_not_overwrite_the_others() -> None:
    sharding = NamedSharding(mesh(4), PartitionSpec())
    array = loaded(jax.ShapeDtypeStruct((4096,), jnp.float32, sharding=sharding), np.ones(4096))
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    first, *others = (shard.data for shard in array.addressable_shards)
    same(jax.block_until_ready(double(first)), np.full(4096, 2, np.float32))
    for other in others:
        same(other, np.ones(4096, np.float32))


def test_a_loaded_array_can_be_donated_whole() -> None:
    sharding = NamedSharding(mesh(2, 2), PartitionSpec("a"))
    like = jax.ShapeDtypeStruct((4096,), jnp.float32, sharding=sharding)
    array = loaded(like, np.arange(4096))
    for _ in range(3):
        array = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    same(array, np.arange(3, 4099, dtype=np.float32))


def test_a_copied_buffer_is_let_go_at_its_commit() -> None:
    sharding = NamedSharding(mesh(4), PartitionSpec("a"))
    target = target_of(jax.ShapeDtypeStruct((64,), "int4", sharding=sharding))
    gone = []
    for index in range(4):
        target.buffer(index)[...] = index
        gone.append(weakref.ref(target.buffer(index)))
        target.commit(index)
        gc.collect()
        assert gone[index]() is None
    same(target.result(), np.repeat(np.arange(4), 16).astype(jnp.dtype("int4")))


def test_the_default_device_takes_what_asks_for_none() -> None:
    array = loaded(jax.ShapeDtypeStruct((3,), jnp.float32), np.arange(3))
    assert array.devices() == {jax.devices()[0]}
    assert not array.committed
    with jax.default_device(jax.devices()[5]):
        target = target_of(jax.ShapeDtypeStruct((3,), jnp.float32))
    target.buffer(0)[...] = 7
    with ThreadPoolExecutor(1) as pool:
        pool.submit(target.commit, 0).result()
    array = target.result()
    assert array.devices() == {jax.devices()[5]}
    assert not array.committed


def test_a_struct_made_from_a_free_array_stays_free() -> None:
    free = jnp.zeros(3)
    like = jax.ShapeDtypeStruct(free.shape, free.dtype, sharding=free.sharding)
    assert not loaded(like, np.ones(3)).committed
    elsewhere = SingleDeviceSharding(jax.devices()[1])
    array = loaded(jax.ShapeDtypeStruct((3,), jnp.float32, sharding=elsewhere), np.ones(3))
    assert array.committed
    assert array.sharding == elsewhere


def test_an_array_is_as_free_as_its_target() -> None:
    free = jnp.zeros(3)
    bound = jax.device_put(np.zeros(3, np.float32), jax.devices()[2])
    assert not loaded(free, np.ones(3)).committed
    array = loaded(bound, np.ones(3))
    assert array.committed
    assert array.sharding == SingleDeviceSharding(jax.devices()[2])
    # Free arrays may still be combined with those on another device.
    same(loaded(free, np.ones(3)) + array, np.full(3, 2, np.float32))


@pytest.mark.parametrize("content", [1.5, np.full((2, 3), 2.5)])
def test_a_weak_type_stays_weak(content: object) -> None:
    like = jnp.full(np.shape(np.asarray(content)), 0.0)
    assert like.weak_type
    array = loaded(like, np.asarray(content))
    assert array.weak_type
    assert not array.committed
    assert (array * jnp.bfloat16(1)).dtype == jnp.bfloat16
    same(array, np.asarray(content, np.float32))
    sharding = NamedSharding(mesh(2), PartitionSpec())
    spread = jax.ShapeDtypeStruct(like.shape, jnp.float32, sharding=sharding, weak_type=True)
    array = loaded(spread, np.asarray(content))
    assert array.weak_type
    assert array.sharding == sharding
    assert not loaded(jnp.zeros(()), np.asarray(1.5)).weak_type


def test_a_deleted_array_is_a_target_still() -> None:
    like = jnp.arange(3)
    like.delete()
    same(loaded(like, np.array([4, 5, 6])), np.array([4, 5, 6], np.int32))


@pytest.mark.parametrize("dtype", ["int64", "float64", "uint64", "complex128"])
def test_64_bits_are_not_narrowed_silently(dtype: str) -> None:
    like = jax.ShapeDtypeStruct((3,), np.dtype(dtype))
    with pytest.raises(UnsupportedLeafError, match=rf"model/w: the target is {dtype}, but 64-bit"):
        ADAPTER.target_for(like, "model/w", in_place=False)


def test_64_bits_survive_a_thread_that_has_them_off() -> None:
    content = np.array([2**40, -(2**62), 3])
    with with_64_bits():
        like = jax.ShapeDtypeStruct(
            (3,), np.int64, sharding=NamedSharding(mesh(2), PartitionSpec())
        )
        for target in (target_of(like), target_of(jnp.zeros(3, jnp.int64))):
            target.buffer(0)[...] = content
            with ThreadPoolExecutor(1) as pool:
                assert not pool.submit(lambda: jax.config.read("jax_enable_x64")).result()
                pool.submit(target.commit, 0).result()
            same(target.result(), content)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("concrete", [True, False])
def test_keys_come_back_as_keys(impl: str, concrete: bool) -> None:
    keys = jax.random.split(jax.random.key(3, impl=impl), 8)
    sharding = NamedSharding(mesh(2, 4), PartitionSpec("b"))
    like: object = jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=sharding)
    if concrete:
        like = jax.device_put(jax.random.split(jax.random.key(9, impl=impl), 8), sharding)
    target = target_of(like)
    assert target.annotation == f"prng_key:{impl}"
    found = fill(target, np.asarray(jax.random.key_data(keys)))
    assert found.dtype == keys.dtype
    assert found.shape == keys.shape
    assert found.sharding.is_equivalent_to(sharding, 1)
    same(jax.random.uniform(found[5]), jax.random.uniform(keys[5]))


def test_a_single_key_comes_back_uncommitted() -> None:
    key = jax.random.key(7)
    found = loaded(key, np.asarray(jax.random.key_data(key)))
    assert found == key
    assert not jax.random.key_data(found).committed


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
def test_host_memory_is_kept(kind: str) -> None:
    sharding = NamedSharding(mesh(2), PartitionSpec("a"), memory_kind=kind)
    array = loaded(jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding), np.arange(4))
    assert array.sharding == sharding
    assert {shard.data.sharding.memory_kind for shard in array.addressable_shards} == {kind}
    same(array, np.arange(4, dtype=np.float32))


@pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="JAX 0.7 does not say which mesh is set")
def test_an_abstract_mesh_takes_the_devices_of_the_one_that_is_set() -> None:
    explicit = jax.make_mesh((2, 4), ("a", "b"))
    with jax.set_mesh(explicit):
        like = jax.eval_shape(lambda: jax.reshard(jnp.zeros((4, 8)), PartitionSpec("a", "b")))
        array = loaded(like, np.arange(32.0).reshape(4, 8))
    assert array.sharding == NamedSharding(explicit, PartitionSpec("a", "b"))
    with pytest.raises(UnsupportedLeafError, match=r"model/w: .*abstract mesh .*jax.set_mesh"):
        ADAPTER.target_for(like, "model/w", in_place=False)


def test_a_sharding_that_does_not_divide_the_shape_is_refused_by_name() -> None:
    sharding = NamedSharding(mesh(2), PartitionSpec("a"))
    like = jax.ShapeDtypeStruct((5,), jnp.float32, sharding=sharding)
    with pytest.raises(UnsupportedLeafError, match=r"model/w: .*does not fit the shape \(5,\)"):
        ADAPTER.target_for(like, "model/w", in_place=False)


@pytest.mark.parametrize("like", [jnp.zeros(3), jax.ShapeDtypeStruct((3,), jnp.float32)])
def test_loading_in_place_is_refused_by_name(like: Any) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"model/w: JAX arrays are immutable.*use load"):
        ADAPTER.target_for(like, "model/w", in_place=True)


def test_tracers_are_refused_by_name() -> None:
    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        ADAPTER.target_for(x, "model/w", in_place=False)
        return x

    with pytest.raises(UnsupportedLeafError, match="model/w: a tracer"):
        step(jnp.ones(3))


@pytest.mark.parametrize("like", [np.zeros(3), 1.0, None, "text"])
def test_other_targets_are_not_ours(like: object) -> None:
    assert not ADAPTER.owns(like)
    assert Adapters((ADAPTER,)).target_for(like, "model/w", in_place=False) is None


def test_arrays_and_structs_cannot_be_written() -> None:
    for like in (jnp.zeros(3), jax.ShapeDtypeStruct((3,), jnp.float32)):
        assert ADAPTER.writable_numpy(like) is None
        with pytest.raises(TypeError, match="no adapter can write a jax"):
            ADAPTER.copy_into(like, np.zeros(3))
