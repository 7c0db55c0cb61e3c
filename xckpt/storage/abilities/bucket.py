"""What a bucket permits, tried with the requests that begin a save; nothing stays there."""

from __future__ import annotations

import time
from dataclasses import dataclass

from xckpt.storage.commit.folder import new_identity
from xckpt.storage.commit.probe import check_conditions, look
from xckpt.storage.location import Location, open_store, storage_errors


@dataclass(frozen=True, slots=True)
class BucketAbilities:
    """What is known about a bucket that permits all that a save needs."""

    place: str
    permitted: tuple[str, ...]
    """Reading, listing, deleting, writing, conditional writing."""
    round_trip_seconds: float
    """Time of three small concurrent requests."""


def bucket_abilities(location: Location) -> BucketAbilities:
    """Try everything that a save needs in a bucket.

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
