"""Writing a conversion in another library's format, through its sink.

1. The coordinator prepares the output under an identity that all conversions share
   (`TensorSink.prepare`): so no two processes convert to one path, and the remains of a killed
   process are resumed.
2. The other ranks, and the workers of an executor, attach to it.
3. Each unit is written as soon as it is made, and noted in a journal.
4. The coordinator commits; staging, journals and claim go together.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from xckpt.convert.journal import noted_units, others_noted, warn_of_others
from xckpt.convert.to_checkpoint import IDENTITY
from xckpt.convert.units.run import UnitShare
from xckpt.convert.units.unit import Chunks, WorkUnit
from xckpt.engine.ranks.group import Group
from xckpt.engine.ranks.rendezvous import host_identity
from xckpt.engine.ranks.watch import Step
from xckpt.engine.steps import all_reduce
from xckpt.formats.detect import open_sink
from xckpt.formats.sink import Contents, TensorSink
from xckpt.storage.commit.folder import new_identity, real_path, staging_folder
from xckpt.storage.location import Location

PREPARE = "prepare the conversion; nothing was written"
WRITE = "convert; nothing was committed"


@dataclass(frozen=True, slots=True, eq=False)
class SinkTarget:
    """The contents of a sink and its path; can be pickled.

    Example:
        >>> from xckpt.core.geometry.box import Box
        >>> from xckpt.mapping.spec import TensorSpec
        >>> contents = Contents({"w": TensorSpec((2,), "float32")})
        >>> sink = SinkTarget("written.safetensors", None, False, contents).open()
        >>> sink.write("w", Box((0,), (2,)), np.ones(2, np.float32))
        >>> sink.commit()
        >>> from safetensors.numpy import load_file
        >>> load_file("written.safetensors")["w"].tolist()
        [1.0, 1.0]
    """

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
    """Unique to the output: outputs with one token are the same, so that a worker opens each
    once."""
    target: SinkTarget = field(compare=False)
    sink: TensorSink | None = field(default=None, compare=False)
    """The sink, where it is open in this process; other processes attach to its output."""

    def only(self, unit: WorkUnit) -> SinkOutput:
        """All of it: a unit needs the layout of all tensors."""
        return replace(self, sink=None)

    def write(self, unit: WorkUnit, made: Sequence[NDArray[np.generic]]) -> bytes:
        """Write a unit's parts, durably; there is nothing to report."""
        sink = _attached(self) if self.sink is None else self.sink
        for part, array in zip(unit.parts, made, strict=True):
            sink.write(part.name, part.box, array)
        sink.sync(part.name for part in unit.parts)
        return b""


@functools.lru_cache(maxsize=1)
def _attached(output: SinkOutput) -> TensorSink:
    """The sink of an output that another process has laid out."""
    return output.target.open(attach=IDENTITY)


class SinkWriter:
    """A conversion's output on one rank.

    Args:
        target: what is written where.
        share: plans the units for a sink's chunks; this rank's share of them.
        step: the context of a step, by its name.
    """

    def __init__(
        self, target: SinkTarget, share: Callable[[Chunks], UnitShare], step: Step = nullcontext
    ) -> None:
        self.target = target
        self._step = step
        self._digest = target.contents.origin
        self._plan = share
        self._share: UnitShare | None = None
        self._sink: TensorSink | None = None
        self._coordinates = False
        folder = Location.parse(target.path).folder
        assert folder is not None  # Or `open_sink` has refused the path.
        self._staged = staging_folder(real_path(folder), IDENTITY)

    def write(self, group: Group) -> UnitShare:
        """Lay out on the coordinator, make and write on every rank, commit on the coordinator.

        Returns:
            What this rank has made.

        Raises:
            CheckpointExistsError: the path is taken, or another process is converting to it.
            XckptError: the first failure. Units that are durable stay for a process that resumes
                the conversion.
        """
        try:
            ranks = all_reduce(group, PREPARE, lambda: host_identity().encode(), self._begin)
            all_reduce(group, WRITE, lambda: self._make(int(ranks)), self._commit)
            assert self._share is not None  # Or a step has failed.
            return self._share
        except BaseException:
            if self._coordinates and self._sink and not noted_units(self._staged, self._digest):
                self._sink.abort()
            raise
        finally:
            if self._sink is not None:
                self._sink.close()
            _attached.cache_clear()  # an executor's threads are this process's own

    def _begin(self, hosts: list[bytes]) -> bytes:
        """Prepare the output, or resume an earlier one; how many ranks a host has, at most."""
        with self._step("plan"):
            starts_over = others_noted(self._staged, self._digest)
            self._sink = self.target.open(identity=IDENTITY)
            if starts_over:
                warn_of_others(self.target.path)
        self._coordinates = True
        return b"%d" % max(Counter(hosts).values())

    def _make(self, host_ranks: int) -> bytes:
        """Make and write this rank's units, except those already written."""
        if self._sink is None:
            self._sink = self.target.open(attach=IDENTITY)
        self._share = self._plan(self._sink.chunks)
        output = SinkOutput(new_identity(), self.target, self._sink)
        with self._step("write"):
            self._share.make(output, self._digest, self._staged, host_ranks)
        return b""

    def _commit(self, _: list[bytes]) -> bytes:
        assert self._sink is not None
        with self._step("commit"):
            self._sink.commit()
        return b""
