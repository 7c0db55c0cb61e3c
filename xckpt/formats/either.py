"""Loading from a URL: a checkpoint of ours is there, or what another library wrote.

The coordinator reads the manifest, as for any load. Only where there is none it looks for anything
else, and tells every rank which reader to take in front of what it found: a manifest is JSON.
"""

from __future__ import annotations

from collections.abc import Callable

from xckpt.core.metadata import Metadata
from xckpt.core.plan.items import LoadPlan
from xckpt.core.plan.load import LoadPlanner
from xckpt.core.storage import StorageReader
from xckpt.errors import NotACheckpointError, StorageError

__all__ = ["EitherReader"]

OTHER = b"other:"


class EitherReader:
    """A storage reader that is one of two, as soon as the coordinator knows which.

    Args:
        ours: reads checkpoints of ours.
        find_other: a reader of whatever else is there; None if it is nothing that is known.

    Example:
        >>> import xckpt
        >>> from xckpt.storage import ZarrStorageReader
        >>> reader = EitherReader(ZarrStorageReader("memory://neither"), lambda: None)
        >>> reader.read_metadata()
        Traceback (most recent call last):
        xckpt.errors.NotACheckpointError: memory://neither holds no committed checkpoint: there is \
no xckpt.json in it; check the path, or whether the save finished
    """

    def __init__(self, ours: StorageReader, find_other: Callable[[], StorageReader | None]) -> None:
        self._reader = ours
        self._find_other = find_other
        self._found = False

    def read_metadata(self) -> bytes:
        """The manifest, or what the other reader says.

        Raises:
            NotACheckpointError: neither is there.
        """
        try:
            return self._reader.read_metadata()
        except NotACheckpointError:
            other = self._find_other()
            if other is None:
                raise
            self._reader, self._found = other, True
            return OTHER + other.read_metadata()

    def set_up_storage_reader(self, manifest: bytes, ranks: int) -> Metadata:
        """Take the reader that the coordinator has chosen, and what it read.

        Raises:
            StorageError: this rank does not find what the coordinator found.
        """
        if not manifest.startswith(OTHER):
            return self._reader.set_up_storage_reader(manifest, ranks)
        if not self._found:
            other = self._find_other()
            if other is None:
                raise StorageError("this rank does not find what the coordinator found there")
            self._reader, self._found = other, True
        return self._reader.set_up_storage_reader(manifest.removeprefix(OTHER), ranks)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As the chosen reader."""
        return self._reader.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As the chosen reader."""
        return self._reader.prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """As the chosen reader."""
        self._reader.read_data(plan, planner)

    def close(self) -> None:
        """As the chosen reader."""
        self._reader.close()
