"""The last steps of a save by several ranks: they write, and the coordinator commits.

Each rank reports what it has written. Where the storage reports early (`EarlyReportsWriter`), what
follows from all reports is under way beside the ranks' data, and the ranks gather once more:

1. All ranks begin to write, and report. A rank that cannot has no report. It does not raise yet: no
   rank may be writing while the coordinator removes what was written.
2. The coordinator begins to write what follows; every rank waits until what it wrote is durable.
3. The coordinator commits if every rank has come so far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from xckpt.core.metadata import Metadata
from xckpt.core.storage import EarlyReportsWriter, StorageWriter
from xckpt.engine.ranks.group import Group
from xckpt.engine.ranks.watch import Step
from xckpt.engine.steps import Codec, all_reduce
from xckpt.errors import RanksFailedError

WRITE = "write; nothing was committed"
COMMIT = "commit the save"


def write_together(
    group: Group,
    writer: StorageWriter,
    metadata: Metadata,
    write: Callable[[], object],
    commit: Callable[[list[object]], bytes],
    reports: Codec[object],
    step: Step,
) -> bytes:
    """Have all ranks write, and commit; collective.

    Args:
        group: the ranks.
        writer: of the save.
        metadata: what will be committed, on the coordinator.
        write: this rank's part; returns its report.
        commit: the coordinator's, given all reports.
        reports: how they travel.
        step: times what the rank waits for.

    Returns:
        What ``commit`` has returned.

    Raises:
        XckptError: some rank failed (see `xckpt.errors`); no rank is left waiting.
    """
    if not isinstance(writer, EarlyReportsWriter) or not writer.report_early():
        return all_reduce(group, WRITE, write, commit, reports, COMMIT)
    early = _Early(writer, metadata, write, commit, step)
    all_reduce(group, WRITE, early.report, early.keep, reports)
    return all_reduce(group, WRITE, early.settle, early.commit, deciding=COMMIT)


@dataclass(slots=True)
class _Early:
    """What a rank does in the three parts."""

    writer: EarlyReportsWriter
    metadata: Metadata
    write: Callable[[], object]
    finish: Callable[[list[object]], bytes]
    step: Step
    failure: Exception | None = None
    """Why this rank has no report, or cannot commit."""
    reports: list[object] = field(default_factory=list[object])
    """All ranks' reports, on the coordinator."""

    def report(self) -> object:
        """Begin to write; None if that fails."""
        try:
            return self.write()
        except RanksFailedError:
            raise
        except Exception as error:
            self.failure = error
            return None

    def keep(self, reports: list[object]) -> bytes:
        """The coordinator has them all."""
        self.reports = reports
        return b""

    def settle(self) -> bytes:
        """Begin to write what follows, and wait for all that this rank has begun."""
        if self.failure is not None:
            raise self.failure
        with self.step("write"):
            if self.reports and None not in self.reports:
                try:
                    self.writer.follow(self.metadata, self.reports)
                except Exception as error:
                    self.failure = error
            self.writer.settle()
        return b""

    def commit(self, _: list[bytes]) -> bytes:
        """Commit, now that all is durable."""
        if self.failure is not None:
            raise self.failure
        return self.finish(self.reports)
