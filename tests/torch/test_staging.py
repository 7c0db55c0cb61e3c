"""Staged torch states, and saves in the background of real gloo ranks that go on training."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import xckpt
from tests.support.ranks import Ranks, die
from tests.support.torch_meshes import on_rank_mesh
from tests.torch.sharded.test_sharded_tensor import Cut
from tests.torch.test_save_load import on_rank_group
from xckpt.core.leaf import HostSource
from xckpt.core.plan.save import DefaultSavePlanner
from xckpt.errors import NotACheckpointError, RanksFailedError, UnsupportedLeafError
from xckpt.staging import AsyncStager, BlockingAsyncStager
from xckpt.torch.group import TorchGroup

SECONDS = 60
MESHES = {"two": "two", "three": "three", "four": "4"}
"""Group -> the mesh of its ranks."""


def stage(state: Any, cached: bool = False) -> Any:
    return BlockingAsyncStager(cached).stage(state)


class Tied(torch.nn.Module):
    """Two layers with one weight, a buffer of a part of it, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(40, 8)
        self.head = torch.nn.Linear(8, 40, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("first", self.embed.weight.detach()[:4])
        self.register_buffer("count", torch.tensor(3))


def test_a_model_is_staged_with_its_ties() -> None:
    model = Tied()
    expected = {name: leaf.clone() for name, leaf in model.state_dict().items()}
    staged = stage({"model": model.state_dict(), "of": model})
    assert list(staged["model"]) == list(expected) == list(staged["of"])
    with torch.no_grad():
        model.embed.weight.zero_()
        model.count += 1  # type: ignore[operator]  # a buffer
    for tree in staged.values():
        assert all(torch.equal(tree[name], leaf) for name, leaf in expected.items())
        weights = [tree[name].untyped_storage().data_ptr() for name in expected if name != "count"]
        assert len(set(weights)) == 1
        assert tree["first"].data_ptr() == tree["head.weight"].data_ptr()


def test_an_optimizer_is_staged_as_it_is_now() -> None:
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(5)).sum().backward()
        optimizer.step()
    staged = stage({"opt": optimizer})["opt"]
    kept = {key: dict(moments) for key, moments in staged["state"].items()}
    moment = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    model(torch.ones(5)).sum().backward()
    optimizer.step()
    assert torch.equal(kept[0]["exp_avg"], moment)
    assert kept[0]["step"] == 2 and staged["param_groups"][0]["params"] == [0, 1]


@pytest.mark.parametrize("cached", [False, True])
def test_the_kind_of_every_tensor_is_kept(cached: bool) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    state = {
        "transposed": base.T,
        "columns": base[:, 1::2],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "parameter": torch.nn.Parameter(base.clone(), requires_grad=True),
        "frozen": torch.nn.Parameter(torch.arange(3), requires_grad=False),
        "bfloat16": torch.arange(5, dtype=torch.bfloat16),
        "float8": torch.arange(4).to(torch.float8_e4m3fn),
        "complex": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "negated": torch.tensor([1 + 2j]).conj().imag,
        "graph": base.clone().requires_grad_() * 2,
        "0-d": torch.tensor(4.5),
        "empty": torch.empty(0, 3),
        "bool": torch.tensor([True, False]),
    }
    expected = {name: leaf.detach().clone() for name, leaf in state.items()}
    staged = stage(state, cached)
    for name, leaf in state.items():
        found = staged[name]
        assert type(found) is type(leaf) and found.dtype == leaf.dtype
        assert found.shape == leaf.shape
        if isinstance(leaf, torch.nn.Parameter):
            assert found.requires_grad == leaf.requires_grad
        else:
            assert not found.requires_grad
    with torch.no_grad():
        for leaf in (base, state["parameter"], state["frozen"], state["0-d"], state["bool"]):
            leaf.zero_()
        state["complex"].conj().zero_()
    for name, leaf in expected.items():
        found = staged[name].detach().resolve_conj().resolve_neg()
        assert torch.equal(found, leaf.resolve_conj().resolve_neg()), name


def test_a_dtype_is_no_new_copy() -> None:
    """Two dtypes over one storage: one copy."""
    base = torch.arange(8, dtype=torch.int32)
    staged = stage({"a": base, "b": base.view(torch.uint8), "c": base.numpy()})
    staged["a"][0] = 7
    assert staged["b"][0] == 7 and staged["c"][0] == 7


@pytest.mark.parametrize(
    "leaf, words",
    [
        (torch.ones(3).to_sparse(), "w: a sparse"),
        (torch.empty(3, device="meta"), "w: a tensor on the meta device"),
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "w: a "),
    ],
)
def test_what_has_no_elements_is_refused_by_name(leaf: torch.Tensor, words: str) -> None:
    with pytest.raises(UnsupportedLeafError, match=words):
        stage({"w": leaf})


def test_freed_memory_is_not_read() -> None:
    freed = torch.ones(1 << 20)
    freed.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedLeafError, match="w: the storage of this tensor"):
        stage({"w": freed})


def test_pinned_memory_needs_an_accelerator() -> None:
    assert not torch.accelerator.is_available()
    with pytest.raises(RuntimeError, match="accelerator"):
        BlockingAsyncStager(cache_staged_state_dict=True, pin_memory=True)


def on_rank_dtensors(rank: int) -> list[str]:
    """The classes and placements of staged DTensors; their elements are looked at here."""
    mesh, line = on_rank_mesh("2x2"), on_rank_mesh("4")
    full = torch.arange(70.0).reshape(10, 7)
    state = {
        "rows": distribute_tensor(full, line, [Shard(0)]),
        "both": distribute_tensor(full, mesh, [Shard(1), Shard(0)]),
        "mixed": distribute_tensor(full, mesh, [Replicate(), Shard(0)]),
        "twice": distribute_tensor(full, mesh, [Shard(0), Shard(0)]),
        "parameter": torch.nn.Parameter(distribute_tensor(full, line, [Shard(1)])),
        "0-d": distribute_tensor(torch.tensor(5.0), line, [Replicate()]),
    }
    state["tied"] = state["rows"]
    locals_ = {name: leaf.to_local().detach().clone() for name, leaf in state.items()}
    staged = stage(state)
    assert staged["tied"] is staged["rows"]
    for name, leaf in state.items():
        found = staged[name]
        assert isinstance(found, DTensor)
        assert isinstance(found, torch.nn.Parameter) == isinstance(leaf, torch.nn.Parameter)
        assert (found.placements, found.device_mesh) == (leaf.placements, leaf.device_mesh)
        assert (found.shape, found.stride()) == (leaf.shape, leaf.stride())
        with torch.no_grad():
            leaf.to_local().fill_(-1)
        assert torch.equal(found.to_local(), locals_[name]), name
    with pytest.raises(UnsupportedLeafError, match=r"w: a DTensor with Partial"):
        stage({"w": DTensor.from_local(torch.ones(2), line, [Partial()])})
    return [str(staged[name].placements) for name in ("both", "mixed")]


def test_dtensors_stay_what_they_are(four_ranks: Ranks) -> None:
    assert len({str(found) for found in four_ranks.run(on_rank_dtensors)}) == 1


CUTS = [
    Cut((10, 3), "float32", (0, 1, 2, 3), dim=0),
    Cut((4, 6), "bfloat16", (3, 0), boxes=(((0, 0), (4, 2)), ((0, 2), (4, 4)))),
]


def on_rank_sharded_tensors(rank: int, path: Path) -> None:
    state = {str(number): cut.on_rank_tensor() for number, cut in enumerate(CUTS)}
    saving = xckpt.save_async(path, state)
    staged = stage(state)
    for name, leaf in state.items():
        found = staged[name]
        assert isinstance(found, ShardedTensor)
        assert str(found.metadata()) == str(leaf.metadata())
        expected = [shard.tensor.clone() for shard in leaf.local_shards()]
        for shard in leaf.local_shards():
            shard.tensor.zero_()
        for shard, tensor in zip(found.local_shards(), expected, strict=True):
            assert torch.equal(shard.tensor, tensor)
    saving.result(SECONDS)


def test_sharded_tensors_stay_what_they_are(four_ranks: Ranks, folders: Iterator[Path]) -> None:
    path = next(folders)
    four_ranks.run(on_rank_sharded_tensors, path)
    for number, cut in enumerate(CUTS):
        assert np.array_equal(xckpt.load(path)[str(number)], cut.array())


class Odd(torch.Tensor):
    """A class whose objects cannot be rebuilt."""


def test_other_classes_become_descriptions() -> None:
    odd = torch.arange(3.0).as_subclass(Odd)
    staged = stage({"w": odd})["w"]
    odd.zero_()
    assert isinstance(staged, HostSource)
    assert np.array_equal(staged.data(0), [0, 1, 2])


class Slow(DefaultSavePlanner):
    """Holds the save up, so that training goes on beside it."""

    def finish_plan(self, new_plan: Any) -> Any:
        time.sleep(0.05)
        return super().finish_plan(new_plan)


def on_rank_train(rank: int, name: str, path: Path, cached: bool) -> float | None:
    """Steps of a training that reduces all the time, each saved and never waited for."""
    group, mesh = on_rank_group(name), on_rank_mesh(MESHES[name])
    if group is None:
        return None
    channel = group._process_group
    weights = torch.zeros(64, 8)
    rows = distribute_tensor(torch.zeros(30, 4), mesh, [Shard(0)])
    stager = BlockingAsyncStager(cache_staged_state_dict=cached)
    reductions, last = 0.0, None
    for step in range(6):
        state = {"weights": weights, "rows": rows, "step": step}
        last = xckpt.save_async(path / str(step), state, stager=stager, group=group, planner=Slow())
        for _ in range(20):
            gradient = torch.full((64, 8), float(dist.get_rank(channel) + 1))
            dist.all_reduce(gradient, group=channel)
            reductions += float(gradient[0, 0])
        weights += 1
        rows.to_local().add_(1)
    assert last is not None
    last.result(SECONDS)
    return reductions


@pytest.mark.parametrize(
    "name, size, cached",
    [
        ("two", 2, True),
        ("four", 4, False),
        *[
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in [
                ("two", 2, False),
                ("three", 3, False),
                ("three", 3, True),
                ("four", 4, True),
            ]
        ],
    ],
)
def test_training_reduces_while_saves_are_in_flight(
    four_ranks: Ranks, folders: Iterator[Path], name: str, size: int, cached: bool
) -> None:
    path = next(folders)
    found = [sums for sums in four_ranks.run(on_rank_train, name, path, cached) if sums is not None]
    assert found == [6 * 20 * size * (size + 1) / 2] * size
    for step in range(6):
        loaded = xckpt.load(path / str(step))
        assert loaded["step"] == step
        assert (loaded["weights"] == step).all() and (loaded["rows"] == step).all()
        assert loaded["rows"].shape == (30, 4)


def on_rank_own_connections(rank: int) -> None:
    group = TorchGroup(
        cast(dist.ProcessGroup, dist.new_group())
    )  # that no load before has left early
    first, second = group.in_background(), group.in_background()
    assert first._star is second._star
    assert first._star is not group._star
    assert (first.rank, first.size, first.coordinator) == (group.rank, group.size, 0)
    heard: list[Any] = []
    thread = threading.Thread(target=lambda: heard.append(first.gather(bytes([rank]))))
    thread.start()
    assert group.gather(b"x" * rank) == ([b"x" * r for r in range(4)] if rank == 0 else None)
    thread.join(SECONDS)
    assert heard == [[bytes([r]) for r in range(4)] if rank == 0 else None]


def test_the_background_has_connections_of_its_own(four_ranks: Ranks) -> None:
    four_ranks.run(on_rank_own_connections)


class FailingStager(AsyncStager):
    def stage(self, state_dict: Any) -> Any:
        raise MemoryError("no room for a copy")


def on_rank_failing_stager(rank: int, path: Path) -> str:
    state = {"w": torch.ones(4)}
    stager = FailingStager() if rank == 2 else None
    saving = xckpt.save_async(path, state, stager=stager)
    with pytest.raises(MemoryError) as caught:
        saving.result(SECONDS)
    xckpt.save_async(path.with_name("after"), state, overwrite=True).result(SECONDS)
    return str(caught.value)


def test_a_rank_whose_stager_fails_fails_the_save(
    four_ranks: Ranks, folders: Iterator[Path]
) -> None:
    path = next(folders)
    for text in four_ranks.run(on_rank_failing_stager, path):
        assert "rank 2: LeafTooLargeError: not enough memory: no room for a copy; free" in text
    with pytest.raises(NotACheckpointError):
        xckpt.load(path)


class Deadly(DefaultSavePlanner):
    def finish_plan(self, new_plan: Any) -> Any:
        die()


def on_rank_dies(rank: int, path: Path) -> tuple[list[int], float]:
    started = time.monotonic()
    planner = Deadly() if rank == 1 else DefaultSavePlanner()
    saving = xckpt.save_async(path, {"w": torch.ones(4, 3), "step": 1}, planner=planner)
    with pytest.raises(RanksFailedError) as caught:
        saving.result(SECONDS)
    return [failure.rank for failure in caught.value.failures], time.monotonic() - started


def test_a_killed_rank_fails_the_save_of_the_others(tmp_path: Path) -> None:
    with Ranks(3) as ranks:
        answers = ranks.attempt(on_rank_dies, tmp_path / "a")
        assert answers[1] == (False, "ended with code -9")
        for ok, answer in (answers[0], answers[2]):
            assert ok, answer
            assert 1 in answer[0] and answer[1] < SECONDS / 2
    with pytest.raises(NotACheckpointError):
        xckpt.load(tmp_path / "a")
