"""Loading a part of a checkpoint, and loading without a target tree into a framework's arrays."""

from __future__ import annotations

import gc
import weakref
from collections import namedtuple
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch

import xckpt
from conformance.implementations.threads import ThreadGroup, results
from xckpt.core.dtypes import DTYPES
from xckpt.core.part.planner import part_planner
from xckpt.core.part.selection import Selection
from xckpt.core.plan.items import LoadPlan
from xckpt.core.plan.reads.items import need_items
from xckpt.planner import DefaultLoadPlanner

Pair = namedtuple("Pair", "mu nu")


def state() -> dict[str, Any]:
    return {
        "model": {"w": np.arange(6.0).reshape(2, 3), "layers": [np.ones(2), np.zeros(3)]},
        "opt": (Pair(np.full(4, 2.0), np.full(4, 3.0)), ()),
        "step": 7,
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    xckpt.save(tmp_path / "ckpt", state())
    return tmp_path / "ckpt"


def test_at_loads_a_subtree(path: Path) -> None:
    like = {"w": np.zeros((2, 3)), "layers": [np.zeros(2), np.ones(3)]}
    for loaded in (xckpt.load(path, like, at="model"), xckpt.load(path, at="model")):
        np.testing.assert_equal(loaded, state()["model"])
    np.testing.assert_equal(xckpt.load(path, at="opt"), state()["opt"])
    np.testing.assert_equal(xckpt.load(path, np.zeros(3), at="model/layers/1"), np.zeros(3))
    assert xckpt.load(path, at="step") == 7


def test_at_loads_into_a_module(tmp_path: Path) -> None:
    saved = torch.nn.Linear(3, 2)
    xckpt.save(tmp_path / "c", {"model": saved, "optim": torch.optim.Adam(saved.parameters())})
    model = torch.nn.Linear(3, 2)
    xckpt.load_into(tmp_path / "c", model, at="model")
    assert torch.equal(model.weight, saved.weight) and torch.equal(model.bias, saved.bias)


def test_at_keeps_strict(path: Path) -> None:
    with pytest.raises(xckpt.TreeMismatchError) as caught:
        xckpt.load(path, {"w": np.zeros((3, 3)), "v": np.zeros(2)}, at="model")
    assert {problem.split(":")[0] for problem in caught.value.problems} == {
        "w",
        "v",
        "layers/0",
        "layers/1",
    }


def test_at_works_for_planners_of_ones_own(path: Path) -> None:
    class Noting(DefaultLoadPlanner):
        def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
            self.seen = sorted(item.storage_index.fqn for item in central_plan.items)
            return super().finish_plan(central_plan)

    planner = Noting()
    np.testing.assert_equal(xckpt.load(path, at="model", planner=planner), state()["model"])
    assert planner.seen == ["layers/0", "layers/1", "w"]


def test_at_works_for_other_formats(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"a": np.ones(2), "b": np.zeros(3)}, file)
    np.testing.assert_equal(xckpt.load(file, np.zeros(2), at="a"), np.ones(2))
    np.testing.assert_equal(xckpt.load(file, select="b"), {"b": np.zeros(3)})


def test_at_works_on_several_ranks(path: Path) -> None:
    def load(group: ThreadGroup) -> Any:
        return xckpt.load(path, {"w": np.zeros((2, 3))}, at="model", select="w", group=group)

    for loaded in results(2, load):
        np.testing.assert_equal(loaded, {"w": state()["model"]["w"]})


def test_the_items_of_a_part_are_sent_only_to_a_planner_that_looks_at_them(path: Path) -> None:
    class Looking(DefaultLoadPlanner):
        def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
            self.seen = [item.storage_index.fqn for plan in global_plan for item in plan.items]
            return super().create_global_plan(global_plan)

    for inner in (DefaultLoadPlanner(), Looking()):
        planner = part_planner(inner, Selection.asked("model"))
        assert need_items(planner.create_global_plan) is isinstance(inner, Looking)

    def load(group: ThreadGroup) -> Any:
        planner = Looking(strict=False)
        xckpt.load(path, {"w": np.zeros((2, 3))}, at="model", planner=planner, group=group)
        return planner.seen if group.rank == group.coordinator else None

    assert results(2, load) == [["w", "w"], None]


def test_what_was_loaded_of_a_part_goes_with_its_last_name(path: Path) -> None:
    """The planner held itself, and with it the arrays, until Python looked for cycles."""
    gc.collect()
    gc.disable()
    try:
        loaded = xckpt.load(path, at="model")
        kept = weakref.ref(loaded["w"])
        del loaded
        assert kept() is None
    finally:
        gc.enable()


def test_select_without_a_target_tree(path: Path) -> None:
    loaded = xckpt.load(path, select=["model/layers/1", "opt", "st?p"])
    expected = {"model": {"layers": {1: np.zeros(3)}}, "opt": state()["opt"], "step": 7}
    np.testing.assert_equal(loaded, expected)


def test_select_leaves_the_rest_of_the_target_as_it_is(path: Path) -> None:
    mine = {"model": {"w": np.zeros((2, 3)), "head": np.zeros(5)}, "epoch": 1}
    loaded = xckpt.load(path, mine, select="model/w")
    assert loaded["model"]["head"] is mine["model"]["head"] and loaded["epoch"] == 1
    np.testing.assert_equal(loaded["model"]["w"], state()["model"]["w"])
    xckpt.load_into(path, mine, select="model/w")
    np.testing.assert_equal(mine["model"], {"w": state()["model"]["w"], "head": np.zeros(5)})


def test_what_is_selected_has_to_be_there(path: Path) -> None:
    with pytest.raises(xckpt.TreeMismatchError, match="w2: wanted, but not in the checkpoint"):
        xckpt.load(path, {"w": np.zeros((2, 3)), "w2": np.zeros(2)}, at="model", select="w*")


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_without_a_target_tree(tmp_path: Path, dtype: str) -> None:
    array = np.array([[0, 1, 1]]).astype(DTYPES[dtype])
    xckpt.save(tmp_path / "c", {"w": array, "s": [array[0, 1]]})
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        with pytest.raises(xckpt.UnsupportedLeafError, match=f"torch has no dtype {dtype}"):
            xckpt.load(tmp_path / "c", framework="torch")
        with pytest.raises(xckpt.UnsupportedLeafError, match=r"^1 leaf cannot be loaded this way"):
            xckpt.load(tmp_path / "c", framework="torch", select="w")
        return
    loaded = xckpt.load(tmp_path / "c", framework="torch", device="cpu")
    assert loaded["w"].dtype == getattr(torch, dtype) and loaded["w"].is_contiguous()
    assert loaded["s"][0].shape == ()
    assert loaded["w"].view(torch.uint8).numpy().tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_without_a_target_tree(tmp_path: Path, dtype: str) -> None:
    array = np.array([[0, 1, 1]]).astype(DTYPES[dtype])
    xckpt.save(tmp_path / "c", {"w": array, "n": 3})
    narrow = jax.dtypes.canonicalize_dtype(array.dtype)
    if narrow != array.dtype:
        with pytest.raises(xckpt.UnsupportedLeafError, match="jax_enable_x64"):
            xckpt.load(tmp_path / "c", framework="jax")
    loaded = xckpt.load(tmp_path / "c", framework="jax", device=jax.devices()[0], cast=True)
    assert isinstance(loaded["w"], jax.Array) and loaded["w"].dtype == narrow
    assert np.asarray(loaded["w"]).tobytes() == array.astype(narrow).tobytes()


def test_keys_come_back_as_keys(tmp_path: Path) -> None:
    keys = jax.random.split(jax.random.key(1, impl="rbg"), 2)
    xckpt.save(tmp_path / "c", {"keys": keys})
    loaded = xckpt.load(tmp_path / "c", framework="jax")["keys"]
    assert loaded.dtype == keys.dtype and (loaded == keys).all()
    plain = xckpt.load(tmp_path / "c", framework="torch")["keys"]
    assert plain.dtype == torch.uint32 and plain.shape == (2, 4)


def test_numpy_by_name_is_the_default(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "c", {"w": np.ones(2, ml_dtypes.bfloat16)})
    for loaded in (xckpt.load(tmp_path / "c"), xckpt.load(tmp_path / "c", framework="numpy")):
        assert loaded["w"].flags.writeable and loaded["w"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"device": "cpu"}, ValueError, "device= goes with framework="),
        ({"framework": "tf"}, ValueError, "give one of 'torch', 'jax', 'numpy'"),
        ({"framework": "torch", "like": {}}, ValueError, "like or framework=, not both"),
        ({"framework": "numpy", "device": "cuda"}, ValueError, "live in host memory"),
        ({"framework": "torch", "device": 1.5}, TypeError, "device= takes a torch.device"),
        ({"framework": "jax", "device": 1.5}, TypeError, "device= takes a jax.Device"),
        ({"framework": "jax", "device": torch.device("cpu")}, TypeError, "not a torch.device"),
        ({"framework": "jax", "device": "cpu:99"}, ValueError, "such devices here"),
        ({"framework": "jax", "device": "cpu:-99"}, ValueError, "such devices here"),
        ({"framework": "jax", "device": "tpu"}, ValueError, "JAX has no such device here"),
        ({"framework": "jax", "device": "cpu:one"}, ValueError, "JAX has no such device here"),
        ({"framework": "torch", "device": "meta"}, ValueError, "has no memory to load into; xckpt"),
        ({"framework": "torch", "device": torch.device("meta")}, ValueError, "gives targets"),
        ({"framework": "torch", "device": "cpux"}, ValueError, "torch has no such device here"),
        ({"framework": "torch", "device": "vulkan"}, ValueError, "torch has no such device here"),
        ({"framework": "jax", "planner": DefaultLoadPlanner()}, ValueError, "your own planner"),
        ({"at": "modle"}, xckpt.TreeMismatchError, "did you mean model"),
    ],
)
def test_arguments_without_sense(
    path: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        xckpt.load(path, **arguments)
