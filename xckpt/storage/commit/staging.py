"""Beginning a save: where it is staged, and by which step it will become visible.

`begin` looks at the path and opens a `Staging` by the rules of `xckpt.core.commit`. Ranks write
below `Staging.location`; `Staging.publish` takes the atomic step with the manifest, `Staging.abort`
removes what was written. Only the coordinator does any of this.

1. A local folder that can be renamed: staged in a folder beside it (`xckpt.storage.commit.folder`).
2. Elsewhere: staged among the path's own keys (`xckpt.storage.commit.keys`).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from xckpt.core.commit import Found, Place, Step, decide
from xckpt.storage.commit.folder import StagedCheckpoint, stage_folder
from xckpt.storage.commit.keys import CLAIM, GENERATIONS, KeyStaging, begin_keys, stage_beside
from xckpt.storage.location import MANIFEST, Location, storage_errors

Staging: TypeAlias = StagedCheckpoint | KeyStaging
"""A save in progress."""


def begin(target: Location, *, overwrite: bool, identity: str = "") -> Staging:
    """Look at a path and open a place to write to.

    Args:
        target: where the checkpoint shall be.
        overwrite: whether it may replace another.
        identity: name of a resumable save; on local folders, staging left under it is reused.

    Raises:
        CheckpointExistsError: something is there, and it may not be replaced.
        StorageError: the storage refused.
    """
    with storage_errors(target):
        if target.folder is None:
            return begin_keys(target, overwrite=overwrite)
        folder = Path(os.path.realpath(target.folder))
        target = replace(target, path=str(folder))
        if not can_rename(folder):
            return begin_keys(target, overwrite=overwrite)
        return _begin_folder(target, folder, overwrite=overwrite, identity=identity)


def _begin_folder(target: Location, folder: Path, *, overwrite: bool, identity: str) -> Staging:
    found = _find_folder(folder)
    step = decide(target, found, Place.FOLDER, overwrite=overwrite)
    if step is not Step.GENERATION:
        staged = stage_folder(folder, step, identity)
        if staged is not None:
            return staged
        step = decide(target, found, Place.PLAIN_FOLDER, overwrite=overwrite)
    assert step is Step.GENERATION
    return stage_beside(target)


def can_rename(folder: Path) -> bool:
    """Whether a new folder can take the place of this one: not if it is a mount point."""
    return not (folder.is_dir() and (folder.is_mount() or not os.access(folder.parent, os.W_OK)))


def _find_folder(folder: Path) -> Found:
    if not folder.exists():
        return Found.NOTHING
    if not folder.is_dir():
        return Found.FOREIGN
    if (folder / MANIFEST).exists():
        return Found.CHECKPOINT
    if (folder / CLAIM).exists() or (folder / GENERATIONS).exists():
        return Found.UNFINISHED  # it was filled in place, as a mount point is
    return Found.FOREIGN if any(folder.iterdir()) else Found.NOTHING
