"""The trainer's own state: which step is the best, what its callbacks count, what it has logged.

1. With the model's configuration it is the notes of a checkpoint: metadata, committed with it.
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
from xckpt.core.metadata import JSONValue
from xckpt.errors import NotACheckpointError, TreeMismatchError
from xckpt.integrations.absent import absent
from xckpt.integrations.newest import check_whole, is_ours
from xckpt.integrations.parts import load_parts

try:
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    ExportableState = absent("transformers", error)

STATE_FILE: Final = "trainer_state.json"
"""The last that the plain trainer writes into a checkpoint."""

WEIGHTS_ONLY: Final = (
    "{} was saved with save_only_model: it holds the model, but no state of the optimizer, the "
    "schedule and the generators to resume from. Resume from a checkpoint that was saved without "
    "it; or begin a new run from the model: xckpt.load_into(path, {{'model': model}})"
)


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
    config = getattr(trainer.model, "config", None)
    return {"trainer_state": text, "config": config and config.to_json_string(use_diff=False)}


def notes_of(checkpoint: str) -> dict[str, str | None]:
    """The notes of a checkpoint; see `notes`.

    Raises:
        NotACheckpointError: there is no checkpoint, or none of this trainer.
    """
    found: object = open_checkpoint(checkpoint).user_metadata
    if not isinstance(found, dict) or "trainer_state" not in found:
        raise NotACheckpointError(f"{checkpoint} was not saved by XckptTrainer")
    return cast(dict[str, str | None], found)


def write_state_file(checkpoint: str) -> None:
    """Write the file in which the trainer looks for its state.

    One that is there may be older than the notes, or half a file, if a process was killed. If it is
    not, nothing is written: who resumes may be allowed to read the checkpoint alone.
    """
    text = cast(str, notes_of(checkpoint)["trainer_state"])  # the config alone may be None
    content, file = text.encode(), Path(checkpoint, STATE_FILE)
    with contextlib.suppress(OSError):
        if file.read_bytes() == content:
            return
    file.write_bytes(content)


def checked(checkpoint: str) -> str:
    """A checkpoint of xckpt, once it is verified; of the plain trainer, if it was finished.

    Raises:
        NotACheckpointError: it was not.
        XckptError: as `check_whole`.
    """
    if is_ours(checkpoint) or Path(checkpoint, "zarr.json").exists():
        return check_whole(checkpoint)
    if not Path(checkpoint, STATE_FILE).exists():
        raise NotACheckpointError(f"{checkpoint} was never finished: it has no {STATE_FILE}")
    return checkpoint


def load_moments(checkpoint: str, moments: dict[str, Any]) -> None:
    """Load what is saved of optimizer, schedule and scaler.

    Raises:
        TreeMismatchError: the checkpoint holds none of it, or of another model.
        XckptError: as `load_parts`.
    """
    try:
        load_parts(checkpoint, moments)
    except TreeMismatchError as error:
        if any(name.startswith("optimizer/") for name in open_checkpoint(checkpoint)):
            raise
        raise TreeMismatchError(WEIGHTS_ONLY.format(checkpoint), error.problems) from None
