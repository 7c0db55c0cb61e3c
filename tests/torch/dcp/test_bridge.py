"""The documented ways to extend DCP's planners, all of them through our storage."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

import xckpt
from tests.support.ranks import Ranks
from tests.torch.dcp.states import on_rank_blank, on_rank_check, on_rank_state, whole
from xckpt.torch.dcp import XckptStorageReader, XckptStorageWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def load(path: Path, state: dict[str, Any], planner: dcp.LoadPlanner | None = None) -> None:
    dcp.load(state, storage_reader=XckptStorageReader(path), planner=planner)


class Renaming(dcp.DefaultSavePlanner):
    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        renamed = {f"foo_{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


class RenamingBack(dcp.DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        self.given = state_dict
        renamed = {f"foo_{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, metadata, is_coordinator)

    def load_bytes(self, read_item: dcp.ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn.removeprefix("foo_")
        self.given[key] = torch.load(value, weights_only=False)


def test_rename(tmp_path: Path):
    tensor = torch.arange(6.0)
    writer = XckptStorageWriter(tmp_path / "a")
    metadata = dcp.save({"w": tensor, "n": 3}, storage_writer=writer, planner=Renaming())
    assert list(metadata.state_dict_metadata) == ["foo_w", "foo_n"]
    assert list(xckpt.open(tmp_path / "a")) == ["foo_w", "foo_n"]
    target = torch.zeros(6)
    state = {"w": target, "n": 0}
    load(tmp_path / "a", state, RenamingBack())
    assert state["w"] is target and torch.equal(target, tensor) and state["n"] == 3


class HalfPrecision(dcp.DefaultSavePlanner):
    def create_local_plan(self) -> dcp.SavePlan:
        plan = super().create_local_plan()
        items = [
            replace(
                item,
                tensor_data=replace(
                    item.tensor_data,
                    properties=replace(item.tensor_data.properties, dtype=torch.float16),
                ),
            )
            if item.tensor_data is not None
            else item
            for item in plan.items
        ]
        return replace(plan, items=items)

    def resolve_data(self, write_item: dcp.WriteItem) -> Any:
        data = super().resolve_data(write_item)
        return data.half() if isinstance(data, torch.Tensor) else data


def on_rank_half(rank: int, path: Path) -> None:
    state = on_rank_state()
    metadata = dcp.save(state, storage_writer=XckptStorageWriter(path), planner=HalfPrecision())
    on_rank_check(state)
    entry = metadata.state_dict_metadata["model.layers.0.weight"]
    assert isinstance(entry, dcp.TensorStorageMetadata)
    assert entry.properties.dtype == torch.float16
    assert state["model"]["layers.0.weight"].dtype == torch.float32
    back = on_rank_blank()
    load(path, back)
    on_rank_check(back)


def test_fp16_on_save(four_ranks: Ranks, tmp_path: Path):
    four_ranks.run(on_rank_half, tmp_path / "ckpt")
    stored: Any = xckpt.open(tmp_path / "ckpt")
    leaf = stored["model/layers.0.weight"]
    assert leaf.dtype == "float16"
    np.testing.assert_array_equal(leaf, whole().astype(np.float16))
    assert stored["step"] == 7


class Balancing(dcp.DefaultSavePlanner):
    """Gives replicated tensors to the ranks in turn, as the pattern for DDP does."""

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        items = [item for plan in plans for item in plan.items]
        shares = [replace(plan, items=items[rank :: len(plans)]) for rank, plan in enumerate(plans)]
        return shares, metadata


def on_rank_balance(rank: int, path: Path, count: int) -> int:
    """How many bytes the rank has written of ``count`` replicated tensors."""
    written: list[int] = []

    class Counting(XckptStorageWriter):
        def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
            done = super().write_data(plan, planner)
            written.append(done.value()[0].size_in_bytes)
            return done

    state = {f"w{n}": torch.full((4,), float(n)) for n in range(count)}
    dcp.save(state, storage_writer=Counting(path), planner=Balancing())
    return written[0]


@pytest.mark.parametrize("count", [0, 1, 3, 4, 9])
def test_ddp_load_balancing(four_ranks: Ranks, tmp_path: Path, count: int):
    written = four_ranks.run(on_rank_balance, tmp_path / "ckpt", count)
    assert written == [16 * len(range(rank, count, 4)) for rank in range(4)]
    tree = xckpt.load(tmp_path / "ckpt")
    assert {name: leaf.tolist() for name, leaf in tree.items()} == {
        f"w{n}": [float(n)] * 4 for n in range(count)
    }


class Extra(dcp.DefaultSavePlanner):
    """Sends data of its own beside the flattening mapping."""

    def create_local_plan(self) -> dcp.SavePlan:
        plan = super().create_local_plan()
        mine = {"rank": dist.get_rank() if dist.is_initialized() else 0, "seed": (1, 2)}
        return replace(plan, planner_data={**plan.planner_data, "mine": mine})

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        merged = [plan.planner_data["mine"] for plan in all_plans]
        data = {**metadata.planner_data, "mine": merged}
        return plans, replace(metadata, planner_data=data)


def on_rank_extra(rank: int, path: Path) -> Any:
    dcp.save(on_rank_state(), storage_writer=XckptStorageWriter(path), planner=Extra())
    state = on_rank_blank()
    load(path, state)
    on_rank_check(state)
    return XckptStorageReader(path).read_metadata().planner_data


def test_save_extra_data(four_ranks: Ranks, tmp_path: Path):
    data = four_ranks.run(on_rank_extra, tmp_path / "ckpt")[1]
    assert data["mine"] == [{"rank": rank, "seed": (1, 2)} for rank in range(4)]
    assert data["opt.1.empty"] == ("opt", 1, "empty")


@pytest.mark.parametrize("extra", [[{"rank": 0}, (1.5, None, True)], "text"])
def test_extra_data_alone_is_kept_too(tmp_path: Path, extra: Any):
    class Alone(dcp.DefaultSavePlanner):
        def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            return plans, replace(metadata, planner_data=extra)

    writer = XckptStorageWriter(tmp_path / "a")
    dcp.save({"m": {"w": torch.ones(2)}}, storage_writer=writer, planner=Alone())
    assert XckptStorageReader(tmp_path / "a").read_metadata().planner_data == extra
    assert list(xckpt.open(tmp_path / "a")) == ["m/w"]


def test_extra_data_that_is_no_plain_value_is_refused_by_its_place(tmp_path: Path):
    class Odd(dcp.DefaultSavePlanner):
        def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            return plans, replace(metadata, planner_data={"x": [torch.ones(1)]})

    with pytest.raises(dcp.CheckpointException, match=r"planner_data\['x'\]\[0\]: a torch.Tensor"):
        dcp.save(
            {"w": torch.ones(2)}, storage_writer=XckptStorageWriter(tmp_path / "a"), planner=Odd()
        )
    assert list(tmp_path.iterdir()) == []


class Materialising(dcp.DefaultLoadPlanner):
    """Fills a model that is on the meta device: allocates once, publishes when complete."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.missing: dict[str, int] = {}
        self.filled: dict[str, torch.Tensor] = {}

    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.flatten_state_dict = metadata, False
        self.missing = {name: tensor.numel() for name, tensor in state_dict.items()}

    def resolve_tensor(self, read_item: dcp.ReadItem) -> torch.Tensor:
        return torch.empty(read_item.lengths)

    def commit_tensor(self, read_item: dcp.ReadItem, tensor: torch.Tensor) -> None:
        name = read_item.dest_index.fqn
        if name not in self.filled:
            self.filled[name] = torch.empty(self.state_dict[name].shape)
        starts = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        self.filled[name][tuple(slice(start, start + n) for start, n in starts)] = tensor
        self.missing[name] -= tensor.numel()
        if not self.missing[name]:
            *path, last = name.split(".")
            module = self.model.get_submodule(".".join(path))
            module.register_parameter(last, torch.nn.Parameter(self.filled.pop(name)))


def on_rank_pieces(rank: int, path: Path) -> None:
    """Saved as boxes that share no grid, so that a tensor has several read items."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from tests.support.torch_meshes import on_rank_mesh

    full = torch.arange(1002.0 * 4).reshape(1002, 4)
    mesh = on_rank_mesh("2x2")
    spread = distribute_tensor(full, mesh, [Shard(0), Shard(0)], src_data_rank=None)
    state = {"0.weight": spread, "0.bias": torch.arange(1002.0)}
    dcp.save(state, storage_writer=XckptStorageWriter(path))


def test_meta_model_materialise(four_ranks: Ranks, tmp_path: Path):
    four_ranks.run(on_rank_pieces, tmp_path / "ckpt")
    model: Any
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 1002))
    planner = Materialising(model)
    load(tmp_path / "ckpt", model.state_dict(), planner)
    assert torch.equal(model[0].weight, torch.arange(1002.0 * 4).reshape(1002, 4))
    assert torch.equal(model[0].bias, torch.arange(1002.0))
    assert not planner.filled


def test_a_planner_without_flattening_names_leaves_by_their_keys(tmp_path: Path):
    state = {"a.b": torch.ones(2), "a/b": torch.zeros(2), "n": {"x": 1}}
    writer = XckptStorageWriter(tmp_path / "a")
    dcp.save(state, storage_writer=writer, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    assert list(xckpt.open(tmp_path / "a")) == ["a.b", "a%2Fb", "n"]
    back: dict[str, Any] = {"a.b": torch.zeros(2), "a/b": torch.ones(2), "n": None}
    load(tmp_path / "a", back, dcp.DefaultLoadPlanner(False, False))
    assert back["a.b"].tolist() == [1, 1] and back["a/b"].tolist() == [0, 0]
    assert back["n"] == {"x": 1}


class Meddling(dcp.DefaultSavePlanner):
    """Does something to the items of the global plan."""

    def __init__(self, meddle: Any) -> None:
        super().__init__()
        self.meddle = meddle

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        return [replace(plan, items=self.meddle(list(plan.items))) for plan in plans], metadata


def moved(item: dcp.WriteItem) -> dcp.WriteItem:
    data = item.tensor_data
    assert data is not None
    chunk = replace(data.chunk, offsets=torch.Size((2, 0)))
    return replace(
        item,
        index=MetadataIndex(item.index.fqn, (2, 0)),
        tensor_data=replace(data, chunk=chunk),
    )


@pytest.mark.parametrize(
    "meddle, complaint",
    [
        (lambda items: items[1:], r"w: in the metadata, but in no rank's plan"),
        (lambda items: [*items, items[0]], r"w: \[0, 3\) x \[0, 4\) is to be written by ranks"),
        (lambda items: [moved(items[0]), *items[1:]], r"w: \[2, 5\) x \[0, 4\) on rank 0 lies out"),
        (lambda items: [*items, items[1]], r"step: to be written by ranks \[0, 0\], not by one"),
    ],
    ids=["drops", "doubles", "misplaces", "doubles bytes"],
)
def test_a_planner_that_drops_doubles_or_misplaces_an_item(
    tmp_path: Path, meddle: Any, complaint: str
):
    state = {"w": torch.ones(3, 4), "step": 1}
    with pytest.raises(dcp.CheckpointException, match=complaint):
        dcp.save(state, storage_writer=XckptStorageWriter(tmp_path / "a"), planner=Meddling(meddle))
    assert list(tmp_path.iterdir()) == []


def test_a_planner_that_drops_the_storage_data_is_named(tmp_path: Path):
    class Dropping(dcp.DefaultSavePlanner):
        def finish_plan(self, new_plan: dcp.SavePlan) -> dcp.SavePlan:
            return dcp.SavePlan(new_plan.items)

    with pytest.raises(dcp.CheckpointException, match=r"keep that: dataclasses\.replace"):
        dcp.save(
            {"w": torch.ones(3)},
            storage_writer=XckptStorageWriter(tmp_path / "a"),
            planner=Dropping(),
        )
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_its_plan_is_refused_by_name(tmp_path: Path):
    class Wrong(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: dcp.WriteItem) -> Any:
            data: Any = super().resolve_data(write_item)
            return data[:2]

    with pytest.raises(dcp.CheckpointException, match=r"w: float32 of shape \(3, 4\) was planned"):
        dcp.save(
            {"w": torch.ones(3, 4)},
            storage_writer=XckptStorageWriter(tmp_path / "a"),
            planner=Wrong(),
        )
