"""Writing a conversion as an xckpt checkpoint, through the ordinary steps of a save.

1. Every leaf is a `LazySource` of the boxes that this rank is to make; the planner merges all
   ranks' boxes and chooses grids, as it does for any save.
2. `ConvertingWriter.write_data` makes this rank's units (`xckpt.convert.units.run`); the chunks of
   each unit are written as soon as it is made. The digests are the unit's report.
3. On local folders reports go to a journal beside the place where the save is staged. Whatever ends
   this process before the commit, the next conversion of the same source in the same way finds
   both, and makes what is missing. Another conversion clears them away.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from xckpt.convert.journal import Start, noted_units
from xckpt.convert.units.run import UnitShare
from xckpt.convert.units.unit import TargetPart, WorkUnit
from xckpt.core.metadata import Metadata
from xckpt.core.plan.items import SavePlan, WriteItem
from xckpt.core.plan.save import DefaultSavePlanner, SavePlanner
from xckpt.storage.budget import Pool, ProgressCounter
from xckpt.storage.commit.claims import remove_journals
from xckpt.storage.commit.folder import StagedCheckpoint
from xckpt.storage.commit.staging import Staging, begin
from xckpt.storage.location import Location
from xckpt.storage.orders import WriteOrders, Written
from xckpt.storage.write_checkpoint import ZarrStorageWriter
from xckpt.storage.write_chunks import ChunkWrites

IDENTITY = "conversion"
"""What the staging folder of every conversion is called, so that the next one finds it."""

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
        writes = ChunkWrites(self.orders, _Made(arrays), ProgressCounter(0, None), self.where)
        try:
            with Pool(threads=1, budget=1 << 62) as pool:
                writes.start_tensors(items, pool)
                writes.write_tensors(pool)
            return _encode(writes.finish())
        except BaseException:
            writes.drain()
            raise


class ConvertingWriter(ZarrStorageWriter):
    """A storage writer that makes what it writes.

    Args:
        path: see `ZarrStorageWriter`.
        start: which conversion this is.
        leaf_names: target tensor -> its leaf's name in the checkpoint.
        share: this rank's units.
        overwrite: replace a checkpoint that is there.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        start: Start,
        leaf_names: Mapping[str, str],
        share: UnitShare,
        *,
        overwrite: bool,
    ) -> None:
        super().__init__(path, overwrite=overwrite, options=share.options)
        self._start = start
        self._leaf_names = leaf_names
        self._share = share

    def _begin(self) -> Staging:
        """Reserve a place to write to: where an earlier process wrote, if one did.

        Raises:
            CheckpointExistsError: the path is taken, or another process is converting to it.
            StorageError: the storage refused.
        """
        staging = begin(self.target, overwrite=self.overwrite, identity=IDENTITY)
        if isinstance(staging, StagedCheckpoint):
            if staging.resumed and noted_units(staging.staging, self._start):
                staging.tidy()
            else:
                remove_journals(staging.staging)
                staging.clear()
        return staging

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Written:
        """Make and write this rank's units, but for those that are written already.

        Raises:
            XckptError: the first failure; the same conversion resumes from what was written.
        """
        orders = msgspec.convert(plan.storage_data, WriteOrders)
        values = self._write_values(orders, plan, planner)
        self._write_documents()
        items = self._items(plan)
        output = CheckpointOutput(orders, self.target, items)
        folder = orders.location.folder
        resumable = folder is not None and folder.name.endswith(f"-{IDENTITY}")
        reports = self._share.make(output, self._start, folder if resumable else None)
        arrays = [array for report in reports for array in _decode(report).arrays]
        return Written([*values.arrays, *arrays], values.values)

    def _write_values(self, orders: WriteOrders, plan: SavePlan, planner: SavePlanner) -> Written:
        writes = ChunkWrites(orders, planner, ProgressCounter(0, None), self.target)
        for item in plan.items:
            if item.tensor_data is None:
                writes.write_value(*self._value(item, planner))
        return writes.finish()

    def _items(self, plan: SavePlan) -> dict[TargetPart, WriteItem]:
        """The plan's tensor items by the parts that they are of."""
        names = {leaf: name for name, leaf in self._leaf_names.items()}
        return {
            TargetPart(names[item.index.fqn], item.tensor_data.chunk): item
            for item in plan.items
            if item.tensor_data is not None
        }

    def finish(self, metadata: Metadata, results: Sequence[object]) -> bytes:
        """Commit, and remove the journals; see `ZarrStorageWriter.finish`."""
        staging = self._staging
        data = super().finish(metadata, results)
        if isinstance(staging, StagedCheckpoint):
            remove_journals(staging.staging)
        return data

    def abort(self) -> None:
        """Stop; units that are durable stay for a process that resumes the conversion."""
        staging = self._staging
        if isinstance(staging, StagedCheckpoint):
            if noted_units(staging.staging, self._start):
                self._drain()
                staging.release()
                self._staging = None
            else:
                remove_journals(staging.staging)
        super().abort()
