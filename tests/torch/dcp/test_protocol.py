"""What a DCP storage plug-in must honour, one test for each clause."""

from __future__ import annotations

import copy
import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import Shard, distribute_tensor

import xckpt
from tests.support.ranks import Ranks
from tests.support.torch_meshes import on_rank_mesh
from tests.torch.dcp.states import on_rank_blank, on_rank_check, on_rank_state, whole
from xckpt.errors import PlanError
from xckpt.storage import write_checkpoint
from xckpt.storage.budget import Pool
from xckpt.storage.chunks import window
from xckpt.torch.dcp import XckptStorageReader, XckptStorageWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def state() -> dict[str, Any]:
    return {"model": {"w": torch.arange(12.0).reshape(3, 4)}, "step": 7}


class Recording(XckptStorageWriter):
    """Notes which hooks DCP calls, and with what."""

    def __init__(self, path: Any) -> None:
        super().__init__(path)
        self.calls: list[tuple[str, Any]] = []

    def reset(self, checkpoint_id: Any = None) -> None:
        self.calls.append(("reset", checkpoint_id))
        super().reset(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        self.calls.append(("storage_meta", None))
        return super().storage_meta()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.calls.append(("set_up_storage_writer", kwargs))
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        self.calls.append(("prepare_local_plan", None))
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        self.calls.append(("prepare_global_plan", len(plans)))
        return super().prepare_global_plan(plans)

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        done = super().write_data(plan, planner)
        self.calls.append(("write_data", done))
        return done

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        self.calls.append(("finish", results))
        super().finish(metadata, results)


def test_writers_and_readers_are_never_falsy(tmp_path: Path):
    assert bool(XckptStorageWriter(tmp_path)) is True
    assert bool(XckptStorageReader(tmp_path)) is True


def test_the_hooks_come_in_this_order(tmp_path: Path):
    writer = Recording(tmp_path / "ckpt")
    dcp.save(state(), storage_writer=writer)
    names = [name for name, _ in writer.calls]
    assert names[:5] == [
        "storage_meta",
        "set_up_storage_writer",
        "prepare_local_plan",
        "prepare_global_plan",
        "write_data",
    ]
    assert names[5] == "finish"


def test_the_ranks_that_torchrun_started_on_a_host_share_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A budget of 16 MiB for four: what a rank has in flight is 4 MiB, in a save and a load."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    budgets: list[int] = []

    class Noted(Pool):
        def __init__(self, *, threads: int | None, budget: int) -> None:
            budgets.append(budget)
            super().__init__(threads=threads, budget=budget)

    monkeypatch.setattr(write_checkpoint, "Pool", Noted)
    monkeypatch.setattr(window, "Pool", Noted)
    saving = xckpt.SaveOptions(memory_bytes=1 << 24)
    dcp.save(state(), storage_writer=XckptStorageWriter(tmp_path / "c", options=saving))
    loading = xckpt.LoadOptions(memory_bytes=1 << 24)
    dcp.load(state(), storage_reader=XckptStorageReader(tmp_path / "c", options=loading))
    assert len(budgets) >= 2 and 0 < max(budgets) <= 1 << 22


def test_reset_comes_only_with_an_id_and_moves_the_writer(tmp_path: Path):
    writer = Recording(tmp_path / "first")
    before = writer.storage_meta()
    dcp.save(state(), storage_writer=writer, checkpoint_id=tmp_path / "second")
    assert ("reset", tmp_path / "second") in writer.calls
    after = writer.storage_meta()
    assert os.listdir(tmp_path) == ["second"]
    assert (before.checkpoint_id, after.checkpoint_id) == (tmp_path / "first", tmp_path / "second")
    assert before.save_id != after.save_id
    reader = XckptStorageReader(tmp_path / "first")
    loaded = {"model": {"w": torch.zeros(3, 4)}, "step": 0}
    dcp.load(loaded, storage_reader=reader, checkpoint_id=tmp_path / "second")
    assert loaded["step"] == 7 and reader.checkpoint_id == tmp_path / "second"


def test_the_planner_gets_the_storage_meta(tmp_path: Path):
    seen: list[StorageMeta | None] = []

    class Planner(dcp.DefaultSavePlanner):
        def set_up_planner(
            self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
        ) -> None:
            seen.append(storage_meta)
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    metadata = dcp.save(
        state(), storage_writer=XckptStorageWriter(tmp_path / "a"), planner=Planner()
    )
    assert seen == [metadata.storage_meta]
    assert seen[0] is not None and seen[0].checkpoint_id == tmp_path / "a" and seen[0].save_id


def test_write_data_returns_a_future_of_a_picklable_list_of_write_results(tmp_path: Path):
    writer = Recording(tmp_path / "ckpt")
    dcp.save(state(), storage_writer=writer)
    done = dict(writer.calls)["write_data"]
    done.wait()
    results = pickle.loads(pickle.dumps(done.value()))
    assert [type(result) for result in results] == [WriteResult]
    assert results[0].size_in_bytes == 48


def test_validate_checkpoint_id_knows_what_can_be_opened():
    for one in ("/data/x", Path("x"), "s3://bucket/x", "gs://bucket/x", "memory://x", "file:///x"):
        assert XckptStorageWriter.validate_checkpoint_id(one), one
        assert XckptStorageReader.validate_checkpoint_id(one), one
    for one in ("", "ftp://host/x", "s3://"):
        assert not XckptStorageWriter.validate_checkpoint_id(one), one
        assert not XckptStorageReader.validate_checkpoint_id(one), one


def test_a_path_that_cannot_be_opened_is_refused_at_once():
    for kind in (XckptStorageWriter, XckptStorageReader):
        with pytest.raises(xckpt.StorageError, match="scheme 'ftp'"):
            kind("ftp://host/x")


def on_rank_calls(rank: int, path: Path) -> Any:
    """The arguments that this rank's writer gets, and the metadata that the save returns."""
    writer = Recording(path)
    metadata = dcp.save(on_rank_state(), storage_writer=writer)
    calls = dict(writer.calls)
    finished = [len(results) for results in calls.get("finish", [])]
    described = {
        fqn: getattr(entry, "size", None) for fqn, entry in metadata.state_dict_metadata.items()
    }
    return calls["set_up_storage_writer"], calls.get("prepare_global_plan"), finished, described


def test_rank_and_use_collectives_arrive_and_only_the_coordinator_plans_and_finishes(
    four_ranks: Ranks, tmp_path: Path
):
    answers = four_ranks.run(on_rank_calls, tmp_path / "ckpt")
    for rank, (arguments, _, _, _) in enumerate(answers):
        assert arguments == {"rank": rank, "use_collectives": True}
    assert [planned for _, planned, _, _ in answers] == [4, None, None, None]
    assert [finished for _, _, finished, _ in answers] == [[1, 1, 1, 1], [], [], []]


def test_the_metadata_is_returned_on_every_rank(four_ranks: Ranks, tmp_path: Path):
    answers = four_ranks.run(on_rank_calls, tmp_path / "ckpt")
    assert all(described == answers[0][3] for *_, described in answers)
    assert tuple(answers[0][3]["model.layers.0.weight"]) == whole().shape


def test_resolve_data_is_called_lazily(tmp_path: Path):
    """Not before `write_data`, and a chunk's data is not kept for the next."""
    events: list[str] = []

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: dcp.WriteItem) -> Any:
            events.append(f"resolve {write_item.index.fqn}")
            return super().resolve_data(write_item)

        def finish_plan(self, new_plan: dcp.SavePlan) -> dcp.SavePlan:
            events.append("finish_plan")
            return super().finish_plan(new_plan)

    dcp.save(state(), storage_writer=XckptStorageWriter(tmp_path / "a"), planner=Planner())
    assert events[0] == "finish_plan"
    assert sorted(events[1:]) == ["resolve model.w", "resolve step"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(4, 6).T,
        torch.arange(48.0).reshape(6, 8)[::2, 1:7:3],
        torch.ones(1).expand(3, 4),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.nn.Parameter(torch.arange(3.0) * 2),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.arange(6.0).to(torch.float8_e4m3fn),
    ],
    ids=["transposed", "strided", "expanded", "conj", "parameter", "0-d", "empty", "bool", "f8"],
)
def test_resolve_data_may_return_any_view_or_stride(tensor: torch.Tensor, tmp_path: Path):
    dcp.save({"x": tensor}, storage_writer=XckptStorageWriter(tmp_path / "a"))
    target = {"x": torch.empty(tensor.shape, dtype=tensor.dtype)}
    dcp.load(target, storage_reader=XckptStorageReader(tmp_path / "a"))
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    assert torch.equal(target["x"].to(wide), tensor.detach().to(wide))


def test_byte_io_goes_through_as_it_is(tmp_path: Path):
    """What the planner gave is what it gets, from position 0; xckpt sees opaque bytes."""
    got: list[bytes] = []

    class Save(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: dcp.WriteItem) -> Any:
            value = io.BytesIO(b"\x00no pickle" * 3000)
            value.seek(5)
            return value

    class Load(dcp.DefaultLoadPlanner):
        def load_bytes(self, read_item: dcp.ReadItem, value: io.BytesIO) -> None:
            assert value.tell() == 0
            got.append(value.read())

    dcp.save({"x": 1}, storage_writer=XckptStorageWriter(tmp_path / "a"), planner=Save())
    dcp.load({"x": 1}, storage_reader=XckptStorageReader(tmp_path / "a"), planner=Load())
    assert got == [b"\x00no pickle" * 3000]
    assert xckpt.open(tmp_path / "a")["x"] == got[0]


class Forged(dcp.DefaultLoadPlanner):
    """Rewrites the indices in the read items, as planners do."""

    def create_local_plan(self) -> dcp.LoadPlan:
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            forged = copy.copy(item)
            object.__setattr__(
                forged,
                "storage_index",
                MetadataIndex(item.storage_index.fqn, item.storage_index.offset, 99),
            )
            items.append(forged)
        return dcp.LoadPlan(items)


def test_an_index_hint_is_a_hint(tmp_path: Path):
    """`MetadataIndex` is (fqn, offset): a wrong or missing ``index`` changes nothing."""
    dcp.save(state(), storage_writer=XckptStorageWriter(tmp_path / "a"))
    loaded = {"model": {"w": torch.zeros(3, 4)}, "step": 0}
    dcp.load(loaded, storage_reader=XckptStorageReader(tmp_path / "a"), planner=Forged())
    assert torch.equal(loaded["model"]["w"], state()["model"]["w"])


class Counting(dcp.DefaultLoadPlanner):
    """Counts the commits of each item, and shows the tensors that it hands out."""

    def __init__(self) -> None:
        super().__init__()
        self.commits: list[tuple[str, tuple[int, ...]]] = []
        self.items = 0
        self.called = ""

    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        self.called = ",".join(state_dict)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def finish_plan(self, new_plan: dcp.LoadPlan) -> dcp.LoadPlan:
        self.items = sum(item.type is LoadItemType.TENSOR for item in new_plan.items)
        return super().finish_plan(new_plan)

    def commit_tensor(self, read_item: dcp.ReadItem, tensor: torch.Tensor) -> None:
        assert tensor.shape == read_item.lengths
        self.commits.append((read_item.dest_index.fqn, tuple(read_item.dest_offsets)))


def on_rank_commits(rank: int, path: Path) -> tuple[int, int, int, str]:
    """Items, commits, distinct commits of a load of columns from what was saved as rows."""
    irregular = distribute_tensor(torch.arange(35.0), on_rank_mesh("4"), [Shard(0)])
    dcp.save({**on_rank_state(), "b": irregular}, storage_writer=XckptStorageWriter(path))
    planner = Counting()
    blank = {"b": torch.zeros(35), **on_rank_blank()}
    dcp.load(blank, storage_reader=XckptStorageReader(path), planner=planner)
    on_rank_check(blank)
    assert torch.equal(blank["b"], torch.arange(35.0))
    return planner.items, len(planner.commits), len(set(planner.commits)), planner.called


def test_commit_tensor_comes_once_for_each_read_item(four_ranks: Ranks, tmp_path: Path):
    for items, commits, distinct, keys in four_ranks.run(on_rank_commits, tmp_path / "ckpt"):
        assert items == commits == distinct > 0
        assert keys == "args,b,model,opt,step"


def test_a_target_of_other_sizes_than_the_item_is_refused(tmp_path: Path):
    class Wrong(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, read_item: dcp.ReadItem) -> torch.Tensor:
            return torch.zeros(2, 4)

    dcp.save(state(), storage_writer=XckptStorageWriter(tmp_path / "a"))
    with pytest.raises(dcp.CheckpointException, match=r"model\.w: resolve_tensor must return"):
        dcp.load(state(), storage_reader=XckptStorageReader(tmp_path / "a"), planner=Wrong())


def on_rank_group(rank: int, path: Path, ranks: list[int]) -> Any:
    """The ranks of a group save and load; the others stay out."""
    group = dist.new_group(ranks)
    if rank not in ranks:
        return None
    assert isinstance(group, dist.ProcessGroup)
    mine = {f"of {rank}": torch.full((3,), float(rank)), "same": torch.arange(5)}
    dcp.save(mine, storage_writer=XckptStorageWriter(path), process_group=group)
    blank = {name: torch.zeros_like(tensor) for name, tensor in mine.items()}
    dcp.load(blank, storage_reader=XckptStorageReader(path), process_group=group)
    return all(torch.equal(blank[name], mine[name]) for name in mine)


@pytest.mark.parametrize("ranks", [[1, 3], [0, 1, 2], [2]])
def test_a_process_group_of_some_ranks(four_ranks: Ranks, tmp_path: Path, ranks: list[int]):
    answers = four_ranks.run(on_rank_group, tmp_path / "ckpt", ranks)
    assert answers == [rank in ranks or None for rank in range(4)]
    tree = xckpt.load(tmp_path / "ckpt")
    assert set(tree) == {"same", *(f"of {rank}" for rank in ranks)}


def on_rank_alone(rank: int, path: Path) -> None:
    own = path / str(rank)
    values = {"x": torch.full((4,), float(rank)), "n": rank}
    dcp.save(values, storage_writer=XckptStorageWriter(own), no_dist=True)
    blank = {"x": torch.zeros(4), "n": -1}
    dcp.load(blank, storage_reader=XckptStorageReader(own), no_dist=True)
    assert torch.equal(blank["x"], values["x"]) and blank["n"] == rank


def test_no_dist_runs_all_steps_on_one_rank(four_ranks: Ranks, tmp_path: Path):
    four_ranks.run(on_rank_alone, tmp_path)


def on_rank_other_coordinator(rank: int, path: Path) -> None:
    # Deprecated, but the only call with a coordinator of one's own.
    dcp.save_state_dict(on_rank_state(), XckptStorageWriter(path), coordinator_rank=2)
    state = on_rank_blank()
    dcp.load_state_dict(state, XckptStorageReader(path), coordinator_rank=3)
    on_rank_check(state)


def test_another_rank_may_coordinate(four_ranks: Ranks, tmp_path: Path):
    four_ranks.run(on_rank_other_coordinator, tmp_path / "ckpt")


def on_rank_uncoordinated(rank: int, path: Path) -> str:
    try:
        dcp.save(
            {"x": torch.ones(2)}, storage_writer=XckptStorageWriter(path), use_collectives=False
        )
    except ValueError as error:
        return str(error)
    return "saved"


def test_use_collectives_false_is_refused_by_name(four_ranks: Ranks, tmp_path: Path):
    for answer in four_ranks.run(on_rank_uncoordinated, tmp_path / "ckpt"):
        assert "cannot save with use_collectives=False" in answer
    assert os.listdir(tmp_path) == []


def test_use_collectives_false_works_in_one_process(tmp_path: Path):
    writer = XckptStorageWriter(tmp_path / "a")
    dcp.save(state(), storage_writer=writer, use_collectives=False)
    assert np.array_equal(xckpt.load(tmp_path / "a")["model"]["w"], state()["model"]["w"])


def test_read_metadata_says_what_torch_wants_to_know(tmp_path: Path):
    dcp.save(
        {"model": {"w": torch.ones(3, 4, dtype=torch.bfloat16), "e": torch.ones(0, 2)}, "step": 7},
        storage_writer=XckptStorageWriter(tmp_path / "a"),
    )
    metadata = XckptStorageReader(tmp_path / "a").read_metadata()
    described = metadata.state_dict_metadata
    assert list(described) == ["model.w", "model.e", "step"]
    tensor = described["model.w"]
    assert isinstance(tensor, dcp.TensorStorageMetadata)
    assert (tensor.size, tensor.properties.dtype) == (torch.Size((3, 4)), torch.bfloat16)
    assert [(c.offsets, c.sizes) for c in tensor.chunks] == [((0, 0), (3, 4))]
    assert isinstance(described["step"], dcp.BytesStorageMetadata)
    assert metadata.planner_data == {
        "model.w": ("model", "w"),
        "model.e": ("model", "e"),
        "step": ("step",),
    }
    assert metadata.storage_meta is not None and metadata.storage_meta.load_id


def test_loading_without_a_state_dict(tmp_path: Path):
    """What torch builds from the metadata alone: everything, one key, one branch."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    dcp.save(
        {**state(), "opt": [{"mu": torch.ones(2)}, {"mu": torch.zeros(2)}]},
        storage_writer=XckptStorageWriter(tmp_path / "a"),
    )

    def load(keys: Any = None) -> dict[str, Any]:
        return _load_state_dict_from_keys(keys, storage_reader=XckptStorageReader(tmp_path / "a"))

    everything = load()
    assert torch.equal(everything["model"]["w"], state()["model"]["w"])
    assert everything["step"] == 7
    assert torch.equal(everything["opt"][0]["mu"], torch.ones(2))
    assert set(load({"step"})) == {"step"}
    assert torch.equal(load("model")["model"]["w"], state()["model"]["w"])


def test_another_shape_is_refused_by_torch(tmp_path: Path):
    dcp.save(state(), storage_writer=XckptStorageWriter(tmp_path / "a"))
    other = {"model": {"w": torch.zeros(4, 3)}, "step": 0}
    with pytest.raises(dcp.CheckpointException, match="Size mismatch"):
        dcp.load(other, storage_reader=XckptStorageReader(tmp_path / "a"))


def test_a_stateful_object_is_asked_and_filled(tmp_path: Path):
    class Trainer:
        def __init__(self, value: float) -> None:
            self.weight, self.epoch = torch.full((2,), value), int(value)

        def state_dict(self) -> dict[str, Any]:
            return {"weight": self.weight, "epoch": self.epoch}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.weight, self.epoch = state_dict["weight"], state_dict["epoch"]

    dcp.save({"t": Trainer(3.0)}, storage_writer=XckptStorageWriter(tmp_path / "a"))
    trainer = Trainer(0.0)
    dcp.load({"t": trainer}, storage_reader=XckptStorageReader(tmp_path / "a"))
    assert trainer.epoch == 3 and torch.equal(trainer.weight, torch.full((2,), 3.0))


def test_hooks_that_come_first_are_named(tmp_path: Path) -> None:
    """For loops of a user's own, which may call them in another order."""
    writer = XckptStorageWriter(tmp_path / "a")
    with pytest.raises(PlanError, match="/a: a save calls set_up_storage_writer first"):
        writer.prepare_local_plan(dcp.SavePlan([]))
    dcp.save(state(), storage_writer=writer)
    reader = XckptStorageReader(tmp_path / "a")
    with pytest.raises(PlanError, match="/a: a load calls read_metadata first"):
        reader.prepare_local_plan(dcp.LoadPlan([]))
