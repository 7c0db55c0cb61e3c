"""Writing a conversion as an xckpt checkpoint, through the ordinary steps of a save.

1. Every leaf is a `LazySource` of the boxes that this rank makes; the planner merges all
   ranks' boxes and chooses grids, as it does for any save.
2. `ConvertingWriter.write_data` makes this rank's units (`xckpt.convert.units.run`); the chunks of
   each unit are written as soon as it is made, small ones into packs of the unit, so that a unit is
   durable by itself. The digests and places are the unit's report.
3. On local folders reports go to a journal beside the place where the save is staged. If this
   process ends before the commit, the next conversion of the same source in the same way finds both
   and makes the missing units. A different conversion removes them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from xckpt.convert.journal import noted_units, others_noted, warn_of_others
from xckpt.convert.units.run import UnitShare
from xckpt.convert.units.unit import TargetPart, WorkUnit
from xckpt.core.manifest.entries import Manifest
from xckpt.core.manifest.packs import PACKS
from xckpt.core.plan.items import SavePlan, WriteItem
from xckpt.core.plan.save import DefaultSavePlanner, SavePlanner
from xckpt.core.storage import SizedItems
from xckpt.storage.budget import Pool, ProgressCounter
from xckpt.storage.chunks.orders import WriteOrders, Written
from xckpt.storage.chunks.write_chunks import ChunkWrites
from xckpt.storage.commit.staging import StagedCheckpoint, Staging, begin
from xckpt.storage.location import Location
from xckpt.storage.packs.write_packs import joined
from xckpt.storage.write_checkpoint import ZarrStorageWriter, orders_of

IDENTITY = "conversion"
"""The identity of every conversion's staging folder, so that the next conversion finds it."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Written).decode


class _Made(DefaultSavePlanner):
    """Gives a unit's arrays to the writer."""

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
        """The part of this output that one unit needs."""
        items = {part: self.items[part] for part in unit.parts}
        leaves = {item.index.fqn for item in items.values()}
        arrays = tuple(array for array in self.orders.arrays if array.leaf in leaves)
        orders = msgspec.structs.replace(self.orders, arrays=arrays)
        return replace(self, orders=orders, items=items)

    def write(self, unit: WorkUnit, made: Sequence[NDArray[np.generic]]) -> bytes:
        """Write and digest a unit's chunks, durably; the report is a `Written`."""
        if not self.orders.location.unsynced:
            return self._write(unit, made)
        from xckpt.storage.commit.batch import synced_together

        leaves = {self.items[part].index.fqn for part in unit.parts}
        paths = [PACKS, *(array.path for array in self.orders.arrays if array.leaf in leaves)]
        with synced_together(self.orders.location, paths):
            return self._write(unit, made)

    def _write(self, unit: WorkUnit, made: Sequence[NDArray[np.generic]]) -> bytes:
        items = [self.items[part] for part in unit.parts]
        arrays = {
            (item.index.fqn, part.box.offsets): array
            for item, part, array in zip(items, unit.parts, made, strict=True)
        }
        progress = ProgressCounter(0, None)
        # The read buffers are free by now: packs get their memory, half of what they may use.
        about = self.orders, _Made(arrays), progress, self.where, 2 * unit.source_bytes
        with closing(ChunkWrites(*about)) as writes:
            with Pool(threads=1, budget=1 << 62) as pool:
                writes.write_tensors(writes.begin_largest(SizedItems(items), pool), pool)
            return _encode(writes.finish())


class ConvertingWriter(ZarrStorageWriter):
    """A storage writer that makes what it writes.

    Args:
        path: see `ZarrStorageWriter`.
        digest: that of the conversion; see `xckpt.convert.journal`.
        leaf_names: mapping name -> name of the leaf in the checkpoint.
        share: this rank's units.
        overwrite: replace a checkpoint that is there.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        digest: bytes,
        leaf_names: Mapping[str, str],
        share: UnitShare,
        *,
        overwrite: bool,
    ) -> None:
        options = replace(share.options, progress=None)  # Units report theirs themselves.
        super().__init__(path, overwrite=overwrite, options=options)
        self.lasting = False
        self._digest = digest
        self._leaf_names = leaf_names
        self._share = share
        self._staged: StagedCheckpoint | None = None
        """The staging folder that this process has claimed."""

    def stage(self, staging: Staging | None = None, *, planned: Manifest | None = None) -> Location:
        """Reserve a place to write to: where an earlier process wrote, if one did.

        Raises:
            CheckpointExistsError: the path is taken, or another process is converting to it.
            StorageError: the storage refused.
        """
        staging = staging or begin(
            self.target, overwrite=self.overwrite, identity=IDENTITY, planned=planned
        )
        where = super().stage(staging)
        if isinstance(staging, StagedCheckpoint):
            self._staged = staging
            if staging.resumed and noted_units(staging.staging, self._digest):
                staging.tidy()
            elif staging.resumed:
                if others_noted(staging.staging, self._digest):
                    warn_of_others(self.target)
                staging.clear()
        return where

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Written:
        """Make and write this rank's units, except those already written.

        Raises:
            XckptError: the first failure; the same conversion resumes from what was written.
        """
        items = list(plan.items)
        values = replace(plan, items=[item for item in items if item.tensor_data is None])
        written = super().write_data(values, planner)
        orders = orders_of(plan)
        output = CheckpointOutput(orders, self.target, self._by_part(items))
        folder = orders.location.folder
        resumable = folder is not None and folder.name.endswith(f"-{IDENTITY}")
        staged = folder if resumable else None
        reports = self._share.make(output, self._digest, staged, self.host_ranks)
        return joined([written, *map(_decode, reports)])

    def _by_part(self, items: Sequence[WriteItem]) -> dict[TargetPart, WriteItem]:
        """The tensor items by the parts that they are of."""
        names = {leaf: name for name, leaf in self._leaf_names.items()}
        return {
            TargetPart(names[item.index.fqn], item.tensor_data.chunk): item
            for item in items
            if item.tensor_data is not None
        }

    def abort(self) -> None:
        """Stop; units that are durable stay for a process that resumes the conversion."""
        if self._staged is not None:
            self._staged.keep = bool(noted_units(self._staged.staging, self._digest))
        super().abort()
