"""Writing a checkpoint through TensorStore.

On the coordinator, `prepare_global_plan` gives every rank its `WriteOrders`: where the save is
staged and which zarr arrays its items belong to. On every rank, `write_data`:

1. Resolve an item to a NumPy view, within the memory budget.
2. For each zarr chunk (or zarr shard) in it, in a thread: take the digest of each chunk from the
   caller's memory, hand the same memory to TensorStore, wait until the write is durable.
3. Report the digests; short values travel in the report itself.

On the coordinator, `finish` puts all digests in the manifest's order, which fails if any chunk was
not written exactly once, then writes digests and zarr.json files and publishes the manifest.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import tensorstore as ts

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
from xckpt.core.metadata import Metadata, TensorStorageMetadata
from xckpt.core.plan.items import SavePlan, WriteItem, WriteItems
from xckpt.core.plan.save import SavePlanner
from xckpt.core.storage import PlainStorageWriter
from xckpt.errors import PlanError
from xckpt.options import SaveOptions
from xckpt.storage.budget import Pool, ProgressCounter
from xckpt.storage.commit.staging import Staging, begin
from xckpt.storage.integrity import digest_bytes
from xckpt.storage.location import DIGESTS, Location, open_store, storage_errors
from xckpt.storage.orders import WriteOrders, Written, merge_digests, merge_values
from xckpt.storage.write_chunks import ChunkWrites

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
        self.target = Location.parse(path)
        self.overwrite = overwrite
        self.options = options or SaveOptions()
        super().__init__(GridOptions(self.options.chunk_bytes, self.options.shard_bytes))
        self._staging: Staging | None = None
        self._committed: tuple[bytes, Manifest] | None = None
        self._draft: Manifest | None = None
        """The manifest of the save under way, without the values."""
        self._arrays: tuple[ZarrArray, ...] = ()
        """The draft's."""
        self._documents = DocumentTree(())
        self._written: list[ts.Future[ts.KvStore.TimestampedStorageGeneration]] = []
        """Writes of documents and of the digest file."""

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
        self._draft, self._arrays = None, ()
        self._documents, self._written = DocumentTree(self.codecs), []
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
        planned = draft(metadata, codecs=self.codecs)
        check(planned)
        where = self.stage() if self._staging is None else self._staging.location
        self._draft = planned
        self._arrays = tuple(arrays(planned))
        regular = tuple(array for array in self._arrays if array.piece_of is None)
        if len(regular) == len(self._arrays):
            orders = WriteOrders(where, self.codecs, regular)
            return [replace(plan, storage_data=orders) for plan in plans], metadata
        pieces = _Pieces(metadata, self._arrays)
        return [
            replace(plan, storage_data=WriteOrders(where, self.codecs, regular + pieces.of(plan)))
            for plan in plans
        ], metadata

    def _write_documents(self) -> None:
        """Start writing the zarr.json files of tensors, on the coordinator."""
        if self._staging is not None:
            self._write_all(self._documents.add(self._arrays))

    def _write_all(self, contents: Iterable[tuple[str, bytes]]) -> None:
        assert self._staging is not None
        store = open_store(self._staging.location)
        with storage_errors(self.target):
            self._written += [store.write(key, content) for key, content in contents]

    def _with_grids(self, metadata: Metadata) -> Metadata:
        options = self.storage_meta()
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
                writes.start_tensors([i for i in items if i.tensor_data is not None], pool)
                self._write_documents()
                writes.write_tensors(pool)
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
            PlanError: a chunk or a value was written by no rank, or twice.
            StorageError: the storage refused.
        """
        assert self._staging is not None and self._draft is not None
        written = [msgspec.convert(result, Written) for result in results]
        values = merge_values(metadata, written)
        manifest = complete(self._draft, metadata, values, root=self._staging.root)
        digests = merge_digests(manifest, written)
        manifest = msgspec.structs.replace(manifest, digests=digest_bytes(digests).hex())
        data = encode(manifest, digest_bytes)
        long_values = [array for entry in values.values() for array in leaf_arrays(entry)]
        self._write_all(self._documents.add(long_values))
        self._write_all([("zarr.json", self._documents.root()), (DIGESTS, digests)])
        with storage_errors(self.target):
            for write in self._written:
                write.result()
        self._staging.publish(data)
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
            self._drain()
            self._staging.abort()
            self._staging = None

    def _drain(self) -> None:
        """After a failure: wait for the writes under way; their folder will be removed."""
        for write in self._written:
            with contextlib.suppress(ValueError):
                write.result()


class _Pieces:
    """Which pieces of leaves a rank writes parts of; it need not know the others."""

    def __init__(self, metadata: Metadata, everything: Iterable[ZarrArray]) -> None:
        self._by_leaf: dict[str, list[ZarrArray]] = {}
        for array in everything:
            if array.piece_of is not None:
                self._by_leaf.setdefault(array.leaf, []).append(array)
        self._boxes = {
            name: tensor.grid.arrays
            for name, tensor in metadata.state_dict_metadata.items()
            if name in self._by_leaf and isinstance(tensor, TensorStorageMetadata) and tensor.grid
        }

    def of(self, plan: SavePlan) -> tuple[ZarrArray, ...]:
        """The pieces that the plan's items lie in."""
        items = WriteItems.of(plan.items)
        pieces: list[ZarrArray] = []
        for block in items.blocks:
            for leaf in np.unique(block.leaf).tolist():
                name = items.table[leaf].name
                if name in self._boxes:
                    boxes = block.boxes.take(block.leaf == leaf)
                    _, numbers, _ = intersect(boxes, self._boxes[name])
                    pieces += [self._by_leaf[name][n] for n in np.unique(numbers).tolist()]
        return tuple(pieces)
