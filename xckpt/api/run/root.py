"""One root of a run: its steps, and the deletions there in the background."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from xckpt.api.save import Path
from xckpt.core.run.record import StepRecord
from xckpt.errors import PathError, StorageError, XckptError
from xckpt.options import LoadOptions

if TYPE_CHECKING:
    from xckpt.storage.location import Location
    from xckpt.storage.run_steps import Steps

logger: Final = logging.getLogger("xckpt")

LEFTOVERS = 86400.0
"""Seconds for which the run has to have saved since a save or deletion began whose owner may be
alive on another host: then what it has left is removed."""


class RunRoot:
    """A folder or prefix in which steps of a run lie; the coordinator alone lists and deletes.

    Args:
        root: its path or URL.
        rate: most files that are deleted a second; None for as many as go.
        options: how long and how often the storage is asked, and what manifests may take in memory
            while they are listed.
        temporary: whether it may be lost, so that only saves raise errors there.
    """

    def __init__(
        self, root: Path, rate: float | None, options: LoadOptions, *, temporary: bool = False
    ) -> None:
        from xckpt.storage.location import Location
        from xckpt.storage.run_steps import Remover

        self.location: Final = Location.parse(root, options)
        self.asked: Location = self.location
        """The same, with the time of the call that asks it now."""
        self.memory_bytes: Final = options.memory_bytes
        self.temporary = temporary
        self.remover: Final = Remover(self.location, rate)

    def is_at(self, other: RunRoot) -> bool:
        """Whether it is the same place as another root, whatever links lead there."""
        one, two = self.location.folder, other.location.folder
        if one is None or two is None:
            return self.location == other.location
        if os.path.realpath(one) == os.path.realpath(two):
            return True
        with contextlib.suppress(OSError):
            return one.samefile(two)
        return False

    def path(self, name: str) -> str:
        """Where the step of a folder name is."""
        return str(self.location.within(name))

    def begin(self) -> None:
        """A call begins: it has one time for its listings and loads."""
        self.asked = self.location.anew()
        self.asked.access.start(parts=True)

    def listing(self, known: Iterable[StepRecord]) -> Steps:
        """The committed steps that are there now, less those that are being deleted.

        Args:
            known: records of this root; their manifests are not read again.

        Raises:
            StorageError: the storage refused, or the root is a file or a checkpoint; never of a
                temporary root.
        """
        from xckpt.storage.run_steps import Steps, committed_steps, described, without

        location = self.asked
        try:
            there = committed_steps(location)
            if not there:
                self._refuse_other(location)
            read = {record.name: record for record in known}
            kept = [read[name] for name in there if name in read]
            new = {name: number for name, number in there.items() if name not in read}
            found = described(location, new, self.memory_bytes)
        except StorageError as error:
            if not self.temporary:
                raise
            logger.warning("the temporary steps in %s are passed over: %s", self.location, error)
            return Steps()
        records = [*kept, *map(self._own, found.records)]
        steps = Steps(records, list(map(self._own, found.unreadable)))
        return without(steps, self.remover.names)

    def _refuse_other(self, location: Location) -> None:
        """Refuse what has no steps because it is a file, or a checkpoint: a run would begin anew.

        Raises:
            StorageError: it is.
        """
        from xckpt.storage.copy_checkpoint import has_checkpoint
        from xckpt.storage.location import storage_errors

        if location.folder is not None:
            with storage_errors(location):
                self._refuse_file(_nearest(location.folder))
        if has_checkpoint(location):
            raise PathError(
                f"{location} is a checkpoint; a run takes the folder in which its steps lie"
            )

    def _refuse_file(self, there: pathlib.Path) -> None:
        """Refuse a root that is a file, or lies below one.

        Args:
            there: what is there of the path of the root.

        Raises:
            StorageError: it is a file.
        """
        if not there.is_dir():
            what = "is" if there == self.location.folder else f"lies below {there}, which is"
            raise StorageError(f"{self.location} {what} a file; a run takes a folder")

    def check_writable(self, name: str) -> None:
        """Refuse to save a step where this user may not write, or through a symbolic link.

        Folders in a bucket are unseen, and have no links.

        Args:
            name: the folder name of the step; one that is there may be filled in place.

        Raises:
            StorageError: a local root cannot be written, or not be made.
            PathError: the step is a link: the save would replace what it leads to.
        """
        from xckpt.storage.commit.file_system import may_write
        from xckpt.storage.location import storage_errors

        folder = self.location.folder
        if folder is None:
            return
        if (step := folder / name).is_symlink():
            raise PathError(
                f"{step} is a symbolic link to {os.readlink(step)}, which a save would replace: "
                f"remove the link, or rename it"
            )
        with storage_errors(self.location):
            there = _nearest(folder / name)
            if there != folder / name:
                self._refuse_file(there)
            allowed = there == folder / name or may_write(there)
        if not allowed:
            raise StorageError(
                f"{self.location}: no step can be saved: this user may not write to {there}: "
                f"check its permissions, and whether it is mounted read only, or name another "
                f"root; to restore steps, reading it is enough"
            )

    def _own(self, record: StepRecord) -> StepRecord:
        return replace(record, temporary=True) if self.temporary else record

    def collect(self, saved: float | None) -> None:
        """Remove in the background what killed saves and deletions have left.

        Args:
            saved: when the newest step of the run was saved, by the run's clock; None if none was.
        """
        self.remover.run(partial(self._collect, saved))

    def _collect(self, saved: float | None) -> None:
        from xckpt.api.gc import gc

        # By the clock of the run: that of this host may be a day ahead, and another host may be
        # saving now. What it writes is younger than the newest step.
        ahead = None if saved is None else max(0.0, time.time() - saved)
        try:
            if self.location.folder is None or self.location.folder.is_dir():
                gc(str(self.location), older_than=None if ahead is None else LEFTOVERS + ahead)
        except XckptError as error:
            logger.warning("leftovers in %s were not removed: %s", self.location, error)


def _nearest(folder: pathlib.Path) -> pathlib.Path:
    """The folder, or else the nearest above it that is there, if only as a file."""
    return next(each for each in (folder, *folder.parents) if each.exists())
