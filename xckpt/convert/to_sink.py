"""Writing a conversion in another library's format, through its sink.

1. The coordinator claims the path (`xckpt.storage.commit.claims`), so that no two processes convert
   to it, and prepares the output, or resumes what an earlier process has left: the token of
   that output is in its journal.
2. The other ranks, and the workers of an executor, attach to it by the token.
3. Each unit is written as soon as it is made, and noted in a journal.
4. The coordinator commits, and removes journals and claim.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from xckpt.convert.journal import Start, noted_units, read_journal
from xckpt.convert.to_checkpoint import IDENTITY
from xckpt.convert.units.run import UnitShare
from xckpt.convert.units.unit import WorkUnit
from xckpt.errors import NotACheckpointError
from xckpt.formats.detect import open_sink
from xckpt.formats.sink import Contents, TensorSink
from xckpt.storage.commit.claims import (
    Claim,
    claim,
    journals,
    reclaim,
    remove_journals,
    staging_folder,
)
from xckpt.storage.commit.folder import make_folder
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
class SinkOutput:
    """Writes units to a sink, in any process; an `Output`. Two with one token are one."""

    token: str
    target: SinkTarget = field(compare=False)
    sink: TensorSink | None = field(default=None, compare=False)
    """The sink, where it is open in this process; other processes attach to it by the token."""

    def only(self, unit: WorkUnit) -> SinkOutput:
        """All of it: the places of all tensors make up the layout."""
        return replace(self, sink=None)

    def write(self, unit: WorkUnit, made: Sequence[NDArray[np.generic]]) -> bytes:
        """Write a unit's parts; there is nothing to report."""
        sink = _attached(self) if self.sink is None else self.sink
        for part, array in zip(unit.parts, made, strict=True):
            sink.write(part.name, part.box, array)
        return b""


@functools.lru_cache(maxsize=1)
def _attached(output: SinkOutput) -> TensorSink:
    """The sink of an output that another process has laid out."""
    return output.target.open(output.token)[0]


class SinkWriter:
    """A conversion's output on one rank.

    Args:
        target: what is written where.
        conversion: a digest of source, mapping and options.
    """

    def __init__(self, target: SinkTarget, conversion: bytes) -> None:
        self.target = target
        self.sink: TensorSink | None = None
        self.bytes_before = 0
        """Bytes of this rank's share that an earlier process had written, once it is written."""
        self._start = Start(conversion)
        self._claim: Claim | None = None
        folder = Location.parse(target.path).folder
        assert folder is not None  # Or `open_sink` has refused the path.
        self._folder = folder

    def begin(self) -> bytes:
        """Prepare the output, or resume an earlier one; on the coordinator.

        Returns:
            The token for the others.

        Raises:
            CheckpointExistsError: the path is taken, or another process is converting to it.
            XckptError: see `TensorSink.prepare`.
        """
        with storage_errors(self._folder):
            make_folder(self._folder.parent)
            # The remains of dead saves are removed later: one may be what this one resumes.
            self._claim = reclaim(self._folder, IDENTITY) or claim(self._folder, IDENTITY)
            self._claim.folder.mkdir(exist_ok=True)
            if not self._resume(self._claim.folder):
                remove_journals(self._claim.folder)
                self._open("")
        return self._start.token.encode()

    def _resume(self, staged: Path) -> bool:
        """Attach to what an earlier process has left for the same conversion, if there is any."""
        for path in journals(staged):
            start, done, _ = read_journal(path)
            if start and start.conversion == self._start.conversion and start.token and done:
                with contextlib.suppress(NotACheckpointError):
                    self._open(start.token)
                    return True
        return False

    def _open(self, token: str) -> None:
        self.sink, token = self.target.open(token)
        self._start = msgspec.structs.replace(self._start, token=token)

    def attach(self, token: bytes) -> TensorSink:
        """The sink; on other ranks than the coordinator, one that takes part in what that began."""
        if self.sink is None:
            self._open(token.decode())
        assert self.sink is not None
        return self.sink

    def write(self, share: UnitShare) -> None:
        """Make and write this rank's units, but for those that are written already."""
        output = SinkOutput(self._start.token, self.target, self.sink)
        share.make(output, self._start, staging_folder(self._folder, IDENTITY))
        self.bytes_before = share.bytes_before

    def commit(self) -> None:
        """Give the output its name; on the coordinator."""
        assert self.sink is not None
        self.sink.commit()
        self._forget()

    def abort(self) -> None:
        """Stop; units that are durable stay for a process that resumes the conversion."""
        if self._claim is None:
            return
        if noted_units(self._claim.folder, self._start):
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
