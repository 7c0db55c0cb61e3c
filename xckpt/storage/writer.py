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

import io
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from xckpt.core import leaves as frameworks
from xckpt.core.boxes import Boxes, intersect, interval
from xckpt.core.dtypes import dtype_name, item_size
from xckpt.core.grid import Grid, GridOptions, cells, choose_grid
from xckpt.core.keys import zarr_path
from xckpt.core.manifest import (
    BytesEntry,
    Manifest,
    ValueEntry,
    ZarrArray,
    arrays,
    build,
    encode,
    parse,
    to_metadata,
)
from xckpt.core.metadata import Metadata, TensorStorageMetadata
from xckpt.core.plan import SavePlan, WriteItem, WriteItems
from xckpt.core.save_planner import SavePlanner
from xckpt.core.zarr_json import documents
from xckpt.errors import PlanError
from xckpt.options import SaveOptions
from xckpt.storage.arrays import open_array
from xckpt.storage.commit import DIGESTS, Staging, begin, storage_errors
from xckpt.storage.digests import DIGEST_BYTES, digest_array, digest_bytes
from xckpt.storage.location import Location, open_store
from xckpt.storage.pool import Pool, ProgressCounter

__all__ = ["ZarrStorageWriter"]

Shape = tuple[int, ...]

SPELLED_OUT_BYTES = 4096
"""Values up to this long (bytes) are spelled out in the manifest; longer ones are arrays."""


class ArrayOrder(msgspec.Struct, array_like=True, frozen=True):
    """A zarr array that a rank is to write parts of."""

    number: int
    offset: Shape
    shape: Shape
    chunk: Shape
    shard: Shape | None
    in_pieces: bool


class WriteOrders(msgspec.Struct, array_like=True, frozen=True):
    """What the coordinator tells a rank: where to write, and the grids of its leaves."""

    driver: str
    path: str
    bucket: str
    arrays: dict[str, list[ArrayOrder]]

    @property
    def location(self) -> Location:
        """Where the root group is staged."""
        return Location(self.driver, self.path, self.bucket)


class WrittenArray(msgspec.Struct, array_like=True):
    """The chunks of one array that a rank has written."""

    leaf: str
    number: int
    cells: bytes
    """Numbers of the chunks, int64."""
    digests: bytes
    """A digest for each, in the same order."""


class Written(msgspec.Struct, array_like=True):
    """What a rank reports."""

    arrays: list[WrittenArray]
    values: dict[str, ValueEntry | BytesEntry]


@dataclass(slots=True)
class _Report:
    """Digests as they come in from the threads."""

    digests: dict[tuple[str, int], list[tuple[int, bytes]]] = field(default_factory=dict)
    values: dict[str, ValueEntry | BytesEntry] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, leaf: str, number: int, found: Sequence[tuple[int, bytes]]) -> None:
        with self.lock:
            self.digests.setdefault((leaf, number), []).extend(found)

    def written(self) -> Written:
        return Written(
            [
                WrittenArray(
                    leaf,
                    number,
                    np.array([cell for cell, _ in found], np.int64).tobytes(),
                    b"".join(digest for _, digest in found),
                )
                for (leaf, number), found in self.digests.items()
            ],
            self.values,
        )


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
        self._staging: Staging | None = None

    @property
    def codecs(self) -> tuple[str, ...]:
        """Names of the codecs behind ``bytes``."""
        return ("crc32c",) if self.options.crc32c else ()

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Reserve a place to write to, on the coordinator.

        Raises:
            CheckpointExistsError: the path is taken.
            StorageError: the storage refused.
        """
        self._staging = begin(self.target, overwrite=self.overwrite) if is_coordinator else None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(
        self, plans: list[SavePlan], metadata: Metadata
    ) -> tuple[list[SavePlan], Metadata]:
        """Choose grids where the planner did not, and write each rank's orders."""
        assert self._staging is not None
        metadata = self._with_grids(metadata)
        where = self._staging.location
        shared = {
            name: _orders(described)
            for name, described in metadata.state_dict_metadata.items()
            if isinstance(described, TensorStorageMetadata)
        }
        regular = {name: orders for name, orders in shared.items() if len(orders) == 1}
        if len(regular) == len(shared):
            everything = WriteOrders(where.driver, where.path, where.bucket, shared)
            return [replace(plan, storage_data=everything) for plan in plans], metadata
        ordered = []
        for plan in plans:
            mine = regular | _orders_of_pieces(plan, metadata, shared)
            orders = WriteOrders(where.driver, where.path, where.bucket, mine)
            ordered.append(replace(plan, storage_data=orders))
        return ordered, metadata

    def _with_grids(self, metadata: Metadata) -> Metadata:
        options = GridOptions(self.options.chunk_bytes, self.options.shard_bytes)
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
        orders = msgspec.convert(plan.storage_data, WriteOrders)
        items = list(plan.items)
        total = sum(item.tensor_storage_size() or 0 for item in items)
        progress = ProgressCounter(total, self.options.progress)
        report = _Report()
        task = _WriteTask(orders, self.codecs, planner, report, progress)
        with (
            storage_errors(str(self.target)),
            Pool(threads=self.options.threads, budget=self.options.memory_bytes) as pool,
        ):
            for item in items:
                if pool.failed:
                    break
                if item.tensor_data is None:
                    self._write_bytes(item, planner, task)
                else:
                    task.submit(item, pool)
        return report.written()

    def _write_bytes(self, item: WriteItem, planner: SavePlanner, task: _WriteTask) -> None:
        """A value: spelled out in the report, or as an array of bytes if it is long or opaque."""
        name = item.index.fqn
        data = planner.resolve_data(item)
        if not isinstance(data, io.BytesIO):
            raise PlanError(
                f"{name}: resolve_data must return a BytesIO, got {type(data).__name__}"
            )
        content = data.getvalue()
        if item.kind != "opaque" and len(content) <= SPELLED_OUT_BYTES:
            text = content.decode("utf-8", "surrogatepass")
            task.report.values[name] = ValueEntry(name, item.kind, text)
            return
        chunk = max(1, min(len(content), self.options.chunk_bytes))
        task.report.values[name] = BytesEntry(name, item.kind, len(content), chunk)
        task.write_bytes(name, content, chunk)

    def finish(self, metadata: Metadata, results: Sequence[object]) -> bytes:
        """Check that every chunk was written once, write digests and zarr.json files, and publish.

        Returns:
            The manifest's bytes.

        Raises:
            PlanError: a chunk was written by nobody, or twice.
            StorageError: the storage refused.
        """
        assert self._staging is not None
        written = [msgspec.convert(result, Written) for result in results]
        values = {name: entry for report in written for name, entry in report.values.items()}
        manifest = build(metadata, values, root=self._staging.root, codecs=self.codecs)
        digests = _assemble(manifest, written)
        manifest = msgspec.structs.replace(manifest, digests=digest_bytes(digests).hex())
        data = encode(manifest, digest_bytes)
        with storage_errors(str(self.target)):
            store = open_store(self._staging.location)
            futures = [store.write(DIGESTS, digests)]
            futures += [store.write(key, content) for key, content in documents(manifest)]
            for future in futures:
                future.result()
        self._staging.publish(data)
        self._staging = None
        return data

    def committed_metadata(self, manifest: bytes) -> Metadata:
        """What the committed manifest says."""
        return to_metadata(parse(manifest, digest_bytes))

    def abort(self) -> None:
        """Remove what was staged; what is committed stays as it is."""
        if self._staging is not None:
            self._staging.abort()
            self._staging = None


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


@dataclass(slots=True)
class _WriteTask:
    """What all writes of one rank share."""

    orders: WriteOrders
    codecs: tuple[str, ...]
    planner: SavePlanner
    report: _Report
    progress: ProgressCounter
    opened: dict[tuple[str, int], ts.TensorStore] = field(default_factory=dict)

    def submit(self, item: WriteItem, pool: Pool) -> None:
        """Resolve a tensor item and hand its units to the pool."""
        assert item.tensor_data is not None
        name, box = item.index.fqn, item.tensor_data.chunk
        size = item.tensor_storage_size() or 0
        if size == 0:
            return
        array, low = self._array_of(item)
        high = tuple(a + n for a, n in zip(low, box.sizes, strict=True))
        _, units = cells(low, high, array.shape, array.shard or array.chunk)
        for unit in units:
            if any(u < a for u, a in zip(unit.offsets, low, strict=True)) or any(
                u + n > b for u, n, b in zip(unit.offsets, unit.sizes, high, strict=True)
            ):
                raise PlanError(
                    f"{name}: {interval(box.offsets, box.sizes)} is to be written by this rank, "
                    f"but shares a chunk with another; a planner must keep to the grid's chunks"
                )
        pool.reserve(size)
        data = self._resolve(item)
        store = self._open(array)
        left = [len(units)]
        for unit in units:
            start = [u - a for u, a in zip(unit.offsets, low, strict=True)]
            region = tuple(slice(s, s + n) for s, n in zip(start, unit.sizes, strict=True))
            view = data[region] if region else data

            def write(view: NDArray[np.generic] = view, offsets: Shape = unit.offsets) -> None:
                try:
                    self._write_unit(store, array, offsets, view)
                finally:
                    with self.report.lock:
                        left[0] -= 1
                        last = left[0] == 0
                    if last:
                        pool.release(size)

            pool.submit(write)

    def write_bytes(self, name: str, content: bytes, chunk: int) -> None:
        """A value as an array of bytes."""
        array = _zarr_array(
            name, "uint8", ArrayOrder(0, (0,), (len(content),), (chunk,), None, False)
        )
        data = np.frombuffer(content, np.uint8)
        if len(data):
            store = self._open(array)
            for start in range(0, len(data), chunk):
                self._write_unit(store, array, (start,), data[start : start + chunk])

    def _array_of(self, item: WriteItem) -> tuple[ZarrArray, Shape]:
        """The zarr array that holds an item, and the item's offset in it."""
        assert item.tensor_data is not None
        name, box = item.index.fqn, item.tensor_data.chunk
        for order in self.orders.arrays.get(name, ()):
            low = tuple(a - b for a, b in zip(box.offsets, order.offset, strict=True))
            ends = (a + n for a, n in zip(low, box.sizes, strict=True))
            if all(a >= 0 for a in low) and all(
                e <= s for e, s in zip(ends, order.shape, strict=True)
            ):
                return _zarr_array(name, item.tensor_data.properties.dtype, order), low
        raise PlanError(
            f"{name}: {interval(box.offsets, box.sizes)} lies in no array of the checkpoint"
        )

    def _resolve(self, item: WriteItem) -> NDArray[np.generic]:
        """An item's data on the host, little-endian, of exactly the planned dtype and sizes."""
        assert item.tensor_data is not None
        data = frameworks.to_numpy(self.planner.resolve_data(item))
        chunk, dtype = item.tensor_data.chunk, item.tensor_data.properties.dtype
        if data.shape != chunk.sizes or dtype_name(data.dtype) != dtype:
            raise PlanError(
                f"{item.index.fqn}: {dtype} of shape {chunk.sizes} was planned, but resolve_data "
                f"returned {data.dtype} of shape {data.shape}"
            )
        return data if data.dtype.isnative else data.astype(data.dtype.newbyteorder("="))

    def _open(self, array: ZarrArray) -> ts.TensorStore:
        key = (array.leaf, array.number)
        if key not in self.opened:
            self.opened[key] = open_array(self.orders.location, array, self.codecs)
        return self.opened[key]

    def _write_unit(
        self,
        store: ts.TensorStore,
        array: ZarrArray,
        offsets: Shape,
        view: NDArray[np.generic],
    ) -> None:
        """Digest and write one unit: a chunk, or a zarr shard of several."""
        data = np.asarray(view, order="C")
        high = tuple(a + n for a, n in zip(offsets, view.shape, strict=True))
        numbers, inner = cells(offsets, high, array.shape, array.chunk)
        found: list[tuple[int, bytes]] = []
        for number, cell in zip(numbers.tolist(), inner, strict=True):
            start = [a - b for a, b in zip(cell.offsets, offsets, strict=True)]
            part = data[tuple(slice(s, s + n) for s, n in zip(start, cell.sizes, strict=True))]
            found.append((number, digest_array(np.asarray(part, order="C"))))
        region = tuple(slice(a, b) for a, b in zip(offsets, high, strict=True))
        with storage_errors(f"{array.leaf} in {self.orders.location}"):
            store[region].write(data, can_reference_source_data_indefinitely=True).result()
        self.report.add(array.leaf, array.number, found)
        self.progress.add(data.nbytes)


def _zarr_array(name: str, dtype: str, order: ArrayOrder) -> ZarrArray:
    path = zarr_path(name)
    return ZarrArray(
        name,
        order.number,
        f"{path}/{order.number}" if order.in_pieces else path,
        dtype,
        order.offset,
        order.shape,
        order.chunk,
        order.shard,
        0,
    )


def _assemble(manifest: Manifest, written: Sequence[Written]) -> bytes:
    """All digests in the manifest's order.

    Raises:
        PlanError: a chunk was written by nobody, or twice; all such arrays are listed.
    """
    first: dict[tuple[str, int], ZarrArray] = {}
    count = 0
    for array in arrays(manifest):
        first[array.leaf, array.number] = array
        count += array.count
    digests = np.zeros((count, DIGEST_BYTES), np.uint8)
    times = np.zeros(count, np.int32)
    for report in written:
        for part in report.arrays:
            numbers = first[part.leaf, part.number].first + np.frombuffer(part.cells, np.int64)
            digests[numbers] = np.frombuffer(part.digests, np.uint8).reshape(-1, DIGEST_BYTES)
            np.add.at(times, numbers, 1)
    if not (times == 1).all():
        raise PlanError.listing(
            "the planner's items do not write every chunk exactly once",
            [
                f"{array.leaf}: of {array.count} chunks {np.sum(here == 0)} were written by no "
                f"rank and {np.sum(here > 1)} more than once"
                for array in first.values()
                for here in [times[array.first : array.first + array.count]]
                if not (here == 1).all()
            ],
        )
    return digests.tobytes()
