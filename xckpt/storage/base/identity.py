"""Whether what lies at a path is still what was seen there.

Data of a generation have keys of their own; those of a save in place may be another save's later
on, once the first one is deleted. In a bucket the claim stays beside such data, and no two saves
write the same.
"""

from __future__ import annotations

import os

from xckpt.core.manifest.own_keys import CLAIM, MANIFEST
from xckpt.storage.array import digest_bytes
from xckpt.storage.location import Location, answer, open_store, storage_errors


def file_identity(folder: str) -> bytes:
    """An identity of the manifest in a folder, different for each save.

    Raises:
        OSError: there is none.
    """
    status = os.stat(f"{folder}/{MANIFEST}")
    return b"%d %d %d" % (status.st_ino, status.st_size, status.st_mtime_ns)


def object_identity(where: Location, root: str, manifest: bytes | None = None) -> bytes:
    """An identity of a checkpoint in a bucket, different for each save that writes such keys.

    Args:
        where: the checkpoint.
        root: its root group, relative to that; empty for a save in place.
        manifest: its manifest, if that was read just now.

    Returns:
        Nothing for a generation: no other save writes its keys.

    Raises:
        StorageError: the storage refused.
    """
    if root:
        return b""
    store = open_store(where)
    with storage_errors(where):
        claim = store.read(CLAIM)
        if manifest is None:
            manifest = answer(store.read(MANIFEST), where).value
        return digest_bytes(answer(claim, where).value) + digest_bytes(manifest)
