"""Writing a checkpoint through TensorStore.

1. On the coordinator, `prepare_global_plan` gives every rank its `WriteOrders`: where the save is
   staged and which zarr arrays its items belong to.
2. On every rank, `write_data` carries them out (`xckpt.storage.chunks.write_chunks`) and reports
   the digests of the chunks; short values travel in the report itself. With an array's first chunk
   goes its zarr.json; the coordinator writes those of the folders above.
3. On the coordinator, `finish` puts all digests in the manifest's order, which fails if any chunk
   was not written exactly once, writes them and the root's zarr.json, and publishes the manifest.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
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
from xckpt.errors import StorageError
from xckpt.options import LoadOptions, SaveOptions, checked_options
from xckpt.storage.array import digest_bytes
from xckpt.storage.budget import IN_FLIGHT, Pool, ProgressCounter, share_of
from xckpt.storage.chunks.orders import WriteOrders, Written, value_entry
from xckpt.storage.chunks.plain_files import write_file
from xckpt.storage.chunks.units import merged_digests, merged_values, orders_for
from xckpt.storage.chunks.write_chunks import TOGETHER, ChunkWrites
from xckpt.storage.commit.explain import check_seen, explained, is_there
from xckpt.storage.commit.keys import KeyStaging
from xckpt.storage.commit.staging import Staging, begin
from xckpt.storage.location import Location, Writing, answer, open_store, storage_errors

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
        self.overwrite = overwrite
        self.options: SaveOptions = checked_options(options, SaveOptions, "ZarrStorageWriter")
        self.target: Location = Location.parse(path, options)
        self.base: str | None = None if base is None else os.fspath(base)
        self.lasting: bool = base is None
        self.shared_bytes: int = 0
        """Bytes not written by this rank, because they are shared with the base."""
        super().__init__(self.options.grid)
        self._base = None if base is None else _base_of(base, self)
        if self._base is not None:
            self._grid = replace(self._grid, kept=self._base.grid)
        self._staging: Staging | None = None
        self._committed: tuple[bytes, Manifest] | None = None
        self._draft: Manifest | None = None
        """The manifest of the save under way, without the values."""
        self._documents = DocumentTree((), 0)
        self._written: deque[Writing] = deque()
        """Writes of documents and of the digest file."""
        self._begun: ChunkWrites | None = None
        """The coordinator's own chunks; digests that go to a bucket do not wait for them."""

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
        self._written = deque()
        self.target.access.start()
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
        self._draft, self._documents = planned, DocumentTree(self.codecs, planned.pack_bytes)
        orders = WriteOrders(where, self.codecs, (), pack_bytes=planned.pack_bytes)
        base_orders = self._base.orders if self._base is not None else None
        given = orders_for(plans, orders, planned, base_orders)
        return [replace(p, storage_data=d) for p, d in zip(plans, given, strict=True)], metadata

    def prepare_own_plan(self, plan: SavePlan, metadata: Metadata) -> tuple[SavePlan, Metadata]:
        """The plan with its orders, and what is known of the manifest; see `OwnOrdersWriter`."""
        from xckpt.storage.chunks.columns import expected_metadata, own_orders

        metadata = with_grids(metadata, self.storage_meta())
        planned = _planned(metadata, self.codecs, self.options, None)
        orders = own_orders(plan, planned, self.target, self.codecs)
        return replace(plan, storage_data=orders), expected_metadata(planned, metadata)

    def _write_documents(
        self, contents: Iterable[tuple[str, bytes]], pool: Pool | None = None
    ) -> None:
        """Start writing documents, if this is the coordinator; no more after one has failed."""
        if self._staging is not None and pool is not None and self.target.driver == "file":
            location, rest = self._staging.location, iter(contents)
            while some := list(islice(rest, TOGETHER)):
                pool.submit(partial(_write_files, self.target, location, some))
        elif self._staging is not None:
            store = open_store(self._staging.location)
            with storage_errors(self.target):
                for key, content in contents:
                    if len(self._written) >= IN_FLIGHT:
                        answer(self._written.popleft(), self.target)
                    self._written.append(store.write(key, content))

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
            with Pool(threads=self.options.threads, budget=writes.memory_bytes) as pool:
                for _, item in items.chosen(np.flatnonzero(items.sizes == 0)):
                    if item.tensor_data is None:
                        data = planner.resolve_data(item)
                        writes.write_value(*value_entry(item, data, self.options.chunk_bytes))
                others = writes.begin_largest(items, pool)
                leaves = self._draft.leaves if self._draft is not None else ()
                self._write_documents(self._documents.add(leaves), pool)
                writes.write_tensors(others, pool)
            if self._staging is not None and self.target.bucket and orders.base is None:
                written = writes.report()
                closing.pop_all()
                self._begun = writes
            else:
                written = writes.finish()
        self.shared_bytes = written.shared
        return written

    def finish(self, metadata: Metadata, results: Sequence[object]) -> bytes:
        """Check that every chunk was written once, write what follows from all, and publish.

        Returns:
            The manifest's bytes.

        Raises:
            PlanError: a chunk or a value was written by no rank, or twice.
            StorageError: the storage refused.
        """
        assert self._staging is not None and self._draft is not None
        written = [msgspec.convert(result, Written) for result in results]
        values = merged_values(metadata, written)
        manifest = complete(self._draft, metadata, values, root=self._staging.root)
        manifest, side_files = _with_side_files(manifest, self._draft, written)
        data = encode(manifest, digest_bytes)
        long_values = (leaf for leaf in manifest.leaves if isinstance(leaf, BytesEntry))
        self._write_documents(self._documents.add(long_values))
        self._write_documents([("zarr.json", self._documents.root()), *side_files])
        with _explaining(self.target, self._staging.location):
            keys = self._staging if isinstance(self._staging, KeyStaging) else None
            with keys.prepare() if keys else contextlib.nullcontext():
                if self._begun is not None:
                    self._begun.wait()
                with storage_errors(self.target):
                    for write in self._written:
                        answer(write, self.target)
            self._committed = data, manifest
            self._staging.publish(data)
        self._staging = self._begun = None
        if self._base is not None:
            self._base.log(written)
        return data

    def committed_metadata(self, manifest: bytes) -> Metadata:
        """What the committed manifest says."""
        if self._committed is not None and self._committed[0] == manifest:
            return to_metadata(self._committed[1])
        return to_metadata(parse(manifest, digest_bytes, is_ours=True))

    def is_committed(self) -> bool:
        """See `CommitKnowingWriter`."""
        return self._committed is not None and is_there(self.target, self._committed[0])

    def abort(self) -> None:
        """Remove what was staged; what is committed stays as it is."""
        if self._staging is not None:
            for write in self._written:
                with contextlib.suppress(Exception):
                    answer(write, self.target)
            if self._begun is not None:
                self._begun.close()
            self._staging.abort()
            self._staging = self._begun = None


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


def _write_files(
    target: Location, location: Location, contents: Iterable[tuple[str, bytes]]
) -> None:
    """Write files of a local folder, in a thread."""
    with storage_errors(target):
        for key, content in contents:
            path, synced = f"{location.path}/{key}", not location.unsynced
            write_file(path, [content], within=location.path, synced=synced)


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
