"""What a planner's hooks may take and give back, and how a wrong one is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xckpt
from conformance.implementations.threads import run_ranks
from tests.support.jobs import fresh_path
from xckpt.metadata import ChunkStorageMetadata, MetadataIndex
from xckpt.planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    ReadItem,
    WriteItem,
)

WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3)
STATE = {"w": WEIGHT, "step": 3}


def hooked(kind: type, hook: str, result: Any) -> Any:
    """A planner one of whose hooks returns something else, for ``result`` of what it should."""

    def wrong(self: Any, *given: Any) -> Any:
        return result(getattr(super(Hooked, self), hook)(*given))

    Hooked = type("Hooked", (kind,), {hook: wrong})
    return Hooked()


class FirstTorch(DefaultSavePlanner):
    """As torch's planners were at first: with two arguments."""

    def set_up_planner(self, state_dict: Mapping[str, object], is_coordinator: bool) -> None:  # type: ignore[override]
        renamed = {f"foo_{name}": leaf for name, leaf in state_dict.items()}
        super().set_up_planner(renamed, is_coordinator)


def test_a_planner_may_be_set_up_with_two_arguments():
    path, options = "memory://hooks-two-arguments", xckpt.SaveOptions(chunk_bytes=12, pack_bytes=0)
    xckpt.save(path, STATE, planner=FirstTorch(), options=options)
    with xckpt.open(path) as checkpoint:
        assert list(checkpoint) == ["foo_w", "foo_step"]
        assert checkpoint.array("foo_w").chunks == (1, 3)


def refused_on_all(size: int, call: Callable[[Any], None], hook: str, text: str) -> None:
    """Every rank raises an error that names the hook."""
    for outcome in run_ranks(size, call):
        assert isinstance(outcome.error, xckpt.PlanError)
        assert f"Hooked.{hook}" in str(outcome.error) and text in str(outcome.error)


WRONG_PLANS = [
    ("create_local_plan", lambda plan: None, "create_local_plan returned None"),
    ("create_local_plan", lambda plan: list(plan.items), "create_local_plan returned an object"),
    ("create_local_plan", lambda plan: replace(plan, items=3), "whose items are of type int"),
    ("finish_plan", lambda plan: None, "finish_plan returned None"),
]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("hook", "result", "text"),
    [
        *WRONG_PLANS,
        ("create_global_plan", lambda made: None, "must return (plans, metadata)"),
        ("create_global_plan", lambda made: ([], made[1]), "returned 0 plan(s): it must return"),
        ("create_global_plan", lambda made: (None, made[1]), "returned no list of plans"),
        ("create_global_plan", lambda made: ([None] * len(made[0]), made[1]), "returned None"),
    ],
)
def test_a_hook_of_a_save_that_returns_no_plan_is_named(tmp_path: Path, size, hook, result, text):
    def save(group: Any) -> None:
        planner = hooked(DefaultSavePlanner, hook, result)
        xckpt.save(tmp_path / "ckpt", STATE, group=group, planner=planner)

    refused_on_all(size, save, hook, text)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("hook", "result", "text"),
    [
        *WRONG_PLANS,
        ("create_global_plan", lambda plans: None, "returned no list of plans"),
        ("create_global_plan", lambda plans: plans[1:], "it must return"),
    ],
)
def test_a_hook_of_a_load_that_returns_no_plan_is_named(tmp_path: Path, size, hook, result, text):
    xckpt.save(tmp_path / "ckpt", STATE)

    def load(group: Any) -> None:
        planner = hooked(DefaultLoadPlanner, hook, result)
        xckpt.load(tmp_path / "ckpt", STATE, group=group, planner=planner)

    refused_on_all(size, load, hook, text)


MISBUILT = {
    "name": lambda item: replace(item, index=replace(item.index, fqn=3)),
    "index": lambda item: replace(item, index="w"),
    "type": lambda item: replace(item, type="SHARD"),
    "data": lambda item: replace(item, tensor_data=(4, 3)),
    **{
        f"{field} {wrong!r}": lambda item, field=field, wrong=wrong: replace(
            item, tensor_data=replace(item.tensor_data, **{field: wrong})
        )
        for field, wrong in [
            ("chunk", None),
            ("properties", "float32"),
            ("size", "ab"),
            ("size", 4),
            ("size", (4.0, 3)),
            ("sharding", "x"),
            ("annotation", 3),
        ]
    },
}


MISREAD = [
    ("type", "TENSOR"),
    ("dest_index", None),
    ("dest_index", MetadataIndex("w", (0, 0), "0")),  # type: ignore[arg-type]
    ("dest_offsets", (0.5, 0)),
    ("storage_index", MetadataIndex("w", 5, 0)),  # type: ignore[arg-type]
    ("storage_offsets", ("0", 0)),
    ("lengths", None),
]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("hook", ["create_local_plan", "finish_plan"])
@pytest.mark.parametrize(("field", "wrong"), MISREAD)
def test_an_item_to_be_read_of_other_types_is_shown(size, hook, field, wrong):
    xckpt.save("memory://hooks-misread", STATE, overwrite=True)

    def result(plan: Any) -> Any:
        return replace(plan, items=[replace(plan.items[0], **{field: wrong}), *plan.items[1:]])

    def load(group: Any) -> None:
        planner = hooked(DefaultLoadPlanner, hook, result)
        xckpt.load("memory://hooks-misread", STATE, group=group, planner=planner)

    refused_on_all(size, load, hook, "an item of other types than ReadItem(")


def test_an_item_that_fills_what_is_beyond_all_memory_is_refused():
    xckpt.save("memory://hooks-beyond", STATE, overwrite=True)

    def result(plan: Any) -> Any:
        return replace(plan, items=[replace(plan.items[0], dest_offsets=(1 << 70, 0))])

    planner = hooked(DefaultLoadPlanner, "create_local_plan", result)
    with pytest.raises(xckpt.PlanError, match=r"w: an item fills .* beyond the box"):
        xckpt.load("memory://hooks-beyond", STATE, planner=planner)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("misbuild", MISBUILT.values(), ids=MISBUILT)
def test_an_item_of_other_types_is_shown(tmp_path: Path, size, misbuild):
    def result(plan: Any) -> Any:
        first, *others = sorted(plan.items, key=lambda item: item.index.fqn != "w")
        return replace(plan, items=[misbuild(first), *others])

    def save(group: Any) -> None:
        planner = hooked(DefaultSavePlanner, "create_local_plan", result)
        xckpt.save(tmp_path / "ckpt", STATE, group=group, planner=planner)

    refused_on_all(size, save, "create_local_plan", "an item of other types than WriteItem(")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("field", "huge"),
    [
        ("size", (1 << 70, 3)),
        ("chunk", ChunkStorageMetadata((1 << 62, 0), (1 << 62, 3))),
        ("chunk", ChunkStorageMetadata((-1 << 70, 0), (4, 3))),
    ],
)
def test_a_box_beyond_all_that_is_stored_is_refused(tmp_path: Path, field: str, huge: object):
    def result(plan: Any) -> Any:
        item = plan.items[0]
        return replace(
            plan, items=[replace(item, tensor_data=replace(item.tensor_data, **{field: huge}))]
        )

    planner = hooked(DefaultSavePlanner, "create_local_plan", result)
    with pytest.raises(xckpt.PlanError, match=r"w: a box .* beyond any that is stored"):
        xckpt.save(tmp_path / "ckpt", STATE, planner=planner)


@pytest.mark.parametrize("what", [None, "text", b"bytes", [1.0]])
def test_data_that_are_no_tensor_are_refused(tmp_path: Path, what: object):
    class Wrong(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> object:
            return what

    with pytest.raises(xckpt.PlanError, match="w: resolve_data must return a tensor, not a"):
        xckpt.save(tmp_path / "ckpt", {"w": WEIGHT}, planner=Wrong())
    assert list(tmp_path.iterdir()) == []


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, whose memory was taken away, as FSDP does it."""
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (torch.empty(4, 3, device="meta"), "on the meta device has no elements"),
        (torch.zeros(4, 3).to_sparse(), "sparse"),
        (freed(torch.zeros(4, 3)), "was freed"),
    ],
    ids=["meta", "sparse", "freed"],
)
def test_tensors_without_plain_elements_are_refused(tmp_path: Path, data: object, text: str):
    class Wrong(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> object:
            return data

    with pytest.raises(xckpt.UnsupportedLeafError, match=f"w: .*{text}"):
        xckpt.save(tmp_path / "ckpt", {"w": WEIGHT}, planner=Wrong())
    assert list(tmp_path.iterdir()) == []


def test_a_scalar_of_numpy_is_a_tensor_without_dimensions():
    class Summing(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> object:
            data: Any = super().resolve_data(write_item)
            return data.sum()

    path = fresh_path()
    xckpt.save(path, {"loss": np.array(2.5)}, planner=Summing())
    assert xckpt.load(path)["loss"] == 2.5


READ_ONLY = np.broadcast_to(np.zeros(3, np.float32), (4, 3))


@pytest.mark.parametrize(("what", "text"), [(None, "a NoneType"), (READ_ONLY, "cannot be written")])
def test_a_destination_that_is_no_memory_is_refused(what: object, text: str):
    class Wrong(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> object:
            return what

    xckpt.save("memory://hooks-destination", {"w": WEIGHT}, overwrite=True)
    with pytest.raises(xckpt.PlanError, match=rf"w: resolve_tensor must return .*{text}"):
        xckpt.load("memory://hooks-destination", {"w": WEIGHT}, planner=Wrong())


class Elsewhere(DefaultLoadPlanner):
    """Reads into memory of its own, and lets the default hook commit it."""

    dtype: type = np.float32

    def resolve_tensor(self, read_item: ReadItem) -> object:
        return np.full(read_item.lengths, -1, self.dtype)


def test_what_was_read_elsewhere_is_brought_to_the_target():
    """It was left there, and the target was whatever its memory had held."""
    xckpt.save("memory://hooks-elsewhere", {"w": WEIGHT})
    loaded = xckpt.load("memory://hooks-elsewhere", {"w": WEIGHT}, planner=Elsewhere())
    assert np.array_equal(loaded["w"], WEIGHT)
    state = {"w": np.zeros_like(WEIGHT)}
    xckpt.load_into("memory://hooks-elsewhere", state, planner=Elsewhere())
    assert np.array_equal(state["w"], WEIGHT)
    planner = Elsewhere()
    planner.dtype = np.int8
    with pytest.raises(xckpt.PlanError, match=r"w: commit_tensor was given int8 .* for float32"):
        xckpt.load("memory://hooks-elsewhere", {"w": WEIGHT}, planner=planner)


@pytest.mark.parametrize("base", [DefaultLoadPlanner, Elsewhere])
def test_what_a_planner_commits_is_what_is_loaded(base: type[DefaultLoadPlanner]):
    """With both hooks overridden the target kept what it had, and no error said so."""

    class Doubling(base):
        def commit_tensor(self, read_item: ReadItem, tensor: Any) -> None:
            super().commit_tensor(read_item, 2 * tensor)

    path = fresh_path()
    xckpt.save(path, {"w": WEIGHT})
    assert np.array_equal(xckpt.load(path, {"w": WEIGHT}, planner=Doubling())["w"], 2 * WEIGHT)
    state = {"w": np.zeros_like(WEIGHT)}
    xckpt.load_into(path, state, planner=Doubling())
    assert np.array_equal(state["w"], 2 * WEIGHT)


def test_a_planner_commits_all_elements_of_an_item():
    class Cutting(DefaultLoadPlanner):
        def commit_tensor(self, read_item: ReadItem, tensor: Any) -> None:
            super().commit_tensor(read_item, tensor[:1].copy())

    path = fresh_path()
    xckpt.save(path, {"w": WEIGHT})
    with pytest.raises(xckpt.PlanError, match="w: commit_tensor was given float32 of shape"):
        xckpt.load(path, {"w": WEIGHT}, planner=Cutting())


def test_an_item_that_was_not_committed_is_an_error():
    class Forgetful(DefaultLoadPlanner):
        def commit_tensor(self, read_item: ReadItem, tensor: object) -> None:
            pass

    xckpt.save("memory://hooks-forgotten", {"w": WEIGHT})
    with pytest.raises(xckpt.PlanError, match="w: commit_tensor was not called for each item read"):
        xckpt.load("memory://hooks-forgotten", {"w": WEIGHT}, planner=Forgetful())


def test_arguments_of_the_state_dict_calls_are_named():
    no_writer: Any = "path"
    with pytest.raises(TypeError, match="give a StorageWriter, such as xckpt"):
        xckpt.save_state_dict(STATE, no_writer)
    with pytest.raises(TypeError, match="give a StorageReader, such as xckpt"):
        xckpt.load_state_dict({}, no_writer)
    writer: Any = xckpt.storage.ZarrStorageWriter("memory://hooks-arguments")
    no_planner: Any = DefaultLoadPlanner()
    with pytest.raises(TypeError, match=r"save_state_dict takes an instance of .*SavePlanner"):
        xckpt.save_state_dict(STATE, writer, planner=no_planner)
