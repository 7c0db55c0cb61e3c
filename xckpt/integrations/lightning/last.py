"""Where a run resumes: ``ckpt_path="last"`` asks for the newest checkpoint of a folder.

Where ``last.ckpt`` is damaged, others beside it are tried, the newest first.
"""

# Lightning has an environment of its own; where the types are checked, it isn't installed.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import cast

from xckpt.api.open import open as open_checkpoint
from xckpt.api.save import Path
from xckpt.errors import XckptError
from xckpt.integrations.absent import absent

try:
    from lightning.fabric.utilities.cloud_io import get_filesystem
except ImportError as error:
    get_filesystem = absent("lightning", error)


def resumable(path: Path) -> Iterator[str]:
    """A checkpoint; and where it is the last one, those beside it, the newest first."""
    yield os.fspath(path)
    folder, name = os.path.split(os.fspath(path))
    if name.startswith("last"):
        names = map(os.path.basename, get_filesystem(folder).ls(folder, detail=False))
        beside = {os.path.join(folder, each) for each in names if each.endswith(".ckpt")}
        yield from sorted(beside - {os.fspath(path)}, key=_step, reverse=True)


def _step(path: str) -> tuple[int, str]:
    """The step of a checkpoint, and what to tell it by from others of that step."""
    try:
        return cast(int, open_checkpoint(path)["global_step"]), path
    except (XckptError, KeyError):
        return -1, path
