"""The trainer's own state: which step is the best, what its callbacks count, what it has logged.

1. With the model's configurations it is the notes of a checkpoint: metadata, committed with it.
2. The trainer reads it from a file, which is made from the notes.
"""

# The trainer has an environment of its own; where the types are checked, it may be another release.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from pathlib import Path
from typing import Any, Final, cast

from xckpt.api.open import open as open_checkpoint
from xckpt.core.manifest.own_keys import MANIFEST
from xckpt.core.metadata import JSONValue
from xckpt.errors import NotACheckpointError
from xckpt.integrations.absent import absent
from xckpt.storage.location import storage_errors

try:
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    ExportableState = absent("transformers", error)

STATE_FILE: Final = "trainer_state.json"
"""The last that the plain trainer writes into a checkpoint."""


def notes(trainer: Any, checkpoint: str) -> dict[str, JSONValue]:
    """The notes of a checkpoint that is about to be saved; the trainer's state knows the best one.

    Args:
        trainer: the `transformers.Trainer`.
        checkpoint: where it is saved, beside the others.
    """
    state, root = trainer.state, os.path.dirname(checkpoint)
    best = os.path.join(root, f"checkpoint-{state.best_global_step}")
    if best == checkpoint or os.path.exists(best):  # the best step may never have been saved
        state.best_model_checkpoint = best
    every = (*trainer.callback_handler.callbacks, trainer.control)
    state.stateful_callbacks = [each for each in every if isinstance(each, ExportableState)]
    state.__post_init__()  # has their states in their place
    text = json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True)
    model = trainer.model
    return {
        "trainer_state": text,
        "config": _json_of(model, "config", use_diff=False),
        "generation_config": _json_of(model, "generation_config", use_diff=True),
    }


def _json_of(model: object, name: str, *, use_diff: bool) -> str | None:
    """A configuration of a model as text; a model of the user's may have another kind, or none.

    Args:
        model: that of the trainer.
        name: the attribute.
        use_diff: write only what is not as by default.
    """
    config: Any = getattr(model, name, None)
    return config.to_json_string(use_diff=use_diff) if hasattr(config, "to_diff_dict") else None


def notes_of(checkpoint: str) -> dict[str, str | None]:
    """The notes of a checkpoint; see `notes`.

    Raises:
        NotACheckpointError: there is no checkpoint, or none of this trainer.
    """
    found: object = open_checkpoint(checkpoint).user_metadata
    if not isinstance(found, dict) or "trainer_state" not in found:
        raise NotACheckpointError(f"{checkpoint} was not saved by XckptTrainer")
    return cast(dict[str, str | None], found)


def write_state_file(checkpoint: str) -> str:
    """The path of a checkpoint, once the file is written in which the trainer looks for its state.

    One that is there may be older than the notes, or half a file, if a process was killed. If it is
    not, nothing is written: who resumes may be allowed to read the checkpoint alone. Nor is it into
    a checkpoint of the plain trainer.

    Raises:
        StorageError: it cannot be written.
        XckptError: as `notes_of`.
    """
    if not Path(checkpoint, MANIFEST).exists():
        return checkpoint
    text = cast(str, notes_of(checkpoint)["trainer_state"])  # the config alone may be None
    content, file = text.encode(), Path(checkpoint, STATE_FILE)
    with contextlib.suppress(OSError):
        if file.read_bytes() == content:
            return checkpoint
    with storage_errors(file):
        file.write_bytes(content)
    return checkpoint
