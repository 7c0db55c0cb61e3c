"""What a rank of torch knows of all ranks' boxes, and saves that each rank plans alone."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import xckpt
from tests.support.examples import examples
from tests.support.ranks import Ranks
from tests.support.torch_meshes import Case, cases, on_rank_distribute, on_rank_mesh
from tests.torch.test_save_load import on_rank_group
from xckpt.core.plan.save import DefaultSavePlanner
from xckpt.errors import XckptError
from xckpt.torch.adapter import ADAPTER
from xckpt.torch.group import TorchGroup

Rows = list[tuple[tuple[int, ...], tuple[int, ...]]]


def rows(boxes: Any) -> Rows:
    """The boxes that have elements, sorted, each once."""
    return sorted({(box.offsets, box.sizes) for box in boxes if box.elements})


def on_rank_held(rank: int, leaves: list[torch.Tensor]) -> list[tuple[Rows, list[Rows] | None]]:
    """Of each tensor the rank's boxes, and those of all ranks as it knows them."""
    processes = TorchGroup().processes
    found: list[tuple[Rows, list[Rows] | None]] = []
    for leaf in leaves:
        source = ADAPTER.describe(leaf, "w")
        assert source is not None
        spread = source.spread and source.spread()
        if spread is None:
            found.append((rows(source.boxes), None))
            continue
        held = spread.held(processes)
        assert held is not None
        ranks, boxes = held
        known = [rows(boxes.take(ranks == each)) for each in range(len(processes.numbers))]
        mine = spread.held_by(rank, processes)
        assert mine is not None and rows(mine) == known[rank]
        found.append((rows(source.boxes), known))
    return found


def on_rank_cases(rank: int, given_cases: list[Case]) -> list[tuple[Rows, list[Rows] | None]]:
    return on_rank_held(rank, [on_rank_distribute(case) for case in given_cases])


@examples(15, 400)
@given(st.lists(cases(), min_size=1, max_size=4))
@example([Case((13, 7), "float32", "2x2", (0, 0)), Case((5,), "int8", "transposed", (None, 0))])
def test_each_rank_knows_what_all_hold(four_ranks: Ranks, given_cases: list[Case]):
    answers = four_ranks.run(on_rank_cases, given_cases)
    for number in range(len(given_cases)):
        actual = [answer[number][0] for answer in answers]
        assert [answer[number][1] for answer in answers] == [actual] * 4


def on_rank_strided(rank: int, size: int) -> list[tuple[Rows, list[Rows] | None]]:
    """Rows as FSDP2 cuts them over tensor parallelism: over the second axis first."""
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = on_rank_mesh("2x2")
    dp, tp = mesh.get_coordinate() or (0, 0)
    full = torch.arange(size * 2).reshape(size, 2)
    local = full.chunk(2)[tp].chunk(2)[dp]
    placements: list[Placement] = [_StridedShard(0, split_factor=2), Shard(0)]
    made = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )
    return on_rank_held(rank, [made])


def test_even_strided_shards_are_known(four_ranks: Ranks):
    answers = four_ranks.run(on_rank_strided, 8)
    actual = [answer[0][0] for answer in answers]
    assert [answer[0][1] for answer in answers] == [actual] * 4


def test_uneven_strided_shards_are_not(four_ranks: Ranks):
    """The local tensor alone says which rows they are."""
    assert [answer[0][1] for answer in four_ranks.run(on_rank_strided, 10)] == [None] * 4


def on_rank_sharded(rank: int) -> list[tuple[Rows, list[Rows] | None]]:
    places: list[Any] = [f"rank:{each}/cpu" for each in (2, 0, 1, 3)]
    boxes = [((0, 0), (3, 4)), ((3, 0), (5, 1)), ((3, 1), (5, 3))]
    shards = [ShardMetadata(list(o), list(n), p) for (o, n), p in zip(boxes, places, strict=False)]
    specs = [ChunkShardingSpec(0, places), EnumerableShardingSpec(shards)]
    return on_rank_held(rank, [sharded_tensor.empty(spec, 8, 4) for spec in specs])


def test_sharded_tensors_say_where_they_are(four_ranks: Ranks):
    answers = four_ranks.run(on_rank_sharded)
    for number in range(2):
        actual = [answer[number][0] for answer in answers]
        assert [answer[number][1] for answer in answers] == [actual] * 4


def state_of(leaves: list[torch.Tensor]) -> dict[str, Any]:
    layers = {f"w{number}": leaf for number, leaf in enumerate(leaves)}
    return {"model": layers, "step": 7, "bias": torch.arange(9), "note": "x" * 5000}


def on_rank_save(
    rank: int, path: Path, given_cases: list[Case], known: bool, group: str = ""
) -> int | None:
    """How often this rank planned for all; None outside the group.

    Each rank is told what is committed, be it brief or the whole manifest.
    """
    ranks = on_rank_group(group) if group else None
    if group and ranks is None:
        return None
    state = state_of([on_rank_distribute(case) for case in given_cases])
    planned = DefaultSavePlanner.create_global_plan
    counting = mock.patch.object(
        DefaultSavePlanner, "create_global_plan", autospec=True, side_effect=planned
    )
    knows = DefaultSavePlanner.known_plans if known else lambda *_: None
    knowing = mock.patch.object(DefaultSavePlanner, "known_plans", new=knows)
    with counting as counted, knowing:
        saved = xckpt.save(path, state, group=ranks, metadata={"loss": [0.5, 2**70], "of": rank})
    assert saved == xckpt.open(path).metadata
    return counted.call_count


def contents(path: Path) -> dict[str, str]:
    """A digest of each file, but for the packs' names, which are drawn, and what names them."""
    named = {file: str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    return {
        name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file, name in named.items()
        if "pack" not in name and name not in ("xckpt.json", "xckpt.places")
    }


EVEN = [Case((8, 3), "float32", "4", (0,))] * 3 + [Case((7, 5), "int64", "2x2", (None, 1))]


@examples(4, 100)
@given(st.lists(cases(), min_size=1, max_size=4))
@example(EVEN)
def test_saves_are_as_if_one_rank_had_planned_them(
    four_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, given_cases: list[Case]
):
    folder = tmp_path_factory.mktemp("saves")
    assert four_ranks.run(on_rank_save, folder / "alone", given_cases, True) == [0] * 4
    four_ranks.run(on_rank_save, folder / "gathered", given_cases, False)
    assert contents(folder / "alone") == contents(folder / "gathered")
    loaded: Any = xckpt.load(folder / "alone")
    assert xckpt.open(folder / "alone").verify() == []
    for number, case in enumerate(given_cases):
        assert np.array_equal(loaded["model"][f"w{number}"], case.array())


@pytest.mark.parametrize(
    ("group", "mesh", "alone"), [("three", "three", True), ("two", "4", False)]
)
def test_groups_of_some_ranks(
    four_ranks: Ranks, tmp_path: Path, group: str, mesh: str, alone: bool
):
    """Plans of tensors that other ranks hold too are gathered, so that the gap is named."""
    given_cases = [Case((8, 3), "float32", mesh, (0,))]
    answers = four_ranks.attempt(on_rank_save, tmp_path / "saved", given_cases, True, group)
    if alone:
        assert [answer for _, answer in answers] == [0, 0, 0, None]
        assert xckpt.open(tmp_path / "saved").verify() == []
    else:
        assert "held by no rank" in answers[1][1] and "model/w0" in answers[3][1]


def on_rank_differ(rank: int, path: Path, what: str) -> str:
    """Save a tensor that another rank has otherwise."""
    other = rank == 2
    shape = (8, 4) if not (other and what == "shape") else (8, 8)
    dtype = torch.float32 if not (other and what == "dtype") else torch.float64
    cut = Shard(1 if other and what == "placements" else 0)
    full = torch.zeros(shape, dtype=dtype)
    made = distribute_tensor(full, on_rank_mesh("4"), [cut], src_data_rank=None)
    state: dict[str, Any] = {"model": {"w": made}}
    if what == "names":
        state["model"][f"own{rank}"] = torch.full((3,), rank)
    try:
        xckpt.save(path, state)
    except XckptError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("what", ["shape", "dtype", "placements"])
def test_ranks_that_differ_are_named_with_the_leaf(four_ranks: Ranks, tmp_path: Path, what: str):
    """Nothing is written."""
    for message in four_ranks.run(on_rank_differ, tmp_path / "saved", what):
        assert "model/w" in message and "rank 0" in message and "rank 2" in message
    assert list(tmp_path.iterdir()) == []


def test_leaves_of_some_ranks_are_gathered(four_ranks: Ranks, tmp_path: Path):
    for path in (tmp_path / "first", tmp_path / "again"):
        assert four_ranks.run(on_rank_differ, path, "names") == ["saved"] * 4
        loaded: Any = xckpt.load(path)
        assert [int(loaded["model"][f"own{rank}"][0]) for rank in range(4)] == [0, 1, 2, 3]
