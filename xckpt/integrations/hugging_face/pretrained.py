"""The weights of a trainer's checkpoint, written for ``from_pretrained``."""

from __future__ import annotations

import os
from pathlib import Path

from xckpt.api.save import check_path
from xckpt.convert import Mapping, Rule, convert
from xckpt.integrations.hugging_face.state import notes_of
from xckpt.mapping.operations import Drop

__all__ = ["save_pretrained"]


def save_pretrained(checkpoint: str, folder: str, *, dtype: str | None = None) -> None:
    """Write the weights of a trainer's checkpoint where ``from_pretrained(folder)`` reads them.

    Args:
        checkpoint: one of `xckpt.integrations.hugging_face.XckptTrainer`.
        folder: gets ``model.safetensors``, and ``config.json`` if the model has a configuration.
        dtype: element type of the weights, such as ``"bfloat16"``; None leaves them.

    Raises:
        NotACheckpointError: there is none, or it is not that trainer's; nothing was written.
    """
    check_path(checkpoint, "save_pretrained(checkpoint, folder)")
    config = notes_of(checkpoint)["config"]
    os.makedirs(folder, exist_ok=True)
    others = ("optimizer", "random", "scaler", "scheduler")
    rules = [Rule(f"{part}/{{name...}}", (), [Drop("unchecked")]) for part in others]
    weights = Mapping([Rule("model/{name...}", "{name...}"), *rules])
    target = os.path.join(folder, "model.safetensors")
    convert(checkpoint, target, mapping=weights, dtype=dtype, overwrite=True)
    if config is not None:
        Path(folder, "config.json").write_text(config, encoding="utf-8")
