"""From where a training resumes: found on one rank for all, with the file that the trainer reads.

1. `resumable` has the newest checkpoint verified; where that is damaged, it is the one before.
2. `load_moments` says what lacks if a checkpoint holds weights alone.
"""

# The trainer has an environment of its own; where the types are checked, it may be another release.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from xckpt.api.open import open as open_checkpoint
from xckpt.core.manifest.own_keys import MANIFEST
from xckpt.core.storage import url_parts
from xckpt.errors import NotACheckpointError, PathError, TreeMismatchError
from xckpt.integrations.absent import absent
from xckpt.integrations.hugging_face.state import STATE_FILE, write_state_file
from xckpt.integrations.newest import check_whole, newest_whole
from xckpt.integrations.parts import load_parts

try:
    from transformers.trainer_utils import sort_checkpoints
except ImportError as error:
    sort_checkpoints = absent("transformers", error)

WEIGHTS_ONLY: Final = (
    "{} was saved with save_only_model: it holds the model, but no state of the optimizer, the "
    "schedule and the generators to resume from. Resume from a checkpoint that was saved without "
    "it; or begin a new run from the model: xckpt.load_into(path, {{'model': model}})"
)


def resumable(wanted: Any, root: str) -> Any:
    """What a training resumes from, as `Trainer.train` takes it; every process calls it.

    Args:
        wanted: True for the newest good checkpoint; a path is resumed from as it is.
        root: where the trainer keeps its checkpoints.

    Raises:
        PathError: the root is a URL.
        CorruptCheckpointError: all checkpoints are damaged.
        StorageError: the trainer's file cannot be written.
    """
    if url_parts(root) is not None:
        raise PathError(
            f"output_dir={root!r}: the trainer keeps its checkpoints in a local folder; name one, "
            f"and xckpt.copy() brings them to a bucket"
        )
    if wanted is True:
        return newest_whole(lambda: sort_checkpoints(root)[::-1], _checked) or True
    if isinstance(wanted, str | os.PathLike):
        newest_whole(lambda: [os.fspath(wanted)], write_state_file)
    return wanted


def _checked(checkpoint: str) -> str:
    """A checkpoint of xckpt, once it is verified; of the plain trainer, if it was finished.

    Raises:
        NotACheckpointError: it was not.
        XckptError: as `check_whole`.
    """
    if any(Path(checkpoint, each).exists() for each in (MANIFEST, "zarr.json")):
        return write_state_file(check_whole(checkpoint))
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
