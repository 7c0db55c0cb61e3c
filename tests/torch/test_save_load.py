"""Saved by torch on a mesh, loaded by torch on another or by NumPy: the arrays are the oracle."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import xckpt
from tests.support.examples import examples
from tests.support.ranks import Ranks, die
from tests.support.torch_meshes import Case, cases, on_rank_distribute, on_rank_mesh
from tests.torch.sharded.test_dtensor import Held, assert_holds, held_by
from xckpt.core.dtypes import numpy_dtype
from xckpt.core.metadata import TensorStorageMetadata
from xckpt.errors import (
    NotACheckpointError,
    PlanError,
    TreeMismatchError,
    UnsupportedLeafError,
    XckptError,
)
from xckpt.torch.adapter import ADAPTER
from xckpt.torch.group import TorchGroup

GROUPS = {"four": [0, 1, 2, 3], "three": [0, 1, 2], "two": [1, 3], "one": [2]}
WITHIN = {"four": None, "three": ["three", "one"], "two": ["two"], "one": ["one"]}
"""Group -> the meshes that lie in it; None for all."""


@functools.cache
def on_rank_group(name: str) -> TorchGroup | None:
    """The group, made once by all four ranks together; None for the ranks that are not in it."""
    group = dist.new_group(GROUPS[name])
    if dist.get_rank() not in GROUPS[name]:
        return None
    assert isinstance(group, dist.ProcessGroup)
    return TorchGroup(group, coordinator_rank=len(GROUPS[name]) - 1)


@st.composite
def journeys(draw: st.DrawFn) -> tuple[list[Case], str, list[Case]]:
    """Some tensors as they are saved by four ranks, and as they are loaded by a group."""
    saved = draw(st.lists(cases(), min_size=1, max_size=4))
    group = draw(st.sampled_from(sorted(GROUPS)))
    loaded = [
        draw(cases(shape=case.shape, dtype=case.dtype, meshes=WITHIN[group])) for case in saved
    ]
    return saved, group, loaded


def load(path: Path, *args: Any, **options: Any) -> Any:
    """`xckpt.load`, for tests that know what comes back."""
    return xckpt.load(path, *args, **options)


def state_of(leaves: list[Any]) -> dict[str, Any]:
    return {"model": {f"w.{i}": leaf for i, leaf in enumerate(leaves)}, "step": 7, "note": "a/b"}


def plain(numbers: int) -> torch.Tensor:
    return torch.arange(numbers, dtype=torch.int32)


def on_rank_save(rank: int, path: Path, saved: list[Case]) -> list[str]:
    state = state_of([on_rank_distribute(case) for case in saved])
    metadata = xckpt.save(path, {**state, "plain": plain(11), "empty": torch.ones(0, 3)})
    return list(metadata.state_dict_metadata)


def on_rank_load(
    rank: int, path: Path, group_name: str, loaded: list[Case], how: str
) -> list[Held]:
    """What the rank holds of each leaf after a load as the cases say; nothing outside the group."""
    likes = [on_rank_distribute(case) for case in loaded]
    with torch.no_grad():
        for like in likes:
            like.to_local().zero_()
    group = on_rank_group(group_name)
    if group is None:
        return []
    state = {**state_of(list(likes)), "step": 0, "note": "", "plain": torch.zeros(11).int()}
    state["empty"] = torch.ones(0, 3, device="cpu" if how == "in place" else "meta")
    if how == "in place":
        result = state
        xckpt.load_into(path, state, group=group)
    else:
        if how == "meta":
            state["model"] = {
                key: torch.empty_like(like, device="meta") for key, like in state["model"].items()
            }
        result = load(path, state, group=group)
    assert result["step"] == 7
    assert result["note"] == "a/b"
    assert torch.equal(result["plain"], plain(11))
    assert result["empty"].shape == (0, 3)
    assert result["empty"].device.type == "cpu"
    held: list[Held] = []
    for like, case in zip(result["model"].values(), loaded, strict=True):
        assert isinstance(like, DTensor)
        assert (like is likes[len(held)]) == (how == "in place")
        assert like.device_mesh == on_rank_mesh(case.mesh)
        source = ADAPTER.describe(like, "w")
        assert source is not None
        held.append(held_by(source))
    return held


@examples(4, 150)
@given(journey=journeys(), how=st.sampled_from(["new", "meta", "in place"]))
@example(
    journey=(
        [Case((7, 5), "bfloat16", "2x2", (0, 1)), Case((), "float32", "4", (None,))],
        "three",
        [Case((7, 5), "bfloat16", "three", (1,)), Case((), "float32", "one", (None,))],
    ),
    how="meta",
)
def test_any_mesh_to_any_other(
    four_ranks: Ranks,
    folders: Iterator[Path],
    journey: tuple[list[Case], str, list[Case]],
    how: str,
) -> None:
    saved, group, loaded = journey
    path = next(folders)
    names = four_ranks.run(on_rank_save, path, saved)
    expected = [f"model/w.{i}" for i in range(len(saved))]
    assert names == [[*expected, "step", "note", "plain", "empty"]] * 4

    here = load(path)
    assert here["step"] == 7
    assert here["note"] == "a/b"
    np.testing.assert_array_equal(here["plain"], np.arange(11))
    assert here["empty"].shape == (0, 3)
    for i, case in enumerate(saved):
        array = here["model"][f"w.{i}"]
        assert array.dtype == numpy_dtype(case.dtype)
        np.testing.assert_array_equal(array, case.array())

    answers = four_ranks.run(on_rank_load, path, group, loaded, how)
    for i, case in enumerate(saved):
        assert_holds([answers[rank][i] for rank in GROUPS[group]], case.array())


def on_rank_save_by(rank: int, path: Path, group_name: str, saved: list[Case]) -> None:
    leaves = [on_rank_distribute(case) for case in saved]
    group = on_rank_group(group_name)
    if group is not None:
        xckpt.save(path, state_of(list(leaves)), group=group)


@pytest.mark.parametrize("group", ["three", "two", "one"])
def test_a_subgroup_saves_alone(four_ranks: Ranks, folders: Iterator[Path], group: str) -> None:
    saved = [Case((8, 5), "float32", group, (0,)), Case((3,), "int64", group, (None,))]
    path = next(folders)
    four_ranks.run(on_rank_save_by, path, group, saved)
    for i, case in enumerate(saved):
        np.testing.assert_array_equal(load(path)["model"][f"w.{i}"], case.array())


def on_rank_save_reshaped(rank: int, path: Path) -> None:
    """Local rows that are several intervals, saved; and others, loaded."""
    mesh = on_rank_mesh("4")
    full = torch.arange(24.0)
    leaf = distribute_tensor(full.reshape(3, 8), mesh, [Shard(1)]).reshape(-1)
    xckpt.save(path, {"w": leaf})
    xckpt.save_async(path.with_suffix(".later"), {"w": leaf}).result(timeout=60)
    like = distribute_tensor(torch.zeros(2, 12), mesh, [Shard(1)]).reshape(-1)
    loaded = load(path, {"w": like})["w"]
    expected = distribute_tensor(full.reshape(2, 12), mesh, [Shard(1)]).reshape(-1)
    assert isinstance(expected, DTensor)
    assert torch.equal(loaded.to_local(), expected.to_local())


def test_interleaved_rows(four_ranks: Ranks, folders: Iterator[Path]) -> None:
    path = next(folders)
    four_ranks.run(on_rank_save_reshaped, path)
    for saved in (path, path.with_suffix(".later")):
        np.testing.assert_array_equal(load(saved)["w"], np.arange(24.0))


def on_rank_save_some(rank: int, path: Path) -> None:
    """Leaves that only some ranks have, as with pipeline parallelism."""
    state = {"all": torch.ones(3), f"stage {rank}": torch.full((4,), float(rank)), "step": 1}
    xckpt.save(path, state)
    mine = {"all": torch.zeros(3), f"stage {rank}": torch.zeros(4), "step": 0}
    xckpt.load_into(path, mine)
    assert (mine[f"stage {rank}"] == rank).all()
    assert (mine["all"] == 1).all()
    assert mine["step"] == 1


def test_leaves_of_some_ranks_only(four_ranks: Ranks, folders: Iterator[Path]) -> None:
    path = next(folders)
    four_ranks.run(on_rank_save_some, path)
    loaded = load(path)
    for rank in range(4):
        np.testing.assert_array_equal(loaded[f"stage {rank}"], np.full(4, rank, np.float32))


def locals_of(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def on_rank_train(rank: int, path: Path) -> list[bool]:
    """FSDP2 over tensor parallelism with AdamW: save, go on; load, go on; compare."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = on_rank_mesh("2x2")

    def make(seed: int):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())})
        fully_shard(model, mesh=mesh["dp"])
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model, optimizer, number: int) -> None:
        torch.manual_seed(number)
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make(0)
    for number in range(3):
        step(model, optimizer, number)
    xckpt.save(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    step(model, optimizer, 3)

    again, optimizer_again = make(1)
    step(again, optimizer_again, 9)
    state = {"model": again.state_dict(), "optimizer": optimizer_again.state_dict()}
    xckpt.load_into(path, state)
    optimizer_again.load_state_dict(state["optimizer"])
    step(again, optimizer_again, 3)
    return [
        torch.equal(locals_of(a), locals_of(b))
        for a, b in zip(model.parameters(), again.parameters(), strict=True)
    ]


def test_training_goes_on_as_if_uninterrupted(four_ranks: Ranks, folders: Iterator[Path]) -> None:
    answers = four_ranks.run(on_rank_train, next(folders))
    assert answers == [[True] * 4] * 4


def on_rank_fail_to_save(rank: int, path: Path, fault: str) -> str:
    """The message of a save that must fail; all ranks are alive afterwards."""
    mesh = on_rank_mesh("4")
    ones = torch.ones(4, 3)
    leaf = distribute_tensor(ones, mesh, [Shard(0)])
    local = leaf.to_local()
    state: dict[str, object] = {"fine": ones, "model": {"w": leaf}}
    if fault == "partial":
        state["model"] = {"w": DTensor.from_local(local, mesh, [Partial()], run_check=False)}
    if fault == "sparse" and rank == 2:
        state["model"] = {"w": ones.to_sparse()}
    if fault == "shape":
        state["model"] = {"w": torch.ones(4, 3 + (rank == 3))}
    if fault == "dtype":
        state["model"] = {"w": torch.ones(4, 3, dtype=torch.half if rank == 1 else torch.float)}
    if fault == "type" and rank == 1:
        state["model"] = {"w": 1.0}
    if fault == "missing" and rank == 3:
        state["model"] = {}
    if fault == "overlap" and rank in (0, 2):
        state["model"] = {"w": ones}
    with pytest.raises(
        UnsupportedLeafError if fault in ("partial", "sparse") else PlanError
    ) as caught:
        xckpt.save(path, state)
    return str(caught.value)


@pytest.mark.parametrize(
    "fault, words",
    [
        ("partial", ["model/w", "Partial", "ranks 0-3", "redistribute"]),
        ("sparse", ["model/w", "sparse", "rank 2", "to_dense"]),
        ("shape", ["model/w", "(4, 3)", "(4, 4)", "rank 0", "rank 3"]),
        ("dtype", ["model/w", "float32", "float16", "rank 0", "rank 1"]),
        ("type", ["model/w", "float", "tensor", "rank 0", "rank 1"]),
        ("missing", ["model/w", "[3, 4)"]),
        ("overlap", ["model/w", "[1, 2) x [0, 3)", "ranks 0, 2", "rank 1"]),
    ],
)
def test_a_save_that_cannot_be_is_refused_on_all_ranks(
    four_ranks: Ranks, folders: Iterator[Path], fault: str, words: list[str]
) -> None:
    path = next(folders)
    messages = four_ranks.run(on_rank_fail_to_save, path, fault)
    assert len(set(messages)) == 1
    for word in words:
        assert word in messages[0], messages[0]
    with pytest.raises(NotACheckpointError):
        xckpt.load(path)


def on_rank_fail_to_load(rank: int, path: Path, fault: str) -> str:
    mesh = on_rank_mesh("4")
    like = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])
    state: dict[str, object] = {"w": like}
    if fault == "shape":
        state = {"w": distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)])}
    if fault == "dtype":
        state = {"w": distribute_tensor(torch.zeros(4, 3).half(), mesh, [Shard(0)])}
    if fault == "missing":
        state = {"w": like, "b": torch.zeros(2)}
    if fault == "unexpected":
        state = {}
    if fault == "meta in place":
        state = {"w": torch.empty_like(like, device="meta")}
    call = xckpt.load_into if fault == "meta in place" else xckpt.load
    kind = UnsupportedLeafError if fault == "meta in place" else TreeMismatchError
    with pytest.raises(kind) as caught:
        call(path, state)
    assert not like.to_local().any()
    return str(caught.value)


@pytest.mark.parametrize(
    "fault, words",
    [
        ("shape", ["w", "(4, 3)", "(5, 3)"]),
        ("dtype", ["w", "float32", "float16"]),
        ("missing", ["b"]),
        ("unexpected", ["w"]),
        ("meta in place", ["w", "meta device"]),
    ],
)
def test_a_load_that_cannot_be_is_refused_on_all_ranks(
    four_ranks: Ranks, folders: Iterator[Path], fault: str, words: list[str]
) -> None:
    path = next(folders)
    xckpt.save(path, {"w": np.ones((4, 3), np.float32)})
    for text in four_ranks.run(on_rank_fail_to_load, path, fault):
        for word in words:
            assert word in text, text


def on_rank_save_and_die(rank: int, path: Path, victim: int) -> str:
    """A rank is killed in the middle of its writing."""
    from xckpt.planner import DefaultSavePlanner

    class Dying(DefaultSavePlanner):
        def resolve_data(self, write_item):
            if rank == victim:
                die()
            return super().resolve_data(write_item)

    leaf = distribute_tensor(torch.full((6, 4), 2.0), DeviceMesh("cpu", [0, 1, 2]), [Shard(0)])
    try:
        xckpt.save(path, {"w": leaf}, overwrite=True, planner=Dying())
    except XckptError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_commits_nothing(tmp_path: Path, victim: int) -> None:
    path = tmp_path / "ckpt"
    before = np.ones((6, 4), np.float32)
    xckpt.save(path, {"w": before})
    with Ranks(3) as ranks:
        answers = ranks.attempt(on_rank_save_and_die, path, victim)
    for rank, (ok, text) in enumerate(answers):
        if rank == victim:
            assert (ok, text) == (False, "ended with code -9")
        else:
            assert ok, text
            assert f"rank {victim}" in text
            assert "lost contact" in text
    np.testing.assert_array_equal(load(path)["w"], before)
    after = np.full((6, 4), 3, np.float32)
    xckpt.save(path, {"w": after}, overwrite=True)
    np.testing.assert_array_equal(load(path)["w"], after)


def on_rank_save_sharding(rank: int, path: Path) -> str:
    leaf = distribute_tensor(torch.ones(4, 4), on_rank_mesh("2x2"), [Replicate(), Shard(1)])
    metadata = xckpt.save(path, {"w": leaf}).state_dict_metadata["w"]
    assert isinstance(metadata, TensorStorageMetadata)
    return str(metadata.sharding)


def test_the_sharding_is_remembered(four_ranks: Ranks, folders: Iterator[Path]) -> None:
    path = next(folders)
    shardings = four_ranks.run(on_rank_save_sharding, path)
    assert set(shardings) == {"Replicate(), Shard(dim=1) on dp=2 x tp=2"}
    stored = xckpt.open(path).metadata.state_dict_metadata["w"]
    assert isinstance(stored, TensorStorageMetadata)
    assert str(stored.sharding) == shardings[0]
