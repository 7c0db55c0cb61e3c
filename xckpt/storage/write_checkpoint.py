"""Writing a checkpoint through TensorStore.

1. On the coordinator, `prepare_global_plan` gives every rank its `WriteOrders`: where the save is
   staged and which zarr arrays its items belong to.
2. On every rank, `write_data` carries them out (`xckpt.storage.chunks.write_chunks`) and reports
   the digests of the chunks; short values travel in the report itself. With an array's first chunk
   goes its zarr.json; the coordinator writes those of the folders above.
3. On the coordinator, `follow` puts all digests in the manifest's order, which fails if any chunk
   was not written exactly once, and begins to write them and the root's zarr.json.
4. Every rank waits until what it wrote is durable (`settle`); `finish` publishes the manifest.

To a bucket ranks may report before that (`report_early`): what follows from their reports is then
under way beside their data, for there each wait for an answer counts.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from xckpt.core.manifest.codec import check, complete, draft, encode, parse, to_metadata
from xckpt.core.manifest.entries import BytesEntry, DocumentTree, Manifest, is_packed
from xckpt.core.manifest.own_keys import DIGESTS
from xckpt.core.manifest.packs import PACKS
from xckpt.core.manifest.pieces import MANY_CHUNKS
from xckpt.core.manifest.rules import count_chunks
from xckpt.core.metadata import Metadata
from xckpt.core.plan.items import SavePlan
from xckpt.core.plan.layout import with_grids
from xckpt.core.plan.save import SavePlanner
from xckpt.core.storage import BriefData, PlainStorageWriter, SizedItems
from xckpt.core.text.arguments import wrong_argument
from xckpt.errors import StorageError
from xckpt.options import LoadOptions, SaveOptions, checked_options
from xckpt.storage.array import digest_bytes
from xckpt.storage.budget import Pool, ProgressCounter, share_of
from xckpt.storage.chunks.orders import WriteOrders, Written, value_entry
from xckpt.storage.chunks.unit_files import DocumentWrites
from xckpt.storage.chunks.units import merged_digests, merged_values, orders_for
from xckpt.storage.chunks.write_chunks import ChunkWrites
from xckpt.storage.commit.conditional import is_written
from xckpt.storage.commit.explain import check_seen, explained
from xckpt.storage.commit.file_system import suited_threads
from xckpt.storage.commit.keys import KeyStaging
from xckpt.storage.commit.staging import Staging, begin
from xckpt.storage.location import Location

if TYPE_CHECKING:
    from xckpt.storage.base.base import Base


ITEM_BYTES = 1 << 10
"""Memory that an item of the plan takes, without its elements: its box, array, digests, place."""


class ZarrStorageWriter(PlainStorageWriter):
    """Writes a checkpoint as zarr v3 through TensorStore.

    Args:
        path: a local path, or a ``file://``, ``memory://``, ``s3://`` or ``gs://`` URL.
        overwrite: replace a checkpoint that is there, once the new one is committed.
        options: sizes, threads, memory.
        base: an earlier checkpoint, to share what did not change; see `xckpt.save`.

    Example:
        >>> writer = ZarrStorageWriter("memory://example-writer", overwrite=True)
        >>> str(writer.target), writer.options.chunk_bytes >> 20
        ('memory://example-writer', 8)
    """

    report_type: type = Written

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        options: SaveOptions | None = None,
        base: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(base, str | os.PathLike | None):
            raise wrong_argument("ZarrStorageWriter", "base", "a path or None", base)
        self.overwrite = overwrite
        checked = checked_options(options, SaveOptions, "ZarrStorageWriter")
        self.target: Location = Location.parse(path, options)
        self.options: SaveOptions = checked.suited(to_bucket=bool(self.target.bucket))
        self.base: str | None = None if base is None else os.fspath(base)
        self.lasting: bool = base is None
        self.shared_bytes: int = 0
        """Bytes not written by this rank, because they are shared with the base."""
        self._base = None if base is None else _base_of(base, self)
        super().__init__(replace(self.options.grid, kept=self._base and self._base.grid))
        self._staging: Staging | None = None
        self._committed: tuple[bytes, Manifest] | None = None
        self._draft: Manifest | None = None
        """The manifest of the save under way, without the values."""
        self._files: DocumentWrites | None = None
        """The coordinator's documents and side files."""
        self._begun: ChunkWrites | None = None
        """This rank's chunks that go to a bucket and are reported already."""
        self._early = False
        """Whether `settle` will be called on this rank."""
        self._complete: tuple[bytes, Manifest] | None = None
        """The manifest to publish, once it is known."""

    @property
    def codecs(self) -> tuple[str, ...]:
        """Names of the codecs behind ``bytes``."""
        return ("crc32c",) if self.options.crc32c else ()

    def stage(self, staging: Staging | None = None, *, planned: Manifest | None = None) -> Location:
        """Reserve a place to write to, on the coordinator; where that is.

        Args:
            staging: one that has begun already.
            planned: the manifest as far as it is known.

        Raises:
            CheckpointExistsError, StorageError: the path is taken, or the storage refused.
        """
        self.target.access.start()  # where a base has limited it, a later save has its own again
        self.target.access.end = math.inf if self._base else self.target.access.end
        self._staging = staging or begin(
            self.target, overwrite=self.overwrite, planned=planned, shares=self._base is not None
        )
        self._staging.location.make_folder()
        return self._staging.location

    def prepare_global_plan(
        self, plans: list[SavePlan], metadata: Metadata
    ) -> tuple[list[SavePlan], Metadata]:
        """Choose grids if the planner did not, and write each rank's orders.

        Raises:
            ManifestError, PlanError: no reader would accept it, or it has too many objects.
        """
        metadata = with_grids(metadata, self.storage_meta())
        planned = _planned(metadata, self.codecs, self.options, self._base)
        _check(planned, self.target, self.options)
        where = self.stage(planned=planned) if self._staging is None else self._staging.location
        tree = DocumentTree(self.codecs, planned.pack_bytes)
        base = self._base
        base_orders, shared = (base.orders, base.in_folder()) if base else (None, None)
        self._draft, self._files = planned, DocumentWrites(self.target, where, tree, shared)
        orders = WriteOrders(where, self.codecs, (), pack_bytes=planned.pack_bytes)
        given = orders_for(plans, orders, planned, base_orders)
        return [replace(p, storage_data=d) for p, d in zip(plans, given, strict=True)], metadata

    def prepare_own_plan(self, plan: SavePlan, metadata: Metadata) -> tuple[SavePlan, Metadata]:
        """The plan with its orders, and what is known of the manifest; see `OwnOrdersWriter`."""
        from xckpt.storage.chunks.columns import expected_metadata, own_orders

        metadata = with_grids(metadata, self.storage_meta())
        planned = _planned(metadata, self.codecs, self.options, None)
        orders = own_orders(plan, planned, self.target, self.codecs)
        return replace(plan, storage_data=orders), expected_metadata(planned, metadata)

    def report_early(self) -> bool:
        """See `EarlyReportsWriter`."""
        self._early = bool(self.target.bucket) and self.base is None
        return self._early

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Written:
        """Write this rank's items, the coordinator's synced as it commits; report their digests.

        Raises:
            PlanError: an item does not fit its grid, or its data does not fit the item.
            StorageError: the storage refused, or this rank sees another disk than the coordinator.
        """
        orders = orders_of(plan)
        if self._staging is None:
            self.target.access.start()
            check_seen(self.target, orders.location)
        with _explaining(self.target, orders.location):
            if self._staging is not None or not orders.location.unsynced:
                return self._write(plan, orders, planner)
            from xckpt.storage.commit.batch import synced_together

            with synced_together(orders.location, _paths(orders)):
                return self._write(plan, orders, planner)

    def _write(self, plan: SavePlan, orders: WriteOrders, planner: SavePlanner) -> Written:
        items = SizedItems(plan.items)
        progress = ProgressCounter(int(items.sizes.sum()), self.options.progress)
        make_writes = ChunkWrites
        if orders.base is not None:
            from xckpt.storage.base.sharing import sharing_writes as make_writes
        with contextlib.ExitStack() as closing:
            memory = share_of(self.options.memory_bytes, self.host_ranks, len(items) * ITEM_BYTES)
            writes = make_writes(orders, planner, progress, self.target, memory)
            closing.callback(writes.close)
            threads = self.options.threads or suited_threads(orders.location.folder)
            with Pool(threads=threads, budget=writes.memory_bytes) as pool:
                for _, item in items.chosen(np.flatnonzero(items.sizes == 0)):
                    if item.tensor_data is None:
                        data = planner.resolve_data(item)
                        writes.write_value(*value_entry(item, data, self.options.chunk_bytes))
                others = writes.begin_largest(items, pool)
                if self._files is not None and self._draft is not None:
                    self._files.begin(self._draft.leaves, pool)
                writes.write_tensors(others, pool)
            if self._early or (self._files and self.target.bucket and orders.base is None):
                written = writes.report()
                closing.pop_all()
                self._begun = writes
            else:
                written = writes.finish()
        self.shared_bytes = written.shared
        return written

    def follow(self, metadata: Metadata, results: Sequence[object]) -> None:
        """Check that every chunk was written once, and begin to write what follows from all."""
        assert self._staging is not None and self._draft is not None and self._files is not None
        written = [msgspec.convert(result, Written) for result in results]
        values = merged_values(metadata, written)
        manifest = complete(self._draft, metadata, values, root=self._staging.root)
        manifest, side_files = _with_side_files(manifest, self._draft, written)
        self._complete = encode(manifest, digest_bytes), manifest
        long_values = (leaf for leaf in manifest.leaves if isinstance(leaf, BytesEntry))
        self._files.begin_last(long_values, side_files)
        if isinstance(self._staging, KeyStaging):
            self._staging.prepare()

    def settle(self) -> None:
        """Wait until what this rank has written is durable; see `EarlyReportsWriter`."""
        with _explaining(self.target, self._staging.location if self._staging else self.target):
            for begun in filter(None, (self._begun, self._files)):
                begun.wait()

    def finish(self, metadata: Metadata, results: Sequence[object]) -> bytes:
        """Publish the checkpoint, after `follow` and `settle`, which it calls if need be.

        Returns:
            The manifest's bytes.

        Raises:
            PlanError: a chunk or a value was written by no rank, or twice.
            StorageError: the storage refused.
        """
        if self._complete is None:
            self.follow(metadata, results)
        self.settle()
        self._committed = self._complete
        assert self._staging is not None and self._committed is not None
        with _explaining(self.target, self._staging.location):
            self._staging.publish(self._committed[0])
        self._staging = self._files = self._begun = self._complete = None
        if self._base is not None:
            self._base.log([msgspec.convert(result, Written) for result in results])
        return self._committed[0]

    def committed_metadata(self, manifest: bytes) -> Metadata:
        """What the committed manifest says."""
        if self._committed is not None and self._committed[0] == manifest:
            return to_metadata(self._committed[1])
        return to_metadata(parse(manifest, digest_bytes, is_ours=True))

    def is_committed(self) -> bool:
        """See `CommitKnowingWriter`."""
        return self._committed is not None and is_written(self.target, self._committed[0])

    def abort(self) -> None:
        """Remove what was staged; what is committed stays as it is."""
        for begun in filter(None, (self._files, self._begun)):
            begun.close()
        if self._staging is not None:
            self._staging.abort()
        self._staging = self._files = self._begun = self._complete = None


def _base_of(path: str | os.PathLike[str], writer: ZarrStorageWriter) -> Base:
    from xckpt.storage.base.base import Base

    return Base(path, writer.target, writer.options, writer.codecs)


@contextlib.contextmanager
def _explaining(target: Location, location: Location) -> Iterator[None]:
    """Explain failures of the storage."""
    try:
        yield
    except StorageError as error:
        raise explained(error, target, location) from error


def _planned(
    metadata: Metadata, codecs: tuple[str, ...], options: SaveOptions, base: Base | None
) -> Manifest:
    """The manifest as far as it is known before the values are."""
    planned = draft(metadata, codecs, options.dimension_names, options.pack_bytes)
    if base is None or options.pack_bytes is not None:
        return planned
    return base.planned(planned)


def _check(planned: Manifest, target: Location, options: SaveOptions) -> None:
    """Refuse a manifest that no reader accepts, or too many objects; warn of what loads need."""
    check(planned)
    if count_chunks(planned) > MANY_CHUNKS:
        from xckpt.core.manifest.objects import check_many  # few saves need it

        most = LoadOptions().memory_bytes
        check_many(planned, str(target), confirmed=options.many_objects, memory_bytes=most)


def _paths(orders: WriteOrders) -> list[str]:
    """The folders that a rank writes to."""
    alone = (array for array in orders.arrays if not is_packed(array, orders.pack_bytes))
    return [PACKS, *(array.path for array in alone)]


def orders_of(plan: SavePlan) -> WriteOrders:
    """The orders in a plan."""
    data = plan.storage_data
    if isinstance(data, WriteOrders):
        return data
    if isinstance(data, BriefData):
        from xckpt.storage.chunks.columns import received

        data = received(data)
    return msgspec.convert(data, WriteOrders)


def _with_side_files(
    manifest: Manifest, draft: Manifest, written: Sequence[Written]
) -> tuple[Manifest, list[tuple[str, bytes]]]:
    """A manifest that has the digests of the files beside it, and these by their keys.

    Raises:
        PlanError: a chunk was written by no rank, or twice.
    """
    digests, placing = merged_digests(manifest, draft, written)
    manifest = msgspec.structs.replace(manifest, digests=digest_bytes(digests).hex())
    side_files = [(DIGESTS, digests)]
    if any(report.packs for report in written):
        from xckpt.storage.packs.write_packs import with_places

        manifest, places = with_places(manifest, written, placing.numbers)
        side_files += places
    return manifest, side_files
