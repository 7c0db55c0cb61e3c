"""A model on the meta device gets memory and weights in one step, however many reads that takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import xckpt
from examples.planners.materialise import MaterialisingPlanner
from tests.support.jobs import fresh_path
from tests.support.sharded_arrays import cut
from xckpt.metadata import TensorStorageMetadata
from xckpt.planner import DefaultLoadPlanner, ReadItem
from xckpt.storage import ZarrStorageReader


def build(device: str) -> torch.nn.Module:
    """Several dtypes, buffers, a scalar, an empty parameter and one without gradients."""
    torch.manual_seed(1)
    with torch.device(device):
        model = torch.nn.Sequential(
            torch.nn.Linear(3, 101), torch.nn.BatchNorm1d(101), torch.nn.Linear(101, 4).half()
        )
        model.register_parameter("frozen", torch.nn.Parameter(torch.ones(3), requires_grad=False))
        model.register_parameter("none", torch.nn.Parameter(torch.ones(0, 7)))
    return model


ROWS = [((0, 0), (7, 3)), ((7, 0), (13, 3)), ((20, 0), (31, 3)), ((51, 0), (50, 3))]


@pytest.fixture(scope="module")
def saved() -> str:
    """The model's state dict; ``0.weight`` is four arrays."""
    path = fresh_path()
    state: dict[str, Any] = build("cpu").state_dict()
    weight = state["0.weight"].numpy()
    metadata = xckpt.save(path, {**state, "0.weight": cut(weight, ROWS)})
    described = metadata.state_dict_metadata["0.weight"]
    assert isinstance(described, TensorStorageMetadata) and len(described.chunks) == 4
    return path


class Watching(MaterialisingPlanner):
    """Notes what is read where, and that the model has nothing yet."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.regions: dict[str, list[tuple[int, ...]]] = {}

    def commit_tensor(self, read_item: ReadItem, tensor: object) -> None:
        assert isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == read_item.lengths
        self.regions.setdefault(read_item.dest_index.fqn, []).append(tuple(tensor.shape))
        super().commit_tensor(read_item, tensor)
        assert all(leaf.is_meta for leaf in self.model.state_dict().values())


def assert_is_the_model(model: torch.nn.Module) -> None:
    expected = build("cpu")
    for (name, leaf), (other, wanted) in zip(
        model.state_dict().items(), expected.state_dict().items(), strict=True
    ):
        assert name == other and leaf.dtype == wanted.dtype and torch.equal(leaf, wanted)
    for leaf, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert isinstance(leaf, torch.nn.Parameter) and leaf.requires_grad == wanted.requires_grad


def test_a_model_gets_memory_and_weights(saved):
    model = build("meta")
    planner = Watching(model)
    metadata = xckpt.load_state_dict(model.state_dict(), ZarrStorageReader(saved), planner=planner)
    assert_is_the_model(model)
    assert set(metadata.state_dict_metadata) == set(model.state_dict())
    # Region-sized temporaries: the four arrays of one tensor came one by one.
    assert sorted(planner.regions["0.weight"]) == [(7, 3), (13, 3), (31, 3), (50, 3)]


def test_load_does_it_too(saved):
    model = build("meta")
    loaded = xckpt.load(saved, model.state_dict(), planner=MaterialisingPlanner(model))
    assert_is_the_model(model)
    assert loaded["0.weight"].data_ptr() == model.state_dict()["0.weight"].data_ptr()


def test_each_tensor_is_allocated_once(saved):
    model = build("meta")
    memory: dict[str, set[int]] = {}

    class Addresses(MaterialisingPlanner):
        def commit_tensor(self, read_item: ReadItem, tensor: object) -> None:
            region: Any = super(MaterialisingPlanner, self).resolve_tensor(read_item)
            found = region.untyped_storage().data_ptr()
            memory.setdefault(read_item.dest_index.fqn, set()).add(found)
            super().commit_tensor(read_item, tensor)

    xckpt.load(saved, model.state_dict(), planner=Addresses(model))
    for name, addresses in memory.items():
        assert addresses == {model.state_dict()[name].untyped_storage().data_ptr()}


def test_a_load_that_fails_leaves_the_model_as_it_was(tmp_path):
    path = tmp_path / "ckpt"
    xckpt.save(path, build("cpu").state_dict())
    chunk = path / "2.weight" / "c" / "0" / "0"
    chunk.write_bytes(bytes(reversed(chunk.read_bytes())))
    model = build("meta")
    with pytest.raises(xckpt.CorruptCheckpointError, match=r"2\.weight"):
        xckpt.load(path, model.state_dict(), planner=MaterialisingPlanner(model))
    assert all(leaf.is_meta for leaf in model.state_dict().values())


def test_the_default_planner_cannot_fill_a_meta_model_in_place(saved):
    state = build("meta").state_dict()
    with pytest.raises(xckpt.UnsupportedLeafError, match="meta device has no memory to load into"):
        xckpt.load_state_dict(state, ZarrStorageReader(saved))


class Materialising(DefaultLoadPlanner):
    """As torch's documentation has it: a tensor on the CPU for each on the meta device."""

    def resolve_tensor(self, read_item: ReadItem) -> object:
        tensor: Any = super().resolve_tensor(read_item)
        return torch.empty_like(tensor, device="cpu")

    def commit_tensor(self, read_item: ReadItem, tensor: object) -> None:
        self.state_dict[read_item.dest_index.fqn] = tensor


@pytest.mark.parametrize("nested", [False, True])
def test_a_hook_puts_its_own_tensors_into_the_state_dict(nested):
    """The load refused meta tensors before a hook of the planner was called."""
    path, mine, weights = fresh_path(), build("meta").state_dict(), build("cpu").state_dict()
    state = {"model": mine, "step": 0} if nested else mine
    xckpt.save(path, {"model": weights, "step": 3} if nested else weights)
    planner = Materialising()
    xckpt.load_state_dict(state, ZarrStorageReader(path), planner=planner)
    assert all(torch.equal(mine[name], weight) for name, weight in weights.items())
    assert planner.is_coordinator and (not nested or state["step"] == planner.state_dict["step"])
    loaded = xckpt.load(path, {**state}, planner=Materialising())
    inner = loaded["model"] if nested else loaded
    assert all(torch.equal(inner[name], weight) for name, weight in weights.items())


def test_a_hook_that_lets_the_default_commit_fills_new_tensors(saved):
    class Logging(DefaultLoadPlanner):
        def commit_tensor(self, read_item: ReadItem, tensor: object) -> None:
            super().commit_tensor(read_item, tensor)

    state = build("meta").state_dict()
    xckpt.load_into(saved, state, planner=Logging())
    assert all(torch.equal(state[name], leaf) for name, leaf in build("cpu").state_dict().items())


def test_what_a_hook_puts_into_the_state_dict_has_memory():
    class Forgetful(Materialising):
        def resolve_tensor(self, read_item: ReadItem) -> object:
            return torch.empty(read_item.lengths, device="meta")

    path = fresh_path()
    xckpt.save(path, {"w": torch.ones(2)})
    match = r"w: a hook of the planner put one of shape \(2,\) on the meta device"
    with pytest.raises(xckpt.PlanError, match=match):
        xckpt.load(path, {"w": torch.zeros(2)}, planner=Forgetful())


@pytest.mark.parametrize("in_place", [False, True])
def test_a_hook_may_write_the_memory_of_a_parameter(in_place):
    class Doubling(DefaultLoadPlanner):
        def commit_tensor(self, read_item: ReadItem, tensor: object) -> None:
            assert isinstance(tensor, torch.Tensor)
            super().commit_tensor(read_item, tensor.mul_(2))

    path = fresh_path()
    xckpt.save(path, {"w": torch.ones(2)})
    state = {"w": torch.nn.Parameter(torch.zeros(2))}
    if in_place:
        xckpt.load_into(path, state, planner=Doubling())
    else:
        state = xckpt.load(path, state, planner=Doubling())
    assert state["w"].tolist() == [2, 2] and state["w"].requires_grad


def test_what_a_hook_puts_into_the_state_dict_has_the_shape(saved):
    """A tensor that came in four reads is not one of them."""
    state = build("meta").state_dict()
    match = r"0\.weight: a hook of the planner put one of shape \(\d+, 3\) .* of shape \(101, 3\)"
    with pytest.raises(xckpt.PlanError, match=match):
        xckpt.load_into(saved, state, planner=Materialising())


def test_a_module_on_the_meta_device_is_refused_whatever_hooks_there_are(saved):
    """Its load_state_dict would drop what was loaded."""
    with pytest.raises(xckpt.UnsupportedLeafError, match="meta device has no memory to load into"):
        xckpt.load_into(saved, build("meta"), planner=Materialising())


def test_a_model_of_another_dtype_is_cast(saved):
    model = build("meta").double()
    planner = MaterialisingPlanner(model, cast=True)
    xckpt.load(saved, model.state_dict(), planner=planner)
    weight = build("cpu").state_dict()["0.weight"].double()
    assert torch.equal(model.state_dict()["0.weight"], weight)
    assert np.array_equal(xckpt.open(saved)["frozen"][:], np.ones(3))  # type: ignore[index]
