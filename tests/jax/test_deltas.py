"""Saves of JAX states with a base: what is equal is shared, however it is sharded now."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import xckpt
from tests.support.counted_bucket import counted_in_thread, environment_of
from tests.support.examples import examples
from tests.support.jax_jobs import run
from tests.support.jax_meshes import meshes, specs
from xckpt import SaveOptions
from xckpt.policies import EverySteps

ROWS, COLUMNS = PartitionSpec("x", None), PartitionSpec(None, "x")


def sharding(spec: PartitionSpec, devices: int = 4) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("x",)), spec)


def a_state(spec: PartitionSpec = ROWS) -> dict[str, Any]:
    w = jax.device_put(jnp.arange(64.0 * 64).reshape(64, 64), sharding(spec))
    params = {"w": w, "b": jnp.ones(7, jnp.bfloat16)}
    return {"params": params, "opt": optax.adam(1e-3).init(params), "key": jax.random.key(3)}


def chunks(folder: Path) -> dict[str, int]:
    """Each chunk's inode."""
    files = [path for path in folder.rglob("*") if path.is_file() and "c" in path.parts]
    return {str(path.relative_to(folder)): path.stat().st_ino for path in files}


def shared(one: Path, other: Path) -> set[str]:
    theirs = chunks(other)
    return {key for key, inode in chunks(one).items() if theirs.get(key) == inode}


def check(path: Path, state: Any) -> None:
    assert xckpt.open(path).verify() == []
    loaded = xckpt.load(path, state)
    data = [
        (each, again) for each, again in zip(*map(jax.tree.leaves, (state, loaded)), strict=True)
    ]
    for each, again in data:
        assert each.sharding == again.sharding and each.dtype == again.dtype
        if jnp.issubdtype(each.dtype, jax.dtypes.prng_key):
            each, again = jax.random.key_data(each), jax.random.key_data(again)
        assert np.array_equal(np.asarray(each), np.asarray(again))


@pytest.mark.parametrize("background", [False, True])
def test_an_unchanged_state_is_shared(tmp_path: Path, background: bool) -> None:
    state = a_state()
    xckpt.save(tmp_path / "a", state)
    if background:
        xckpt.save_async(tmp_path / "b", a_state(), base=tmp_path / "a").result()
    else:
        xckpt.save(tmp_path / "b", a_state(), base=tmp_path / "a")
    assert shared(tmp_path / "a", tmp_path / "b") == chunks(tmp_path / "b").keys()
    assert len(chunks(tmp_path / "b")) >= 3 * 4 + 3
    check(tmp_path / "b", state)


def test_one_leaf_that_changed_is_written(tmp_path: Path) -> None:
    state = a_state()
    xckpt.save(tmp_path / "a", state)
    state["params"]["b"] = jax.jit(lambda b: b + 1)(state["params"]["b"])
    xckpt.save(tmp_path / "b", state, base=tmp_path / "a")
    own = chunks(tmp_path / "b").keys() - shared(tmp_path / "a", tmp_path / "b")
    assert own == {"params/b/c/0"}
    check(tmp_path / "b", state)


def test_of_a_sharded_leaf_the_shard_that_changed_is_written(tmp_path: Path) -> None:
    state = a_state()
    xckpt.save(tmp_path / "a", state)
    state["params"]["w"] = state["params"]["w"].at[20, 5].set(-1)
    assert state["params"]["w"].sharding == sharding(ROWS)
    xckpt.save(tmp_path / "b", state, base=tmp_path / "a")
    own = chunks(tmp_path / "b").keys() - shared(tmp_path / "a", tmp_path / "b")
    assert own == {"params/w/c/1/0"}
    check(tmp_path / "b", state)


@pytest.mark.parametrize(
    "spec, devices, kept",
    [
        (ROWS, 2, True),  # two chunks a shard
        (PartitionSpec(), 4, True),  # replicas
        (ROWS, 8, False),  # half a chunk a shard
        (COLUMNS, 4, False),
    ],
)
def test_a_resharded_state_is_shared_where_the_grid_fits(
    tmp_path: Path, spec: PartitionSpec, devices: int, kept: bool
) -> None:
    """A chunk is of one shard; where the new shards cut the old chunks, these are written anew."""
    state = a_state()
    xckpt.save(tmp_path / "a", state)
    w = jax.device_put(state["params"]["w"], sharding(spec, devices))
    state["params"]["w"] = w
    xckpt.save(tmp_path / "b", state, base=tmp_path / "a")
    own = chunks(tmp_path / "b").keys() - shared(tmp_path / "a", tmp_path / "b")
    assert {key.rsplit("/c/", 1)[0] for key in own} == (set() if kept else {"params/w"})
    check(tmp_path / "b", state)
    # From there on it is shared again.
    xckpt.save(tmp_path / "again", state, base=tmp_path / "b")
    assert shared(tmp_path / "b", tmp_path / "again") == chunks(tmp_path / "again").keys()


@given(data=st.data())
@examples(6)
def test_any_sharding_after_any_other(data: st.DataObject) -> None:
    """Two saves of two shardings: the second is whole, and shares nothing that differs."""
    values = np.arange(24 * 16.0).reshape(24, 16)
    values[:3] = 0
    with tempfile.TemporaryDirectory() as place:
        before: Path | None = None
        for number in range(3):
            mesh = data.draw(meshes())
            spec = data.draw(specs(mesh, 2).filter(lambda s, m=mesh: divides(m, s)))
            row = data.draw(st.integers(0, 23))
            values[row, 0] += data.draw(st.sampled_from([0.0, 1.0]))
            state = {"w": jax.device_put(jnp.asarray(values), NamedSharding(mesh, spec))}
            path = Path(place) / str(number)
            xckpt.save(path, state, base=before, options=SaveOptions(chunk_bytes=256))
            check(path, state)
            before = path


def divides(mesh: Mesh, spec: PartitionSpec) -> bool:
    axes = [names if isinstance(names, tuple) else (names,) for names in spec if names is not None]
    parts = [math.prod(mesh.shape[axis] for axis in names) for names in axes]
    return all(24 % part == 0 and 16 % part == 0 for part in parts)


def on_process(folder: str) -> None:
    """Three saves: all, the same again, and with one element changed."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    rows = NamedSharding(mesh, ROWS)
    values = np.ones((64, 64), np.float32)
    changed = values.copy()
    changed[0, 0] = 5
    for number, each in enumerate([values, values, changed]):
        array = jax.make_array_from_callback((64, 64), rows, each.__getitem__)
        base = f"{folder}/{number - 1}" if number else None
        xckpt.save(f"{folder}/{number}", {"w": array}, base=base)


@pytest.mark.thorough
def test_two_processes_share(tmp_path: Path) -> None:
    run(on_process, 2, str(tmp_path))
    first, second, third = (tmp_path / name for name in "012")
    assert shared(first, second) == chunks(second).keys() and len(chunks(second)) == 4
    assert chunks(third).keys() - shared(second, third) == {"w/c/0/0"}
    assert xckpt.load(third)["w"].sum() == 64 * 64 + 4


def trained(place: str, steps: list[int], port: int = 0) -> list[int]:
    """A run of a frozen model beside an adapter, in a folder or in a bucket at a port."""
    if port:
        os.environ.update(environment_of(port))
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    by_rows, everywhere = (NamedSharding(mesh, spec) for spec in (ROWS, PartitionSpec()))

    def state(step: int) -> dict[str, Any]:
        frozen = np.arange(768.0 * 64, dtype=np.float32).reshape(768, 64)
        small = {f"l{n}": np.full(300, n, np.float32) for n in range(300)}
        lora = np.full((48, 2), step, np.float32)
        return {
            "frozen": jax.make_array_from_callback(frozen.shape, by_rows, frozen.__getitem__),
            "copies": jax.make_array_from_callback((64, 64), everywhere, frozen[:64].__getitem__),
            "small": {
                name: jax.make_array_from_callback((300,), everywhere, array.__getitem__)
                for name, array in small.items()
            },
            "lora": jax.make_array_from_callback(lora.shape, by_rows, lora.__getitem__),
            "mine": xckpt.PerRank({"process": jax.process_index(), "step": step}),
        }

    taken: list[xckpt.Metrics] = []
    options = SaveOptions(chunk_bytes=1 << 14, metrics=taken.append)
    with xckpt.CheckpointManager(place, save=EverySteps(1), options=options) as run_:
        first = run_.next_step
        if first:
            like = {**state(0), "mine": xckpt.PerRank.all}
            restored = run_.restore(like)
            assert float(restored["lora"].addressable_shards[0].data[0, 0]) == first - 1
            theirs = {each["process"] for each in restored["mine"].values()}
            assert theirs == set(range(len(restored["mine"])))
        for step in steps:
            run_.save(step, state(step))
            run_.wait()
    return [metrics.shared for metrics in taken]


CHUNKS = 768 * 64 * 4 + 64 * 64 * 4
SHARED = CHUNKS + 300 * 300 * 4
"""Bytes of `trained`'s state that no step changes; the others lie in packs."""


def check_run(place: str, steps: int) -> None:
    for step in range(steps):
        path = f"{place}/step-{step:08}"
        assert xckpt.open(path).verify() == []
        loaded = xckpt.load(path)
        assert (loaded["lora"] == step).all() and loaded["frozen"][-1, -1] == 768 * 64 - 1
        assert all((array == int(name[1:])).all() for name, array in loaded["small"].items())


@pytest.mark.thorough
@pytest.mark.parametrize("home", ["folder", "bucket"])
def test_a_run_of_processes_shares_what_is_frozen(tmp_path: Path, home: str) -> None:
    """Three processes, then two that go on: their shards fit the chunks of the three."""
    with counted_in_thread() as (bucket, port), pytest.MonkeyPatch.context() as patch:
        place, port = (str(tmp_path), 0) if home == "folder" else ("s3://bucket/run", port)
        for name, value in environment_of(port).items():
            patch.setenv(name, value)
        of_three = run(trained, 3, place, [0, 1, 2], port)
        sums = [sum(each) for each in zip(*of_three, strict=True)]
        assert sums == [0, SHARED, SHARED]
        of_two = run(trained, 2, place, [3, 4], port)
        sums = [sum(each) for each in zip(*of_two, strict=True)]
        # A pack is shared by a process that has half of it: not each, where there are fewer now.
        assert CHUNKS <= sums[0] < SHARED and sums[1] == SHARED
        check_run(place, 5)
        if home == "bucket":
            requests = bucket.taken()
            sent = [
                sum(each.sent for each in requests if f"{step:08}" in each.key) for step in range(5)
            ]
            assert sent[0] > SHARED > sent[3] and max(sent[1], sent[2], sent[4]) < 0.1 * SHARED
