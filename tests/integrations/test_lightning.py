"""Lightning's `Trainer` over `XckptCheckpointIO`: resumed runs, kept checkpoints, failures."""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import xckpt
from tests.integrations.conftest import damage, kill_a_deletion, own_bytes, torchrun
from tests.support.ranks import Ranks
from xckpt.integrations.lightning import XckptCheckpointIO, XckptModelParallelStrategy
from xckpt.integrations.lightning.last import make_way
from xckpt.storage.write_checkpoint import ZarrStorageWriter

EPOCHS = 4
SIZES = {"max_epochs": EPOCHS, "accelerator": "cpu", "logger": False, "enable_progress_bar": False}
SIZES |= {"enable_model_summary": False}


class Regression(LightningModule):
    """Two layers, dropout, AdamW and a schedule; its metric falls, then rises."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, 1)
        )

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        torch.manual_seed(self.global_step)
        loss = self.layers(batch).square().mean()
        self.log("loss", loss, sync_dist=True)
        self.log("metric", float(abs(self.current_epoch - 1)))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        # By the step: Lightning saves at the end of an epoch before it steps a schedule of epochs,
        # so that such a run resumes with the old rate, whatever writes the checkpoint.
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Sharded(Regression):
    """The same over FSDP2."""

    def configure_model(self) -> None:
        if isinstance(self.layers[0].weight, DTensor):
            return
        mesh = self.device_mesh["data_parallel"]
        for layer in [*self.layers, self]:
            fully_shard(layer, mesh=mesh)


def trained(
    folder: Path, epochs: int, io: Any = None, resume: str | None = None, **settings: Any
) -> tuple[Trainer, list[torch.Tensor]]:
    """The trainer after a run, and all tensors of its model and optimizer."""
    seed_everything(0, verbose=False)
    rules = {"monitor": "metric", "save_top_k": 2, "save_last": True} | settings.pop("keep", {})
    trainer = Trainer(
        **SIZES | settings | {"max_epochs": epochs},
        callbacks=ModelCheckpoint(folder, "{epoch}", **rules),
        plugins=[] if io is None else [io],
    )
    model = Sharded() if settings.get("devices") and io is None else Regression()
    data: Any = torch.arange(64.0).sin().view(16, 4)
    trainer.fit(model, DataLoader(data, 4), ckpt_path=resume)
    moments = trainer.optimizers[0].state_dict()["state"]
    tensors = [*model.parameters(), *(t for each in moments.values() for t in each.values())]
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in tensors]
    return trainer, [tensor.detach().clone() for tensor in whole]


@pytest.mark.parametrize("background", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one(background: bool, tmp_path: Path) -> None:
    _, whole = trained(tmp_path / "whole", EPOCHS)
    trained(tmp_path / "run", 2, XckptCheckpointIO(background=background))
    last = str(tmp_path / "run" / "last.ckpt")
    assert xckpt.open(last).verify() == [] and xckpt.open(last)["epoch"] == 1
    trainer, resumed = trained(
        tmp_path / "run", EPOCHS, XckptCheckpointIO(background=background), "last"
    )
    assert trainer.global_step == 4 * EPOCHS
    assert len(whole) == 4 + 3 * 4 and all(map(torch.equal, whole, resumed))


@pytest.mark.parametrize("background", [False, True])
def test_a_frozen_model_is_written_once(background: bool, tmp_path: Path) -> None:
    frozen = {"state_dict": {"base": torch.ones(1024, 1024), "adapter": torch.zeros(8)}}
    for _ in range(2):  # the second process resumes
        io = XckptCheckpointIO(background=background)
        if (tmp_path / "0.ckpt").exists():
            io.load_checkpoint(tmp_path / "1.ckpt")
        for _ in range(2):
            frozen["state_dict"]["adapter"] += 1
            io.save_checkpoint(frozen, tmp_path / f"{len(list(tmp_path.glob('*.ckpt')))}.ckpt")
            io.teardown()
    paths = sorted(tmp_path.glob("*.ckpt"))
    assert len(paths) == 4 and max(map(own_bytes, paths)) < 10_000
    assert [xckpt.load(path)["state_dict"]["adapter"][0] for path in paths] == [1, 2, 3, 4]


def test_what_was_put_aside_stays(tmp_path: Path) -> None:
    last = tmp_path / "last.ckpt"
    for text in ("first", "second", "third"):
        torch.save({"text": text}, last)
        make_way(last, alone=True, background=False)
    assert {torch.load(each)["text"] for each in tmp_path.iterdir()} == {"first", "second", "third"}


@pytest.mark.parametrize("background", [False, True])
def test_a_run_of_lightnings_own_goes_on(background: bool, tmp_path: Path) -> None:
    _, whole = trained(tmp_path / "whole", EPOCHS)
    trained(tmp_path / "run", 2)
    trained(tmp_path / "run", 3, XckptCheckpointIO(background=background), "last")
    assert xckpt.open(tmp_path / "run" / "last.ckpt").verify() == []
    assert (tmp_path / "run" / "last-torch.ckpt").is_file()
    _, resumed = trained(tmp_path / "run", EPOCHS, XckptCheckpointIO(background=background), "last")
    assert all(map(torch.equal, whole, resumed))
    assert xckpt.open(tmp_path / "run" / "last.ckpt")["global_step"] == 4 * EPOCHS


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    "keep, left",
    [
        ({"save_top_k": 1, "save_last": False}, ["epoch=1.ckpt"]),
        ({"save_top_k": 2}, ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]),
        ({"save_top_k": 1, "mode": "max"}, ["epoch=3.ckpt", "last.ckpt"]),
        ({"save_top_k": 2, "save_last": "link"}, ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]),
        ({"save_top_k": 1, "monitor": None}, ["epoch=3.ckpt", "last.ckpt"]),
        ({"save_top_k": -1, "save_last": None}, [f"epoch={n}.ckpt" for n in range(EPOCHS)]),
    ],
)
def test_model_checkpoint_keeps_what_it_keeps(
    background: bool, keep: dict[str, Any], left: list[str], tmp_path: Path
) -> None:
    trainer, _ = trained(tmp_path, EPOCHS, XckptCheckpointIO(background=background), keep=keep)
    assert sorted(os.listdir(tmp_path)) == left
    assert all(xckpt.open(tmp_path / name).verify() == [] for name in left)
    best = trainer.checkpoint_callback.best_model_path
    assert Path(best).name in left


@pytest.mark.parametrize("last", [True, "link"])
def test_a_damaged_last_gives_way_to_the_newest_good_one(last: Any, tmp_path: Path) -> None:
    _, whole = trained(tmp_path / "whole", EPOCHS)
    keep = {"save_top_k": -1, "save_last": last}
    trained(tmp_path / "run", 3, XckptCheckpointIO(), keep=keep)
    newest = tmp_path / "run" / "epoch=2.ckpt"
    for path in [newest, tmp_path / "run" / "last.ckpt"][: 2 if last is True else 1]:
        damage(path)
    path = str(newest)
    with pytest.raises(xckpt.CorruptCheckpointError):  # a path names one and no other
        trained(tmp_path / "run", EPOCHS, XckptCheckpointIO(), path, keep=keep)
    with pytest.warns(UserWarning, match=r"epoch=1.ckpt was restored.*last.ckpt.*epoch=2.ckpt"):
        _, resumed = trained(tmp_path / "run", EPOCHS, XckptCheckpointIO(), "last", keep=keep)
    assert all(map(torch.equal, whole, resumed))


@pytest.mark.parametrize("last", [True, "link"])
def test_what_was_never_committed_is_passed_over_and_its_name_is_given_again(
    last: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning links last.ckpt to a checkpoint that is still being written."""
    _, whole = trained(tmp_path / "whole", EPOCHS)
    keep = {"save_top_k": -1, "save_last": last}
    write = ZarrStorageWriter.write_data

    def fail(self: ZarrStorageWriter, *arguments: Any) -> Any:
        if "epoch=2" in str(self.target):
            raise xckpt.StorageError("killed")
        return write(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ZarrStorageWriter, "write_data", fail)
        with pytest.raises(xckpt.StorageError, match="killed"):
            trained(tmp_path / "run", EPOCHS, XckptCheckpointIO(background=True), keep=keep)
    last_file = tmp_path / "run" / "last.ckpt"
    assert os.listdir(tmp_path / "run" / "epoch=2.ckpt") == []
    if last == "link":
        assert os.readlink(last_file) == "epoch=2.ckpt"
    with contextlib.ExitStack() as stack:
        if last == "link":
            warned = r"epoch=1.ckpt was restored.*last.ckpt"
            stack.enter_context(pytest.warns(UserWarning, match=warned))
        trained(tmp_path / "run", 2, XckptCheckpointIO(), "last", keep=keep)  # has nothing to do
    assert xckpt.open(last_file)["epoch"] == 1  # wherever the next process is killed
    _, resumed = trained(tmp_path / "run", EPOCHS, XckptCheckpointIO(), "last", keep=keep)
    assert all(map(torch.equal, whole, resumed))
    names = [*(f"epoch={epoch}.ckpt" for epoch in range(EPOCHS)), "last.ckpt"]
    assert sorted(os.listdir(tmp_path / "run")) == names


def test_the_place_of_a_save_that_goes_on_is_not_cleared_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a training, by an evaluation that loads beside it."""
    training, write = XckptCheckpointIO(background=True), ZarrStorageWriter.write_data
    training.save_checkpoint({"w": torch.ones(2)}, tmp_path / "epoch=0.ckpt")
    training.teardown()
    xckpt.save(tmp_path / "epoch=3.ckpt", {"w": torch.ones(2)})
    kill_a_deletion(tmp_path / "epoch=3.ckpt")
    assert len(list(tmp_path.glob("*.ckpt"))) == 2
    begun, goes_on = threading.Event(), threading.Event()

    def wait(self: ZarrStorageWriter, *arguments: Any) -> Any:
        begun.set()
        assert goes_on.wait(60)
        return write(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ZarrStorageWriter, "write_data", wait)
        training.save_checkpoint({"w": torch.ones(2)}, tmp_path / "epoch=1.ckpt")
        assert begun.wait(60)
        (tmp_path / "epoch=2.ckpt").mkdir()
        XckptCheckpointIO().load_checkpoint(tmp_path / "epoch=0.ckpt")
        found = {each.name for each in tmp_path.glob("*.ckpt")}
        goes_on.set()
        training.teardown()
    assert found == {"epoch=0.ckpt", "epoch=1.ckpt"}
    assert xckpt.open(tmp_path / "epoch=1.ckpt").verify() == []


@pytest.mark.parametrize("last", [True, "link"])
def test_a_run_whose_first_save_was_never_committed_begins_anew(
    last: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, whole = trained(tmp_path / "whole", EPOCHS)
    keep = {"save_top_k": 1, "monitor": None, "save_last": last}

    def fail(*_: object) -> None:
        raise xckpt.StorageError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(ZarrStorageWriter, "write_data", fail)
        with pytest.raises(xckpt.StorageError, match="killed"):
            trained(tmp_path / "run", EPOCHS, XckptCheckpointIO(background=True), keep=keep)
    io = XckptCheckpointIO(background=True)
    _, resumed = trained(tmp_path / "run", EPOCHS, io, "last", keep=keep)
    assert all(map(torch.equal, whole, resumed))


def test_a_last_that_was_killed_in_its_first_save_is_no_other_name(tmp_path: Path) -> None:
    _, whole = trained(tmp_path / "whole", EPOCHS)
    keep = {"save_top_k": -1}
    io = XckptCheckpointIO(background=True)
    trained(tmp_path / "run", 1, io, keep=keep | {"save_last": False})
    (tmp_path / "run" / "last.ckpt").mkdir()
    with pytest.warns(UserWarning, match=r"epoch=0.ckpt was restored.*last.ckpt"):
        _, resumed = trained(tmp_path / "run", EPOCHS, io, "last", keep=keep)
    assert all(map(torch.equal, whole, resumed))
    names = [*(f"epoch={epoch}.ckpt" for epoch in range(EPOCHS)), "last.ckpt"]
    assert sorted(os.listdir(tmp_path / "run")) == names


def test_a_damaged_best_is_refused(tmp_path: Path) -> None:
    trainer, _ = trained(tmp_path, EPOCHS, XckptCheckpointIO(), keep={"save_top_k": 1})
    best = trainer.checkpoint_callback.best_model_path
    assert Path(best).name == "epoch=1.ckpt"
    damage(Path(best))
    data: Any = torch.ones(4, 4)
    with pytest.raises(xckpt.CorruptCheckpointError, match=r"epoch=1\.ckpt"):
        trainer.fit(trainer.model, DataLoader(data), ckpt_path="best")


class Fails(XckptCheckpointIO):
    """It cannot save the second epoch: a file is where a folder should be."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        if checkpoint["epoch"] == 1:
            Path(path).write_text("in the way")
        super().save_checkpoint(checkpoint, path, storage_options)


@pytest.mark.parametrize("background", [False, True])
def test_a_failed_save_is_raised_and_its_predecessor_stays(
    background: bool, tmp_path: Path
) -> None:
    keep = {"save_top_k": 1, "monitor": None, "save_last": False}
    with pytest.raises(xckpt.XckptError):
        trained(tmp_path, EPOCHS, Fails(background=background), keep=keep)
    assert sorted(os.listdir(tmp_path)) == ["epoch=0.ckpt", "epoch=1.ckpt"]
    assert xckpt.open(tmp_path / "epoch=0.ckpt").verify() == []


def test_weights_are_loaded_into_a_module_alone(tmp_path: Path) -> None:
    _, tensors = trained(tmp_path, 1, XckptCheckpointIO())
    model = Regression()
    path = tmp_path / "last.ckpt"
    report = xckpt.load_into(path, {"state_dict": model.state_dict()}, unexpected="ignore")
    assert len(report.loaded) == 4 and all(map(torch.equal, model.parameters(), tensors))


def test_arguments_that_make_no_sense() -> None:
    with pytest.raises(TypeError, match="not storage_options"):
        XckptCheckpointIO().save_checkpoint({}, "memory://lightning", storage_options={})
    wrongs: Any = ({"options": 5}, {"load_options": xckpt.SaveOptions()}, {"background": "yes"})
    for wrong in wrongs:
        with pytest.raises(TypeError, match=f"XckptCheckpointIO.*{next(iter(wrong))}"):
            XckptCheckpointIO(**wrong)


@pytest.mark.parametrize("background", [False, True])
def test_a_folder_that_cannot_be_made_is_named(background: bool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    io = XckptCheckpointIO(background=background)

    def save() -> None:
        io.save_checkpoint({"a": 1}, tmp_path / "file" / "below" / "epoch=0.ckpt")
        io.teardown()

    with pytest.raises(xckpt.StorageError, match=r"below.*file"):
        save()


def on_rank_train(rank: int, folder: str, epochs: int, background: bool, resume: str | None) -> Any:
    torchrun(rank)
    trainer, tensors = trained(
        Path(folder),
        epochs,
        XckptCheckpointIO(background=background),
        resume,
        strategy="ddp",
        devices=2,
    )
    return trainer.world_size, tensors


@pytest.mark.parametrize("background", [False, True])
def test_two_processes_resume(background: bool, two_ranks: Ranks, tmp_path: Path) -> None:
    whole = two_ranks.run(on_rank_train, str(tmp_path / "whole"), EPOCHS, background, None)
    two_ranks.run(on_rank_train, str(tmp_path / "run"), 2, background, None)
    resumed = two_ranks.run(on_rank_train, str(tmp_path / "run"), EPOCHS, background, "last")
    assert [size for size, _ in whole] == [2, 2]
    for (_, once), (_, again) in zip(whole, resumed, strict=True):
        assert all(map(torch.equal, once, again))
    assert xckpt.open(tmp_path / "run" / "last.ckpt").verify() == []
    damage(tmp_path / "run" / "last.ckpt")
    for (_, once), (_, again) in zip(
        whole,
        two_ranks.run(on_rank_train, str(tmp_path / "run"), EPOCHS, background, "last"),
        strict=True,
    ):
        assert all(map(torch.equal, once, again))


def on_rank_train_in_the_midst(
    rank: int, folder: str, steps: int, resume: str | None
) -> list[torch.Tensor]:
    torchrun(rank)
    seed_everything(0, verbose=False)
    data: Any = torch.arange(64.0).sin().view(16, 4)
    trainer = Trainer(
        **SIZES | {"max_epochs": 2, "max_steps": steps},
        strategy="ddp",
        devices=2,
        use_distributed_sampler=False,
        callbacks=ModelCheckpoint(folder, every_n_train_steps=3, save_last=True),
        plugins=[XckptCheckpointIO()],
    )
    sampler = StatefulDistributedSampler(data, num_replicas=2, rank=rank)
    model = Regression()
    trainer.fit(model, StatefulDataLoader(data, 2, sampler=sampler), ckpt_path=resume)
    return [each.detach().clone() for each in model.parameters()]


def test_two_processes_resume_in_the_midst_of_an_epoch(two_ranks: Ranks, tmp_path: Path) -> None:
    whole = two_ranks.run(on_rank_train_in_the_midst, str(tmp_path / "whole"), -1, None)
    run = str(tmp_path / "run")
    two_ranks.run(on_rank_train_in_the_midst, run, 6, None)  # of 4 an epoch
    again = two_ranks.run(on_rank_train_in_the_midst, run, -1, f"{run}/last.ckpt")
    assert all(map(torch.equal, whole[0], again[0]))


def strategy_of(size: int, background: bool = False) -> XckptModelParallelStrategy:
    return XckptModelParallelStrategy(
        background=background, data_parallel_size=size, tensor_parallel_size=1
    )


def on_rank_train_sharded(
    rank: int, folder: str, epochs: int, background: bool, resume: str | None
) -> Any:
    torchrun(rank)
    strategy = strategy_of(2, background)
    found = trained(Path(folder), epochs, None, resume, strategy=strategy, devices=2)
    left = sorted(os.listdir(folder))
    return isinstance(found[0].model.layers[0].weight, DTensor), left, found[1]


@pytest.mark.parametrize("background", [False, True])
def test_two_processes_resume_sharded(
    background: bool, two_ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, whole = str(tmp_path / "run"), str(tmp_path / "whole")
    once = two_ranks.run(on_rank_train_sharded, whole, EPOCHS, background, None)
    two_ranks.run(on_rank_train_sharded, run, 2, background, None)
    last = xckpt.open(tmp_path / "run" / "last.ckpt")
    assert last.verify() == [] and "optimizer_states/0/state/layers.0.weight/exp_avg" in last
    again = two_ranks.run(on_rank_train_sharded, run, EPOCHS, background, "last")
    for (sharded, left, before), (_, _, after) in zip(once, again, strict=True):
        assert sharded and left == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
        assert len(before) == 4 + 3 * 4 and all(map(torch.equal, before, after))
    damage(tmp_path / "run" / "last.ckpt")
    again = two_ranks.run(on_rank_train_sharded, run, EPOCHS, background, "last")
    assert all(map(torch.equal, once[0][2], again[0][2]))
    # By one process, which has nothing left to train; then whole, in a module.
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        _, tensors = trained(Path(run), EPOCHS, None, "last", devices=1, strategy=strategy_of(1))
    finally:
        torch.distributed.destroy_process_group()
    assert all(map(torch.equal, tensors, again[0][2]))
    model = Regression()
    path = tmp_path / "run" / "last.ckpt"
    xckpt.load_into(path, {"state_dict": model.state_dict()}, unexpected="ignore")
    assert all(map(torch.equal, model.parameters(), again[0][2]))


class Adapted(Sharded):
    """A frozen layer of 4 MiB, sharded, before what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(0, torch.nn.Linear(4, 262_144).requires_grad_(False))
        self.layers.insert(1, torch.nn.AdaptiveAvgPool1d(4))


def on_rank_adapt(rank: int, folder: str, epochs: int, background: bool, resume: str | None) -> int:
    torchrun(rank)
    trainer = Trainer(
        **SIZES | {"max_epochs": epochs, "devices": 2},
        strategy=strategy_of(2, background),
        callbacks=ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_last=True),
    )
    data: Any = torch.arange(64.0).sin().view(16, 4)
    trainer.fit(Adapted(), DataLoader(data, 4), ckpt_path=resume)
    return trainer.global_step


@pytest.mark.parametrize("background", [False, True])
def test_a_frozen_sharded_model_is_written_once(
    background: bool, two_ranks: Ranks, tmp_path: Path
) -> None:
    for epochs, resume in ((2, None), (4, "last")):  # the second resumes
        two_ranks.run(on_rank_adapt, str(tmp_path), epochs, background, resume)
    paths = sorted(tmp_path.glob("*.ckpt"))
    assert len(paths) == 5 and all(xckpt.open(each).verify() == [] for each in paths)
    assert all("state_dict/layers.0.weight" in xckpt.open(each) for each in paths)
    assert max(map(own_bytes, paths)) < 100_000
