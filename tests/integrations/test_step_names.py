"""The trainers' packages name a step, and its number is read from the name."""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xckpt.core.run.names import step_number


def orbax(number: int, **settings: Any) -> str:
    from orbax.checkpoint.path import step

    return step.standard_name_format(**settings).build_name(number)


def lightning(number: int, filename: str | None = None) -> str:
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    found = {"epoch": 3, "step": number, "loss": -0.5, "val_step": 9}
    metrics = {name: torch.tensor(value) for name, value in found.items()}
    callback = ModelCheckpoint("run", filename)
    return os.path.basename(callback.format_checkpoint_name(metrics, ver=2))


def hugging_face(number: int) -> str:
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

    return f"{PREFIX_CHECKPOINT_DIR}-{number}"


def torchtitan(number: int) -> str:
    from torchtitan.components.checkpointer import CheckpointManager

    manager = CheckpointManager.__new__(CheckpointManager)
    manager.folder = "run"
    return Path(manager._create_checkpoint_id(number)).name


NAMES: dict[str, Callable[[int], str]] = {
    "orbax": orbax,
    "orbax, padded": lambda number: orbax(number, step_format_fixed_length=8),
    "orbax, prefix": lambda number: orbax(number, step_prefix="checkpoint"),
    "lightning": lightning,
    "lightning, metrics": lambda number: lightning(number, "{epoch}-{loss:.2f}-{step}-{val_step}"),
    "lightning, underscores": lambda number: lightning(number, "llama_{epoch}_{val_step}_{step}"),
    "hugging face": hugging_face,
    "torchtitan": torchtitan,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("number", [0, 7, 123456])
def test_the_number_is_read_from_the_name(name: str, number: int) -> None:
    assert step_number(NAMES[name](number)) == number
