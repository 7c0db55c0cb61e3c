"""DTensors on real process groups: every rank's boxes and data against the array distributed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import xckpt
from tests.support.examples import examples
from tests.support.ranks import Ranks
from tests.support.torch_meshes import MESHES, Case, cases, on_rank_distribute, on_rank_mesh
from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.cover import cover_fault, unique
from xckpt.core.metadata import Sharding
from xckpt.errors import UnsupportedLeafError
from xckpt.torch.adapter import ADAPTER
from xckpt.torch.leaf import TensorLeaf, to_numpy

Held = list[tuple[tuple[int, ...], tuple[int, ...], np.ndarray]]
"""Offsets, sizes and data of the boxes of one rank."""


def held_by(source: TensorLeaf) -> Held:
    held: Held = []
    for index, box in enumerate(source.boxes):
        array = ADAPTER.to_numpy(source.data(index))
        assert array is not None
        held.append((box.offsets, box.sizes, array.copy()))
    return held


def assert_holds(ranks: Sequence[Held], full: np.ndarray) -> None:
    """All boxes hold what the array has there, and together they are the array, replicas apart."""
    for held in ranks:
        for offsets, sizes, data in held:
            region = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            assert math.prod(sizes) > 0
            assert data.dtype == full.dtype
            np.testing.assert_array_equal(data, full[region])
    boxes = [(offsets, sizes) for held in ranks for offsets, sizes, _ in held]
    distinct, _ = unique(Boxes.of(boxes, rank=full.ndim))
    assert cover_fault(full.shape, distinct) is None


def on_rank_describe(rank: int, case: Case) -> tuple[Held, bool, Sharding | None, bool]:
    leaf = on_rank_distribute(case)
    source = ADAPTER.describe(leaf, "w")
    assert source is not None
    assert source.shape == case.shape
    assert source.dtype == case.dtype
    local = leaf.to_local()
    shared = all(
        source.data(i).untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        for i in range(len(source.boxes))
    )
    return held_by(source), source.sharded, source.sharding, shared


@examples(30, 600)
@given(case=cases())
@example(case=Case((), "float32", "2x2", (None, None)))
@example(case=Case((7, 5), "bfloat16", "2x1x2", (0, 0, 0)))
@example(case=Case((5, 7), "float32", "transposed", (1, 1)))
def test_any_distribution(four_ranks: Ranks, case: Case) -> None:
    described = four_ranks.run(on_rank_describe, case)
    assert_holds([held for held, *_ in described], case.array())
    assert all(sharded for _, sharded, _, _ in described)
    assert all(shared for *_, shared in described)
    for rank, (held, *_) in enumerate(described):
        if rank not in np.array(MESHES[case.mesh]):
            assert held == []


def test_the_sharding_is_described(four_ranks: Ranks) -> None:
    for case, text in [
        (Case((4, 4), "float32", "2x2", (1, None)), "Shard(dim=1), Replicate() on dp=2 x tp=2"),
        (Case((4, 4), "float32", "4", (0,)), "Shard(dim=0) on dim0=4"),
    ]:
        for _, _, sharding, _ in four_ranks.run(on_rank_describe, case):
            assert str(sharding) == text


def on_rank_load(rank: int, case: Case, in_place: bool, meta: bool) -> list[bool]:
    """Fill a DTensor like the case's through a target, and compare it with the case's."""
    expected = on_rank_distribute(case)
    like = torch.zeros_like(expected, device="meta" if meta else None)
    target = ADAPTER.target_for(like, "w", in_place=in_place)
    assert target is not None
    full = case.array()
    for index, box in enumerate(target.boxes):
        region = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        memory = ADAPTER.writable_numpy(target.buffer(index))
        assert memory is not None
        memory[...] = full[region]
        target.commit(index)
    result = target.result()
    assert isinstance(result, DTensor)
    outside = result.device_mesh.get_coordinate() is None  # and what is there means nothing
    equal = np.array_equal(to_numpy(result.to_local()), to_numpy(expected.to_local()))
    return [
        result.placements == expected.placements,
        result.device_mesh is expected.device_mesh,
        result.shape == expected.shape,
        result.device.type == "cpu",
        (result is like) == in_place,
        outside or equal,
    ]


@examples(20, 400)
@given(case=cases())
def test_targets_like_any_distribution(four_ranks: Ranks, case: Case) -> None:
    for in_place, meta in [(False, False), (False, True), (True, False)]:
        for checks in four_ranks.run(on_rank_load, case, in_place, meta):
            assert all(checks), checks


def on_rank_alike(rank: int) -> list[bool]:
    mesh = on_rank_mesh("4")

    def held(rows: int, dim: int = 0, **about: object) -> TensorLeaf:
        local = torch.zeros((rows, 8) if dim == 0 else (rows * 4, 2))
        made = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, **about)  # type: ignore[arg-type]
        return ADAPTER.describe(made, "w")

    one, again = held(3), held(3, shape=torch.Size((12, 8)), stride=(8, 1))
    return [
        one.boxes is again.boxes and one.sharding is again.sharding,
        one.boxes is not held(4).boxes and one.boxes is not held(3, 1).boxes,
        bool(one.spread and again.spread and one.spread() and one.spread() is again.spread()),
        one.data(0) is not again.data(0),
    ]


def test_what_dtensors_that_lie_alike_have_in_common_is_found_once(four_ranks: Ranks) -> None:
    assert four_ranks.run(on_rank_alike) == [[True] * 4] * 4


def on_rank_views(rank: int) -> list[bool]:
    mesh = on_rank_mesh("4")
    leaf = distribute_tensor(torch.zeros(12, 8), mesh, [Shard(0)])
    local = leaf.to_local()
    leaf.requires_grad_()
    places = [ADAPTER.describe(leaf, "w").parts, [ADAPTER.describe(leaf, "w").data(0)]]
    return [
        places[0][0]._base is None,  # the local tensor itself: no view is made before it is asked
        *(parts[0].data_ptr() == local.data_ptr() for parts in places),
        not any(part.requires_grad for parts in places for part in parts),
    ]


def test_no_view_is_made_of_a_local_tensor_that_is_one_box(four_ranks: Ranks) -> None:
    assert four_ranks.run(on_rank_views) == [[True] * 4] * 4


def on_rank_refuse(rank: int) -> list[str]:
    mesh = on_rank_mesh("2x2")
    partial = DTensor.from_local(torch.ones(2), mesh, [Shard(0), Partial()], run_check=False)
    meta = DTensor.from_local(torch.ones(2, device="meta"), mesh, [Shard(0)] * 2, run_check=False)
    # torch takes the sum of the local sizes for the size, so that 3 + 1 rows look like 2 + 2.
    uneven = DTensor.from_local(
        torch.ones(3 if rank == 0 else 1),
        on_rank_mesh("4"),
        [Shard(0)],
        run_check=False,
        shape=torch.Size([6]),
        stride=(1,),
    )
    flat = DTensor.from_local(
        torch.ones(6),
        on_rank_mesh("4"),
        [Shard(0)],
        run_check=False,
        shape=torch.Size([6, 4]),
        stride=(4, 1),
    )
    messages: list[str] = []
    for leaf, in_place in [(partial, False), (meta, True), (uneven, False), (flat, False)]:
        try:
            if in_place:
                ADAPTER.target_for(leaf, "opt/mu", in_place=True)
            else:
                ADAPTER.describe(leaf, "opt/mu")
        except UnsupportedLeafError as error:
            messages.append(str(error))
        else:
            messages.append("")
    try:
        ADAPTER.describe(meta, "opt/mu")
    except UnsupportedLeafError as error:
        messages.append(str(error))
    return messages


def test_what_cannot_be_described_is_refused_by_name(four_ranks: Ranks) -> None:
    for rank, messages in enumerate(four_ranks.run(on_rank_refuse)):
        partial, in_place, uneven, flat, meta = messages
        assert partial.startswith("opt/mu: ")
        assert "Partial(sum)" in partial
        assert "mesh axis 1" in partial
        assert "redistribute" in partial
        assert "meta device" in in_place
        assert "meta device" in meta
        expected = {0: "rows [0, 2)", 1: "rows [2, 4)", 2: "rows [4, 6)", 3: "rows nothing"}[rank]
        assert expected in uneven
        assert f"local tensor has shape ({3 if rank == 0 else 1},)" in uneven
        assert "local tensor has shape (6,)" in flat


def on_rank_unsorted(rank: int) -> tuple[str, tuple[int, ...]]:
    mesh = DeviceMesh("cpu", [3, 1, 2, 0])
    full = torch.arange(8.0)
    sharded = distribute_tensor(full, mesh, [Shard(0)])
    replicated = ADAPTER.describe(distribute_tensor(full, mesh, [Replicate()]), "w")
    assert replicated is not None
    try:
        ADAPTER.describe(sharded, "w")
    except UnsupportedLeafError as error:
        return str(error), replicated.boxes[0].sizes
    return "", replicated.boxes[0].sizes


def test_a_mesh_of_unsorted_ranks_is_refused_by_name(four_ranks: Ranks) -> None:
    """torch itself gives such shards in two orders."""
    answers = four_ranks.run(on_rank_unsorted)
    for rank in (0, 3):  # the two ranks whose coordinate is not their rank
        assert answers[rank][0].startswith("w: ")
        assert "ascending" in answers[rank][0]
        assert answers[rank][1] == (8,)


def on_rank_reshape(rank: int, rows: int, columns: int) -> tuple[Held, int, bool]:
    """A DTensor whose local rows are several intervals: columns sharded, then flattened."""
    full = torch.arange(float(rows * columns)).reshape(rows, columns)
    leaf = distribute_tensor(full, on_rank_mesh("4"), [Shard(1)]).reshape(-1)
    assert isinstance(leaf, DTensor)
    source = ADAPTER.describe(leaf, "w")
    assert source is not None
    target = ADAPTER.target_for(leaf.clone().zero_(), "w", in_place=True)
    assert target is not None
    for index, box in enumerate(target.boxes):
        memory = ADAPTER.writable_numpy(target.buffer(index))
        assert memory is not None
        memory[...] = np.arange(box.offsets[0], box.offsets[0] + box.sizes[0])
        target.commit(index)
    filled = target.result()
    assert isinstance(filled, DTensor)
    return held_by(source), len(source.boxes), torch.equal(filled.to_local(), leaf.to_local())


@pytest.mark.parametrize("rows, columns", [(3, 8), (2, 7), (5, 4), (1, 8)])
def test_several_intervals_are_several_boxes(four_ranks: Ranks, rows: int, columns: int) -> None:
    described = four_ranks.run(on_rank_reshape, rows, columns)
    assert_holds([held for held, *_ in described], np.arange(rows * columns, dtype=np.float32))
    assert described[0][1] == rows
    assert all(filled for *_, filled in described)


def on_rank_fsdp(rank: int, grid: tuple[int, ...], rows: int) -> tuple[Held, str, list[bool]]:
    """FSDP2 over tensor parallelism of one linear layer, replicated (HSDP) if the grid has 3 axes.

    Ranks beyond the grid take no part.
    """
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    count = math.prod(grid)
    names = ("replicas", "dp", "tp")[-len(grid) :]
    mesh = DeviceMesh("cpu", np.arange(count).reshape(grid).tolist(), mesh_dim_names=names)
    if rank >= count:
        return [], "", []
    layer = torch.nn.Linear(3, rows, bias=False)
    full = torch.arange(3.0 * rows).reshape(rows, 3)
    with torch.no_grad():
        layer.weight.copy_(full)
    model = torch.nn.Sequential(layer)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh[names[:-1]])
    weight = model[0].weight
    assert isinstance(weight, DTensor)
    source = ADAPTER.describe(weight, "w")
    assert source is not None

    target = ADAPTER.target_for(weight, "w", in_place=False)
    assert target is not None
    for index, box in enumerate(target.boxes):
        memory = ADAPTER.writable_numpy(target.buffer(index))
        assert memory is not None
        memory[...] = full.numpy()[box.offsets[0] : box.offsets[0] + box.sizes[0]]
        target.commit(index)
    loaded = target.result()
    assert isinstance(loaded, DTensor)
    checks = [
        torch.equal(loaded.to_local(), weight.to_local()),
        loaded.placements == weight.placements,
        loaded.requires_grad,
        torch.equal(weight.full_tensor(), full),
        torch.equal(loaded.full_tensor(), full),
    ]
    dist.barrier(group=mesh.get_group("tp"))
    return held_by(source), repr(source.sharding), checks


FSDP_CASES = [((2, 2), 8), ((2, 2), 7), ((2, 2), 3), ((2, 2), 1), ((1, 4), 7)]


@pytest.mark.parametrize("grid, rows", FSDP_CASES)
def test_fsdp_over_tensor_parallelism(four_ranks: Ranks, grid: tuple[int, ...], rows: int) -> None:
    assert_fsdp(four_ranks, grid, rows)


@pytest.mark.thorough  # `tests/core/geometry/test_placements.py` has these cases without ranks
def test_fsdp_over_tensor_parallelism_where_the_order_of_cuts_matters() -> None:
    """7 rows on 3 x 2 and 9 on 4 x 2: cutting left to right would give other rows."""
    with Ranks(8) as eight_ranks:
        for grid, rows in EIGHT_RANK_CASES:
            assert_fsdp(eight_ranks, grid, rows)


EIGHT_RANK_CASES = [
    *[((3, 2), 7), ((4, 2), 9), ((2, 4), 13), ((3, 2), 8), ((4, 2), 16)],
    *[((2, 2, 2), 7), ((2, 2, 2), 3), ((2, 2, 2), 8)],
]


def assert_fsdp(ranks: Ranks, grid: tuple[int, ...], rows: int) -> None:
    described = ranks.run(on_rank_fsdp, grid, rows)
    full = np.arange(3 * rows, dtype=np.float32).reshape(rows, 3)
    assert_holds([held for held, *_ in described], full)
    for _, sharding, checks in described[: math.prod(grid)]:
        assert ("_StridedShard" in sharding) == (grid[-1] > 1)
        # The last two: torch's own full_tensor agrees, before and after.
        assert checks == [True] * 5


def on_rank_tied(rank: int, path: Path) -> tuple[str, list[float], list[float]]:
    tied = distribute_tensor(torch.zeros(8), on_rank_mesh("4"), [Shard(0)])
    message = ""
    try:
        xckpt.load_into(path, {"same": tied, "other": tied}, unexpected="ignore")
    except UnsupportedLeafError as error:
        message = str(error)
    before = tied.to_local().tolist()
    xckpt.load_into(path, {"same": tied, "equal": tied}, unexpected="ignore")
    return message, before, tied.to_local().tolist()


def test_tied_dtensors_are_filled_or_refused_by_all(four_ranks: Ranks, tmp_path: Path) -> None:
    """Only the third rank's shards differ."""
    numbers = np.arange(8, dtype=np.float32)
    other = numbers + (numbers == 4)
    xckpt.save(tmp_path / "c", {"same": numbers, "equal": numbers, "other": other})
    for rank, (message, before, after) in enumerate(four_ranks.run(on_rank_tied, tmp_path / "c")):
        assert "rank 2: UnsupportedLeafError" in message
        assert "same [4, 6) and other [4, 6) share memory" in message
        assert (before, after) == ([0, 0], [2 * rank, 2 * rank + 1])


def on_tensor_parallel_replicas(rank: int, path: str, damaged: bool) -> str:
    """Two data-parallel replicas, each with a mesh of its own, as under DDP over TP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))["shard"]
    local = torch.full((1 << 17, 4), float(mesh.get_local_rank()))
    if damaged and rank == 3:
        local[5, 1] += 1
    state = {"w": DTensor.from_local(local, mesh, [Shard(0)])}
    try:
        xckpt.save(path, state, options=xckpt.SaveOptions(compare_replicas=True))
    except xckpt.PlanError as error:
        return str(error)
    return ""


def test_shards_of_meshes_that_are_part_of_the_group(four_ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    said = four_ranks.run(on_tensor_parallel_replicas, path, True)
    part = "[131072, 262144) x [0, 4) differs between rank 1 and rank 3"
    assert all(text.endswith(f"- w: {part}") for text in said)
    assert four_ranks.run(on_tensor_parallel_replicas, path, False) == [""] * 4
