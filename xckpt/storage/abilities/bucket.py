"""What a bucket permits, asked by the requests with which a save begins; nothing stays there."""

from __future__ import annotations

import time
from dataclasses import dataclass

from xckpt.storage.commit.folder import new_identity
from xckpt.storage.commit.probe import check_conditions, look
from xckpt.storage.location import Location, open_store, storage_errors


@dataclass(frozen=True, slots=True)
class BucketAbilities:
    """What was found out about a bucket in which all that a save needs is permitted."""

    place: str
    permitted: tuple[str, ...]
    """Reading, listing, deleting, writing, writing on a condition."""
    round_trip_seconds: float
    """Time of three small requests that were made at once."""


def bucket_abilities(location: Location) -> BucketAbilities:
    """Ask a bucket for all that a save needs.

    Raises:
        StorageError: something is not permitted; the message says what.
    """
    target = location.within(f"xckpt.doctor-{new_identity()}")
    store = open_store(target)
    with storage_errors(target):
        started = time.perf_counter()
        seen, _ = look(store, target, overwrite=True)
        seconds = time.perf_counter() - started
        check_conditions(store, target, f"xckpt.trial-{new_identity()}", seen)
    permitted = ("read", "list", "delete", "write", "write on a condition")
    return BucketAbilities(str(location), permitted, seconds)
