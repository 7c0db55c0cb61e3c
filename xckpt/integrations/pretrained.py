"""What lies in the folder of a Hugging Face trainer's checkpoint; without transformers.

`xckpt.integrations.hugging_face` writes such checkpoints, and has `save_pretrained` as well.

1. The trainer's own state and the model's configuration are notes: metadata of the checkpoint, so
   that they are committed with it. The trainer reads its state from a file, made from the notes.
2. Its weights are written for ``from_pretrained``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeGuard, cast

from xckpt.api.open import open as open_checkpoint
from xckpt.convert import Mapping, Rule, convert
from xckpt.core.manifest.own_keys import MANIFEST
from xckpt.core.metadata import JSONValue
from xckpt.errors import NotACheckpointError
from xckpt.integrations.newest import check_whole
from xckpt.mapping.operations import Drop

__all__ = ["save_pretrained"]

STATE_FILE = "trainer_state.json"
"""The last that the plain trainer writes into a checkpoint."""


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


def notes(state: str, config: Any) -> dict[str, JSONValue]:
    """What is saved of the trainer's state, as JSON's text, and of the model's configuration."""
    return {"trainer_state": state, "config": config and config.to_json_string(use_diff=False)}


def notes_of(checkpoint: str) -> dict[str, str]:
    """The notes of a checkpoint; see `notes`."""
    return cast(dict[str, str], open_checkpoint(checkpoint).user_metadata)


def write_state_file(checkpoint: str) -> None:
    """Write the file in which the trainer looks for its state, if it is not there."""
    file = Path(checkpoint, STATE_FILE)
    if not file.exists():
        file.write_text(notes_of(checkpoint)["trainer_state"], encoding="utf-8")


def is_ours(checkpoint: object) -> TypeGuard[str]:
    """Whether a trainer's checkpoint is one of xckpt."""
    return isinstance(checkpoint, str | os.PathLike) and Path(checkpoint, MANIFEST).exists()


def checked(checkpoint: str) -> str:
    """A checkpoint of xckpt, once it is verified; of the plain trainer, if it was finished.

    Raises:
        NotACheckpointError: it was not.
        XckptError: as `check_whole`.
    """
    if any(Path(checkpoint, name).exists() for name in (MANIFEST, "zarr.json")):
        return check_whole(checkpoint)
    if not Path(checkpoint, STATE_FILE).exists():
        raise NotACheckpointError(f"{checkpoint} was never finished: it has no {STATE_FILE}")
    return checkpoint
