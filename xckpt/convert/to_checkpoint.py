"""Writing a conversion as an xckpt checkpoint, through the ordinary steps of a save.

1. Every leaf is a `LazySource` of the boxes that this rank is to make; the planner merges all
   ranks' boxes and chooses grids, as it does for any save.
2. `ConvertingWriter.write_data` makes this rank's units, in threads or by an executor, and writes
   the chunks of each unit as soon as it is made. The digests are the unit's report.
3. On local folders reports go to a journal beside the place where the save is staged. Whatever ends
   this process before the commit, the next conversion of the same source in the same way finds
   both, and makes what is missing. Another conversion clears them away.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from xckpt.convert.journal import Journal, Start, read_journal
from xckpt.convert.units.run import Note, Numbered, Output
from xckpt.convert.units.unit import TargetPart, WorkUnit
from xckpt.core.metadata import Metadata
from xckpt.core.plan.items import SavePlan, WriteItem
from xckpt.core.plan.save import DefaultSavePlanner, SavePlanner
from xckpt.options import SaveOptions
from xckpt.storage.budget import Pool, ProgressCounter
from xckpt.storage.commit.folder import journal_of, journals, remove_journals
from xckpt.storage.commit.staging import StagedCheckpoint, begin
from xckpt.storage.location import Location
from xckpt.storage.write_checkpoint import ZarrStorageWriter
from xckpt.storage.write_chunks import ChunkWrites, WriteOrders, Written

IDENTITY = "conversion"
"""What the staging folder of every conversion is called, so that the next one finds it."""

Run = Callable[[Sequence[Numbered], Output, Note], None]
"""Makes units, writes them to an output, and notes each that is durable."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Written).decode


class _Made(DefaultSavePlanner):
    """Gives a unit's arrays to what writes them."""

    def __init__(self, arrays: Mapping[tuple[str, tuple[int, ...]], object]) -> None:
        super().__init__()
        self.arrays = arrays

    def resolve_data(self, write_item: WriteItem) -> object:
        assert write_item.tensor_data is not None
        return self.arrays[write_item.index.fqn, write_item.tensor_data.chunk.offsets]


@dataclass(frozen=True, slots=True)
class CheckpointOutput:
    """Writes units as chunks of a checkpoint that is staged; an `Output`."""

    orders: WriteOrders
    where: Location
    """The checkpoint's place, for errors."""
    items: Mapping[TargetPart, WriteItem]

    def only(self, unit: WorkUnit) -> CheckpointOutput:
        """What one unit needs of this."""
        items = {part: self.items[part] for part in unit.parts}
        leaves = {item.index.fqn for item in items.values()}
        arrays = tuple(array for array in self.orders.arrays if array.leaf in leaves)
        orders = msgspec.structs.replace(self.orders, arrays=arrays)
        return replace(self, orders=orders, items=items)

    def write(self, unit: WorkUnit, made: Sequence[NDArray[np.generic]]) -> bytes:
        """Write and digest a unit's chunks; the report is a `Written`."""
        items = [self.items[part] for part in unit.parts]
        arrays = {
            (item.index.fqn, part.box.offsets): array
            for item, part, array in zip(items, unit.parts, made, strict=True)
        }
        progress = ProgressCounter(0, None)
        with closing(ChunkWrites(self.orders, _Made(arrays), progress, self.where)) as writes:
            with Pool(threads=1, budget=1 << 62) as pool:
                writes.write_tensors(items, pool)
            return _encode(writes.finish())


class ConvertingWriter(ZarrStorageWriter):
    """A storage writer that makes what it writes.

    Args:
        path: see `ZarrStorageWriter`.
        units: this rank's.
        leaf_names: target tensor -> its leaf's name in the checkpoint.
        run: makes units and writes them.
        conversion: a digest of source, mapping and options.
        rank: this process's in its group.
        overwrite: replace a checkpoint that is there.
        options: sizes, threads, memory.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        units: Sequence[Numbered],
        leaf_names: Mapping[str, str],
        run: Run,
        conversion: bytes,
        rank: int,
        *,
        overwrite: bool = False,
        options: SaveOptions | None = None,
    ) -> None:
        # Units report their progress themselves.
        options = replace(options or SaveOptions(), progress=None)
        super().__init__(path, overwrite=overwrite, options=options)
        self._units = units
        self._leaf_names = leaf_names
        self._run = run
        self._conversion = conversion
        self._rank = rank
        self._staged: StagedCheckpoint | None = None
        """The staging folder that this process has claimed."""
        self._worth_keeping = False

    def prepare_global_plan(
        self, plans: list[SavePlan], metadata: Metadata
    ) -> tuple[list[SavePlan], Metadata]:
        """Reserve a place to write to: where an earlier process wrote, if one did.

        Raises:
            CheckpointExistsError: the path is taken, or another process is converting to it.
            StorageError: the storage refused.
        """
        staging = begin(self.target, overwrite=self.overwrite, identity=IDENTITY)
        self.stage(staging)
        if isinstance(staging, StagedCheckpoint):
            self._staged = staging
            if staging.resumed and self._earlier(staging.location):
                self._worth_keeping = True
                staging.tidy()
            else:
                remove_journals(staging.staging)
                if staging.resumed:
                    staging.clear()
        return super().prepare_global_plan(plans, metadata)

    def _earlier(self, staged: Location) -> dict[int, bytes]:
        """What earlier processes have written for the same conversion: unit -> report."""
        found: dict[int, bytes] = {}
        start = Start(self._conversion)
        for path in journals(Path(staged.path)) if staged.folder else ():
            begun, done, _ = read_journal(path)
            if begun == start:
                found |= done
        return found

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Written:
        """Make and write this rank's units, but for those that are written already.

        Raises:
            XckptError: the first failure; the same conversion resumes from what was written.
        """
        items = list(plan.items)
        values = replace(plan, items=[item for item in items if item.tensor_data is None])
        written = super().write_data(values, planner)
        orders = msgspec.convert(plan.storage_data, WriteOrders)
        output = CheckpointOutput(orders, self.target, self._by_part(items))
        arrays = [array for report in self._make(output) for array in _decode(report).arrays]
        return Written([*written.arrays, *arrays], written.values)

    def _by_part(self, items: Sequence[WriteItem]) -> dict[TargetPart, WriteItem]:
        """The tensor items by the parts that they are of."""
        names = {leaf: name for name, leaf in self._leaf_names.items()}
        return {
            TargetPart(names[item.index.fqn], item.tensor_data.chunk): item
            for item in items
            if item.tensor_data is not None
        }

    def _make(self, output: CheckpointOutput) -> list[bytes]:
        """Make what is missing; the reports of all units."""
        units = self._units
        staged = output.orders.location
        if not (staged.folder and staged.folder.name.endswith(f"-{IDENTITY}")):
            reports: dict[int, bytes] = {}
            self._run(units, output, reports.__setitem__)
            return list(reports.values())
        earlier = self._earlier(staged)
        journal = Journal(journal_of(staged.folder, self._rank), Start(self._conversion))
        mine = {number for number, _ in units}
        reports = {number: report for number, report in earlier.items() if number in mine}

        def note(number: int, report: bytes) -> None:
            journal.note(number, report)
            reports[number] = report
            self._worth_keeping = True

        self._worth_keeping = self._worth_keeping or bool(reports)
        self._run([each for each in units if each[0] not in reports], output, note)
        return [reports[number] for number, _ in units]

    def finish(self, metadata: Metadata, results: Sequence[object]) -> bytes:
        """Commit, and remove the journals; see `ZarrStorageWriter.finish`."""
        data = super().finish(metadata, results)
        if self._staged is not None:
            remove_journals(self._staged.staging)
        return data

    def abort(self) -> None:
        """Stop; units that are durable stay for a process that resumes the conversion."""
        if self._staged is not None:
            self._staged.keep = self._worth_keeping
            if not self._worth_keeping:
                remove_journals(self._staged.staging)
        super().abort()
