"""`dcp.load` from xckpt's format: a DCP StorageReader over the reader that `xckpt.load` uses.

1. `read_metadata`, on every rank: read and check the manifest, and say in DCP's words what it
   holds, so that DCP's planners plan against it.
2. `prepare_local_plan`: refuse by name what torch cannot hold; tell the coordinator which manifest
   this rank has read and which chunks it wants.
3. `prepare_global_plan`, on the coordinator: all ranks must have read the same manifest; a chunk
   that several ranks of one host want is read by one of them.
4. `read_data`: read and verify the chunks that the plan touches, and no others.
"""

from __future__ import annotations

import os
import uuid
import weakref
from dataclasses import dataclass, replace
from math import prod
from typing import Final

import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType as TorchItemType
from torch.futures import Future

from xckpt.core.geometry.box import Box, Boxes
from xckpt.core.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from xckpt.core.plan.host_reads import PackedReads
from xckpt.core.plan.items import LoadItemType, LoadPlan, ReadItem
from xckpt.core.plan.wanted import local_reads
from xckpt.engine.ranks.launched import launched_on_host
from xckpt.engine.ranks.watch import bytes_read
from xckpt.errors import PlanError, StorageError, UnsupportedLeafError
from xckpt.formats.dcp.keys import StoredObject, stored_objects
from xckpt.options import LoadOptions, checked_options, with_progress
from xckpt.storage.array import digest_bytes
from xckpt.storage.foreign.paths import is_location
from xckpt.storage.location import Location
from xckpt.storage.read_checkpoint import ZarrStorageReader
from xckpt.torch.dcp.bridge import LoadBridge, Wanted
from xckpt.torch.dcp.hook_watch import HookWatch
from xckpt.torch.dcp.old_folders import naming_dcp
from xckpt.torch.dcp.planner_data import restore, unpack
from xckpt.torch.dcp.plans import torch_metadata
from xckpt.torch.dcp.shared_memory import check_shared_memory
from xckpt.torch.leaf import torch_dtype


@dataclass(frozen=True, slots=True)
class _Announced:
    """What a rank's plan announces to the coordinator, and the coordinator's answer."""

    manifest: bytes
    """Digest of the manifest that the rank has read."""
    items: int
    """Number of the items for which it wants chunks."""
    sharing: object
    """The storage's own."""
    ranks: int = 1
    """How many ranks load; the coordinator knows."""


class _OpenLoad:
    """A load under way, as one rank sees it."""

    def __init__(self, reader: ZarrStorageReader, watch: HookWatch) -> None:
        self.reader = reader
        self.watch = watch
        self.rank = 0
        self.manifest = reader.read_metadata()
        self.metadata: Metadata = reader.set_up_storage_reader(self.manifest, 1)
        data, odd = unpack(self.metadata.planner_data)
        stored = self.metadata.state_dict_metadata
        self.objects: dict[str, StoredObject] = stored_objects(
            stored,
            self.metadata.containers,
            lambda name: isinstance(stored[name], TensorStorageMetadata),
            odd,
        )
        implied = {fqn: stored_object.path for fqn, stored_object in self.objects.items()}
        self.planner_data = restore(data, implied)
        self.items: list[ReadItem] = []
        """What was announced to the other ranks."""
        self.close = weakref.finalize(self, reader.close)
        """Releases what peers might wait for; called at the latest with the last reference."""

    def translate(self, plan: dcp.LoadPlan) -> tuple[list[ReadItem], list[Wanted]]:
        """The plan's items in the storage's words, and what each of them is for.

        Raises:
            PlanError: an item is of no stored tensor, or reaches beyond it.
            UnsupportedLeafError: an item wants a tensor that torch cannot hold, or as bytes.
        """
        items: list[ReadItem] = []
        wanted: list[Wanted] = []
        problems: list[str] = []
        for number, item in enumerate(plan.items):
            stored = self.objects.get(item.storage_index.fqn)
            if stored is None:
                raise PlanError(f"{item.storage_index.fqn}: wanted, but not in the checkpoint")
            wanted.append(Wanted(item, stored))
            if item.type is TorchItemType.TENSOR:
                items += self._part(number, item, stored)
            else:
                problems += self._unfit(item, stored)
                items += [part for name in stored.leaves for part in self._whole(number, name)]
        if problems:
            raise UnsupportedLeafError.listing("torch cannot hold some leaves", problems)
        return items, wanted

    def _unfit(self, item: dcp.ReadItem, stored: StoredObject) -> list[str]:
        """Why an object cannot be given as bytes."""
        problems: list[str] = []
        for name in stored.leaves:
            leaf = self.metadata.state_dict_metadata[name]
            if isinstance(leaf, TensorStorageMetadata):
                dtype = leaf.properties.dtype
                if torch_dtype(dtype) is None:
                    problems.append(f"{name}: torch has no dtype {dtype}; load it with xckpt.load")
                elif stored.leaf is not None:
                    problems.append(f"{item.storage_index.fqn}: a tensor, but wanted as bytes")
        return problems

    def _part(self, number: int, item: dcp.ReadItem, stored: StoredObject) -> list[ReadItem]:
        """The part of a stored tensor that an item wants."""
        fqn, name = item.storage_index.fqn, stored.leaf
        leaf = self.metadata.state_dict_metadata.get(name or "")
        if name is None or not isinstance(leaf, TensorStorageMetadata):
            raise PlanError(f"{fqn}: wanted as a tensor, but the checkpoint holds no tensor there")
        if not prod(item.lengths):
            return []
        offset = item.storage_index.offset
        index = item.storage_index.index
        chunks = leaf.chunks
        if index is None or index >= len(chunks) or chunks[index].offsets != offset:
            index = next((n for n, box in enumerate(chunks) if box.offsets == offset), None)
        part = Box(tuple(item.storage_offsets), tuple(item.lengths))
        if index is None or not Box.whole(chunks[index].sizes).holds(part):
            raise PlanError(
                f"{fqn}: {part.sizes} elements from {part.offsets} of the "
                f"stored part at {offset} are wanted, and the checkpoint has no such"
            )
        return [
            ReadItem(
                LoadItemType.TENSOR,
                MetadataIndex(name, None, number),
                tuple(item.dest_offsets),
                MetadataIndex(name, chunks[index].offsets, index),
                part.offsets,
                part.sizes,
            )
        ]

    def _whole(self, number: int, name: str) -> list[ReadItem]:
        """All of a leaf, as a part of an object."""
        leaf = self.metadata.state_dict_metadata[name]
        target = MetadataIndex(name, None, number)
        if not isinstance(leaf, TensorStorageMetadata):
            return [ReadItem(LoadItemType.BYTE_IO, target, (), MetadataIndex(name), (), ())]
        reads = local_reads(name, Boxes.whole(leaf.size), leaf)
        return [replace(item, dest_index=target) for item in reads]


class XckptStorageReader(dcp.StorageReader):
    """Has `dcp.load` read xckpt's format.

    Python values, and the lists and tuples that DCP takes for one object, are handed to the planner
    as `torch.save` would write them; bytes that DCP has saved, as they were.

    Args:
        path: a local path, or a ``file://``, ``memory://``, ``s3://`` or ``gs://`` URL.
        options: threads, memory, progress, metrics, sharing of reads within a host.

    Example:
        >>> import numpy as np, torch, warnings, xckpt
        >>> warnings.simplefilter("ignore")  # DCP says that it works in one process
        >>> _ = xckpt.save("memory://dcp-reader", {"model": {"w": np.arange(3.0)}, "step": 7})
        >>> state = {"model": {"w": torch.zeros(3)}, "step": 0}
        >>> dcp.load(state, storage_reader=XckptStorageReader("memory://dcp-reader"))
        >>> state
        {'model': {'w': tensor([0., 1., 2.])}, 'step': 7}
    """

    def __init__(self, path: str | os.PathLike[str], *, options: LoadOptions | None = None) -> None:
        super().__init__()
        Location.parse(path)
        self.path = path
        self.options: Final = checked_options(options, LoadOptions, "XckptStorageReader")
        self.load_id: str = uuid.uuid4().hex
        self.bytes_read: int = 0
        """Bytes of chunks that this rank has read in the last load."""
        self._load: _OpenLoad | None = None

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The path that is loaded from."""
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin again, at another path if one is given."""
        self._end()
        if checkpoint_id:
            Location.parse(checkpoint_id)
            self.path = checkpoint_id
        self.load_id = uuid.uuid4().hex

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path or URL that xckpt can read."""
        return is_location(checkpoint_id)

    def read_metadata(self) -> dcp.Metadata:
        """What the checkpoint holds, in DCP's words.

        Raises:
            NotACheckpointError: no committed checkpoint is at the path.
            ManifestError: the manifest cannot be trusted.
            TreeMismatchError: several leaves have one fqn; all are listed.
        """
        self._end()
        watch = HookWatch("dcp.load", self.path, self.options)
        if dist.is_available() and dist.is_initialized():
            watch.meet(rank=dist.get_rank(), size=dist.get_world_size())
        with watch.hook("find"), naming_dcp(self.path):
            reader = ZarrStorageReader(self.path, options=self.options)
            reader.host_ranks = launched_on_host(os.environ)
            self._load = _OpenLoad(reader, watch)
        return dcp.Metadata(
            torch_metadata(self._load.metadata, self._load.objects),
            planner_data=self._load.planner_data,
            storage_meta=StorageMeta(checkpoint_id=self.path, load_id=self.load_id),
        )

    def set_up_storage_reader(
        self, metadata: dcp.Metadata, is_coordinator: bool, *args: object, **kwargs: object
    ) -> None:
        """Meet the other ranks of this host, if there may be any."""
        load = self._under_way
        load.rank = int(str(kwargs.get("rank") or 0))
        load.watch.meet(rank=load.rank)
        if dist.is_available() and dist.is_initialized() and self.options.share_reads is not False:
            load.reader.set_up_storage_reader(load.manifest, dist.get_world_size())

    def prepare_local_plan(self, plan: dcp.LoadPlan) -> dcp.LoadPlan:
        """The plan, with what the coordinator has to know.

        Raises:
            PlanError: an item wants what is not there.
            UnsupportedLeafError: an item wants what torch cannot hold; all are listed.
        """
        load = self._under_way
        with load.watch.hook("plan", waits=False):
            load.items, _ = load.translate(plan)
            announced = load.reader.prepare_local_plan(LoadPlan(load.items)).storage_data
        data = _Announced(digest_bytes(load.manifest), len(plan.items), announced)
        return replace(plan, storage_data=data)

    def prepare_global_plan(self, plans: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        """The plans, with the chunks that one rank of a host reads for others.

        Raises:
            StorageError: the checkpoint was replaced while the ranks were opening it.
        """
        with self._under_way.watch.hook("share"):
            return self._shared(plans)

    def _shared(self, plans: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        known = [p.storage_data for p in plans if isinstance(p.storage_data, _Announced)]
        if len({each.manifest for each in known}) > 1:
            raise StorageError(
                f"{self.path} was replaced while the ranks opened it, and they see different "
                f"checkpoints; load again"
            )
        if [each.items for each in known] != [len(plan.items) for plan in plans]:
            # A planner of the user's own has made other plans; each rank reads for itself.
            return [replace(plan, storage_data=None) for plan in plans]
        ours = [LoadPlan((), storage_data=each.sharing) for each in known]
        shared = self._under_way.reader.prepare_global_plan(ours)
        return [
            replace(plan, storage_data=replace(each, sharing=share.storage_data, ranks=len(plans)))
            for plan, each, share in zip(plans, known, shared, strict=True)
        ]

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        """Read and verify what the plan wants; when this returns, it has arrived.

        Raises:
            CorruptCheckpointError: something is not what was saved.
            StorageError: the storage refused, or another save replaced the checkpoint meanwhile.
            UnsupportedLeafError: tensors share memory (tied weights, overlapping views) for which
                the checkpoint holds different elements. This rank has written nothing then.
        """
        load = self._under_way
        try:
            with (
                load.watch.hook("read", last=True),
                with_progress(self.options, "dcp.load", load.rank, self.path) as shown,
            ):
                load.reader.options = shown
                _read(load, plan, planner)
        finally:
            self.bytes_read = load.reader.source.bytes_read
            self._end()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @property
    def _under_way(self) -> _OpenLoad:
        if self._load is None:
            raise PlanError(f"{self.path}: a load calls read_metadata first, as dcp.load does")
        return self._load

    def _end(self) -> None:
        if self._load is not None:
            self._load.close()
            self._load = None


def _read(load: _OpenLoad, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> None:
    """Read a rank's items, for itself and for the ranks that share them."""
    items, wanted = load.translate(plan)
    answer = plan.storage_data
    sharing = None
    if isinstance(answer, _Announced):
        sharing = answer.sharing
        load.watch.meet(size=answer.ranks)
    if not isinstance(sharing, PackedReads):
        sharing = PackedReads(0)
    elif items != load.items and sharing.reads().elsewhere:
        raise PlanError(
            "the planner has changed what this rank reads after the ranks have shared "
            "the reading; use LoadOptions(share_reads=False)"
        )
    bridge = LoadBridge(planner, load.metadata, wanted)
    shares = LoadPlan(items, storage_data=sharing)
    if load.watch.is_on:
        load.watch.set_bytes(bytes_read(shares, load.metadata))
    with bridge.raising():
        check_shared_memory(planner, items, wanted, load.metadata, load.reader)
        bridge.begin()
        load.reader.read_data(shares, bridge)
