"""Saved from XLA devices, loaded anywhere; saved anywhere, loaded onto XLA devices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import xckpt
from tests.support.examples import examples
from tests.support.jax_meshes import meshes as jax_meshes
from tests.support.jax_meshes import same, specs, ways
from tests.support.ranks import Ranks
from tests.support.torch_meshes import Case, cases
from tests.torch.test_save_load import on_rank_save
from tests.xla.meshes import (
    DTYPES,
    Array,
    Layout,
    Transfers,
    assert_holds,
    device,
    inner,
    layouts,
    mark,
    numbers,
    shapes,
    sharding,
    spmd,
)
from xckpt.core.metadata import TensorStorageMetadata
from xckpt.storage import ZarrStorageReader, ZarrStorageWriter
from xckpt.torch.leaf import to_numpy
from xckpt.torch.xla import SPMDLoadPlanner, SPMDSavePlanner

MESH = (2, 4)
KINDS = {
    "tiled": (0, 1),
    "replicated": (None, None),
    "partially replicated": (0, None),
    "several axes": ((0, 1), None),
    "several axes backwards": (None, (1, 0)),
    "transposed": (1, 0),
}


@st.composite
def journeys(draw: st.DrawFn) -> list[tuple[Array, Layout, Layout]]:
    """Some arrays, each with a layout to save it from and one to load it into."""
    journeys: list[tuple[Array, Layout, Layout]] = []
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(shapes())
        array = numbers(shape, draw(st.sampled_from(DTYPES)))
        rank = len(shape)
        journeys.append((array, draw(layouts(rank)), draw(layouts(rank))))
    return journeys


@pytest.mark.parametrize("planner", [None, SPMDSavePlanner])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_sharding_is_saved_and_loaded(
    kind: str, planner: type[SPMDSavePlanner] | None, tmp_path: Path, transfers: Transfers
) -> None:
    array = numbers((7, 11), "float32")
    state = {"w": mark(torch.tensor(array).to(device()), MESH, KINDS[kind]), "step": 3}
    xckpt.save(tmp_path / "ckpt", state, planner=planner and planner())
    fetched = 0 if kind == "replicated" else 1
    assert transfers.to_host == fetched
    group: Any = zarr.open_group(tmp_path / "ckpt", mode="r")
    same(group["w"][:], array)

    loaded = xckpt.load(tmp_path / "ckpt", state)
    assert (transfers.to_host, transfers.to_devices) == (fetched, 1)
    assert_holds(loaded["w"], array)
    assert sharding(loaded["w"]) == sharding(state["w"])
    assert type(loaded["w"]) is spmd.XLAShardedTensor
    assert loaded["w"].partition_spec == KINDS[kind]
    assert loaded["step"] == 3


@examples(40)
@given(journeys())
def test_any_mesh_to_any_other(
    folders: Iterator[Path], journeys: list[tuple[Array, Layout, Layout]]
) -> None:
    path = next(folders)
    xckpt.save(path, [before.put(array) for array, before, _ in journeys])
    for array, loaded in zip([a for a, _, _ in journeys], xckpt.load(path), strict=True):
        same(loaded, array)
    targets = [after.put(np.zeros_like(array)) for array, _, after in journeys]
    for (array, _, _), like, loaded in zip(
        journeys, targets, xckpt.load(path, targets), strict=True
    ):
        assert_holds(loaded, array)
        assert sharding(loaded) == sharding(like)
        assert_holds(like, np.zeros_like(array))
    before = [sharding(target) for target in targets]
    xckpt.load_into(path, targets)
    for (array, _, _), target in zip(journeys, targets, strict=True):
        assert_holds(target, array)
    assert [sharding(target) for target in targets] == before


@st.composite
def jax_shardings(draw: st.DrawFn) -> tuple[NamedSharding, tuple[int, ...]]:
    """A sharding over JAX's devices and a shape that it divides."""
    mesh, rank = draw(jax_meshes()), draw(st.integers(0, 3))
    sharding = NamedSharding(mesh, draw(specs(mesh, rank)))
    factors = st.sampled_from([1, 1, 2, 3, 5])
    return sharding, tuple(parts * draw(factors) for parts in ways(sharding, rank))


@examples(40)
@given(jax_shardings(), st.data())
def test_xla_to_jax_and_back(
    folders: Iterator[Path], jax_side: tuple[NamedSharding, tuple[int, ...]], data: st.DataObject
) -> None:
    there, shape = jax_side
    array = numbers(shape, data.draw(st.sampled_from(["float32", "bfloat16", "int32", "bool"])))
    here = data.draw(layouts(len(shape)))
    path = next(folders)
    xckpt.save(path / "xla", {"w": here.put(array)})
    like = {"w": jax.ShapeDtypeStruct(shape, array.dtype, sharding=there)}
    on_jax = xckpt.load(path / "xla", like)["w"]
    assert on_jax.sharding == there
    same(on_jax, array)

    xckpt.save(path / "jax", {"w": on_jax})
    target = {"w": data.draw(layouts(len(shape))).put(np.zeros_like(array))}
    assert_holds(xckpt.load(path / "jax", target)["w"], array)
    xckpt.load_into(path / "jax", target)
    assert_holds(target["w"], array)


@examples(20)
@given(st.lists(cases(), min_size=1, max_size=4), st.data())
def test_dtensors_to_xla(
    folders: Iterator[Path], four_ranks: Ranks, saved: list[Case], data: st.DataObject
) -> None:
    path = next(folders)
    four_ranks.run(on_rank_save, path, saved)
    targets: dict[str, Any] = {}
    for number, case in enumerate(saved):
        layout = data.draw(layouts(len(case.shape)))
        if 0 in case.shape:  # torch_xla cannot pad a tensor without elements
            layout = Layout(layout.order, layout.mesh, (None,) * len(case.shape))
        targets[f"w.{number}"] = layout.put(np.zeros_like(case.array()))
    loaded = xckpt.load(path, {"model": targets}, strict=False)["model"]
    xckpt.load_into(path, {"model": targets}, strict=False)
    for number, case in enumerate(saved):
        assert_holds(loaded[f"w.{number}"], case.array())
        assert_holds(targets[f"w.{number}"], case.array())


def test_plain_tensors_on_the_device(tmp_path: Path) -> None:
    array = numbers((7, 3), "bfloat16")
    state = {
        "held": torch.arange(5).to(device()),
        "recorded": torch.arange(5).to(device()) * 2,
        "scalar": torch.tensor(2.5).to(device()),
        "bfloat16": mark(torch.ones(7, 3).to(device()).bfloat16(), MESH, (None, None)),
    }
    inner(state["bfloat16"]).copy_(torch.tensor(array.astype(np.float32)).bfloat16())
    xckpt.save(tmp_path / "ckpt", state)
    read = xckpt.load(tmp_path / "ckpt")
    same(read["held"], np.arange(5))
    same(read["recorded"], np.arange(5) * 2)
    assert read["scalar"] == 2.5
    same(read["bfloat16"], array)

    fresh = xckpt.load(tmp_path / "ckpt", state)
    assert all(leaf.device == device() for leaf in fresh.values())
    assert type(fresh["held"]) is torch.Tensor
    for leaf in state.values():
        inner(leaf).zero_()
    xckpt.load_into(tmp_path / "ckpt", state)
    for name in state:
        same(to_numpy(inner(fresh[name])), read[name])
        same(to_numpy(inner(state[name])), read[name])


def test_a_sharded_tensor_that_was_copied_to_the_host_is_a_plain_one(tmp_path: Path) -> None:
    array = numbers((7, 11), "float32")
    copied = mark(torch.tensor(array).to(device()), MESH, (0, 1)).cpu()
    assert copied.device.type == "cpu"
    xckpt.save(tmp_path / "ckpt", {"w": copied})
    same(xckpt.load(tmp_path / "ckpt")["w"], array)
    inner(copied).zero_()
    xckpt.load_into(tmp_path / "ckpt", {"w": copied})
    same(inner(copied).numpy(), array)
    loaded = xckpt.load(tmp_path / "ckpt", {"w": copied})["w"]
    same(inner(loaded).numpy(), array)


def test_padding_is_never_written(tmp_path: Path) -> None:
    array = numbers((7, 5), "float32")
    tensor = Layout(tuple(range(8)), MESH, (0, 1)).put(array)
    poisoned = tensor.local_shards
    for shard in poisoned:
        inside = tuple(slice(0, part.stop - part.start) for part in shard.indices)
        kept = shard.data[inside].clone()
        shard.data.fill_(-777.25)
        shard.data[inside] = kept
    tensor.load_local_shards_(poisoned)
    poison = np.float32(-777.25).tobytes()
    held = b"".join(shard.data.numpy().tobytes() for shard in tensor.local_shards)
    assert held.count(poison) == 8 * 8 - 35

    xckpt.save(tmp_path / "ckpt", {"w": tensor})
    same(xckpt.load(tmp_path / "ckpt")["w"], array)
    files = [file for file in (tmp_path / "ckpt").rglob("*") if file.is_file()]
    assert array[:4, :2].tobytes() in b"".join(file.read_bytes() for file in files)
    assert all(poison not in file.read_bytes() for file in files)


def test_another_dtype_is_cast_only_where_it_is_allowed(tmp_path: Path) -> None:
    array = numbers((7, 5), "float32")
    xckpt.save(tmp_path / "ckpt", {"w": Layout(tuple(range(8)), MESH, (0, 1)).put(array)})
    like = {"w": Layout(tuple(range(8)), MESH, (None, 0)).put(numbers((7, 5), "bfloat16"))}
    with pytest.raises(xckpt.TreeMismatchError, match="bfloat16 wanted"):
        xckpt.load(tmp_path / "ckpt", like)
    loaded = xckpt.load(tmp_path / "ckpt", like, cast=True)["w"]
    assert_holds(loaded, array.astype("bfloat16"))


def model_of(mesh: tuple[int, ...], spec: tuple[Any, ...]) -> tuple[Any, Any]:
    """A model whose weights are cut, as FSDP over SPMD cuts them, and its optimizer."""
    torch.manual_seed(0)
    layers = (torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 3))
    model: Any = torch.nn.Sequential(*layers).to(device())
    for layer in (model[0], model[2]):
        mark(layer.weight, mesh, spec)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def steps(model: Any, optimizer: Any, count: int) -> list[float]:
    losses: list[float] = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 5).to(device())).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_resumes_under_another_sharding(tmp_path: Path) -> None:
    model, optimizer = model_of((2, 4), (0, None))
    steps(model, optimizer, 2)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    xckpt.save(tmp_path / "ckpt", state)
    wanted = steps(model, optimizer, 3)

    resumed, its_optimizer = model_of((8,), (None, 0))
    steps(resumed, its_optimizer, 1)
    cut = sharding(resumed[0].weight)
    like = {"model": resumed.state_dict(), "optimizer": its_optimizer.state_dict()}
    xckpt.load_into(tmp_path / "ckpt", like)
    its_optimizer.load_state_dict(like["optimizer"])
    np.testing.assert_allclose(steps(resumed, its_optimizer, 3), wanted, rtol=1e-5)
    assert sharding(resumed[0].weight) == cut


def test_the_planners_serve_any_storage(tmp_path: Path) -> None:
    array = numbers((7, 5), "int32")
    layout = Layout(tuple(range(8)), MESH, ((1, 0), None))
    saving, loading = SPMDSavePlanner(), SPMDLoadPlanner()
    state = {"w": layout.put(array), "plain": torch.arange(3).to(device()), "step": 4}
    xckpt.save_state_dict(state, ZarrStorageWriter(tmp_path / "ckpt"), planner=saving)
    assert list(saving.sharded_state_dict) == ["w"]
    assert list(saving.unsharded_state_dict) == ["plain", "step"]
    target = {"w": layout.put(np.zeros_like(array)), "plain": torch.ones(3).long(), "step": 0}
    xckpt.load_state_dict(target, ZarrStorageReader(tmp_path / "ckpt"), planner=loading)
    assert_holds(target["w"], array)
    assert target["plain"].tolist() == [0, 1, 2]
    assert target["step"] == 4


def test_the_manifest_remembers_mesh_and_spec(tmp_path: Path) -> None:
    ones = torch.ones(8, 8)
    named = spmd.Mesh(np.arange(8), (2, 4), ("fsdp", "tensor"))
    linear = torch.nn.Linear(8, 8).to(device())
    mark(linear.weight, MESH, (None, 1))
    state = {
        "numbers": mark(ones.to(device()), MESH, ((1, 0), None)),
        "names": spmd.mark_sharding(ones.to(device()), named, ("tensor", "fsdp")),
        "parameter": linear.weight,
        "replicated": mark(ones.to(device()), MESH, (None, None)),
        "plain": ones.to(device()),
    }
    metadata = xckpt.save(tmp_path / "ckpt", state)
    assert {
        name: str(leaf.sharding)
        for name, leaf in metadata.state_dict_metadata.items()
        if isinstance(leaf, TensorStorageMetadata)
    } == {
        "numbers": "PartitionSpec(dim1+dim0, -) on dim0=2 x dim1=4",
        "names": "PartitionSpec(tensor, fsdp) on fsdp=2 x tensor=4",
        "parameter": "PartitionSpec(-, dim0) on dim0=4 x dim1=2",
        "replicated": "PartitionSpec(-, -) on dim0=2 x dim1=4",
        "plain": "None",
    }


@pytest.mark.parametrize("spmd_mode", ["spmd", "no spmd"])
def test_one_device(spmd_mode: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.xla.one_device", spmd_mode, str(tmp_path / "ckpt")]
    environment = {**os.environ, "CPU_NUM_DEVICES": "1"}
    environment.pop("XLA_USE_SPMD", None)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    same(xckpt.load(tmp_path / "ckpt")["w"], numbers((7, 5), "float32"))
