"""Removing a checkpoint: at no moment is a part of it readable as a checkpoint.

1. The claim of a save is written, so that a path whose removal was killed is known as unfinished: a
   save with ``overwrite=True`` clears it.
2. The manifest is deleted, on the condition that it is still the one that was seen. From here on
   there is no checkpoint.
3. Everything that this manifest implies is deleted, then the claim, then the folder if it is empty.
   Other files there are the user's and stay.
"""

from __future__ import annotations

import contextlib

import msgspec

from xckpt.core.commit import Step
from xckpt.core.manifest.own_keys import CLAIM, MANIFEST
from xckpt.errors import NotACheckpointError, StorageError
from xckpt.storage.commit.folder import ClaimText, new_identity, sync_folder
from xckpt.storage.commit.keys import KeyStaging
from xckpt.storage.location import Location, answer, open_store, storage_errors


def remove_checkpoint(target: Location) -> None:
    """Delete the checkpoint at a place.

    Raises:
        NotACheckpointError: no committed checkpoint is there.
        StorageError: the storage refused, or another save has replaced the checkpoint just now.
    """
    with storage_errors(target):
        store = open_store(target)
        seen = answer(store.read(MANIFEST), target)
        if seen.state != "value":
            raise NotACheckpointError(
                f"{target} holds no committed checkpoint, so nothing was deleted"
            )
        generation = seen.stamp.generation
        staging = KeyStaging(Step.GENERATION, target, target, generation, seen.value)
        keys = staging.replaced(store)
        answer(store.write(CLAIM, msgspec.json.encode(ClaimText.own(new_identity()))), target)
        if not answer(store.write(MANIFEST, None, if_equal=generation), target).generation:
            answer(store.write(CLAIM, None), target)
            raise StorageError(f"{target}: another save has replaced this checkpoint just now")
        folder = target.folder
        if folder is not None:
            sync_folder(folder)
        staging.delete(store, [*keys, CLAIM])
        if folder is not None:
            with contextlib.suppress(OSError):
                folder.rmdir()  # the user's files may be in it
                sync_folder(folder.parent)
