"""Weights of a Hugging Face trainer's checkpoint, for ``from_pretrained``; without transformers.

`xckpt.integrations.hugging_face` writes such checkpoints, and has `save_pretrained` as well.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

from xckpt.api.open import open as open_checkpoint
from xckpt.convert import Mapping, Rule, convert
from xckpt.mapping.operations import Drop

__all__ = ["save_pretrained"]


def save_pretrained(checkpoint: str, folder: str, *, dtype: str | None = None) -> None:
    """Write the weights of a trainer's checkpoint where ``from_pretrained(folder)`` reads them.

    Args:
        checkpoint: one of `xckpt.integrations.hugging_face.XckptTrainer`.
        folder: gets ``model.safetensors`` and ``config.json``.
        dtype: element type of the weights, such as ``"bfloat16"``; None leaves them.

    Raises:
        NotACheckpointError: there is none.
    """
    os.makedirs(folder, exist_ok=True)
    others = ("optimizer", "random", "scaler", "scheduler")
    rules = [Rule(f"{part}/{{name...}}", (), [Drop("unchecked")]) for part in others]
    weights = Mapping([Rule("model/{name...}", "{name...}"), *rules])
    target = os.path.join(folder, "model.safetensors")
    convert(checkpoint, target, mapping=weights, dtype=dtype, overwrite=True)
    Path(folder, "config.json").write_text(notes_of(checkpoint)["config"], encoding="utf-8")


def notes_of(checkpoint: str) -> dict[str, str]:
    """The trainer's state and the model's configuration, as JSON's text."""
    return cast(dict[str, str], open_checkpoint(checkpoint).user_metadata)
