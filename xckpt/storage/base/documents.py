"""The zarr.json documents of a base in a folder: one that is equal gets a second name.

Most saves of a run have the documents of the one before, byte for byte. Each is compared as a whole
before it is shared.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

from xckpt.storage.base.chunks import BaseChunks
from xckpt.storage.chunks.orders import BaseOrders
from xckpt.storage.commit.folder import sync_folder
from xckpt.storage.location import Location, storage_errors


def unshared(
    documents: Iterable[tuple[str, bytes]], base: BaseOrders, target: Location, staged: Location
) -> Iterator[tuple[str, bytes]]:
    """The (key, content) that a base does not have; what it has gets a second name, durably.

    Args:
        documents: all of them.
        base: finds the base.
        target: where the save goes, for errors.
        staged: the folder where it is written.

    Raises:
        StorageError: the storage refused.
    """
    synced, folders = not staged.unsynced, set[str]()
    with contextlib.ExitStack() as opened:
        chunks = None
        with contextlib.suppress(OSError):  # replaced meanwhile: then everything is written
            chunks = opened.enter_context(contextlib.closing(BaseChunks(base, staged.path)))
        for key, content in documents:
            new = f"{staged.path}/{key}"
            with storage_errors(target):
                is_shared = chunks and chunks.share_document(key, content, new, synced=synced)
            if is_shared:
                folders.add(os.path.dirname(new))
            else:
                yield key, content
    with storage_errors(target):
        for folder in sorted(folders) if synced else ():
            sync_folder(folder)
