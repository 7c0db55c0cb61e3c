"""Whole checkpoints of JAX states: mesh to mesh, pytrees, keys, processes, NumPy and zarr."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import flax.core
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import zarr
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

import xckpt
from tests.support.examples import examples
from tests.support.jax_jobs import run
from tests.support.jax_meshes import DTYPES, meshes, same, specs, values, ways, with_64_bits

Case = tuple[NamedSharding, NamedSharding, tuple[int, ...], str]


@st.composite
def moves(draw: st.DrawFn) -> Case:
    """An array under one sharding, wanted under another."""
    rank = draw(st.integers(0, 3))
    pair = []
    for _ in range(2):
        mesh = draw(meshes())
        pair.append(NamedSharding(mesh, draw(specs(mesh, rank))))
    parts = zip(ways(pair[0], rank), ways(pair[1], rank), strict=True)
    shape = tuple(math.lcm(a, b) * draw(st.integers(0, 2)) for a, b in parts)
    return pair[0], pair[1], shape, draw(st.sampled_from(DTYPES))


def mesh(*sizes: int) -> Mesh:
    names = ("data", "model", "expert")[: len(sizes)]
    return Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), names)


def structs(tree: object) -> object:
    """Abstract targets of the same shardings."""
    return jax.tree_util.tree_map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            if isinstance(leaf, jax.Array)
            else leaf
        ),
        tree,
    )


def same_tree(found: object, expected: object) -> None:
    assert jax.tree_util.tree_structure(found) == jax.tree_util.tree_structure(expected)
    pairs = zip(jax.tree_util.tree_leaves(found), jax.tree_util.tree_leaves(expected), strict=True)
    for a, b in pairs:
        assert type(a) is type(b)
        if not isinstance(b, jax.Array):
            assert a == b
            continue
        assert a.dtype == b.dtype
        assert a.sharding.is_equivalent_to(b.sharding, b.ndim)
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        same(a, b)


@examples(15, 300)
@given(cases=st.lists(moves(), min_size=1, max_size=4), chunk=st.sampled_from([16, 1 << 20]))
def test_any_mesh_to_any_other(
    cases: list[Case], chunk: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("case") / "ckpt"
    content = [values(shape, dtype, n) for n, (_, _, shape, dtype) in enumerate(cases)]
    state = [jax.device_put(data, case[0]) for data, case in zip(content, cases, strict=True)]
    xckpt.save(path, state, options=xckpt.SaveOptions(chunk_bytes=chunk))
    like = [
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
        for _, sharding, shape, dtype in cases
    ]
    found = xckpt.load(path, like)
    assert isinstance(found, list)
    for array, target, data in zip(found, like, content, strict=True):
        same(array, data)
        assert array.sharding == target.sharding
    whole = xckpt.load(path)
    assert isinstance(whole, list)
    for array, data in zip(whole, content, strict=True):
        assert type(array) is np.ndarray
        same(array, data)


def test_zarr_reads_what_jax_wrote(tmp_path: Path) -> None:
    content = np.arange(240, dtype=np.float32).reshape(24, 10)
    array = jax.device_put(content, NamedSharding(mesh(4, 2), PartitionSpec("data", "model")))
    xckpt.save(tmp_path / "c", {"w": array})
    same(zarr.open_group(tmp_path / "c", mode="r")["w"][:], content)  # type: ignore[index]


def test_replicas_on_cpu_devices_are_loaded_once(tmp_path: Path) -> None:
    content = np.arange(1 << 16, dtype=np.float32)
    xckpt.save(tmp_path / "c", {"w": content})
    sharding = NamedSharding(mesh(2, 4), PartitionSpec("data"))
    like: Any = {"w": jax.ShapeDtypeStruct(content.shape, jnp.float32, sharding=sharding)}
    found = xckpt.load(tmp_path / "c", like)
    assert isinstance(found, dict)
    same(found["w"], content)
    pointers = {shard.data.unsafe_buffer_pointer() for shard in found["w"].addressable_shards}
    assert len(pointers) == 2


def test_the_sharding_is_kept_with_the_leaf(tmp_path: Path) -> None:
    sharding = NamedSharding(mesh(4, 2), PartitionSpec(None, ("data", "model")))
    xckpt.save(tmp_path / "c", {"w": jax.device_put(np.zeros((3, 8)), sharding)})
    stored = xckpt.open(tmp_path / "c").metadata.state_dict_metadata["w"]
    assert str(stored.sharding) == "PartitionSpec(-, data+model) on data=4 x model=2"  # type: ignore[union-attr]


@flax.struct.dataclass
class Extra:
    ema: dict[str, jax.Array]
    rng: jax.Array
    note: str = flax.struct.field(pytree_node=False, default="")


def trained(spread: Mesh) -> TrainState:
    """A few optimizer steps of a small sharded model."""
    params = {
        "dense": {"kernel": jnp.arange(32.0).reshape(8, 4) / 32, "bias": jnp.zeros(4)},
        "scale": jnp.ones((), jnp.bfloat16),
    }
    shardings = {
        "dense": {
            "kernel": NamedSharding(spread, PartitionSpec("data", "model")),
            "bias": NamedSharding(spread, PartitionSpec("model")),
        },
        "scale": NamedSharding(spread, PartitionSpec()),
    }
    params = jax.device_put(params, shardings)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    state = TrainState.create(apply_fn=lambda p, x: x, params=params, tx=optimizer)
    return stepped(stepped(state))


def loss(params: dict[str, dict[str, jax.Array]]) -> jax.Array:
    dense = params["dense"]
    return jnp.sum((jnp.ones((3, 8)) @ dense["kernel"] + dense["bias"]) ** 2)


gradients = jax.jit(jax.grad(loss))


def stepped(state: TrainState) -> TrainState:
    return state.apply_gradients(grads=gradients(state.params))


@pytest.fixture(scope="module")
def state() -> TrainState:
    return trained(mesh(2, 4))


def test_a_train_state_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, state: TrainState
) -> None:
    xckpt.save(tmp_path / "c", state)
    expected = stepped(state)
    for like in (structs(state), jax.tree_util.tree_map(lambda x: x * 0, state)):
        found = xckpt.load(tmp_path / "c", like)
        assert isinstance(found, TrainState)
        same_tree(found, state)
        same_tree(stepped(found), expected)


def test_a_train_state_moves_to_another_mesh(tmp_path: Path, state: TrainState) -> None:
    def moved(leaf: object) -> object:
        if not isinstance(leaf, jax.Array) or not isinstance(leaf.sharding, NamedSharding):
            return leaf
        sharding = NamedSharding(mesh(4, 1), leaf.sharding.spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    xckpt.save(tmp_path / "c", state)
    like = jax.tree_util.tree_map(moved, state)
    found = xckpt.load(tmp_path / "c", like)
    expected = jax.tree_util.tree_map(
        lambda leaf, target: (
            jax.device_put(leaf, target.sharding)
            if isinstance(target, jax.ShapeDtypeStruct)
            else leaf
        ),
        state,
        like,
    )
    same_tree(found, expected)
    same(found.params["dense"]["kernel"], state.params["dense"]["kernel"])  # type: ignore[attr-defined]


def test_leaf_names_are_key_paths(tmp_path: Path, state: TrainState) -> None:
    tree = {"train": state, "rng": jax.random.key(1), 0: [jnp.ones(2)]}
    xckpt.save(tmp_path / "c", tree)
    names = set(xckpt.open(tmp_path / "c"))
    assert {"train/params/dense/kernel", "train/opt_state/1/0/mu/scale", "rng", "0/0"} <= names


def test_custom_nodes_come_back_as_their_class(tmp_path: Path) -> None:
    spread = mesh(2, 2)
    keys = jax.random.split(jax.random.key(5, impl="rbg"), 4)
    state = {
        "extra": Extra(
            {"w": jax.device_put(np.arange(8.0), NamedSharding(spread, PartitionSpec("model")))},
            jax.device_put(keys, NamedSharding(spread, PartitionSpec("data"))),
            "kept",
        ),
        "frozen": flax.core.freeze({"a": {"b": jnp.arange(3)}}),
        "none": None,
        "empty": (),
    }
    xckpt.save(tmp_path / "c", state)
    found = xckpt.load(tmp_path / "c", structs(state))
    assert isinstance(found, dict)
    same_tree(found, state)
    plain = xckpt.load(tmp_path / "c")
    assert isinstance(plain, dict)
    same(plain["extra"]["rng"], jax.random.key_data(keys))
    same(plain["frozen"]["a"]["b"], np.arange(3, dtype=np.int32))
    assert (plain["none"], plain["empty"]) == (None, ())


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)])
        self.drop = nnx.Dropout(0.5, rngs=rngs)


def test_nnx_models_and_states_come_back(tmp_path: Path) -> None:
    saved, other = Model(nnx.Rngs(0)), Model(nnx.Rngs(1))
    for number, (state, like) in enumerate([(saved, other), (nnx.state(saved), nnx.state(other))]):
        xckpt.save(tmp_path / str(number), state)
        same_tree(xckpt.load(tmp_path / str(number), like), state)


def test_weak_and_uncommitted_scalars_stay_so(tmp_path: Path) -> None:
    state = {"step": jnp.asarray(3) + 1, "rate": jnp.asarray(0.1), "key": jax.random.key(0)}
    xckpt.save(tmp_path / "c", state)
    found = xckpt.load(tmp_path / "c", state)
    assert isinstance(found, dict)
    same_tree(found, state)
    for name in ("step", "rate"):
        assert found[name].weak_type
        assert not found[name].committed


@pytest.mark.parametrize("impl", ["threefry2x32", "unsafe_rbg"])
def test_keys_of_another_implementation_are_refused(tmp_path: Path, impl: str) -> None:
    xckpt.save(tmp_path / "c", {"rng": jax.random.key(0, impl="rbg")})
    with pytest.raises(xckpt.TreeMismatchError, match="rng: "):
        xckpt.load(tmp_path / "c", {"rng": jax.random.key(0, impl=impl)})


def test_64_bits_are_refused_or_kept(tmp_path: Path) -> None:
    content = np.array([2**40, -(2**62)])
    xckpt.save(tmp_path / "c", {"n": content})
    with pytest.raises(xckpt.UnsupportedLeafError, match="n: the target is int64, but 64-bit"):
        xckpt.load(tmp_path / "c", {"n": jax.ShapeDtypeStruct((2,), np.int64)})
    with pytest.raises(xckpt.TreeMismatchError, match="dtype int64 in the checkpoint, int32"):
        xckpt.load(tmp_path / "c", {"n": jax.ShapeDtypeStruct((2,), np.int32)})
    with with_64_bits():
        found = xckpt.load(tmp_path / "c", {"n": jax.ShapeDtypeStruct((2,), np.int64)})
        assert isinstance(found, dict)
        same(found["n"], content)


def test_a_cast_on_load(tmp_path: Path) -> None:
    content = values((8, 4), "float32")
    xckpt.save(tmp_path / "c", {"w": content})
    sharding = NamedSharding(mesh(4), PartitionSpec("data"))
    like = {"w": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16, sharding=sharding)}
    found = xckpt.load(tmp_path / "c", like, cast=True)
    assert isinstance(found, dict)
    same(found["w"], content.astype(jnp.bfloat16))


def test_refusals_name_every_leaf(tmp_path: Path) -> None:
    gone = jnp.arange(3)
    gone.delete()
    with pytest.raises(xckpt.UnsupportedLeafError) as caught:
        xckpt.save(tmp_path / "c", {"a": gone, "b": {"c": jnp.zeros(3, "uint2")}, "d": jnp.ones(2)})
    assert [text.split(":")[0] for text in caught.value.problems] == ["a", "b/c"]
    assert not (tmp_path / "c").exists()


def test_loading_into_jax_arrays_is_refused(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "c", {"w": jnp.ones(3)})
    with pytest.raises(xckpt.UnsupportedLeafError, match="w: JAX arrays are immutable"):
        xckpt.load_into(tmp_path / "c", {"w": jnp.ones(3)})


def contents() -> dict[str, NDArray[np.generic]]:
    return {
        "rows": values((24, 5), "float32", 1),
        "both": values((12, 12), "bfloat16", 2),
        "all": values((7,), "int32", 3),
        "partly": values((6, 6), "complex64", 4),
        "scalar": values((), "float32", 5),
        "none": values((0, 12), "float32", 6),
    }


SPECS = {
    "rows": PartitionSpec("data"),
    "both": PartitionSpec("model", "data"),
    "all": PartitionSpec(),
    "partly": PartitionSpec(None, "model"),
    "scalar": PartitionSpec(),
    "none": PartitionSpec(None, ("data", "model")),
}


def placed(name: str, data: NDArray[np.generic], spread: Mesh) -> jax.Array:
    sharding = NamedSharding(spread, SPECS[name])
    return jax.make_array_from_callback(data.shape, sharding, lambda index: data[index])


def job_mesh(model: int) -> Mesh:
    """All devices of all processes; the rows of the mesh mix processes."""
    return Mesh(np.array(jax.devices()).reshape(model, -1).T, ("data", "model"))


def save_job(path: str, model: int) -> list[str]:
    spread = job_mesh(model)
    state = {name: placed(name, data, spread) for name, data in contents().items()}
    rank = jax.process_index()
    local: dict[str, object] = {"plain": np.arange(5), "step": 7, "mine": {rank: np.full(3, rank)}}
    keys = jax.random.split(jax.random.key(1), 12)
    sharding = NamedSharding(spread, PartitionSpec("data"))
    data = np.asarray(jax.random.key_data(keys))
    shared = jax.make_array_from_callback(
        data.shape, NamedSharding(spread, PartitionSpec("data", None)), lambda index: data[index]
    )
    wrapped = jax.random.wrap_key_data(shared)
    assert wrapped.sharding.is_equivalent_to(sharding, 1)
    # An array on a local device, held by every process for itself.
    local["own"] = jax.device_put(np.arange(4, dtype=np.float32), jax.local_devices()[0])
    metadata = xckpt.save(path, {"state": state, "keys": wrapped, **local})
    return sorted(metadata.state_dict_metadata)


def load_job(path: str, model: int) -> list[str]:
    """Load under this job's mesh; the names of leaves that are right on the local devices."""
    spread = job_mesh(model)
    like = {
        name: jax.ShapeDtypeStruct(
            data.shape, data.dtype, sharding=NamedSharding(spread, SPECS[name])
        )
        for name, data in contents().items()
    }
    key_type = jax.random.key(0).dtype
    keys = jax.ShapeDtypeStruct(
        (12,), key_type, sharding=NamedSharding(spread, PartitionSpec("data"))
    )
    found = xckpt.load(path, {"state": like, "keys": keys, "step": 0}, strict=False)
    assert isinstance(found, dict)
    assert found["step"] == 7
    right = []
    for name, data in contents().items():
        array = found["state"][name]
        assert array.sharding == like[name].sharding
        assert array.shape == data.shape
        for shard in array.addressable_shards:
            same(shard.data, data[shard.index])
        right.append(name)
    expected = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(1), 12)))
    for shard in jax.random.key_data(found["keys"]).addressable_shards:
        same(shard.data, expected[shard.index])
    return right


def load_and_save_job(path: str, model: int, again: str) -> list[str]:
    right = load_job(path, model)
    save_job(again, model)
    return right


def test_processes_save_and_others_load(tmp_path: Path) -> None:
    """2 processes of 3 devices save; 3 of 2 load and save; this process loads both."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    saved = run(save_job, 2, first, 1, devices=3)
    assert saved == [saved[0]] * 2
    loaded = run(load_and_save_job, 3, first, 3, second, devices=2)
    assert loaded == [list(contents())] * 3
    for path, processes in ((first, 2), (second, 3)):
        whole = xckpt.load(path)
        assert isinstance(whole, dict)
        for name, data in contents().items():
            same(whole["state"][name], data)
        same(whole["keys"], jax.random.key_data(jax.random.split(jax.random.key(1), 12)))
        same(whole["plain"], np.arange(5))
        same(whole["own"], np.arange(4, dtype=np.float32))
        assert len(whole["mine"]) == processes
        for rank in range(processes):
            same(whole["mine"][rank], np.full(3, rank))


def broken_job(path: str) -> str:
    """One process holds a deleted array."""
    array = jax.device_put(np.arange(4), jax.local_devices()[0])
    if jax.process_index() == 1:
        array.delete()
    with pytest.raises(xckpt.UnsupportedLeafError) as caught:
        xckpt.save(path, {"w": array})
    return str(caught.value)


def test_a_deleted_array_on_one_process_fails_all(tmp_path: Path) -> None:
    for answer in run(broken_job, 2, str(tmp_path / "c")):
        assert "rank 1: UnsupportedLeafError" in str(answer)
        assert "w: this jax.Array was deleted or donated" in str(answer)
    with pytest.raises(xckpt.NotACheckpointError):
        xckpt.load(tmp_path / "c")
