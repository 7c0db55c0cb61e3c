"""One call of `convert` on one rank: see `xckpt.convert.run`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

from xckpt.convert.conversion import Conversion, Opened
from xckpt.convert.target_tree import find_places, target_tree, user_metadata
from xckpt.convert.to_checkpoint import ConvertingWriter
from xckpt.convert.to_sink import SinkTarget, SinkWriter
from xckpt.convert.units.assertions import check_assertions
from xckpt.convert.units.plan import plan_units
from xckpt.convert.units.run import Note, Numbered, Output, run_elsewhere, run_here, start
from xckpt.convert.units.unit import Chunks, WorkUnit
from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.grid import GridOptions
from xckpt.core.metadata import JSONValue, Metadata
from xckpt.core.plan.save import DefaultSavePlanner
from xckpt.engine.group import Group
from xckpt.engine.save import save_state
from xckpt.engine.steps import all_reduce, broadcast
from xckpt.errors import StorageError
from xckpt.formats.opaque import Opaque
from xckpt.formats.sink import Contents
from xckpt.formats.source import metadata_texts
from xckpt.options import SaveOptions
from xckpt.storage.budget import ProgressCounter

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
    _mine: list[Numbered] = field(default_factory=list, init=False)
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
            start(self.executor)

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

    def run(self, units: Sequence[Numbered], output: Output, note: Note) -> None:
        """Make and write those of this rank's units that no earlier process has written."""
        mine = _target_bytes(self._mine)
        self._made_bytes = _target_bytes(units)
        progress = ProgressCounter(mine, self.options.progress)
        if mine > self._made_bytes:
            progress.add(mine - self._made_bytes)
        if self.executor is not None:
            run_elsewhere(
                self.executor, self.opened, self.conversion, units, output, note, progress
            )
            return
        source = self.opened.source
        run_here(
            self.opened,
            units,
            output,
            note,
            progress,
            threads=self.options.threads or source.threads,
            memory_bytes=self.options.memory_bytes,
        )

    def converted(self, metadata: Metadata | None = None) -> Converted:
        """What was done."""
        return Converted(
            len(self.opened.resolved.targets),
            sum(unit.target_bytes for unit in self._units),
            _target_bytes(self._mine) - self._made_bytes,
            metadata,
        )

    def into_checkpoint(self) -> Converted:
        """Write an xckpt checkpoint."""
        self.prepare()
        self.plan()
        options = self.options
        sizes = (options.chunk_bytes, options.shard_bytes, options.crc32c)
        names, tree = target_tree(
            self.opened,
            self._boxes(),
            as_it_is=self.as_it_is,
            like=self.like,
        )
        writer = ConvertingWriter(
            self.destination,
            self._mine,
            names,
            self.run,
            self.opened.identity(self.unit_bytes, sizes),
            self.group.rank,
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
        target = SinkTarget(self.destination, format, self.overwrite, self._contents())
        identity = self.opened.identity(format, self.options.memory_bytes)
        writer = SinkWriter(target, identity, self.group.rank)
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
            writer.make(self._mine, self.run)
            return b""

        def commit(_: list[bytes]) -> bytes:
            writer.commit()
            return b""

        all_reduce(self.group, WRITE, make, commit)

    def _boxes(self) -> dict[str, Boxes]:
        """The boxes of each target that this rank makes."""
        boxes: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        for _, unit in self._mine:
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


def _share(units: Sequence[WorkUnit], rank: int, ranks: int) -> list[Numbered]:
    """A rank's units: to the rank with the fewest bytes goes the next."""
    loads = [0] * ranks
    mine: list[Numbered] = []
    for number, unit in enumerate(units):
        taker = loads.index(min(loads))
        loads[taker] += unit.target_bytes
        if taker == rank:
            mine.append((number, unit))
    return mine


def _target_bytes(units: Sequence[Numbered]) -> int:
    return sum(unit.target_bytes for _, unit in units)
