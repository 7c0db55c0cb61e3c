"""What hooks have in common: how they delete checkpoints that a new one outdates.

1. `remove_outdated` deletes the oldest, once the newest is committed.
2. `finish_deletion` ends what a process has begun that was killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from xckpt.api.gc import gc
from xckpt.api.places import delete, exists
from xckpt.core.manifest.own_keys import CLAIM, MANIFEST
from xckpt.errors import XckptError
from xckpt.storage.location import Location


def remove_outdated(paths: Sequence[str], limit: int | None, *kept: str | None) -> None:
    """Delete checkpoints until few enough are left; call it on one rank.

    Args:
        paths: local folders, the oldest first. The newest always stays.
        limit: how many may stay; None, or less than one, for all.
        kept: others that stay, such as the best one; None is passed over.

    Example:
        >>> import numpy as np, xckpt
        >>> for step in "12":
        ...     _ = xckpt.save(f"steps/{step}", {"w": np.ones(2)})
        >>> remove_outdated(["steps/1", "steps/2"], 1)
        >>> os.listdir("steps")
        ['2']
    """
    stays = {os.path.realpath(path) for path in (*paths[-1:], *kept) if path is not None}
    others = [path for path in paths if os.path.realpath(path) not in stays]
    surplus = 0 if limit is None or limit < 1 else len(paths) - max(limit, len(paths) - len(others))
    for path in others[: max(surplus, 0)]:
        remove(path)
        shutil.rmtree(path, ignore_errors=True)


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint, or the symbolic link to one; if there is none, nothing.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://removed", {"w": np.ones(2)})
        >>> for _ in range(2):
        ...     remove("memory://removed")
    """
    if os.path.islink(path):
        os.remove(path)
    elif exists(path):
        delete(path)


def finish_deletion(path: str | os.PathLike[str]) -> None:
    """Remove what a killed deletion has left of a checkpoint in a local folder; else nothing.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("stays", {"w": np.ones(2)})
        >>> finish_deletion("stays")
        >>> xckpt.exists("stays")
        True
    """
    if Path(path, CLAIM).is_file() and not Path(path, MANIFEST).exists():
        with contextlib.suppress(XckptError):
            gc(path)
        remove_empty(os.fspath(path))


def remove_empty(path: str) -> None:
    """Remove a local folder if nothing lies in it; anything else stays.

    Example:
        >>> os.mkdir("nothing")
        >>> remove_empty("nothing")
        >>> os.path.exists("nothing")
        False
    """
    if (folder := Location.parse(path).folder) is not None:
        with contextlib.suppress(OSError):
            os.rmdir(folder)
