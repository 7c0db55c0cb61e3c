"""What TensorStore leaves beside a local key when it is killed while writing it.

To write the key ``K`` TensorStore locks ``K.__lock``, fills it and renames it to ``K``. A process
that is killed in between leaves the file, and the next one writes its content over the old without
cutting off what is longer: the key would end in a tail of the dead process's. Keys in a folder of
their own are written once; a manifest that is replaced, and a claim, need `empty_stale_lock`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

__all__ = ["empty_stale_lock"]


def empty_stale_lock(folder: Path, key: str) -> None:
    """Empty the lock file of a key, unless a living process holds it.

    Raises:
        OSError: it can be neither opened nor emptied.
    """
    path = folder / f"{key}.__lock"
    with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # its holder fills it
        # Only a holder renames it, so what it is now it stays: it may be the key itself by now.
        if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            file.truncate(0)
