"""Sources, targets and shards on the host: what is transferred, when, and what is let go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from tests.support.jax_meshes import same
from tests.xla.meshes import (
    DEVICES,
    Layout,
    Transfers,
    assert_holds,
    device,
    inner,
    layouts,
    mark,
    numbers,
    shapes,
    spmd,
    stager_of_torch_xla,
    sync,
)
from xckpt.core.geometry.cover import cover_fault
from xckpt.core.metadata import Metadata
from xckpt.core.plan.items import ReadItem, SavePlan, WriteItem, WriteItems
from xckpt.errors import PlanError, UnsupportedLeafError
from xckpt.torch.leaf import to_numpy
from xckpt.torch.xla import CpuShards, SPMDLoadPlanner, SPMDSavePlanner
from xckpt.torch.xla.shards import ShardLayout, fetch

STRAIGHT = tuple(range(DEVICES))
UNEVEN = Layout(STRAIGHT, (2, 4), (0, 1))
PARTIAL = Layout(STRAIGHT, (2, 4), (0, None))
ARRAY: Any = numbers((7, 5), "int32")


def planned(state: dict[str, Any]) -> tuple[SPMDSavePlanner, list[WriteItem]]:
    """A planner that has been through all steps before the writing, and its items."""
    planner = SPMDSavePlanner()
    planner.set_up_planner(state)
    plans, _ = planner.create_global_plan([planner.create_local_plan()])
    return planner, list(planner.finish_plan(plans[0]).items)


def part(item: WriteItem) -> tuple[slice, ...]:
    assert item.tensor_data is not None
    box = item.tensor_data.chunk
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


def resolved(planner: SPMDSavePlanner, item: WriteItem) -> torch.Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor)
    return tensor


@given(shapes(), st.data())
def test_a_layout_is_what_the_devices_hold(shape: tuple[int, ...], data: st.DataObject) -> None:
    array = numbers(shape, "int32")
    tensor = inner(data.draw(layouts(len(shape))).put(array))
    layout = ShardLayout.of(tensor, "w")
    if array.size:
        assert cover_fault(shape, layout.boxes) is None
    shards = spmd.XLAShardedTensor(tensor).local_shards
    assert layout.devices == len(shards)
    assert {tuple(shard.data.shape) for shard in shards} == {layout.shard}
    padded = any(shard.data.numel() != box_of(shard, array).size for shard in shards)
    assert layout.padded == (padded or (not array.size and not layout.whole))
    fetched = fetch(tensor, layout)
    for box, view, holders in zip(layout.boxes, layout.views, layout.holders, strict=True):
        wanted = array[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
        for number in holders:
            shard = fetched[0 if layout.whole else number]
            same(shard[view].numpy(), wanted)
            same(box_of(shards[number], array), wanted)


def box_of(shard: Any, array: Any) -> Any:
    return array if shard.indices is Ellipsis else array[tuple(shard.indices)]


def test_what_was_only_recorded_is_computed_first() -> None:
    tensor = inner(PARTIAL.put(ARRAY)) * 3
    assert ShardLayout.of(tensor, "w").annotated
    same(fetch(tensor, ShardLayout.of(tensor, "w"))[0].numpy(), ARRAY * 3)
    pending = inner(PARTIAL.put(ARRAY)) * 5
    sync()  # returns before the devices are done
    same(fetch(pending, ShardLayout.of(pending, "w"))[0].numpy(), ARRAY * 5)


@pytest.mark.parametrize("layout", [UNEVEN, PARTIAL], ids=["tiled", "partial"])
def test_a_tensor_is_transferred_once_and_data_may_be_asked_again(
    layout: Layout, transfers: Transfers
) -> None:
    planner, items = planned({"w": layout.put(ARRAY), "v": layout.put(ARRAY)})
    assert transfers.to_host == 0
    for item in items:
        same(resolved(planner, item).numpy(), ARRAY[part(item)])
    assert transfers.to_host == 2
    for item in reversed(items):
        same(resolved(planner, item).numpy(), ARRAY[part(item)])


def test_each_shard_is_let_go_after_its_last_use_and_replicas_at_once(
    monkeypatch: pytest.MonkeyPatch, transfers: Transfers
) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    transfers.watch(lambda shards: alive.extend(weakref.ref(data) for data, _ in shards[0]))
    planner, items = planned({"w": PARTIAL.put(ARRAY)})
    assert len(items) == 2
    for left in (1, 0):
        resolved(planner, items[1 - left])
        gc.collect()
        assert len(alive) == DEVICES
        assert sum(shard() is not None for shard in alive) <= left
    assert transfers.to_host == 1


class Halving(SPMDSavePlanner):
    """Writes each box in two items."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        halves: list[WriteItem] = []
        for item in new_plan.items:
            data = item.tensor_data
            assert data is not None
            (first, *offsets), (rows, *sizes) = data.chunk.offsets, data.chunk.sizes
            for low, high in ((0, rows // 2), (rows // 2, rows)):
                chunk = replace(
                    data.chunk, offsets=(first + low, *offsets), sizes=(high - low, *sizes)
                )
                index = replace(item.index, offset=chunk.offsets)
                halves.append(replace(item, index=index, tensor_data=replace(data, chunk=chunk)))
        return super().finish_plan(replace(new_plan, items=WriteItems.of(halves)))


def test_several_items_of_a_box_share_its_transfer(transfers: Transfers) -> None:
    array = numbers((8, 8), "int32")
    planner = Halving()
    planner.set_up_planner({"w": Layout(STRAIGHT, (2, 4), (0, 1)).put(array)})
    plans, _ = planner.create_global_plan([planner.create_local_plan()])
    items = list(planner.finish_plan(plans[0]).items)
    assert len(items) == 2 * DEVICES
    for item in items:
        same(resolved(planner, item).numpy(), array[part(item)])
    assert transfers.to_host == 1


def test_replicas_that_are_compared_are_read_as_they_are(tmp_path: Path) -> None:
    state = {"w": mark(torch.tensor(ARRAY).to(device()), (8,), (None, None))}
    xckpt.save(tmp_path / "ckpt", state, options=xckpt.SaveOptions(compare_replicas=True))
    same(xckpt.load(tmp_path / "ckpt")["w"], ARRAY)


class Watching(SPMDLoadPlanner):
    """Looks at the tensor before and after each commit."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self.look = look

    def commit_tensor(self, read_item: ReadItem, tensor: object) -> None:
        self.look()
        super().commit_tensor(read_item, tensor)


@pytest.mark.parametrize("layout", [UNEVEN, PARTIAL], ids=["tiled", "partial"])
def test_a_tensor_changes_once_after_the_last_commit(
    layout: Layout, tmp_path: Path, transfers: Transfers
) -> None:
    xckpt.save(tmp_path / "ckpt", {"w": Layout(STRAIGHT, (8,), (None, 0)).put(ARRAY)})
    target = layout.put(np.full_like(ARRAY, -1))
    before = transfers.to_host
    looks: list[int] = []

    def look() -> None:
        assert (inner(target).cpu() == -1).all()
        looks.append(transfers.to_devices)

    xckpt.load_into(tmp_path / "ckpt", {"w": target}, planner=Watching(look))
    assert len(looks) > 1
    assert set(looks) == {0}
    assert transfers.to_devices == 1
    assert transfers.to_host == before + 1  # the padding
    assert_holds(target, ARRAY)


def test_without_padding_nothing_is_fetched_to_be_loaded(
    tmp_path: Path, transfers: Transfers
) -> None:
    array = numbers((8, 4), "float32")
    xckpt.save(tmp_path / "ckpt", {"w": array})
    target = UNEVEN.put(np.zeros_like(array))
    xckpt.load_into(tmp_path / "ckpt", {"w": target})
    xckpt.load(tmp_path / "ckpt", {"w": UNEVEN.put(np.zeros_like(array))})
    assert (transfers.to_host, transfers.to_devices) == (0, 2)
    assert_holds(target, array)


def test_padding_is_kept(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "ckpt", {"w": ARRAY})
    for layout in (UNEVEN, Layout(STRAIGHT, (4, 2), (0, None))):
        target = layout.put(np.zeros_like(ARRAY))
        marked = target.local_shards
        for number, shard in enumerate(marked):
            shard.data.fill_(-number - 1)
        target.load_local_shards_(marked)
        xckpt.load_into(tmp_path / "ckpt", {"w": target})
        assert_holds(target, ARRAY)
        padding = 0
        for number, shard in enumerate(target.local_shards):
            outside = np.ones(shard.data.shape, bool)
            outside[tuple(slice(0, p.stop - p.start) for p in shard.indices)] = False
            assert (shard.data.numpy()[outside] == -number - 1).all()
            padding += outside.sum()
        assert padding


class Doubling(SPMDLoadPlanner):
    """Commits each item twice."""

    def commit_tensor(self, read_item: ReadItem, tensor: object) -> None:
        super().commit_tensor(read_item, tensor)
        super().commit_tensor(read_item, tensor)


def test_an_overrun_is_an_error(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "ckpt", {"w": ARRAY})
    target = UNEVEN.put(np.full_like(ARRAY, -1))
    with pytest.raises(PlanError, match=r"w: .* elements too many"):
        xckpt.load_into(tmp_path / "ckpt", {"w": target}, planner=Doubling())


def test_a_load_that_fails_leaves_the_tensor_alone(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "ckpt", {"w": UNEVEN.put(ARRAY)})
    files = [file for file in (tmp_path / "ckpt" / "w").rglob("*") if file.is_file()]
    chunk = max(file for file in files if file.name != "zarr.json")
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    target = PARTIAL.put(np.full_like(ARRAY, -1))
    with pytest.raises(xckpt.CorruptCheckpointError):
        xckpt.load_into(tmp_path / "ckpt", {"w": target})
    assert_holds(target, np.full_like(ARRAY, -1))


def staged_by_us(state: dict[str, Any]) -> dict[str, Any]:
    return {name: CpuShards.of(leaf) for name, leaf in state.items()}


@pytest.mark.parametrize("stage", [staged_by_us, stager_of_torch_xla], ids=["ours", "torch_xla's"])
def test_shards_on_the_host_are_saved_as_the_tensor_would_be(
    stage: Callable[[dict[str, Any]], dict[str, Any]], tmp_path: Path, transfers: Transfers
) -> None:
    state = {
        "tiled": UNEVEN.put(ARRAY),
        "partial": PARTIAL.put(ARRAY),
        "replicated": Layout(STRAIGHT, (8,), (None, None)).put(ARRAY),
        "plain": torch.tensor(ARRAY).to(device()),
    }
    staged = stage(state)
    made = transfers.to_host
    for leaf in state.values():
        inner(leaf).zero_()
    metadata = xckpt.save(tmp_path / "ckpt", staged, planner=SPMDSavePlanner())
    assert transfers.to_host == made
    for loaded in xckpt.load(tmp_path / "ckpt").values():
        same(loaded, ARRAY)
    again = xckpt.save(tmp_path / "direct", state)
    if stage is staged_by_us:
        assert described(metadata) == described(again)
    with pytest.raises(UnsupportedLeafError, match=r"tiled: .* load into the tensor"):
        xckpt.load(tmp_path / "ckpt", staged)


def described(metadata: Metadata) -> list[str]:
    return [
        f"{name} {getattr(leaf, 'size', None)} {getattr(leaf, 'sharding', None)}"
        for name, leaf in metadata.state_dict_metadata.items()
    ]


def test_a_parameter_is_loaded_in_place_as_it_is(tmp_path: Path) -> None:
    array = numbers((7, 5), "float32")
    xckpt.save(tmp_path / "ckpt", {"w": array, "v": array})
    target = torch.nn.Parameter(torch.zeros(7, 5).to(device()))
    mark(target, (2, 4), (1, 0))
    plain = torch.nn.Parameter(torch.zeros(7, 5).to(device()))
    state = {"w": target, "v": plain}
    xckpt.load_into(tmp_path / "ckpt", state)
    assert state["w"] is target
    assert_holds(target.detach(), array)
    same(to_numpy(plain), array)
    loaded = xckpt.load(tmp_path / "ckpt", state)["w"]
    assert loaded.requires_grad
    assert_holds(loaded.detach(), array)
    (loaded * 2).sum().backward()
    assert loaded.grad is not None
    same(to_numpy(loaded.grad), np.full_like(array, 2))


def test_shards_under_manual_sharding_are_refused_by_name() -> None:
    over = spmd.Mesh(np.arange(8), (2, 4))
    local = spmd.enable_manual_sharding(inner(PARTIAL.put(ARRAY)), (0, None), mesh=over)
    with pytest.raises(UnsupportedLeafError, match=r"w: .* MANUAL"):
        xckpt.save("memory://never", {"w": local})
    xckpt.save("memory://manual", {"w": ARRAY})
    with pytest.raises(UnsupportedLeafError, match=r"w: .* MANUAL"):
        xckpt.load_into("memory://manual", {"w": local})
