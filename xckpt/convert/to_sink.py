"""Writing a conversion in another library's format, through its sink.

1. The coordinator claims the path (`xckpt.storage.commit.folder`), so that no two processes convert
   to it, and prepares the output, or resumes what an earlier process has left: the token of
   that output is in its journal.
2. The other ranks, and the workers of an executor, attach to it by the token.
3. Each unit is written as soon as it is made, and noted in a journal.
4. The coordinator commits, and removes journals and claim.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xckpt.convert.journal import Journal, Start, read_journal
from xckpt.convert.to_checkpoint import IDENTITY, Run
from xckpt.convert.units.run import Numbered
from xckpt.convert.units.unit import WorkUnit
from xckpt.errors import NotACheckpointError, StorageError
from xckpt.formats.detect import open_sink
from xckpt.formats.sink import Contents, TensorSink
from xckpt.storage.commit.folder import (
    Claim,
    claim,
    journal_of,
    journals,
    make_folder,
    reclaim,
    remove_journals,
    staging_folder,
)
from xckpt.storage.location import Location, storage_errors


@dataclass(frozen=True, slots=True, eq=False)
class SinkTarget:
    """What a sink is to carry, and where; pickles."""

    path: str
    format: str | None
    overwrite: bool
    contents: Contents

    def open(self, attach: str = "") -> tuple[TensorSink, str]:
        """A sink that is ready for boxes, and its token.

        Raises:
            XckptError: see `TensorSink.prepare`.
        """
        sink = open_sink(self.path, self.format, overwrite=self.overwrite)
        assert sink is not None
        try:
            token = sink.prepare(self.contents, attach=attach)
        except BaseException:
            sink.close()
            raise
        return sink, token


@dataclass(frozen=True, slots=True)
class _Attachment:
    """A target and a token; two with one token are one, in one process."""

    token: str
    target: SinkTarget = field(compare=False)


@functools.lru_cache(maxsize=1)
def _attached(attachment: _Attachment) -> TensorSink:
    """The sink of an output that another process has laid out."""
    return attachment.target.open(attachment.token)[0]


@dataclass(frozen=True, slots=True)
class SinkOutput:
    """Writes units to a sink, in any process; an `Output`."""

    attachment: _Attachment

    def only(self, unit: WorkUnit) -> SinkOutput:
        """All of it: the places of all tensors make up the layout."""
        return self

    def write(self, unit: WorkUnit, made: Sequence[NDArray[np.generic]]) -> bytes:
        """Write a unit's parts; there is nothing to report."""
        write_unit(_attached(self.attachment), unit, made)
        return b""


@dataclass(frozen=True, slots=True)
class _OpenOutput:
    """Writes units to a sink that is open here; other processes attach to it."""

    sink: TensorSink
    elsewhere: SinkOutput

    def only(self, unit: WorkUnit) -> SinkOutput:
        return self.elsewhere

    def write(self, unit: WorkUnit, made: Sequence[NDArray[np.generic]]) -> bytes:
        write_unit(self.sink, unit, made)
        return b""


def write_unit(sink: TensorSink, unit: WorkUnit, made: Sequence[NDArray[np.generic]]) -> None:
    """Write a unit's parts to a sink."""
    for part, array in zip(unit.parts, made, strict=True):
        sink.write(part.name, part.box, array)


class SinkWriter:
    """A conversion's output on one rank.

    Args:
        target: what is written where.
        conversion: a digest of source, mapping and options.
        rank: this process's in its group.
    """

    def __init__(self, target: SinkTarget, conversion: bytes, rank: int) -> None:
        self.target = target
        self.conversion = conversion
        self.rank = rank
        self.sink: TensorSink | None = None
        self._token = ""
        self._claim: Claim | None = None
        self._worth_keeping = False

    @property
    def _staged(self) -> Path:
        folder = Location.parse(self.target.path).folder
        if folder is None:
            raise StorageError(f"{self.target.path}: only our own format is written there")
        return staging_folder(folder, IDENTITY)

    def begin(self) -> bytes:
        """Prepare the output, or resume an earlier one; on the coordinator.

        Returns:
            The token for the others.

        Raises:
            CheckpointExistsError: the path is taken, or another process is converting to it.
            XckptError: see `TensorSink.prepare`.
        """
        folder = Location.parse(self.target.path).folder
        assert folder is not None
        with storage_errors(folder):
            make_folder(folder.parent)
            # The remains of dead saves are removed later: one may be what this one resumes.
            self._claim = reclaim(folder, IDENTITY) or claim(folder, IDENTITY)
            self._claim.folder.mkdir(exist_ok=True)
            if not self._resume(self._claim.folder):
                remove_journals(self._claim.folder)
                self.sink, self._token = self.target.open()
        return self._token.encode()

    def _resume(self, staged: Path) -> bool:
        """Attach to what an earlier process has left for the same conversion, if there is any."""
        for path in journals(staged):
            start, done, _ = read_journal(path)
            if start is not None and start.conversion == self.conversion and start.token and done:
                try:
                    self.sink, self._token = self.target.open(start.token)
                except NotACheckpointError:
                    continue
                self._worth_keeping = True
                return True
        return False

    def attach(self, token: bytes) -> TensorSink:
        """The sink; on other ranks than the coordinator, one that takes part in what that began."""
        if self.sink is None:
            self.sink, self._token = self.target.open(token.decode())
        return self.sink

    def make(self, units: Sequence[Numbered], run: Run) -> None:
        """Make and write this rank's units, but for those that are written already."""
        assert self.sink is not None
        start = Start(self.conversion, self._token)
        earlier: set[int] = set()
        for path in journals(self._staged):
            begun, done, _ = read_journal(path)
            if begun == start:
                earlier |= set(done)
        journal = Journal(journal_of(self._staged, self.rank), start)

        def note(number: int, report: bytes) -> None:
            journal.note(number, report)
            self._worth_keeping = True

        attachment = _Attachment(self._token, self.target)
        output = _OpenOutput(self.sink, SinkOutput(attachment))
        run([each for each in units if each[0] not in earlier], output, note)

    def commit(self) -> None:
        """Give the output its name; on the coordinator."""
        assert self.sink is not None
        self.sink.commit()
        self._forget()

    def abort(self) -> None:
        """Stop; units that are durable stay for a process that resumes the conversion."""
        if self._claim is None:
            return
        if self._worth_keeping:
            self._claim.release()
            return
        if self.sink is not None:
            self.sink.abort()
        self._forget()

    def _forget(self) -> None:
        """Remove what a later process would resume from."""
        if self._claim is not None:
            remove_journals(self._claim.folder)
            with storage_errors(self._claim.folder):
                self._claim.folder.rmdir()
            self._claim.release()
            self._claim = None

    def close(self) -> None:
        """Let go of files."""
        if self.sink is not None:
            self.sink.close()
