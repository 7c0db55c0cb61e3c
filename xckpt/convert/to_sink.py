"""Writing a conversion in another library's format, through its sink.

1. The coordinator prepares the output under an identity that all conversions share
   (`TensorSink.prepare`): so no two processes convert to one path, and what a killed process has
   left of the same conversion is resumed.
2. The other ranks, and the workers of an executor, attach to it.
3. Each unit is written as soon as it is made, and noted in a journal.
4. The coordinator commits; staging, journals and claim go together.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xckpt.convert.journal import Start, noted_units
from xckpt.convert.to_checkpoint import IDENTITY
from xckpt.convert.units.run import UnitShare
from xckpt.convert.units.unit import WorkUnit
from xckpt.formats.detect import open_sink
from xckpt.formats.sink import Contents, TensorSink
from xckpt.storage.commit.folder import new_identity, staging_folder
from xckpt.storage.location import Location


@dataclass(frozen=True, slots=True, eq=False)
class SinkTarget:
    """What a sink is to carry, and where; pickles."""

    path: str
    format: str | None
    overwrite: bool
    contents: Contents

    def open(self, *, attach: str = "", identity: str = "") -> TensorSink:
        """A sink that is ready for boxes.

        Raises:
            XckptError: see `TensorSink.prepare`.
        """
        sink = open_sink(self.path, self.format, overwrite=self.overwrite)
        assert sink is not None
        try:
            sink.prepare(self.contents, attach=attach, identity=identity)
        except BaseException:
            sink.close()
            raise
        return sink


@dataclass(frozen=True, slots=True)
class SinkOutput:
    """Writes units to a sink, in any process; an `Output`."""

    token: str
    """Unique to the conversion: two with one token are one, so that a worker opens it once."""
    target: SinkTarget = field(compare=False)
    sink: TensorSink | None = field(default=None, compare=False)
    """The sink, where it is open in this process; other processes attach to its output."""

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
    return output.target.open(attach=IDENTITY)


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
        self._token = ""
        self._coordinates = False
        folder = Location.parse(target.path).folder
        assert folder is not None  # Or `open_sink` has refused the path.
        self._staged = staging_folder(Path(os.path.realpath(folder)), IDENTITY)

    def begin(self) -> bytes:
        """Prepare the output, or resume an earlier one; on the coordinator.

        Returns:
            A token for the others.

        Raises:
            CheckpointExistsError: the path is taken, or another process is converting to it.
            XckptError: see `TensorSink.prepare`.
        """
        self.sink = self.target.open(identity=IDENTITY)
        self._coordinates, self._token = True, new_identity()
        return self._token.encode()

    def attach(self, token: bytes) -> TensorSink:
        """The sink; on other ranks than the coordinator, one that takes part in what that began."""
        if self.sink is None:
            self._token = token.decode()
            self.sink = self.target.open(attach=IDENTITY)
        return self.sink

    def write(self, share: UnitShare) -> None:
        """Make and write this rank's units, but for those that are written already."""
        output = SinkOutput(self._token, self.target, self.sink)
        share.make(output, self._start, self._staged)
        self.bytes_before = share.bytes_before

    def commit(self) -> None:
        """Give the output its name; on the coordinator."""
        assert self.sink is not None
        self.sink.commit()

    def abort(self) -> None:
        """Stop; units that are durable stay for a process that resumes the conversion."""
        if self._coordinates and self.sink and not noted_units(self._staged, self._start):
            self.sink.abort()

    def close(self) -> None:
        """Let go of files."""
        if self.sink is not None:
            self.sink.close()
