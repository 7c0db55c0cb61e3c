"""Conditional writes, and finding out who wrote a key if the answer was lost.

An object store may carry out a request and lose the answer; when it is asked again, the condition
no longer holds. So the key is read then, and its content tells who has won.

To write the local key ``K`` TensorStore locks ``K.__lock``, fills it and renames it to ``K``. A
process killed in between leaves the file, and the next one writes over it without cutting off what
is longer: the key would end in a tail of the dead process's. `empty_stale_lock` prevents that for
the one local key that is replaced, the manifest.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

import tensorstore as ts

from xckpt.errors import StorageError
from xckpt.storage.location import Location, answer


def write_if(store: ts.KvStore, key: str, content: bytes, seen: bytes, target: Location) -> bytes:
    """Write to a key if its generation is ``seen``.

    No two savers write the same content, so the content tells who wrote the key if the answer was
    lost.

    Returns:
        The key's new generation; empty if another save has written it.

    Raises:
        StorageError: ``seen`` is empty, so there is no condition.
    """
    if not seen:
        raise StorageError(
            f"the storage does not say the generation of {key}, so that two saves at once could "
            f"not be distinguished; save to another storage"
        )
    written = answer(store.write(key, content, if_equal=seen), target).generation
    return written or generation_if(store, key, content, target)


def generation_if(store: ts.KvStore, key: str, content: bytes, target: Location) -> bytes:
    """The generation of a key that holds this content; empty if it does not."""
    read = answer(store.read(key), target)
    return read.stamp.generation if read.state == "value" and read.value == content else b""


def empty_stale_lock(folder: Path, key: str) -> None:
    """Empty the lock file of a local key, unless a living process holds it.

    Raises:
        OSError: it can be neither opened nor emptied.
    """
    path = folder / f"{key}.__lock"
    with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # its holder fills it
        # Only the holder of the lock renames it. It may be the key itself by now.
        if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            file.truncate(0)
