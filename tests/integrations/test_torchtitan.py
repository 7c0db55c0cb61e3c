"""torchtitan's optimizers, schedules and data loaders under `XckptManager`, in one process and two.

Its trainer itself wants a GPU: the loop here is what that does with a manager.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset

import xckpt
from tests.integrations.conftest import torchrun
from tests.support.ranks import Ranks

STEPS = 9


class Numbers(IterableDataset[torch.Tensor]):
    """Batches that each rank has its own of, and a position."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.position += 1
            yield torch.sin(torch.arange(4.0) + 5 * self.position + self.rank)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Trainer:
    """What of torchtitan's trainer a manager has to do with."""

    def __init__(self, folder: Path | str, kind: Any = None, data: bool = True, **settings: Any):
        from torchtitan.components.dataloader import ParallelAwareDataloader
        from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

        from xckpt.integrations.torchtitan import XckptManager

        torch.manual_seed(settings.pop("seed", 0))
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.step = 0
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Linear(7, 1))
        if size > 1:
            mesh = torch.distributed.init_device_mesh("cpu", (size,))
            for layer in [*self.model, self.model]:
                fully_shard(layer, mesh=mesh)
        parts, config = [self.model], default_adamw(1e-2)
        config.implementation = "for-loop"
        self.optimizers = config.build(model_parts=parts)
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        self.schedules = schedule.build(optimizers=self.optimizers, training_steps=STEPS)
        numbers = Numbers(rank)
        self.loader = ParallelAwareDataloader(numbers, rank, size, batch_size=2) if data else None
        settings = {"interval": 2, "keep_latest_k": 2, "last_save_model_only": False} | settings
        settings |= {"enable": True, "folder": "checkpoint"}
        self.checkpointer = (
            (kind or XckptManager)
            .Config(**settings)
            .build(
                dataloader=self.loader,
                model_parts=parts,
                optimizers=self.optimizers,
                lr_schedulers=self.schedules,
                states={"train_state": self},
                sd_adapter=None,
                base_folder=str(folder),
            )
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def train(self, end: int, load: bool = True, final: bool = True) -> list[torch.Tensor]:
        """All tensors of the model and the optimizers after a run."""
        if load:
            self.checkpointer.load()
        data = iter(self.loader if self.loader is not None else [torch.ones(2, 4)] * STEPS)
        while self.step < end:
            self.step += 1
            self.model(next(data)).square().mean().backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedules.step()
            self.optimizers.zero_grad()
            self.checkpointer.save(self.step, last_step=final and self.step == end)
        self.checkpointer.maybe_wait_for_saving()
        self.checkpointer.close()
        return self.tensors()

    def tensors(self) -> list[torch.Tensor]:
        moments = [v for v in self.optimizers.state_dict().values() if isinstance(v, torch.Tensor)]
        found = [*self.model.state_dict().values(), *moments]
        whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in found]
        return [each.detach().clone() for each in whole]


def steps_in(folder: Path) -> list[int]:
    found = xckpt.CheckpointManager(folder / "checkpoint", group=xckpt.LocalGroup()).steps()
    return [record.number for record in found]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("background", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one(background: bool, tmp_path: Path) -> None:
    whole = Trainer(tmp_path / "whole", background=background).train(STEPS)
    Trainer(tmp_path / "run", background=background).train(5, final=False)
    assert steps_in(tmp_path / "run") == [2, 4]
    resumed = Trainer(tmp_path / "run", seed=1, background=background).train(STEPS)
    assert steps_in(tmp_path / "run") == [8, 9]
    assert len(whole) == 4 + 3 * 4 and all(map(torch.equal, whole, resumed))


@pytest.mark.usefixtures("alone")
def test_it_resumes_from_torchtitans_own_steps(tmp_path: Path) -> None:
    from torchtitan.components.checkpointer import CheckpointManager

    whole = Trainer(tmp_path / "whole").train(STEPS)
    Trainer(tmp_path / "run", CheckpointManager).train(5, final=False)
    resumed = Trainer(tmp_path / "run", seed=1).train(STEPS)
    assert all(map(torch.equal, whole, resumed))
    assert steps_in(tmp_path / "run") == [2, 4, 8, 9]  # its own are never deleted


@pytest.mark.usefixtures("alone")
def test_a_damaged_newest_step_is_passed_over(tmp_path: Path) -> None:
    whole = Trainer(tmp_path / "whole").train(STEPS)
    Trainer(tmp_path / "run").train(5, final=False)
    newest = tmp_path / "run" / "checkpoint" / "step-00000004"
    (newest / "0.weight" / "c" / "0" / "0").unlink()
    with pytest.warns(UserWarning, match="step 2 was restored"):
        resumed = Trainer(tmp_path / "run", seed=1).train(STEPS)
    assert all(map(torch.equal, whole, resumed))


def damaged(folder: Path, step: int) -> None:
    """Flip a bit of the model: the moments of the optimizers are as they were saved."""
    chunk = folder / "checkpoint" / f"step-{step:08d}" / "0.weight" / "c" / "0" / "0"
    chunk.write_bytes(bytes([chunk.read_bytes()[0] ^ 1, *chunk.read_bytes()[1:]]))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("cut", [False, True])
def test_a_damaged_newest_step_gives_way_to_a_seed(cut: bool, tmp_path: Path) -> None:
    """A seed is a model and nothing else; what was read of the damaged step is forgotten."""
    seed = Trainer(tmp_path / "whole", seed=7, last_save_model_only=True)
    seed.checkpointer.save(0, last_step=True)
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    whole = Trainer(tmp_path / "whole", seed=1).train(STEPS)
    Trainer(tmp_path / "run", seed=1).train(3, final=False)
    assert steps_in(tmp_path / "run") == [0, 2]
    if cut:
        (tmp_path / "run" / "checkpoint" / "step-00000002" / "xckpt.json").write_text("{")
    else:
        damaged(tmp_path / "run", 2)
    with pytest.warns(UserWarning, match="step 0 was restored"):
        resumed = Trainer(tmp_path / "run", seed=1).train(STEPS)
    assert all(map(torch.equal, whole, resumed))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("cut", [False, True])
def test_where_all_are_damaged_no_run_begins_anew(cut: bool, tmp_path: Path) -> None:
    Trainer(tmp_path / "first").train(4)
    first = str(tmp_path / "first" / "checkpoint" / "step-00000004")
    Trainer(tmp_path / "run").train(3, final=False)
    if cut:
        (tmp_path / "run" / "checkpoint" / "step-00000002" / "xckpt.json").write_text("{")
    else:
        damaged(tmp_path / "run", 2)
    for begins_with in (None, first):
        trainer = Trainer(tmp_path / "run", initial_load_path=begins_with)
        with pytest.raises(xckpt.CorruptCheckpointError, match="no step is good"):
            trainer.checkpointer.load()
    with pytest.raises((xckpt.CorruptCheckpointError, xckpt.ManifestError)):
        Trainer(tmp_path / "run").checkpointer.load(2)
    damaged(tmp_path / "first", 4)
    with pytest.raises(xckpt.CorruptCheckpointError):
        Trainer(tmp_path / "new", initial_load_path=first).checkpointer.load()


@pytest.mark.usefixtures("alone")
def test_the_last_save_is_of_the_model_and_begins_another_run(tmp_path: Path) -> None:
    weights = Trainer(tmp_path / "run", last_save_model_only=True, export_dtype="bfloat16").train(
        4
    )[:4]
    last = tmp_path / "run" / "checkpoint" / "step-00000004"
    stored = xckpt.load(last, framework="torch")
    assert list(stored) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(stored.values(), weights, strict=True))
    begun = Trainer(tmp_path / "begun", seed=1, initial_load_path=str(last))
    assert begun.checkpointer.load()  # in the model's own dtype, as by torchtitan's manager
    exported = [each.float() for each in stored.values()]
    assert all(map(torch.equal, begun.tensors()[:4], exported))
    earlier = str(tmp_path / "run" / "checkpoint" / "step-00000002")
    new = Trainer(tmp_path / "new", seed=1, initial_load_path=earlier)
    assert new.checkpointer.load() and new.step == 0
    whole = Trainer(tmp_path / "whole", initial_load_path=earlier, initial_load_model_only=False)
    assert whole.checkpointer.load() and whole.step == 2
    assert all(map(torch.equal, new.tensors()[:4], whole.tensors()[:4]))
    assert not torch.equal(new.tensors()[0], weights[0])


@pytest.mark.usefixtures("alone")
def test_what_the_configuration_says(tmp_path: Path) -> None:
    fresh = Trainer(tmp_path / "run", enable_first_step_checkpoint=True, keep_latest_k=0)
    assert not fresh.checkpointer.load()
    fresh.train(5)
    assert steps_in(tmp_path / "run") == [1, 2, 4, 5]
    reader = Trainer(tmp_path / "run", load_only=True, exclude_from_loading=["train_state"])
    assert reader.checkpointer.load(2) and reader.step == 0
    reader.train(4, load=False)
    assert steps_in(tmp_path / "run") == [1, 2, 4, 5]
    with pytest.raises(ValueError, match="initial_load_in_hf: use"):
        Trainer(tmp_path, last_save_in_hf=True, last_save_model_only=True)
    with pytest.raises(ValueError, match="exclude_from_loading"):
        Trainer(tmp_path, exclude_from_loading=["optimiser"])


@pytest.mark.usefixtures("alone")
def test_a_failed_save_is_raised(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "step-00000004").write_text("in the way")
    with pytest.raises(xckpt.XckptError):
        trainer.train(STEPS)
    assert steps_in(tmp_path) == [2]


def on_rank_train(rank: int, folder: str, end: int, final: bool, seed: int) -> Any:
    torchrun(rank)
    return Trainer(folder, seed=seed).train(end, final=final)


def test_two_processes_resume(two_ranks: Ranks, alone: None, tmp_path: Path) -> None:
    whole, _ = two_ranks.run(on_rank_train, str(tmp_path / "whole"), STEPS, True, 0)
    two_ranks.run(on_rank_train, str(tmp_path / "run"), 5, False, 0)
    assert steps_in(tmp_path / "run") == [2, 4]
    one, other = two_ranks.run(on_rank_train, str(tmp_path / "run"), STEPS, True, 1)
    assert all(map(torch.equal, whole, one)) and all(map(torch.equal, whole, other))
    # Saved in two shards, loaded whole by one process; the data of two are not for one.
    reader = Trainer(tmp_path / "run", seed=2, data=False, exclude_from_loading=["train_state"])
    assert reader.checkpointer.load(9)
    assert all(map(torch.equal, whole, reader.tensors()))
