"""Why a save could not write, if the store's own message does not say it.

1. Another save to the same path has committed and removed what this one has written so far.
2. The disk is full: what killed saves have left on it is listed.
3. Each host has a disk of its own at the path. A rank checks that before it writes: TensorStore
   would create the missing folders, and a checkpoint without this rank's chunks would be committed.
"""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Final

from xckpt.engine.ranks.alive import WORK
from xckpt.errors import CheckpointExistsError, StorageError, XckptError
from xckpt.storage.location import Location

_GONE = ("NOT_FOUND", "No such file")
_FULL = ("RESOURCE_EXHAUSTED", "No space left", "Disk quota exceeded")

LOOKS: Final = (0.1, 0.4, 0.5, 0.5, 0.5)
"""Seconds before each further look: some network disks show a new folder a moment later."""


def explained(error: StorageError, target: Location, staged: Location) -> XckptError:
    """The error to raise for a failed write.

    Args:
        error: what the store said.
        target: the checkpoint's place.
        staged: where the save wrote.
    """
    cause = error.__cause__
    code = cause.errno if isinstance(cause, OSError) else None
    if target.folder is None or staged.folder is None:
        return error
    gone = code == errno.ENOENT or any(word in str(error) for word in _GONE)
    if staged.folder.is_relative_to(target.folder) and gone:
        return CheckpointExistsError(
            f"{target}: another save committed here meanwhile; this one is not committed"
        )
    if code in (errno.ENOSPC, errno.EDQUOT) or any(word in str(error) for word in _FULL):
        return full_disk(error, target.folder.parent)
    return error


def full_disk(error: StorageError, parent: Path) -> StorageError:
    """The error of a full disk, with the leftovers that could be removed from a folder on it."""
    from xckpt.storage.commit.collect import in_words

    left = in_words(parent)
    return type(error)(f"{error}{left}", error.problems) if left else error


def check_seen(target: Location, staged: Location) -> None:
    """Refuse to write where this rank does not see the folder that the coordinator has made.

    Args:
        target: the checkpoint's place.
        staged: where the save writes.

    Raises:
        StorageError: the folder is not there.
        RanksFailedError: the coordinator has left the save, and removed it.
    """
    folder = staged.folder
    for seconds in (*LOOKS, None):
        if folder is None or folder.is_dir():
            return
        if seconds is not None:
            time.sleep(seconds)
            WORK.get().advance()
    raise StorageError(
        f"{target}: this rank does not see {folder}, which the coordinator has made; all ranks "
        f"have to see the same folder, so a disk that each host has of its own does not do"
    )
