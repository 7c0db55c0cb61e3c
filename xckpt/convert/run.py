"""`convert`: a checkpoint of any format and model becomes one of another, unit by unit.

1. Open the source, resolve the mapping, and check what it takes for granted of the data: before
   anything is written. Ranks share the reading.
2. Plan units of work (`xckpt.convert.units`). Every process finds the same ones.
3. Make and write them: a checkpoint of ours through the ordinary steps of a save
   (`xckpt.convert.to_checkpoint`), any other format through a sink
   (`xckpt.convert.to_sink`). The work is shared by the ranks of a group, by the workers of an
   executor, or by this process's threads.
4. Commit. Until then nothing is at the destination.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

from xckpt.convert.assertions import check_assertions
from xckpt.convert.conversion import Conversion, Opened
from xckpt.convert.run_units import Note, Numbered, Output, run_elsewhere, run_here, start
from xckpt.convert.target_tree import target_tree, user_metadata
from xckpt.convert.to_checkpoint import ConvertingWriter
from xckpt.convert.to_sink import SinkLayout, SinkWriter
from xckpt.convert.units import Chunks, WorkUnit, plan_units
from xckpt.core.geometry.boxes import Boxes
from xckpt.core.geometry.grid import GridOptions
from xckpt.core.plan.save import DefaultSavePlanner
from xckpt.engine.group import Group, LocalGroup
from xckpt.engine.save import save_state
from xckpt.engine.steps import all_reduce, broadcast
from xckpt.errors import StorageError
from xckpt.find_group import find_group
from xckpt.formats.detect import open_sink
from xckpt.mapping.infer.leaf_names import specs_of
from xckpt.mapping.mapping import LeafMapping
from xckpt.mapping.spec import TensorSpec
from xckpt.options import SaveOptions
from xckpt.storage.budget import ProgressCounter
from xckpt.storage.foreign.concurrency import reading_threads

__all__ = ["Converted", "convert"]

UNITS_IN_FLIGHT = 8
"""Units of the usual size that fit the budget of memory, sources and targets counted."""

PREPARE = "prepare the conversion; nothing was written"
WRITE = "convert; nothing was committed"

Path = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion has done."""

    tensors: int
    """Tensors of the target."""
    bytes: int
    """Bytes of their elements."""
    bytes_before: int
    """How many of these bytes an earlier process had written, on this rank."""


def convert(
    src: Path,
    dst: Path,
    *,
    mapping: LeafMapping | None = None,
    dtype: str | None = None,
    executor: Executor | None = None,
    group: Group | None = None,
    overwrite: bool = False,
    format: str | None = None,
    allow_lossy: bool = False,
    like: object = None,
    options: SaveOptions | None = None,
) -> Converted:
    """Write a checkpoint of another model, dtype or format; every rank of a group calls it.

    Memory stays within ``options.memory_bytes``, whatever the size of the model. If this ends
    before it is done, by an error or a kill, what it has written to a local folder is kept in a
    hidden folder beside ``dst``, and the same call goes on with it.

    Args:
        src: what to convert: a checkpoint of ours, a safetensors file or folder, an Orbax or DCP
            checkpoint, a ``torch.save`` file; a local path or a URL. What it is is found out.
        dst: where to; see `xckpt.save`.
        mapping: how tensors of the source become tensors of the target; None leaves them as they
            are. Python values go along under their own names.
        dtype: element type of all floating-point tensors, such as ``"bfloat16"``; None leaves them.
        executor: any executor of `concurrent.futures`, whose workers share the work. They must
            reach both paths; this process plans and commits.
        group: the ranks that share the work; found by itself if there is no executor.
        overwrite: replace what is at ``dst``, once the new checkpoint is committed.
        format: what to write: ``"xckpt"``, ``"safetensors"``, ``"orbax"`` or ``"dcp"``; None goes
            by the name of ``dst``.
        allow_lossy: allow steps that do not bring every value back. ``dtype`` needs no leave.
        like: the target's tree, of anything with ``.shape`` and ``.dtype``: the mapping is then
            proven to make just this, optional leaves included, and the checkpoint has its
            containers. None makes what the mapping makes of the source, in nested dicts.
        options: chunk sizes, threads, memory, progress.

    Returns:
        How much was converted.

    Raises:
        NotACheckpointError: nothing that is known lies at ``src``.
        MappingError: the mapping does not fit the source, leaves some of it out or is lossy without
            leave, or the data are not what it takes for granted; all problems are listed.
        CheckpointExistsError: something is at ``dst``, and ``overwrite`` is False.
        CorruptCheckpointError: the source is not what was saved; names leaf and range.
        StorageError: a storage refused, or a worker died.
        RanksFailedError: any of these, in a group of several ranks. Nothing is committed.

    Example:
        >>> import numpy as np, xckpt
        >>> from xckpt.convert import Mapping, Rule
        >>> from xckpt.mapping.operations import Transpose
        >>> state = {"fc.weight": np.arange(6.0).reshape(2, 3), "step": 7}
        >>> _ = xckpt.save("memory://torch-model", state)
        >>> mapping = Mapping([Rule("fc.weight", "fc/kernel", [Transpose((1, 0))])])
        >>> convert("memory://torch-model", "memory://flax-model", mapping=mapping)
        Converted(tensors=1, bytes=48, bytes_before=0)
        >>> xckpt.load("memory://flax-model")["fc"]["kernel"].shape
        (3, 2)
    """
    work = _Work(
        Conversion(os.fspath(src), None, mapping, dtype, allow_lossy, _wanted(mapping, like)),
        os.fspath(dst),
        overwrite,
        options or SaveOptions(),
        executor,
        _group_for(executor, group),
        like,
    )
    work.check()
    try:
        if open_sink(dst, format, overwrite=overwrite) is None:
            return work.into_checkpoint()
        return work.into_sink(format)
    finally:
        work.close()


def _wanted(mapping: LeafMapping | None, like: object) -> tuple[tuple[str, TensorSpec], ...] | None:
    if like is None:
        return None
    if mapping is None:
        raise ValueError("like is the target of a mapping: give one")
    return tuple(specs_of(like).items())


def _group_for(executor: Executor | None, group: Group | None) -> Group:
    if executor is None:
        return find_group() if group is None else group
    if group is not None and group.size > 1:
        raise ValueError("an executor's workers or a group's ranks can share the work, not both")
    return LocalGroup()


@dataclass(slots=True, eq=False)
class _Work:
    """One call of `convert`, on one rank."""

    conversion: Conversion
    destination: str
    overwrite: bool
    options: SaveOptions
    executor: Executor | None
    group: Group
    like: object
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
        """Open the source on every rank, and check what the mapping takes for granted of it."""

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
            threads=self.options.threads or reading_threads(getattr(source, "path", None)),
            memory_bytes=self.options.memory_bytes,
        )

    def converted(self) -> Converted:
        """What was done."""
        return Converted(
            len(self.opened.resolved.targets),
            sum(unit.target_bytes for unit in self._units),
            _target_bytes(self._mine) - self._made_bytes,
        )

    def into_checkpoint(self) -> Converted:
        """Write a checkpoint of ours."""
        self.prepare()
        self.plan()
        options = self.options
        sizes = (options.chunk_bytes, options.shard_bytes, options.crc32c)
        names, tree = target_tree(
            self.opened,
            self._boxes(),
            as_it_is=self.conversion.mapping is None,
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
        save_state(
            tree,
            writer,
            group=self.group,
            planner=DefaultSavePlanner(grid=GridOptions(options.chunk_bytes, options.shard_bytes)),
            metadata=user_metadata(self.opened.source.metadata),
        )
        return self.converted()

    def into_sink(self, format: str | None) -> Converted:
        """Write another format."""
        self.prepare()
        source, targets = self.opened.source, self.opened.resolved.targets
        layout = SinkLayout(
            self.destination, format, self.overwrite, targets, source.values, source.metadata
        )
        identity = self.opened.identity(format, self.options.memory_bytes)
        writer = SinkWriter(layout, identity, self.group.rank)
        try:
            self._write_through(writer)
        except BaseException:
            writer.abort()
            raise
        finally:
            writer.close()
        return self.converted()

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
