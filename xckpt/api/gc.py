"""`gc`: what saves that were killed have left in a folder of checkpoints, or in a bucket."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from xckpt.api.save import Path, check_path

if TYPE_CHECKING:
    from xckpt.storage.commit.collect import Leftover


def gc(
    path: Path, *, dry_run: bool = False, older_than: float | timedelta | None = None
) -> list[Leftover]:
    """List what saves and conversions that were killed have left, and remove what is dead.

    A save does that itself for the folder that its path is in. This looks through all folders below
    as well, and into buckets. Committed checkpoints and files of the user are never touched.

    An owner is *dead* for certain where the system that it ran on tells: whatever the host name
    was, its lock is free and the system is still the same, or it was started again since. Another
    host's may be alive: such leftovers are removed only with ``older_than``, which must be longer
    than any save or conversion takes. In a bucket that holds for all of them. What a conversion
    could go on with is removed too.

    Args:
        path: a folder, ``memory://`` or a bucket, with the checkpoints below it; a path or URL as
            for `save`.
        dry_run: remove nothing.
        older_than: also remove what may belong to another host, if nothing in it has changed for so
            long: seconds, or a timedelta.

    Returns:
        Everything that was found, also what stays: place, owner, bytes, age, and whether it was
        removed. ``bytes`` of buckets are at least these.

    Raises:
        StorageError: the storage refused.
        TypeError: ``older_than`` is no time.
        ValueError: ``older_than`` is negative.

    Example:
        >>> import xckpt
        >>> xckpt.gc("memory://example-gc", dry_run=True)
        []
    """
    check_path(path, "gc(path)")
    seconds = _seconds(older_than)
    from xckpt.storage.commit.collect import find_in_folders, remove
    from xckpt.storage.commit.collect_keys import find_in_keys, remove_keys
    from xckpt.storage.location import Location, storage_errors

    place = Location.parse(path)
    folder = place.folder
    if folder is None:
        found = list(find_in_keys(place))
        return found if dry_run else [remove_keys(place, each, seconds) for each in found]
    with storage_errors(place):
        found = list(find_in_folders(folder))
        return found if dry_run else [remove(each, seconds) for each in found]


def _seconds(older_than: float | timedelta | None) -> float | None:
    if isinstance(older_than, timedelta):
        older_than = older_than.total_seconds()
    if older_than is None:
        return None
    if isinstance(older_than, bool) or not isinstance(older_than, int | float):
        raise TypeError(
            f"older_than must be seconds or a timedelta, not a {type(older_than).__name__}"
        )
    if not older_than >= 0:
        raise ValueError(f"older_than must not be negative, and is {older_than}")
    return float(older_than)
