"""The checkpoints that Accelerate names: ``project_dir/checkpoints/checkpoint_0`` and so on.

Its `ProjectConfiguration` says whether it names them, which comes next, and how many stay.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from xckpt.api.places import exists
from xckpt.errors import CheckpointExistsError
from xckpt.integrations.newest import newest_good, said_by_one
from xckpt.integrations.removal import finish_deletion, remove_outdated

RESTORED: Final = "_xckpt_restored"
"""Attribute of an accelerator: the path that was restored, and the number of the save after it."""


def next_path(accelerator: Any) -> str:
    """Where the next one is saved; every process calls it.

    Raises:
        ValueError: Accelerate does not name checkpoints.
        CheckpointExistsError: it would come before one that is there, and `was_begun` would delete
            it as the oldest.
    """
    number = accelerator.project_configuration.iteration
    path = _named(accelerator, number)

    def checked() -> None:
        newest, there = max(_committed(accelerator).items(), default=(-1, ""))
        if newest >= number:
            raise CheckpointExistsError(
                f"{there} is there already, and this run would save checkpoint_{number}: call "
                f"load_state(accelerator) first to go on behind it, or name another project_dir"
            )

    said_by_one("name the next checkpoint", checked, None)
    return path


def was_begun(accelerator: Any) -> None:
    """The save of the next one has begun, or is done: delete what that outdates."""
    config = accelerator.project_configuration
    config.iteration += 1
    if accelerator.is_main_process:
        there = _committed(accelerator)
        restored, after = vars(accelerator).get(RESTORED, (None, 0))
        # What was restored may be the only good one until a save after it is committed.
        kept = restored if max(there, default=-1) < after else None
        for each in Path(_named(accelerator, "")).parent.glob("checkpoint_*"):
            finish_deletion(each)
        remove_outdated([*there.values()], config.total_limit, kept)


def restore_newest(accelerator: Any, load: Callable[[str], str]) -> None:
    """Load the newest good one; the next is named behind all. One process lists them for all.

    Args:
        accelerator: the `accelerate.Accelerator`.
        load: loads what is at a path, which it returns.

    Raises:
        NotACheckpointError: there is none.
        CorruptCheckpointError: all are damaged.
        ValueError: Accelerate does not name checkpoints.
    """
    listing = partial(_committed, accelerator)
    there: dict[int, str] = said_by_one("list the checkpoints", listing, dict[int, str])
    there = there or {0: _named(accelerator, 0)}
    restored = newest_good(reversed(there.values()), load)
    after = 1 + max(there)
    accelerator.project_configuration.iteration = after
    vars(accelerator)[RESTORED] = restored, after


def _named(accelerator: Any, number: object) -> str:
    """Where the checkpoint of a number is, as Accelerate names it.

    Raises:
        ValueError: it does not name checkpoints, or has no folder for them.
    """
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError(
            "give a path, or set ProjectConfiguration(automatic_checkpoint_naming=True)"
        )
    if accelerator.project_dir is None:
        raise ValueError(
            "there is no folder for the names: set ProjectConfiguration(project_dir=), or give a "
            "path"
        )
    return os.path.join(accelerator.project_dir, "checkpoints", f"checkpoint_{number}")


def _committed(accelerator: Any) -> dict[int, str]:
    """The committed ones, in order: number -> path."""
    folder, names = os.path.split(_named(accelerator, "*"))
    paths = {each.name.removeprefix("checkpoint_"): str(each) for each in Path(folder).glob(names)}
    found = {int(number): path for number, path in paths.items() if number.isdecimal()}
    return {number: found[number] for number in sorted(found) if exists(found[number])}
