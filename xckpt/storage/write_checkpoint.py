"""Writing a checkpoint through TensorStore.

On the coordinator, `prepare_global_plan` gives every rank its `WriteOrders`: where the save is
staged and which zarr arrays its items belong to. On every rank, `write_data`:

1. Resolve an item to a NumPy view, within the memory budget.
2. For each zarr chunk (or zarr shard) in it, in a thread: take the digest of each chunk from the
   caller's memory, hand the same memory to TensorStore, wait until the write is durable.
3. Report the digests; short values travel in the report itself.

On the coordinator, `finish` puts all digests in the manifest's order, which fails if any chunk was
written by nobody or twice, then writes digests and zarr.json files and publishes the manifest.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import tensorstore as ts

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.boxes import Boxes, intersect
from xckpt.core.geometry.grid import Grid, GridOptions, choose_grid
from xckpt.core.manifest.codec import (
    BytesEntry,
    Manifest,
    ValueEntry,
    arrays,
    build,
    encode,
    parse,
    to_metadata,
)
from xckpt.core.manifest.zarr_json import documents
from xckpt.core.metadata import Metadata, TensorStorageMetadata
from xckpt.core.plan.columns import WriteItems
from xckpt.core.plan.items import SavePlan, WriteItem
from xckpt.core.plan.save import SavePlanner
from xckpt.errors import PlanError
from xckpt.options import SaveOptions
from xckpt.storage.budget import Pool, ProgressCounter
from xckpt.storage.commit.staging import Staging, begin
from xckpt.storage.errors import storage_errors
from xckpt.storage.integrity import DIGEST_BYTES, digest_bytes
from xckpt.storage.location import DIGESTS, Location, open_store
from xckpt.storage.reports import merge_values, miswritten
from xckpt.storage.write_chunks import ArrayOrder, ChunkWrites, WriteOrders, Written

__all__ = ["ZarrStorageWriter"]

Shape = tuple[int, ...]

SPELLED_OUT_BYTES = 4096
"""Values up to this long (bytes) are spelled out in the manifest; longer ones are arrays."""


@dataclass(frozen=True, slots=True)
class _Document:
    """A zarr.json, or the digest file, that is being written."""

    content: bytes
    written: ts.Future[ts.KvStore.TimestampedStorageGeneration]


class ZarrStorageWriter:
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
        self.target = Location.parse(path)
        self.overwrite = overwrite
        self.options = options or SaveOptions()
        self.storage_meta = GridOptions(self.options.chunk_bytes, self.options.shard_bytes)
        """The sizes of chunks, for planners that have none of their own."""
        self._staging: Staging | None = None
        self._committed: tuple[bytes, Manifest] | None = None
        self._draft: Manifest | None = None
        self._documents: dict[str, _Document] = {}

    @property
    def codecs(self) -> tuple[str, ...]:
        """Names of the codecs behind ``bytes``."""
        return ("crc32c",) if self.options.crc32c else ()

    def stage(self) -> Location:
        """Reserve a place to write to, on the coordinator; where that is.

        Raises:
            CheckpointExistsError: the path is taken.
            StorageError: the storage refused.
        """
        # What an earlier save has left would be taken for written already.
        self._draft = None
        self._documents = {}
        self._staging = self._begin()
        return self._staging.location

    def _begin(self) -> Staging:
        return begin(self.target, overwrite=self.overwrite)

    def prepare_global_plan(
        self, plans: list[SavePlan], metadata: Metadata
    ) -> tuple[list[SavePlan], Metadata]:
        """Choose grids where the planner did not, and write each rank's orders.

        Raises:
            ManifestError: the manifest could not be written in the end, so nothing is begun.
        """
        metadata = self._with_grids(metadata)
        draft = _draft(metadata, self.codecs)
        where = self.stage() if self._staging is None else self._staging.location
        self._draft = draft
        shared = {
            name: _orders(described)
            for name, described in metadata.state_dict_metadata.items()
            if isinstance(described, TensorStorageMetadata)
        }
        regular = {name: orders for name, orders in shared.items() if len(orders) == 1}
        if len(regular) == len(shared):
            everything = WriteOrders(where.driver, where.path, where.bucket, self.codecs, shared)
            return [replace(plan, storage_data=everything) for plan in plans], metadata
        ordered = []
        for plan in plans:
            mine = regular | _orders_of_pieces(plan, metadata, shared)
            orders = WriteOrders(where.driver, where.path, where.bucket, self.codecs, mine)
            ordered.append(replace(plan, storage_data=orders))
        return ordered, metadata

    def _write_documents(self) -> None:
        """Start writing the zarr.json files, as far as they are known before the values are."""
        if self._staging is not None and self._draft is not None:
            store = open_store(self._staging.location)
            with storage_errors(self.target):
                for key, content in documents(self._draft):
                    self._documents[key] = _Document(content, store.write(key, content))

    def _with_grids(self, metadata: Metadata) -> Metadata:
        options = self.storage_meta
        described = dict(metadata.state_dict_metadata)
        for name, tensor in described.items():
            if isinstance(tensor, TensorStorageMetadata) and tensor.grid is None:
                boxes = tensor.chunks
                if not isinstance(boxes, Boxes):
                    pairs = [(box.offsets, box.sizes) for box in boxes]
                    boxes = Boxes.of(pairs, rank=len(tensor.size))
                item = item_size(tensor.properties.dtype)
                described[name] = replace(
                    tensor, grid=choose_grid(tensor.size, item, boxes, options)
                )
        return replace(metadata, state_dict_metadata=described)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Written:
        """Write this rank's items and report their digests.

        Raises:
            PlanError: an item does not fit its grid, or its data does not fit the item.
            StorageError: the storage refused.
        """
        items = list(plan.items)
        total = sum(item.tensor_storage_size() or 0 for item in items)
        writes = ChunkWrites(
            msgspec.convert(plan.storage_data, WriteOrders),
            planner,
            ProgressCounter(total, self.options.progress),
            self.target,
        )
        try:
            with Pool(threads=self.options.threads, budget=self.options.memory_bytes) as pool:
                for item in items:
                    if item.tensor_data is None:
                        writes.write_value(*self._value(item, planner))
                tensors = [item for item in items if item.tensor_data is not None]
                writes.write_tensors(tensors, pool, meanwhile=self._write_documents)
            return writes.finish()
        except BaseException:
            writes.drain()
            raise

    def _value(
        self, item: WriteItem, planner: SavePlanner
    ) -> tuple[ValueEntry | BytesEntry, bytes]:
        """A value's entry and content: spelled out, or an array of bytes if long or opaque."""
        name = item.index.fqn
        data = planner.resolve_data(item)
        if not isinstance(data, io.BytesIO):
            raise PlanError(
                f"{name}: resolve_data must return a BytesIO, not {type(data).__name__}"
            )
        content = data.getvalue()
        if item.kind != "opaque" and len(content) <= SPELLED_OUT_BYTES:
            return ValueEntry(name, item.kind, content.decode("utf-8", "surrogatepass")), content
        chunk = max(1, min(len(content), self.options.chunk_bytes))
        return BytesEntry(name, item.kind, len(content), chunk), content

    def finish(self, metadata: Metadata, results: Sequence[object]) -> bytes:
        """Check that every chunk was written once, write digests and zarr.json files, and publish.

        Returns:
            The manifest's bytes.

        Raises:
            PlanError: a chunk or a value was written by nobody, or twice.
            StorageError: the storage refused.
        """
        assert self._staging is not None
        written = [msgspec.convert(result, Written) for result in results]
        values = merge_values(metadata, written)
        manifest = build(metadata, values, root=self._staging.root, codecs=self.codecs)
        digests = _assemble(manifest, written)
        manifest = msgspec.structs.replace(manifest, digests=digest_bytes(digests).hex())
        data = encode(manifest, digest_bytes)
        with storage_errors(self.target):
            store = open_store(self._staging.location)
            self._documents[DIGESTS] = _Document(digests, store.write(DIGESTS, digests))
            self._await_documents()
            if any(isinstance(entry, BytesEntry) for entry in values.values()):
                self._amend_documents(store, manifest)
                self._await_documents()
        self._staging.publish(data)
        self._staging = None
        self._committed = data, manifest
        return data

    def _amend_documents(self, store: ts.KvStore, manifest: Manifest) -> None:
        """Write what the draft did not know: arrays of long values, and so the root."""
        known = self._documents
        for key, content in documents(manifest):
            if key not in known or known[key].content != content:
                known[key] = _Document(content, store.write(key, content))

    def _await_documents(self) -> None:
        for document in self._documents.values():
            document.written.result()

    def committed_metadata(self, manifest: bytes) -> Metadata:
        """What the committed manifest says."""
        if self._committed is not None and self._committed[0] == manifest:
            return to_metadata(self._committed[1])
        return to_metadata(parse(manifest, digest_bytes))

    def abort(self) -> None:
        """Remove what was staged; what is committed stays as it is."""
        if self._staging is not None:
            for document in self._documents.values():
                with contextlib.suppress(ValueError):
                    document.written.result()
            self._staging.abort()
            self._staging = None


def _draft(metadata: Metadata, codecs: tuple[str, ...]) -> Manifest:
    """The manifest without the values, which nobody has encoded yet.

    Raises:
        ManifestError: it breaks a rule of the format already.
    """
    tensors = {
        name: described
        for name, described in metadata.state_dict_metadata.items()
        if isinstance(described, TensorStorageMetadata)
    }
    # Containers may hold nothing but values, so they are left to the final manifest.
    draft = build(replace(metadata, state_dict_metadata=tensors, containers={}), {}, codecs=codecs)
    encode(draft, digest_bytes)
    return draft


def _orders(tensor: TensorStorageMetadata) -> list[ArrayOrder]:
    """All arrays of a leaf."""
    grid = tensor.grid
    assert grid is not None
    in_pieces = not grid.is_regular(tensor.size)
    return [_order(grid, number, in_pieces) for number in range(len(grid.arrays))]


def _order(grid: Grid, number: int, in_pieces: bool) -> ArrayOrder:
    box = grid.arrays[number]
    chunk = tuple(grid.chunks[number].tolist())
    shard = None if grid.shards is None else tuple(grid.shards[number].tolist())
    return ArrayOrder(number, box.offsets, box.sizes, chunk, shard, in_pieces)


def _orders_of_pieces(
    plan: SavePlan, metadata: Metadata, orders: dict[str, list[ArrayOrder]]
) -> dict[str, list[ArrayOrder]]:
    """The pieces that a rank's items lie in; a rank need not know the others."""
    items = WriteItems.of(plan.items)
    mine: dict[str, list[ArrayOrder]] = {}
    for block in items.blocks:
        for leaf in np.unique(block.leaf).tolist():
            name = items.table.names[leaf]
            if len(orders.get(name, ())) > 1:
                tensor = metadata.state_dict_metadata[name]
                assert isinstance(tensor, TensorStorageMetadata) and tensor.grid is not None
                _, pieces, _ = intersect(block.boxes.take(block.leaf == leaf), tensor.grid.arrays)
                mine[name] = [orders[name][piece] for piece in np.unique(pieces).tolist()]
    return mine


def _assemble(manifest: Manifest, written: Sequence[Written]) -> bytes:
    """All digests in the manifest's order.

    Raises:
        PlanError: a chunk was written by nobody, or twice; all such arrays are listed.
    """
    placed = {(array.leaf, array.number): array for array in arrays(manifest)}
    count = sum(array.count for array in placed.values())
    digests = np.zeros((count, DIGEST_BYTES), np.uint8)
    times = np.zeros(count, np.int32)
    for report in written:
        firsts = [placed[part.leaf, part.number].first for part in report.arrays]
        chunks = [len(part.digests) // DIGEST_BYTES for part in report.arrays]
        cells = np.frombuffer(b"".join(part.cells for part in report.arrays), np.int64)
        numbers = np.repeat(np.array(firsts, np.int64), chunks) + cells
        found = np.frombuffer(b"".join(part.digests for part in report.arrays), np.uint8)
        digests[numbers] = found.reshape(-1, DIGEST_BYTES)
        np.add.at(times, numbers, 1)
    if not (times == 1).all():
        raise PlanError.listing(
            "the planner's items do not write every chunk exactly once",
            miswritten(manifest, written),
        )
    return digests.tobytes()
