"""`dcp.save` in xckpt's format: a DCP StorageWriter over the writer that `xckpt.save` uses.

1. `prepare_local_plan`, on every rank: refuse by name what the format cannot hold.
2. `prepare_global_plan`, on the coordinator: check that the items make up whole tensors, name the
   leaves, choose the grids, stage the save, and send each rank its `Orders`. Where the planner
   repeats an earlier save's plans, it only names the place of the staging.
3. `write_data`, on every rank: write the items and report the digests of their chunks.
4. `finish`, on the coordinator: commit, if every chunk was written exactly once.

Where `write_data` fails on any rank, the coordinator removes the staging
(`xckpt.torch.dcp.staged_save`). Any other failure leaves a staging that goes with the writer, or
with its next save.

A writer may serve several threads at a time, as `dcp.async_save` has them: DCP takes all steps of
one save in one thread, so what belongs to a save is kept by thread.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Final

import msgspec
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from xckpt.core.plan.items import SavePlan, WriteItem, WriteItems
from xckpt.engine.ranks.launched import launched_on_host
from xckpt.errors import PlanError
from xckpt.formats.dcp.keys import LeafNames
from xckpt.options import SaveOptions, checked_options, with_progress
from xckpt.storage.chunks.orders import WriteOrders
from xckpt.storage.chunks.piece_orders import RankOrders
from xckpt.storage.foreign.paths import is_location
from xckpt.storage.location import Location
from xckpt.storage.write_checkpoint import ZarrStorageWriter
from xckpt.torch.dcp.bridge import SaveBridge
from xckpt.torch.dcp.hook_watch import HookWatch
from xckpt.torch.dcp.planner_data import pack
from xckpt.torch.dcp.plans import (
    check_items,
    check_metadata,
    described,
    note_unsent,
    whole_plans,
    write_item,
)
from xckpt.torch.dcp.staged_save import (
    SESSION,
    Orders,
    StagedSave,
    find_place,
    name_place,
    note_failed,
    note_stopped,
    shared_store,
    warn_of_saving_alone,
)


class _OfThread(threading.local):
    """What belongs to the save that a thread makes; in another process there is none."""

    path: str | os.PathLike[str] | None = None
    save_id: str | None = None
    save: StagedSave | None = None

    def __reduce__(self) -> tuple[type[_OfThread], tuple[()]]:
        return _OfThread, ()


class XckptStorageWriter(dcp.StorageWriter):
    """Has `dcp.save` and `dcp.async_save` write xckpt's format.

    Args:
        path: a local path, or a ``file://``, ``memory://``, ``s3://`` or ``gs://`` URL.
        overwrite: replace a checkpoint that is at the path, as DCP's own writer does; the old one
            stays readable until the new one is committed. False refuses.
        options: sizes, threads, memory, progress, metrics.

    Files of yours at the path stay where they are; a path that holds nothing but such files is
    refused with ``overwrite=False``.

    Example:
        >>> import torch, warnings
        >>> warnings.simplefilter("ignore")  # DCP says that it works in one process
        >>> state = {"model": {"weight": torch.ones(2, 3)}}
        >>> _ = dcp.save(state, storage_writer=XckptStorageWriter("memory://dcp-writer"))
        >>> import xckpt
        >>> xckpt.open("memory://dcp-writer")["model/weight"].shape
        (2, 3)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = True,
        options: SaveOptions | None = None,
    ) -> None:
        super().__init__()
        Location.parse(path)
        self.path = path
        self.overwrite = overwrite
        self.options: Final = checked_options(options, SaveOptions, "XckptStorageWriter")
        self.save_id: str = uuid.uuid4().hex
        self._own = _OfThread()

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The path that this thread saves to."""
        return self._own.path or self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin again, at another path if one is given."""
        if checkpoint_id:
            Location.parse(checkpoint_id)
            self.path = self._own.path = checkpoint_id
        self.save_id = self._own.save_id = uuid.uuid4().hex

    def storage_meta(self) -> StorageMeta:
        """The path and a name for this save, for planners."""
        save_id = self._own.save_id or self.save_id
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path or URL that xckpt can write to."""
        return is_location(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Begin a save; what an earlier one in this thread has left is removed.

        Raises:
            ValueError: ``use_collectives=False`` with several ranks: one checkpoint has one
                manifest, so its ranks have to agree.

        Warns:
            UserWarning: a launcher has started several processes, and no process group joins them.
        """
        if not kwargs.get("use_collectives", True) and shared_store() is not None:
            raise ValueError(
                "XckptStorageWriter cannot save with use_collectives=False: all ranks write one "
                "checkpoint; leave the argument out"
            )
        warn_of_saving_alone(self.checkpoint_id)
        if self._own.save is not None:
            self._own.save.abort()
        rank = int(str(kwargs.get("rank") or 0))
        watch = HookWatch("dcp.save", self.checkpoint_id, self.options)
        watch.meet(rank=rank)
        with watch.hook("describe"):
            writer = ZarrStorageWriter(
                self.checkpoint_id, overwrite=self.overwrite, options=self.options
            )
            writer.host_ranks = launched_on_host(os.environ)
            self._own.save = StagedSave(writer, rank, is_coordinator, watch)

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        """The plan as it is.

        Raises:
            UnsupportedLeafError: tensors that the format cannot hold; all are listed.
        """
        with self._save.watch.hook("describe", waits=False):
            check_items(plan.items)
        self._save.local = plan
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Lay out the checkpoint, stage the save, and give each rank its orders.

        Raises:
            PlanError: the items do not write every element exactly once; all faults are listed.
            CheckpointExistsError: the path is taken.
            StorageError: the storage refused.
        """
        save = self._save
        try:
            with save.watch.hook("plan"):
                whole = whole_plans(plans, save.local, save.rank)
                if whole is not None:
                    return self._plan(save, whole)
                name_place(save.writer.target, save.stage(len(plans)))
                return plans
        except BaseException:
            note_unsent(plans)
            save.abort()
            raise

    def _plan(self, save: StagedSave, plans: Sequence[dcp.SavePlan]) -> list[dcp.SavePlan]:
        shares, metadata, leaves = described(plans, save.writer.options.grid)
        place = save.stage(len(plans))
        ordered, metadata = save.writer.prepare_global_plan(shares, metadata)
        save.metadata, save.names = metadata, leaves.names
        encoded: dict[int, tuple[WriteOrders, bytes]] = {}  # orders of which each keeps its id
        sent: list[dcp.SavePlan] = []
        for rank, (plan, own) in enumerate(zip(plans, ordered, strict=True)):
            writes = own.storage_data
            if isinstance(writes, RankOrders):
                writes = writes.as_arrays(WriteItems.of(own.items).table)
            assert isinstance(writes, WriteOrders)
            if id(writes) not in encoded:
                orders = Orders(SESSION, place, leaves.names, writes, len(plans))
                encoded[id(writes)] = writes, msgspec.msgpack.encode(orders)
            # The coordinator finishes a save by cached plans, and so needs what they lay out.
            layout = metadata if rank == save.rank else None
            sent.append(replace(plan, storage_data=(encoded[id(writes)][1], layout)))
        return sent

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items; when this returns, they are durable.

        Raises:
            PlanError: an item does not fit its grid, or its data does not fit the item.
            UnsupportedLeafError: a tensor whose elements cannot be read as they are.
            StorageError: the storage refused.
        """
        save = self._save
        with (
            save.watch.hook("write", last=not save.is_coordinator),
            with_progress(save.writer.options, "dcp.save", save.rank, self.checkpoint_id) as shown,
        ):
            save.writer.options = shown
            result = _write_share(save, plan, planner)
            save.watch.set_bytes(result.size_in_bytes)
        done: Future[list[WriteResult]] = Future()
        done.set_result([result])
        return done

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Commit what all ranks have written.

        Raises:
            PlanError: a chunk was not written, or twice; or the planner's metadata holds
                what cannot be stored.
            StorageError: the storage refused.
        """
        save = self._save
        try:
            with save.watch.hook("commit", last=True):
                assert save.metadata is not None
                check_metadata(metadata, save.metadata, save.names)
                names = LeafNames(save.names, dict(save.metadata.containers))
                planner_data = pack(metadata.planner_data, names.paths, names.odd)
                reports = [result.storage_data for of_rank in results for result in of_rank]
                save.writer.finish(replace(save.metadata, planner_data=planner_data), reports)
        finally:
            save.abort()
        metadata.storage_meta = self.storage_meta()

    @property
    def _save(self) -> StagedSave:
        if self._own.save is None:
            raise PlanError(
                f"{self.checkpoint_id}: a save calls set_up_storage_writer first, in the same "
                "thread, as dcp.save does"
            )
        return self._own.save


def _orders(save: StagedSave, plan: dcp.SavePlan) -> Orders:
    """What `XckptStorageWriter.prepare_global_plan` of this or an earlier save has sent."""
    if not isinstance(plan.storage_data, tuple):
        raise PlanError(
            "the plan came without its storage_data; a planner that changes a plan must "
            "keep that: dataclasses.replace(plan, items=...)"
        )
    encoded, layout = plan.storage_data
    orders = msgspec.msgpack.decode(encoded, type=Orders)
    if save.place is not None and save.metadata is None:
        # The plan is an earlier save's, and so is the layout.
        save.names = orders.names
        _, save.metadata = save.writer.prepare_global_plan([], layout)
    return orders


def _write_share(save: StagedSave, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> WriteResult:
    """Write a rank's items, and let the other ranks know whether that failed."""
    where = save.place
    try:
        orders = _orders(save, plan)
        save.watch.meet(size=orders.ranks)
        where = where or find_place(orders.session, save.writer.target) or orders.place
        result = _write(save, orders, where.location, plan, planner)
    except BaseException:
        if save.ranks == 1:
            save.abort()
        elif where is not None:
            note_failed(where.save)
        raise
    if save.ranks != 1:
        note_stopped(where.save)
    return result


def _write(
    save: StagedSave,
    orders: Orders,
    staged: Location,
    plan: dcp.SavePlan,
    planner: dcp.SavePlanner,
) -> WriteResult:
    """Write a rank's items to where the save is staged."""
    items: list[WriteItem] = []
    sources: dict[tuple[str, object], dcp.WriteItem] = {}
    for item in plan.items:
        name = orders.names.get(item.index.fqn)
        if name is None:
            raise PlanError(f"{item.index.fqn}: in this rank's plan, but not in the global one")
        own = write_item(item, name)
        if own.tensor_data is None or prod(own.tensor_data.chunk.sizes):
            items.append(own)
            sources[name, own.index.offset] = item
    writes = msgspec.structs.replace(orders.writes, location=staged)
    bridge = SaveBridge(planner, sources)
    with bridge.raising():
        written = save.writer.write_data(SavePlan(items, writes), bridge)
    size = sum(item.box_bytes for item in items)
    return WriteResult(MetadataIndex("xckpt"), size, written)
