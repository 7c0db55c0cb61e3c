"""Writing a checkpoint through TensorStore.

1. On the coordinator, `prepare_global_plan` gives every rank its `WriteOrders`: where the save is
   staged and which zarr arrays its items belong to.
2. On every rank, `write_data` carries them out (`xckpt.storage.chunks.write_chunks`) and reports
   the digests of the chunks; short values travel in the report itself.
3. On the coordinator, `finish` puts all digests in the manifest's order, which fails if any chunk
   was not written exactly once, then writes digests and zarr.json files and publishes the manifest.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Boxes, intersect
from xckpt.core.geometry.grid import GridOptions, choose_grid
from xckpt.core.manifest.codec import check, complete, draft, encode, parse, to_metadata
from xckpt.core.manifest.entries import (
    BytesEntry,
    DocumentTree,
    Manifest,
    ValueEntry,
    ZarrArray,
    arrays,
    leaf_arrays,
)
from xckpt.core.manifest.own_keys import DIGESTS
from xckpt.core.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from xckpt.core.plan.items import SavePlan, WriteItem, WriteItems
from xckpt.core.plan.save import SavePlanner
from xckpt.core.storage import PlainStorageWriter
from xckpt.core.values import ValueText
from xckpt.errors import PlanError, StorageError
from xckpt.options import SaveOptions
from xckpt.storage.array import DIGEST_BYTES, digest_bytes
from xckpt.storage.budget import IN_FLIGHT, Pool, ProgressCounter
from xckpt.storage.chunks.miswritten import miswritten, spelled
from xckpt.storage.chunks.orders import WriteOrders, Written
from xckpt.storage.chunks.write_chunks import ChunkWrites, by_leaf
from xckpt.storage.commit.staging import Staging, begin
from xckpt.storage.location import Location, answer, open_store, storage_errors

SPELLED_OUT_BYTES = 4096
"""Values up to this long (bytes) are spelled out in the manifest; longer ones are arrays."""


class ZarrStorageWriter(PlainStorageWriter):
    """Writes a checkpoint as zarr v3 through TensorStore.

    Args:
        path: a local path, or a ``file://``, ``memory://``, ``s3://`` or ``gs://`` URL.
        overwrite: replace a checkpoint that is there, once the new one is committed.
        options: sizes, threads, memory.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        options: SaveOptions | None = None,
    ) -> None:
        self.target = Location.parse(path, options)
        self.overwrite = overwrite
        self.options = options or SaveOptions()
        super().__init__(GridOptions(self.options.chunk_bytes, self.options.shard_bytes))
        self._staging: Staging | None = None
        self._committed: tuple[bytes, Manifest] | None = None
        self._draft: Manifest | None = None
        """The manifest of the save under way, without the values; `_arrays` are its."""
        self._arrays: tuple[ZarrArray, ...] = ()
        self._documents = DocumentTree(())
        self._written: deque[ts.Future[ts.KvStore.TimestampedStorageGeneration]] = deque()
        """Writes of documents and of the digest file."""

    @property
    def codecs(self) -> tuple[str, ...]:
        """Names of the codecs behind ``bytes``."""
        return ("crc32c",) if self.options.crc32c else ()

    def stage(self, staging: Staging | None = None, *, planned: Manifest | None = None) -> Location:
        """Reserve a place to write to, on the coordinator; where that is.

        Args:
            staging: one that was begun already.
            planned: the manifest as far as it is known.

        Raises:
            CheckpointExistsError: the path is taken.
            StorageError: the storage refused.
        """
        self._documents, self._written = DocumentTree(self.codecs), deque()
        self.target.access.start()
        self._staging = staging or begin(self.target, overwrite=self.overwrite, planned=planned)
        return self._staging.location

    def prepare_global_plan(
        self, plans: list[SavePlan], metadata: Metadata
    ) -> tuple[list[SavePlan], Metadata]:
        """Choose grids where the planner did not, and write each rank's orders.

        Raises:
            ManifestError: the manifest could not be written in the end, so nothing is begun.
        """
        metadata = self._with_grids(metadata)
        planned = draft(metadata, self.codecs, self.options.dimension_names)
        check(planned)
        where = self.stage(planned=planned) if self._staging is None else self._staging.location
        self._draft, self._arrays = planned, tuple(arrays(planned))
        regular = tuple(array for array in self._arrays if array.piece_of is None)
        pieces = by_leaf(array for array in self._arrays if array.piece_of is not None)
        boxes = {
            leaf: Boxes.of([(piece.offset, piece.shape) for piece in arrays])
            for leaf, arrays in pieces.items()
        }
        orders = WriteOrders(where, self.codecs, regular)

        def orders_of(plan: SavePlan) -> WriteOrders:
            if not pieces:
                return orders
            return msgspec.structs.replace(orders, arrays=regular + _pieces_of(plan, pieces, boxes))

        return [replace(plan, storage_data=orders_of(plan)) for plan in plans], metadata

    def _write_documents(self, contents: Iterable[tuple[str, bytes]]) -> None:
        """Start writing documents, if this is the coordinator; no more after one has failed."""
        if self._staging is not None:
            store = open_store(self._staging.location)
            with storage_errors(self.target):
                for key, content in contents:
                    if len(self._written) >= IN_FLIGHT:
                        answer(self._written.popleft(), self.target)
                    self._written.append(store.write(key, content))

    def _with_grids(self, metadata: Metadata) -> Metadata:
        options = self.storage_meta()
        described = dict(metadata.state_dict_metadata)
        for name, tensor in described.items():
            if isinstance(tensor, TensorStorageMetadata) and tensor.grid is None:
                pairs = ((box.offsets, box.sizes) for box in tensor.chunks)
                boxes = Boxes.of(pairs, rank=len(tensor.size))
                grid = choose_grid(tensor.size, item_size(tensor.properties.dtype), boxes, options)
                described[name] = replace(tensor, grid=grid)
        return replace(metadata, state_dict_metadata=described)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Written:
        """Write this rank's items and report their digests.

        Raises:
            PlanError: an item does not fit its grid, or its data does not fit the item.
            StorageError: the storage refused.
        """
        orders = msgspec.convert(plan.storage_data, WriteOrders)
        if self._staging is None:
            self.target.access.start()
        try:
            if not orders.location.unsynced:
                return self._write(plan, orders, planner)
            from xckpt.storage.commit.batch import synced_together

            with synced_together(orders.location, (array.path for array in orders.arrays)):
                return self._write(plan, orders, planner)
        except StorageError as error:
            from xckpt.storage.commit.explain import explained

            raise explained(error, self.target, orders.location) from error

    def _write(self, plan: SavePlan, orders: WriteOrders, planner: SavePlanner) -> Written:
        items = list(plan.items)
        total = sum(item.tensor_storage_size() or 0 for item in items)
        progress = ProgressCounter(total, self.options.progress)
        with contextlib.closing(ChunkWrites(orders, planner, progress, self.target)) as writes:
            with Pool(threads=self.options.threads, budget=self.options.memory_bytes) as pool:
                for item in items:
                    if item.tensor_data is None:
                        writes.write_value(*self._value(item, planner))
                others = writes.begin_largest(items, pool)
                self._write_documents(self._documents.add(self._arrays))
                writes.write_tensors(others, pool)
            return writes.finish()

    def _value(
        self, item: WriteItem, planner: SavePlanner
    ) -> tuple[ValueEntry | BytesEntry, bytes]:
        """A value's entry and content: spelled out, or an array of bytes if long or opaque."""
        name = item.index.fqn
        data = planner.resolve_data(item)
        if not isinstance(data, io.BytesIO):
            what = type(data).__name__
            raise PlanError(f"{name}: resolve_data must return a BytesIO, not {what}")
        content, kind = data.getvalue(), data.kind if isinstance(data, ValueText) else item.kind
        if kind != "opaque" and len(content) <= SPELLED_OUT_BYTES:
            return ValueEntry(name, kind, content.decode("utf-8", "surrogatepass")), content
        chunk = max(1, min(len(content), self.options.chunk_bytes))
        return BytesEntry(name, kind, len(content), chunk), content

    def finish(self, metadata: Metadata, results: Sequence[object]) -> bytes:
        """Check that every chunk was written once, write digests and zarr.json files, and publish.

        Returns:
            The manifest's bytes.

        Raises:
            PlanError: a chunk or a value was written by no rank, or twice.
            StorageError: the storage refused.
        """
        assert self._staging is not None and self._draft is not None
        written = [msgspec.convert(result, Written) for result in results]
        values = _merge_values(metadata, written)
        manifest = complete(self._draft, metadata, values, root=self._staging.root)
        digests = _merge_digests(manifest, written)
        manifest = msgspec.structs.replace(manifest, digests=digest_bytes(digests).hex())
        data = encode(manifest, digest_bytes)
        long_values = [array for entry in values.values() for array in leaf_arrays(entry)]
        self._write_documents(self._documents.add(long_values))
        self._write_documents([("zarr.json", self._documents.root()), (DIGESTS, digests)])
        try:
            with storage_errors(self.target):
                for write in self._written:
                    answer(write, self.target)
            self._staging.publish(data)
        except StorageError as error:
            from xckpt.storage.commit.explain import explained

            raise explained(error, self.target, self._staging.location) from error
        self._staging = None
        self._committed = data, manifest
        return data

    def committed_metadata(self, manifest: bytes) -> Metadata:
        """What the committed manifest says."""
        if self._committed is not None and self._committed[0] == manifest:
            return to_metadata(self._committed[1])
        return to_metadata(parse(manifest, digest_bytes))

    def abort(self) -> None:
        """Remove what was staged; what is committed stays as it is."""
        if self._staging is not None:
            for write in self._written:
                with contextlib.suppress(Exception):
                    answer(write, self.target)
            self._staging.abort()
            self._staging = None


def _pieces_of(
    plan: SavePlan, pieces: Mapping[str, Sequence[ZarrArray]], boxes: Mapping[str, Boxes]
) -> tuple[ZarrArray, ...]:
    """The pieces of leaves that a plan's items lie in; a rank need not know the others.

    ``pieces`` are those of each leaf, ``boxes`` are theirs in the same order.
    """
    items = WriteItems.of(plan.items)
    needed: list[ZarrArray] = []
    for block in items.blocks:
        for leaf in np.unique(block.leaf).tolist():
            name = items.table[leaf].name
            if name in pieces:
                _, numbers, _ = intersect(block.boxes.take(block.leaf == leaf), boxes[name])
                needed += [pieces[name][n] for n in np.unique(numbers).tolist()]
    return tuple(needed)


def _merge_values(
    metadata: Metadata, written: Sequence[Written]
) -> dict[str, ValueEntry | BytesEntry]:
    """The entries of all values, from the ranks' reports in rank order.

    Raises:
        PlanError: a value was written by no rank or by several, or is not in the metadata.
    """
    writers: dict[str, list[int]] = {
        name: []
        for name, described in metadata.state_dict_metadata.items()
        if isinstance(described, BytesStorageMetadata)
    }
    problems: list[str] = []
    for rank, report in enumerate(written):
        for name in report.values:
            if name in writers:
                writers[name].append(rank)
            else:
                problems.append(f"{name}: rank {rank} wrote it, but the plan has no such value")
    problems += [
        f"{name}: the value was written by {spelled(ranks)}"
        for name, ranks in writers.items()
        if len(ranks) != 1
    ]
    if problems:
        raise PlanError.listing("the planner's items do not write every value once", problems)
    return {name: written[rank].values[name] for name, [rank] in writers.items()}


def _merge_digests(manifest: Manifest, written: Sequence[Written]) -> bytes:
    """All digests in the manifest's order.

    Raises:
        PlanError: a chunk was written by no rank, or twice; all such arrays are listed.
    """
    placed = {(array.leaf, array.number): array for array in arrays(manifest)}
    count = sum(array.count for array in placed.values())
    digests = np.zeros((count, DIGEST_BYTES), np.uint8)
    written_by: list[NDArray[np.int64]] = []
    for report in written:
        firsts = [placed[part.leaf, part.number].first for part in report.arrays]
        chunks = [len(part.digests) // DIGEST_BYTES for part in report.arrays]
        within = np.frombuffer(b"".join(part.cells for part in report.arrays), np.int64)
        numbers = np.repeat(np.array(firsts, np.int64), chunks) + within
        taken = np.frombuffer(b"".join(part.digests for part in report.arrays), np.uint8)
        digests[numbers] = taken.reshape(-1, DIGEST_BYTES)
        written_by.append(numbers)
    times = np.bincount(np.concatenate([*written_by, np.zeros(0, np.int64)]), minlength=count)
    if not (times == 1).all():
        raise PlanError.listing(
            "the planner's items do not write every chunk exactly once",
            miswritten(placed.values(), times, written_by),
        )
    return digests.tobytes()
