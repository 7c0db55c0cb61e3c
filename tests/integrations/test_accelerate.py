"""Accelerate: resumed runs in one process, under DDP and FSDP2, and from one to the other."""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import xckpt
from tests.integrations.conftest import damage, kill_a_deletion, own_bytes, torchrun
from tests.support.ranks import Ranks
from xckpt.storage.write_checkpoint import ZarrStorageWriter

STEPS = 6


class Counter:
    """An object of the user's."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def naming(folder: Path, limit: int | None = None) -> tuple[Any, Any]:
    """An accelerator that names its checkpoints and keeps so many, and a model it has prepared."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    names = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=limit)
    accelerator = Accelerator(cpu=True, project_config=names)
    return accelerator, accelerator.prepare(torch.nn.Linear(1, 1))


def trained(
    path: str | None, start: int, end: int, sharded: bool = False, background: bool = False
) -> tuple[int, int, list[torch.Tensor]]:
    """Train from a step to another, loading first and saving at the end."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    from xckpt.integrations.accelerate import load_state, save_state

    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    torch.manual_seed(start)
    accelerator = Accelerator(cpu=True)
    if sharded:
        # Accelerate turns its FSDP2 on for accelerators alone; on a CPU the switch is set by hand.
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        accelerator.state.distributed_type = DistributedType.FSDP
    model = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Dropout(0.1), torch.nn.Linear(7, 1))
    first = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
    other = torch.optim.SGD(model[2].parameters(), lr=1e-2, momentum=0.9)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.9) for each in (first, other)]
    model, first, other, *schedules = accelerator.prepare(model, first, other, *schedules)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if start:
        assert path is not None
        load_state(accelerator, path)
    elif accelerator.process_index:
        torch.manual_seed(100)  # each rank has a generator of its own
    for step in range(start, end):
        batch = torch.sin(torch.arange(16.0) + step + accelerator.process_index).view(4, 4)
        accelerator.backward(model(batch).square().mean())
        for each in (first, other, *schedules):
            each.step()
        for each in (first, other):
            each.zero_grad()
        counter.count += 1
    if path is not None:
        future = save_state(accelerator, path, background=background)
        assert (future is None) is not background
        if future is not None:
            future.result()
    moments = [m for each in (first, other) for m in each.state_dict()["state"].values()]
    tensors = [*model.parameters(), *(tensor for each in moments for tensor in each.values())]
    assert all(isinstance(t, DTensor) is sharded for t in model.parameters())
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return accelerator.num_processes, counter.count, [t.detach().clone() for t in whole]


@pytest.mark.parametrize("background", [False, True])
def test_one_process_resumes(background: bool, tmp_path: Path) -> None:
    *_, whole = trained(None, 0, STEPS)
    trained(str(tmp_path / "run"), 0, 3, background=background)
    _, count, resumed = trained(str(tmp_path / "run"), 3, STEPS)
    assert count == STEPS and len(whole) == 4 + 2 * 3 + 2
    assert all(map(torch.equal, whole, resumed))
    assert xckpt.open(tmp_path / "run").verify() == []


@pytest.mark.parametrize("background", [False, True])
def test_mixed_precision_stays(background: bool, tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from xckpt.integrations.accelerate import load_state, save_state

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    torch.manual_seed(0)
    exact = torch.nn.Linear(64, 1)
    batch = torch.arange(256.0).sin().view(4, 64)
    unrounded = exact(batch)
    model = accelerator.prepare(exact)
    before = model(batch)
    assert not torch.equal(before, unrounded)
    future = save_state(accelerator, tmp_path / "run", background=background)
    assert torch.equal(model(batch), before)
    assert future is None or future.result()
    load_state(accelerator, tmp_path / "run")
    assert torch.equal(model(batch), before)
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize("background", [False, True])
def test_checkpoints_that_accelerate_names(background: bool, tmp_path: Path) -> None:
    from accelerate import Accelerator

    from xckpt.integrations.accelerate import load_state, save_state

    accelerator, model = naming(tmp_path, 2)
    with pytest.raises(xckpt.NotACheckpointError):
        load_state(accelerator)
    futures: list[Any] = []
    for number in range(4):
        torch.nn.init.constant_(model.weight, number)
        futures.append(save_state(accelerator, background=background))
    assert all(future.result() for future in futures) if background else not any(futures)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left[-2:] == ["checkpoint_2", "checkpoint_3"] and len(left) <= 2 + background
    accelerator, model = naming(tmp_path, 2)
    accelerator.project_configuration.iteration = 3
    with pytest.raises(xckpt.CheckpointExistsError):
        save_state(accelerator)
    accelerator.project_configuration.iteration = 0  # a new run: it would be deleted as the oldest
    with pytest.raises(xckpt.CheckpointExistsError, match=r"checkpoint_3 is there.*load_state"):
        save_state(accelerator)
    for name in ("9", "checkpoint_best_9"):  # the user's own are not among them
        xckpt.copy(tmp_path / "checkpoints" / left[-2], tmp_path / "checkpoints" / name)
    load_state(accelerator)
    assert model.weight.item() == 3
    save_state(accelerator)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["9", "checkpoint_3", "checkpoint_4", "checkpoint_best_9"]
    with pytest.raises(ValueError, match="give a path"):
        save_state(Accelerator(cpu=True))


@pytest.mark.parametrize("background", [False, True])
def test_a_frozen_model_is_written_once(background: bool, tmp_path: Path) -> None:
    from xckpt.integrations.accelerate import load_state, save_state

    for _ in range(2):  # the second process resumes
        accelerator, _ = naming(tmp_path)
        accelerator.prepare(torch.nn.Linear(1024, 1024))
        if accelerator.project_configuration.iteration or (tmp_path / "checkpoints").exists():
            load_state(accelerator)
        for _ in range(2):
            future = save_state(accelerator, background=background)
            if future is not None:
                future.result()
    sizes = [own_bytes(each) for each in (tmp_path / "checkpoints").iterdir()]
    assert len(sizes) == 4 and max(sizes) < 100_000


def on_rank_list(rank: int, folder: Path) -> float:
    """The weight after a load by two processes, of which one sees no checkpoints."""
    from xckpt.integrations.accelerate import load_state, names

    torchrun(rank)
    accelerator, model = naming(folder)
    if rank:
        names._committed = lambda _: {}
    load_state(accelerator)
    return accelerator.unwrap_model(model).weight.item()


def test_one_process_lists_for_all(two_ranks: Ranks, tmp_path: Path) -> None:
    from xckpt.integrations.accelerate import save_state

    accelerator, model = naming(tmp_path)
    torch.nn.init.constant_(model.weight, 7)
    save_state(accelerator)
    assert two_ranks.run(on_rank_list, tmp_path) == [7, 7]


def test_a_run_of_accelerates_own_goes_on(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from xckpt.integrations.accelerate import load_state, save_state

    def prepared() -> tuple[Any, Any]:
        names = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
        accelerator = Accelerator(cpu=True, project_config=names)
        model = torch.nn.Linear(2, 1)
        model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        return accelerator, model

    accelerator, model = prepared()
    for number in range(2):
        torch.nn.init.constant_(model.weight, number)
        accelerator.save_state()
    accelerator, model = prepared()
    load_state(accelerator)
    assert model.weight.tolist() == [[1, 1]]
    save_state(accelerator)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_1", "checkpoint_2"]
    accelerator, model = prepared()
    load_state(accelerator, tmp_path / "checkpoints" / "checkpoint_1")
    load_state(accelerator)
    assert model.weight.tolist() == [[1, 1]] and accelerator.save_iteration == 3


@pytest.mark.parametrize("background", [False, True])
def test_a_damaged_newest_gives_way_to_the_one_before(background: bool, tmp_path: Path) -> None:

    from xckpt.integrations.accelerate import load_state, save_state

    accelerator, model = naming(tmp_path, 1)
    accelerator.project_configuration.total_limit = 3
    for number in range(3):
        torch.nn.init.constant_(model.weight, number)
        save_state(accelerator)
    root = tmp_path / "checkpoints"
    damage(root / "checkpoint_2")
    accelerator, model = naming(tmp_path, 1)
    with pytest.raises(xckpt.CorruptCheckpointError):
        load_state(accelerator, root / "checkpoint_2")
    with pytest.warns(UserWarning, match=r"checkpoint_1 was restored.*checkpoint_2"):
        load_state(accelerator)
    assert model.weight.item() == 1
    for number in (3, 4):
        future = save_state(accelerator, background=background)
        # Until the new one is committed, what was restored is the only good one.
        left = sorted(path.name for path in root.iterdir() if not path.name.startswith("."))
        if background and number == 3:
            assert left[:2] == ["checkpoint_1", "checkpoint_2"]
        if future is not None:
            future.result()
    left = sorted(path.name for path in root.iterdir())
    assert left[-1] == "checkpoint_4" and len(left) == 1 + background
    for name in left:
        damage(root / name)
    with pytest.raises(xckpt.CorruptCheckpointError):
        load_state(naming(tmp_path, 1)[0])


def test_the_only_good_one_stays_until_a_save_after_it_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    from xckpt.integrations.accelerate import load_state, save_state

    accelerator, _ = naming(tmp_path)
    for _ in range(2):
        save_state(accelerator)
    root = tmp_path / "checkpoints"
    damage(root / "checkpoint_1")
    with pytest.warns(UserWarning, match="checkpoint_0 was restored"):
        load_state(accelerator)
    accelerator.project_configuration.total_limit = 1
    for number in (2, 3):
        with monkeypatch.context() as patch:
            patch.setattr(ZarrStorageWriter, "write_data", refused)
            future = save_state(accelerator, background=True)
            assert future is not None and future.where.endswith(f"checkpoint_{number}")
            with pytest.raises(xckpt.StorageError, match="disk is full"):
                future.result()
        assert xckpt.open(root / "checkpoint_0").verify() == []
    future = save_state(accelerator, background=True)
    assert future is not None and future.result()
    save_state(accelerator)
    assert [path.name for path in root.iterdir()] == ["checkpoint_5"]


def test_a_deletion_that_was_killed_is_finished(tmp_path: Path) -> None:

    from xckpt.integrations.accelerate import save_state

    accelerator, _ = naming(tmp_path)
    for _ in range(3):
        save_state(accelerator)
    root = tmp_path / "checkpoints"
    kill_a_deletion(root / "checkpoint_0")
    assert (root / "checkpoint_0").exists() and not xckpt.exists(root / "checkpoint_0")
    save_state(accelerator)
    assert sorted(os.listdir(root)) == ["checkpoint_1", "checkpoint_2", "checkpoint_3"]


def refused(*_: object) -> None:
    raise xckpt.StorageError("the disk is full")


def test_what_is_not_saved_is_refused(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.state import DistributedType

    from xckpt.integrations.accelerate import load_state, save_state

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    save_state(accelerator, tmp_path / "run")
    wrong: Any = 5
    with pytest.raises(TypeError, match=r"load_state\(accelerator, path\)"):
        load_state(accelerator, wrong)
    with pytest.raises(TypeError, match=r"save_state.*background"):
        save_state(accelerator, tmp_path / "run", background=wrong)
    accelerator.project_configuration.automatic_checkpoint_naming = True
    with pytest.raises(ValueError, match="project_dir="):
        save_state(accelerator)
    for call in (save_state, load_state):
        with pytest.raises(TypeError, match=r"takes an accelerate\.Accelerator, not a Linear"):
            call(torch.nn.Linear(1, 1), tmp_path / "run")
    hook = accelerator.register_save_state_pre_hook(lambda *_: None)
    with pytest.raises(ValueError, match="register_for_checkpointing"):
        save_state(accelerator, tmp_path / "run")
    hook.remove()
    accelerator.state.distributed_type = DistributedType.DEEPSPEED
    for call in (save_state, load_state):
        with pytest.raises(ValueError, match=r"DEEPSPEED: call accelerator\.save_state"):
            call(accelerator, tmp_path / "run")


def test_what_was_saved_and_is_not_there_is_said(tmp_path: Path) -> None:
    from accelerate import Accelerator

    from xckpt.integrations.accelerate import load_state, save_state

    class Notes(Counter):
        def __init__(self, **notes: int) -> None:
            self.notes = notes

        def state_dict(self) -> dict[str, int]:
            return self.notes

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.notes = state

    def prepared(layers: int, with_optimizer: bool, **notes: int) -> Any:
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(layers)))
        optimizer = torch.optim.AdamW(model.parameters())
        accelerator.prepare(model, *[optimizer] * with_optimizer)
        accelerator.register_for_checkpointing(Notes(**notes))
        return accelerator

    save_state(prepared(2, True, one=1, other=2), tmp_path / "run")
    with pytest.warns(UserWarning, match=r"run holds parts.*not loaded: optimizers/0$"):
        load_state(prepared(2, False, one=0, other=0), tmp_path / "run")
    lacks_a_layer = prepared(1, False, one=0, other=0), r"models/0/1\.weight"
    for lacking, name in (lacks_a_layer, (prepared(2, True, one=0), "registered/0/other")):
        before = [each.tolist() for each in lacking._models[0].parameters()]
        with pytest.raises(xckpt.TreeMismatchError, match=f"resume with the parts.*\n.*{name}: in"):
            load_state(lacking, tmp_path / "run")
        assert before == [each.tolist() for each in lacking._models[0].parameters()]


def on_rank_train(rank: int, path: str | None, start: int, end: int, sharded: bool) -> Any:
    torchrun(rank)
    return trained(path, start, end, sharded)


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_two_processes_resume(sharded: bool, two_ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    whole = two_ranks.run(on_rank_train, None, 0, STEPS, sharded)
    two_ranks.run(on_rank_train, path, 0, 3, sharded)
    resumed = two_ranks.run(on_rank_train, path, 3, STEPS, sharded)
    for (size, _, once), (_, count, again) in zip(whole, resumed, strict=True):
        assert (size, count) == (2, STEPS)
        assert all(map(torch.equal, once, again))
    # Saved by two, and now loaded whole by one, or in the other way of sharding.
    *_, alone = trained(path, STEPS, STEPS)
    assert all(map(torch.equal, alone, resumed[0][2]))
    for *_, other in two_ranks.run(on_rank_train, path, STEPS, STEPS, not sharded):
        assert all(map(torch.equal, alone, other))


EPOCHS = 4


def shuffled(path: str, start: int, end: int, seedable: bool) -> list[float]:
    """The batches of some epochs, in the order of a shuffling loader; saved at the end."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DataLoaderConfiguration

    from xckpt.integrations.accelerate import load_state, save_state

    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    settings = DataLoaderConfiguration(use_seedable_sampler=seedable)
    accelerator = Accelerator(cpu=True, dataloader_config=settings)
    torch.manual_seed(0)
    data: Any = torch.arange(32.0)
    loader = torch.utils.data.DataLoader(data, 4, shuffle=True)
    _, loader = accelerator.prepare(torch.nn.Linear(1, 1), loader)
    if start:
        load_state(accelerator, path)
    found = [float(batch[0]) for _ in range(start, end) for batch in loader]
    save_state(accelerator, path)
    return found


@pytest.mark.parametrize("seedable", [False, True])
def test_a_shuffling_loader_goes_on(seedable: bool, tmp_path: Path) -> None:
    whole = shuffled(str(tmp_path / "whole"), 0, EPOCHS, seedable)
    first = shuffled(str(tmp_path / "run"), 0, 2, seedable)
    assert first + shuffled(str(tmp_path / "run"), 2, EPOCHS, seedable) == whole
    assert whole[:8] != whole[8:16]


@pytest.mark.parametrize("cut", [3, 8, 16], ids=["within", "last batch", "last of two epochs"])
def test_a_loader_goes_on_within_an_epoch_and_behind_its_last_batch(
    cut: int, tmp_path: Path
) -> None:
    """Bit for bit, by the seed of the run that saved, also where dropout draws."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from xckpt.integrations.accelerate import load_state, save_state

    def prepared(seed: int) -> tuple[Any, Any, Any]:
        torch.manual_seed(seed)
        settings = DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=True)
        accelerator = Accelerator(cpu=True, dataloader_config=settings)
        data: Any = torch.arange(32.0).view(16, 2)
        loader = torch.utils.data.DataLoader(data, 2, shuffle=True, generator=torch.Generator())
        model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(2, 2))
        return accelerator, *accelerator.prepare(model, loader)

    accelerator, model, loader = prepared(0)
    whole: list[list[float]] = []
    for _ in range(3):
        for batch in loader:
            whole.append(model(batch).tolist())
            if len(whole) == cut:
                save_state(accelerator, tmp_path / "run")
    accelerator, model, loader = prepared(5)
    load_state(accelerator, tmp_path / "run")
    rest: list[list[float]] = []
    while len(rest) < 24 - cut:
        rest += [model(batch).tolist() for batch in loader]
    assert rest == whole[cut:]


def on_rank_shuffle(rank: int, *arguments: Any) -> list[float]:
    torchrun(rank)
    return shuffled(*arguments)


def test_shuffling_loaders_of_two_processes_go_on(two_ranks: Ranks, tmp_path: Path) -> None:
    """Their samplers draw from a generator that they share, and that is no process's own."""
    whole = two_ranks.run(on_rank_shuffle, str(tmp_path / "whole"), 0, EPOCHS, False)
    path = str(tmp_path / "run")
    first = two_ranks.run(on_rank_shuffle, path, 0, 2, False)
    rest = two_ranks.run(on_rank_shuffle, path, 2, EPOCHS, False)
    assert [one + other for one, other in zip(first, rest, strict=True)] == whole
    # For one process they begin anew: what two have seen is not the place of one.
    assert len(shuffled(path, 2, EPOCHS, False)) == 16
