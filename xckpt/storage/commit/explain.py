"""Why a save could not write, where the store's own words do not say it.

1. Another save to the same path has committed and removed what this one has written so far.
2. The disk is full: what killed saves have left on it is listed.
"""

from __future__ import annotations

import errno
from pathlib import Path

from xckpt.errors import CheckpointExistsError, StorageError, XckptError
from xckpt.storage.location import Location

_GONE = ("NOT_FOUND", "No such file")
_FULL = ("RESOURCE_EXHAUSTED", "No space left", "Disk quota exceeded")


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
    """The error of a full disk, with what could be removed from a folder on it."""
    from xckpt.storage.commit.collect import in_words

    left = in_words(parent)
    return type(error)(f"{error}{left}", error.problems) if left else error
