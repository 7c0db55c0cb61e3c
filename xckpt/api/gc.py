"""`gc`: leftovers of killed saves in a folder of checkpoints, or in a bucket."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Final, SupportsFloat

from xckpt.api.save import Path, check_path, names_limits
from xckpt.core.text.arguments import as_float, named
from xckpt.core.text.printable import in_few
from xckpt.engine.ranks.watch import watched_call
from xckpt.errors import StorageError
from xckpt.options import LoadOptions, check_flags, checked_options

if TYPE_CHECKING:
    from xckpt.storage.commit.collect import Leftover
    from xckpt.storage.location import Location

logger: Final = logging.getLogger("xckpt")


@names_limits
def gc(
    path: Path,
    *,
    dry_run: bool = False,
    older_than: SupportsFloat | timedelta | None = None,
    options: LoadOptions | None = None,
) -> list[Leftover]:
    """List what killed saves and conversions have left behind, and remove what is dead.

    A save does that itself for the folder that its path is in. This looks through all folders below
    as well, and into buckets. Committed checkpoints and files of the user are never touched.

    An owner is certainly *dead* if it ran on this system, whatever the host was called, and either
    its lock is free or the system was started again since. An owner on another host may be alive:
    its leftovers are removed only with ``older_than``, which must be longer than any save or
    conversion takes. In a bucket this holds for all leftovers; a save there that is alive after all
    fails, because its claim is taken over first. What does not say its age, such as a damaged claim
    in a bucket, is removed with ``older_than=0`` alone. Where a manifest cannot be read, perhaps
    because a newer release wrote it, nothing is removed. Remains that a conversion could resume
    from are removed too, and so is the empty folder of a step that a killed deletion has left, a
    minute later; beside steps of xckpt also one with another usual name, by ``older_than``. Folders
    that cannot be read are passed over, and the log names them.

    Args:
        path: a folder, ``memory://`` or a bucket, with the checkpoints below it; a path or URL as
            for `save`.
        dry_run: remove nothing.
        older_than: also remove what may belong to another host, if nothing in it has changed for
            this long: seconds, or a timedelta.
        options: progress, which counts files as their leftovers go, metrics, and retries.

    Returns:
        Everything that was found, also what stays: place, owner, bytes, age, and whether it was
        removed. In a bucket ``bytes`` is a lower bound.

    Raises:
        StorageError: the storage refused, or a save that was taken for a dead one has committed.
        TypeError: ``older_than`` is not a time.
        ValueError: ``older_than`` is negative.

    Example:
        >>> import xckpt
        >>> xckpt.gc("memory://example-gc", dry_run=True)
        []
    """
    check_path(path, "gc(path)")
    check_flags("gc", dry_run=dry_run)
    seconds = _seconds(older_than)
    from xckpt.storage.budget import ProgressCounter
    from xckpt.storage.commit.collect import find_in_folders, is_due, remove
    from xckpt.storage.commit.collect_keys import find_in_keys, remove_keys
    from xckpt.storage.location import Location, storage_errors

    options = checked_options(options, LoadOptions, "gc")
    place = Location.parse(path, options)
    folder = place.folder
    _check_place(place)
    with (
        watched_call(options, "gc", path) as chosen,
        storage_errors(place),
    ):
        unread: list[str] = []
        found = list(find_in_keys(place) if folder is None else find_in_folders(folder, unread))
        if unread:
            logger.warning("passed over, because they cannot be read: %s", in_few(unread))
        if dry_run:
            return found
        due = sum(each.files for each in found if is_due(each, seconds))
        counter = ProgressCounter(due, chosen.progress, "files")
        in_folders = (remove(left, seconds) for left in found)
        removed: list[Leftover] = []
        for left in remove_keys(place, found, seconds) if folder is None else in_folders:
            removed.append(left)
            if is_due(left, seconds):
                counter.add(left.files)
        return removed


def _check_place(place: Location) -> None:
    from xckpt.storage.location import storage_errors

    folder = place.folder
    if folder is not None and os.path.isfile(folder):
        raise StorageError(f"{place} is a file; gc takes a folder or a bucket with checkpoints")
    if folder is not None and not os.path.lexists(folder):
        from xckpt.storage.absent import checkpoint_meant

        with storage_errors(place):
            meant = checkpoint_meant(folder)
        raise StorageError(
            f"{place} holds no checkpoints: {meant}; gc takes the folder that "
            f"the checkpoints are in: check the path"
        )


def _seconds(older_than: SupportsFloat | timedelta | None) -> float | None:
    if isinstance(older_than, timedelta):
        older_than = older_than.total_seconds()
    if older_than is None:
        return None
    if (seconds := as_float(older_than)) is None:
        raise TypeError(
            f"older_than must be seconds or a timedelta, not {named(type(older_than).__name__)}"
        )
    if not seconds >= 0:
        raise ValueError(f"older_than must not be negative, got {seconds:g}")
    return seconds
