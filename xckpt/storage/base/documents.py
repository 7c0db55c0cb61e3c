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
    documents: Iterable[tuple[str, bytes]], base: BaseChunks, staged: Location, folders: set[str]
) -> Iterator[tuple[str, bytes]]:
    """The (key, content) that a base does not have; what it has gets a second name.

    Args:
        documents: all of them.
        base: the base.
        staged: the folder where the save is written.
        folders: gets the folders with new names, which the caller syncs.

    Raises:
        OSError: a name is taken, or its folder cannot be made.
    """
    for key, content in documents:
        new = f"{staged.path}/{key}"
        if base.share_document(key, content, new, synced=not staged.unsynced):
            folders.add(os.path.dirname(new))
        else:
            yield key, content


def unshared_of_coordinator(
    documents: Iterable[tuple[str, bytes]], base: BaseOrders, target: Location, staged: Location
) -> Iterator[tuple[str, bytes]]:
    """As `unshared`, for what goes with no chunk; the base is opened, and new names are synced.

    Args:
        documents: all of them.
        base: finds the base.
        target: where the save goes, for errors.
        staged: the folder where it is written.

    Raises:
        StorageError: the storage refused.
    """
    try:
        chunks = BaseChunks(base, staged.path)
    except OSError:  # replaced meanwhile
        yield from documents
        return
    folders: set[str] = set()
    with contextlib.closing(chunks), storage_errors(target):
        yield from unshared(documents, chunks, staged, folders)
        for folder in () if staged.unsynced else sorted(folders):
            sync_folder(folder)
