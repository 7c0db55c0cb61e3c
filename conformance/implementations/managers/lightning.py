"""Lightning's `ModelCheckpoint` in a `Trainer`, which fits one batch for each save.

A state is the model: a module whose buffers are the arrays, trained by one batch before each save.
`ModelCheckpoint` keeps by a metric: the number of the step for the newest, the loss for the best. A
run goes on with ``ckpt_path="last"``. Lightning writes a file where temporary files go, and moves
it; so that this is a rename, they go beside the run here. (On another file system it is a copy.)
"""

# Lightning has an environment of its own; where the types are checked, it isn't installed.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from conformance.implementation import Refused
from conformance.runs.manager import Keep, Restored, Run, State, state_of

__all__ = ["MANAGER", "Lightning"]

UNREADABLE = -1
"""The step that a run would go on from, if its file cannot be read."""


class Model(LightningModule):
    """Holds a state, and logs its number and its loss, by which `ModelCheckpoint` keeps steps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        for name, array in state_of(0).items():
            self.register_buffer(name, torch.zeros_like(torch.from_numpy(array)))
        self.register_buffer("number", torch.tensor(-1))
        self.loss = 0.0

    def hold(self, step: int, state: State, loss: float) -> None:
        for name, array in (*state.items(), ("number", np.array(step))):
            getattr(self, name).copy_(torch.from_numpy(array))
        self.loss = loss

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.log("number", float(self.number))
        self.log("loss", self.loss)
        return self.weight * batch.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class LightningRun:
    """A trainer at work."""

    def __init__(self, root: Path, keep: Keep) -> None:
        if keep.latest and keep.best:
            raise Refused("one ModelCheckpoint has one metric")
        if not keep.latest and not keep.best:
            raise Refused("save_top_k=0 saves nothing")
        metric, mode = ("number", "max") if keep.latest else ("loss", "min")
        self.callback = ModelCheckpoint(
            root,
            "step={number:.0f}",
            monitor=metric,
            mode=mode,
            save_top_k=keep.latest or keep.best,
            save_last=True,
            every_n_train_steps=1,
            auto_insert_metric_name=False,
        )
        self.model = Model()
        self.data: Any = torch.ones(1)
        self.beside = str(root.parent)
        self.trainer = Trainer(
            callbacks=[self.callback],
            max_steps=0,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def save(self, step: int, state: State, loss: float) -> bool:
        self.model.hold(step, state, loss)
        self._fit(self.trainer.global_step + 1)
        return True

    def _fit(self, steps: int, path: str | None = None) -> None:
        self.trainer.fit_loop.epoch_loop.max_steps = steps
        with mock.patch("tempfile.tempdir", self.beside):
            self.trainer.fit(self.model, DataLoader(self.data), ckpt_path=path)

    def wait(self) -> None:
        """Nothing goes on in the background."""

    def latest(self) -> int | None:
        last = self.callback._find_last_checkpoints(self.trainer)
        if not last:
            return None
        try:
            return _loaded(Path(max(last, key=os.path.getmtime)))[0]
        except Exception:
            return UNREADABLE

    def restore(self) -> Restored | None:
        if not self.callback._find_last_checkpoints(self.trainer):
            return None
        self._fit(0, "last")
        arrays = {name: np.array(getattr(self.model, name).numpy()) for name in state_of(0)}
        return Restored(int(self.model.number), arrays, {})

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.trainer.strategy.teardown()


class Lightning:
    """What a training with Lightning has by default."""

    fewest = 1
    name = f"Lightning {version('lightning')}"

    def __init__(self) -> None:
        logging.disable(logging.WARNING)

    def open(self, root: Path, keep: Keep) -> Run:
        return LightningRun(root, keep)

    def begin(self, root: Path, step: int) -> Callable[[], State]:
        path, last = root / f"step={step}.ckpt", root / "last.ckpt"
        chosen = path if path.exists() else last

        def rest() -> State:
            number, found = _loaded(chosen)
            if number != step:
                raise FileNotFoundError(f"step {step} is not there")
            return found

        return rest


def _loaded(path: Path) -> tuple[int, State]:
    found = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    arrays = {name: np.array(found[name].numpy()) for name in state_of(0)}
    return int(found["number"]), arrays


MANAGER = Lightning()
