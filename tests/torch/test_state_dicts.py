"""Models that torch wraps, through torch's own state dicts: saved in one way, resumed in another.

Every rank trains on the same data, so that training is the same however the model is sharded, but
for the order of sums. What is saved and loaded must be equal to the bit: a checkpoint that is
loaded and saved again is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor

import xckpt
from tests.support.ranks import Ranks
from tests.torch.test_save_load import load, on_rank_group
from tests.torch.test_stateful import equal

GROUPS = {"four": [0, 1, 2, 3], "three": [0, 1, 2], "two": [1, 3]}
SIDES = {"four": (2, 2), "three": (1, 3), "two": (2, 1)}
"""Replicas and shards of HSDP."""


@functools.cache
def on_rank_mesh(group: str, replicas: bool) -> DeviceMesh:
    """A mesh of the group's ranks, made once by all four together."""
    ranks = np.array(GROUPS[group])
    if replicas:
        return DeviceMesh("cpu", ranks.reshape(SIDES[group]), mesh_dim_names=("replicate", "shard"))
    return DeviceMesh("cpu", ranks, mesh_dim_names=("shard",))


@functools.cache
def on_rank_members(group: str) -> Any:
    """The ranks as torch's own process group, made once by all four together."""
    return dist.new_group(GROUPS[group])


def on_rank_prepare() -> None:
    """Make what all four ranks make together, before some of them are left out."""
    for group in GROUPS:
        on_rank_members(group)
        on_rank_group(group)
        for replicas in (False, True):
            on_rank_mesh(group, replicas)


class App:
    """A model and its optimizer as torch's documents say that they be saved."""

    def __init__(self, way: str, group: str, seed: int) -> None:
        torch.manual_seed(seed)
        model: Any = torch.nn.Sequential(
            torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.ReLU(), torch.nn.Linear(7, 3)
        ).double()
        self.model = wrap(model, way, group)
        decayed = [p for name, p in self.model.named_parameters() if name.endswith("0.weight")]
        others = [p for name, p in self.model.named_parameters() if not name.endswith("0.weight")]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.9))

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )

    def train(self, first: int, last: int) -> list[float]:
        """The losses of these steps."""
        losses: list[float] = []
        for number in range(first, last):
            torch.manual_seed(number)
            loss = self.model(torch.randn(8, 5).double()).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses


def wrap(model: torch.nn.Module, way: str, group: str) -> Any:
    """The model, sharded in one of torch's ways."""
    cpu = torch.device("cpu")
    if way == "fsdp2":
        return fully_shard(model, mesh=on_rank_mesh(group, False))
    if way == "fsdp2 hsdp":
        for layer in model:  # type: ignore[attr-defined]  # a Sequential
            fully_shard(layer, mesh=on_rank_mesh(group, True))
        return fully_shard(model, mesh=on_rank_mesh(group, True))
    if way == "fsdp1 sharded tensors":
        members = on_rank_members(group)
        return FullyShardedDataParallel(model, members, use_orig_params=True, device_id=cpu)
    if way == "fsdp1 dtensors":
        mesh = on_rank_mesh(group, False)
        return FullyShardedDataParallel(
            model, device_mesh=mesh, use_orig_params=True, device_id=cpu
        )
    if way == "fsdp1 hsdp":
        return FullyShardedDataParallel(
            model,
            device_mesh=on_rank_mesh(group, True),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            use_orig_params=True,
            device_id=cpu,
        )
    assert way == "plain"
    return model


KINDS = {
    "plain": torch.nn.Parameter,
    "fsdp2": DTensor,
    "fsdp2 hsdp": DTensor,
    "fsdp1 sharded tensors": ShardedTensor,
    "fsdp1 dtensors": DTensor,
    "fsdp1 hsdp": DTensor,
}
"""What a model's state dict holds."""


def on_rank_save(rank: int, path: Path, way: str, group: str) -> list[float]:
    on_rank_prepare()
    if rank not in GROUPS[group]:
        return []
    app = App(way, group, 0)
    app.train(0, 3)
    xckpt.save(path, {"app": app, "step": 3}, group=on_rank_group(group))
    return app.train(3, 6)


def on_rank_resume(rank: int, path: Path, way: str, group: str) -> tuple[list[float], str]:
    """The losses after a resume, and what the state dict holds; saves what was loaded again."""
    on_rank_prepare()
    if rank not in GROUPS[group]:
        return [], ""
    app = App(way, group, 1)
    state = {"app": app, "step": 0}
    xckpt.load_into(path, state, group=on_rank_group(group))
    assert state == {"app": app, "step": 3}
    xckpt.save(path.with_name(f"{path.name} again"), state, group=on_rank_group(group))
    weight = app.state_dict()["model"]["0.weight"]
    return app.train(3, 6), type(weight).__name__


@functools.cache
def uninterrupted() -> list[float]:
    app = App("plain", "four", 0)
    return app.train(0, 6)


def same_checkpoints(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same tree, to the bit."""
    a, b = xckpt.open(one), xckpt.open(other)
    assert sorted(a) == sorted(b)
    for name in a:
        kind = getattr(a[name], "dtype", type(a[name]))
        assert kind == getattr(b[name], "dtype", type(b[name])), name
        np.testing.assert_array_equal(np.asarray(a[name]), np.asarray(b[name]), err_msg=name)
    return dict(a.metadata.containers) == dict(b.metadata.containers)


JOURNEYS = [
    ("plain", "two", "fsdp2", "four"),
    ("fsdp2", "four", "fsdp2", "three"),
    ("fsdp2", "three", "fsdp2 hsdp", "four"),
    ("fsdp2 hsdp", "four", "fsdp2", "two"),
    ("fsdp2", "four", "fsdp1 sharded tensors", "three"),
    ("fsdp1 sharded tensors", "four", "fsdp1 sharded tensors", "two"),
    ("fsdp1 sharded tensors", "three", "fsdp1 dtensors", "four"),
    ("fsdp1 dtensors", "two", "fsdp1 hsdp", "four"),
    ("fsdp1 hsdp", "four", "fsdp2 hsdp", "two"),
    ("fsdp1 dtensors", "four", "plain", "three"),
]


OFTEN = (0, 4, 6, 7, 8)
"""Which of them the default tier takes: each way is left once, and reached once."""


@pytest.mark.parametrize(
    "before, saved_by, after, loaded_by",
    [
        pytest.param(*journey, marks=() if number in OFTEN else pytest.mark.thorough)
        for number, journey in enumerate(JOURNEYS)
    ],
)
def test_training_goes_on_in_another_way(
    four_ranks: Ranks,
    folders: Iterator[Path],
    before: str,
    saved_by: str,
    after: str,
    loaded_by: str,
) -> None:
    path = next(folders)
    expected = uninterrupted()[3:]
    for rank, losses in enumerate(four_ranks.run(on_rank_save, path, before, saved_by)):
        if rank in GROUPS[saved_by]:
            np.testing.assert_allclose(losses, expected, rtol=1e-9)
    answers = four_ranks.run(on_rank_resume, path, after, loaded_by)
    for rank in GROUPS[loaded_by]:
        losses, kind = answers[rank]
        np.testing.assert_allclose(losses, expected, rtol=1e-9)
        assert kind in (KINDS[after].__name__, "Tensor")
        assert (kind == "Tensor") == (after == "plain")
    assert same_checkpoints(path, path.with_name(f"{path.name} again"))


def on_rank_options(rank: int, path: Path) -> bool:
    """Model and optimizer apart, and the optimizer's state flattened; on other ranks too."""
    on_rank_prepare()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    app = App("fsdp2", "four", 0)
    app.train(0, 3)
    state = {
        "model": get_model_state_dict(app.model),
        "optim": get_optimizer_state_dict(app.model, app.optimizer, options=flat),
    }
    xckpt.save(path, state)
    dist.barrier()
    if rank not in GROUPS["three"]:
        return True
    other = App("fsdp2", "three", 1)
    into = {
        "model": get_model_state_dict(other.model),
        "optim": get_optimizer_state_dict(other.model, other.optimizer, options=flat),
    }
    xckpt.load_into(path, into, group=on_rank_group("three"))
    set_model_state_dict(other.model, into["model"])
    set_optimizer_state_dict(other.model, other.optimizer, into["optim"], options=flat)
    return bool(np.allclose(other.train(3, 6), uninterrupted()[3:], rtol=1e-9))


def test_flattened_optimizer_states(four_ranks: Ranks, folders: Iterator[Path]) -> None:
    path = next(folders)
    assert four_ranks.run(on_rank_options, path) == [True] * 4
    stored = load(path)["optim"]
    assert stored["state.0.weight.exp_avg"].shape == (7, 5)
    assert stored["param_groups.0.weight.weight_decay"] == 0.1


def on_rank_objects(rank: int, path: Path, way: str, group: str) -> bool:
    """The model and the optimizer themselves, the optimizer new, on a part of the ranks."""
    on_rank_prepare()
    if rank not in GROUPS[group]:
        return True
    app = App(way, group, 1)
    state = {"model": app.model, "optim": app.optimizer, "step": 0}
    xckpt.load_into(path, state, group=on_rank_group(group))
    parameter = next(iter(app.model.parameters()))
    moments = app.optimizer.state[parameter]["exp_avg"]
    assert type(moments) is (DTensor if way.startswith("fsdp2") else torch.Tensor)
    assert getattr(moments, "placements", ()) == getattr(parameter, "placements", ())
    return bool(np.allclose(app.train(3, 6), uninterrupted()[3:], rtol=1e-9))


def test_wrapped_objects_themselves(four_ranks: Ranks, folders: Iterator[Path]) -> None:
    """Saved by one process that knows no wrapper; a new optimizer's moments are as its weights."""
    path = next(folders)
    app = App("plain", "four", 0)
    app.train(0, 3)
    xckpt.save(path, {"model": app.model, "optim": app.optimizer, "step": 3})
    for way, group in [("fsdp2", "three"), ("fsdp2 hsdp", "four"), ("plain", "two")]:
        assert four_ranks.run(on_rank_objects, path, way, group) == [True] * 4


def on_rank_flattened(rank: int, path: Path, originals: bool) -> str:
    """The optimizer itself, over FSDP1: what an attempt to save it raises."""
    on_rank_prepare()
    cpu = torch.device("cpu")
    model: Any = torch.nn.Linear(5, 8)
    model = FullyShardedDataParallel(model, use_orig_params=originals, device_id=cpu)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    try:
        xckpt.save(path, {"model": model, "optim": optimizer})
    except xckpt.UnsupportedLeafError as error:
        return str(error)
    return "it was saved"


@pytest.mark.parametrize("originals", [False, True])
def test_an_optimizer_over_fsdp1_is_refused(
    originals: bool, four_ranks: Ranks, folders: Iterator[Path]
) -> None:
    """Its moments are parts of one shape on all ranks: they would be taken for replicas."""
    for text in four_ranks.run(on_rank_flattened, next(folders), originals):
        assert "optim: the state_dict() of an optimizer over FSDP1" in text


def on_rank_exact(rank: int, path: Path) -> bool:
    """An optimizer's state dict with all that may be in one."""
    weights = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]
    groups = [{"params": [weights[1]], "lr": 0.25, "tag": "a/b"}, {"params": [weights[0]]}]
    optimizer = torch.optim.Adam(groups, lr=0.5, amsgrad=True, foreach=False, maximize=True)
    for weight in weights:
        weight.grad = torch.full_like(weight, 0.5)
    optimizer.step()
    saved = optimizer.state_dict()
    xckpt.save(path, saved)
    fresh = torch.optim.Adam([{"params": [weights[1]]}, {"params": [weights[0]]}])
    xckpt.load_into(path, fresh)
    assert fresh.param_groups[0]["foreach"] is False
    assert list(saved["state"]) == [0, 1]
    return equal(fresh.state_dict(), saved) and equal(load(path, saved), saved)


def test_optimizer_states_are_exact(four_ranks: Ranks, folders: Iterator[Path]) -> None:
    assert four_ranks.run(on_rank_exact, next(folders)) == [True] * 4
