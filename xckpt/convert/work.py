"""One call of `convert` on one rank: see `xckpt.convert.run`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from xckpt.convert.conversion import Conversion, Opened
from xckpt.convert.journal import Journal, Start, noted_units
from xckpt.convert.target_tree import find_places, target_tree, user_metadata
from xckpt.convert.to_checkpoint import ConvertingWriter
from xckpt.convert.to_sink import SinkTarget, SinkWriter
from xckpt.convert.units.assertions import check_assertions
from xckpt.convert.units.plan import plan_units
from xckpt.convert.units.run import Output, run_elsewhere, run_here
from xckpt.convert.units.unit import Chunks, WorkUnit
from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.grid import GridOptions
from xckpt.core.metadata import JSONValue, Metadata
from xckpt.core.plan.save import DefaultSavePlanner
from xckpt.engine.group import Group
from xckpt.engine.save import save_state
from xckpt.engine.steps import all_reduce, broadcast
from xckpt.errors import StorageError
from xckpt.formats.sink import Contents
from xckpt.formats.source import Opaque, metadata_texts
from xckpt.options import SaveOptions
from xckpt.storage.budget import ProgressCounter
from xckpt.storage.commit.folder import journal_of

UNITS_IN_FLIGHT = 8
"""Units of the usual size that fit the budget of memory, sources and targets counted."""

PREPARE = "prepare the conversion; nothing was written"
WRITE = "convert; nothing was committed"


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion has done."""

    tensors: int
    """Tensors of the target."""
    bytes: int
    """Bytes of their elements."""
    bytes_before: int
    """How many of these bytes an earlier process had written, on this rank."""
    metadata: Metadata | None = field(default=None, compare=False, repr=False)
    """Metadata of the new checkpoint, if its format is xckpt."""


@dataclass(slots=True, eq=False)
class ConversionRun:
    """One call of `convert`, on one rank."""

    conversion: Conversion
    destination: str
    overwrite: bool
    options: SaveOptions
    executor: Executor | None
    group: Group
    like: object
    metadata: JSONValue
    _opened: Opened | None = field(default=None, init=False)
    _units: list[WorkUnit] = field(default_factory=list, init=False)
    _mine: list[WorkUnit] = field(default_factory=list, init=False)
    """This rank's units."""
    _made_bytes: int = field(default=0, init=False)
    """Bytes of those that this process has made, and none before it."""

    @property
    def opened(self) -> Opened:
        """The source, once it is open."""
        assert self._opened is not None
        return self._opened

    @property
    def as_it_is(self) -> bool:
        """Whether names and layouts stay those of the source."""
        return self.conversion.mapping is None

    @property
    def unit_bytes(self) -> int:
        """The usual size of a unit."""
        return max(1, self.options.memory_bytes // (2 * UNITS_IN_FLIGHT))

    def check(self) -> None:
        """Refuse what cannot work and start the workers, before anything is opened.

        Raises:
            StorageError: the workers of the executor could not reach this process's memory.
        """
        inside = self.executor is None or isinstance(self.executor, ThreadPoolExecutor)
        for path in (self.conversion.path, self.destination):
            if not inside and path.startswith("memory://"):
                raise StorageError(f"{path}: no other process reaches the memory of this one")
        if self.executor is not None:
            # A process that is forked later has TensorStore's memory, but not its threads, and dies
            # of it.
            self.executor.submit(os.getpid).result()

    def prepare(self) -> None:
        """Open the source on every rank, and check the mapping's assertions on it."""

        def look() -> bytes:
            self._opened = opened = self.conversion.open()
            # Every rank reads its share of what must hold.
            mine = opened.resolved.assertions[self.group.rank :: self.group.size]
            check_assertions(mine, opened.source, memory_bytes=self.options.memory_bytes)
            return b""

        all_reduce(self.group, PREPARE, look, lambda _: b"")

    def plan(self, target_chunks: Chunks | None = None) -> None:
        """Plan the units, and say which are this rank's."""
        resolved, chunks = self.opened.resolved, self.opened.source.chunks
        self._units = plan_units(resolved, chunks, self.unit_bytes, target_chunks)
        self._mine = _share(self._units, self.group.rank, self.group.size)

    def make(self, output: Output, start: Start, staged: Path | None) -> list[bytes]:
        """Make and write this rank's units, but for those that are written; see `MakeUnits`."""
        journal: Journal | None = None
        reports: dict[int, bytes] = {}
        if staged is not None:
            reports = noted_units(staged, start)
            journal = Journal(journal_of(staged, self.group.rank), start)
        missing = [unit for unit in self._mine if unit.number not in reports]
        mine, self._made_bytes = _target_bytes(self._mine), _target_bytes(missing)
        progress = ProgressCounter(mine, self.options.progress)
        if mine > self._made_bytes:
            progress.add(mine - self._made_bytes)

        def note(unit: WorkUnit, report: bytes) -> None:
            if journal is not None:
                journal.note(unit.number, report)
            reports[unit.number] = report
            progress.add(unit.target_bytes)

        opened, options = self.opened, self.options
        if self.executor is not None:
            run_elsewhere(self.executor, opened, self.conversion, missing, output, note)
        else:
            threads = options.threads or opened.source.threads
            memory = options.memory_bytes
            run_here(opened, missing, output, note, threads=threads, memory_bytes=memory)
        return [reports[unit.number] for unit in self._mine]

    def converted(self, metadata: Metadata | None = None) -> Converted:
        """What was done."""
        return Converted(
            len(self.opened.resolved.targets),
            _target_bytes(self._units),
            _target_bytes(self._mine) - self._made_bytes,
            metadata,
        )

    def into_checkpoint(self) -> Converted:
        """Write an xckpt checkpoint."""
        self.prepare()
        self.plan()
        options = self.options
        sizes = (options.chunk_bytes, options.shard_bytes, options.crc32c)
        boxes = self._boxes()
        names, tree = target_tree(self.opened, boxes, as_it_is=self.as_it_is, like=self.like)
        writer = ConvertingWriter(
            self.destination,
            Start(self.opened.identity(self.unit_bytes, sizes)),
            names,
            self.make,
            overwrite=self.overwrite,
            options=options,
        )
        planner = DefaultSavePlanner(
            grid=GridOptions(options.chunk_bytes, options.shard_bytes), serialise=_content
        )
        kept = user_metadata(self.opened.source.metadata)
        user = kept if self.metadata is None else self.metadata
        return self.converted(
            save_state(tree, writer, group=self.group, planner=planner, metadata=user)
        )

    def into_sink(self, format: str | None) -> Converted:
        """Write another format."""
        self.prepare()
        identity = self.opened.identity(format, self.options.memory_bytes)
        contents = replace(self._contents(), origin=identity)
        target = SinkTarget(self.destination, format, self.overwrite, contents)
        writer = SinkWriter(target, identity)
        try:
            self._write_through(writer)
        except BaseException:
            writer.abort()
            raise
        finally:
            writer.close()
        return self.converted()

    def _contents(self) -> Contents:
        """What a sink is to carry."""
        source, targets = self.opened.source, self.opened.resolved.targets
        places = find_places(self.opened, as_it_is=self.as_it_is, like=self.like)
        return Contents(
            targets,
            source.values,
            source.metadata if self.metadata is None else metadata_texts(self.metadata),
            places.leaf_names,
            places.containers,
            {name: source.chunks(name) for name in targets} if self.as_it_is else {},
            max(1, self.options.memory_bytes // 4),
        )

    def _write_through(self, writer: SinkWriter) -> None:
        """Lay out on the coordinator, make and write on every rank, commit on the coordinator."""
        token = broadcast(self.group, PREPARE, writer.begin)

        def make() -> bytes:
            self.plan(writer.attach(token).chunks)
            writer.write(self.make)
            return b""

        def commit(_: list[bytes]) -> bytes:
            writer.commit()
            return b""

        all_reduce(self.group, WRITE, make, commit)

    def _boxes(self) -> dict[str, Boxes]:
        """The boxes of each target that this rank makes."""
        boxes: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        for unit in self._mine:
            for part in unit.parts:
                boxes.setdefault(part.name, []).append((part.box.offsets, part.box.sizes))
        return {
            name: Boxes.of(boxes.get(name, ()), rank=len(spec.shape))
            for name, spec in self.opened.resolved.targets.items()
        }

    def close(self) -> None:
        """Let go of the source."""
        if self._opened is not None:
            self._opened.source.close()


def _content(leaf: object) -> bytes:
    """The bytes of the only kind of leaf that no adapter knows."""
    assert isinstance(leaf, Opaque)
    return leaf.content()


def _share(units: Sequence[WorkUnit], rank: int, ranks: int) -> list[WorkUnit]:
    """A rank's units: to the rank with the fewest bytes goes the next."""
    loads = [0] * ranks
    mine: list[WorkUnit] = []
    for unit in units:
        taker = loads.index(min(loads))
        loads[taker] += unit.target_bytes
        if taker == rank:
            mine.append(unit)
    return mine


def _target_bytes(units: Sequence[WorkUnit]) -> int:
    return sum(unit.target_bytes for unit in units)
