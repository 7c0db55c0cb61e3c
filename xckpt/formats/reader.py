"""Loading straight from any source of tensors: a `StorageReader` over a `TensorSource`.

1. The coordinator opens the source and sends its identity; every rank opens it too and compares, so
   that all read the same.
2. To a planner each tensor is one stored array, cut where reading is cheap. It plans as ever.
3. Each rank reads its items part by part, in threads, straight into their destinations. Where those
   have another dtype or cannot be reached from the host, parts go through scratch memory.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size, numpy_dtype
from xckpt.core.geometry.box import Box
from xckpt.core.geometry.boxes import Boxes
from xckpt.core.geometry.grid import Grid
from xckpt.core.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from xckpt.core.names import join_keys
from xckpt.core.plan.items import LoadItemType, LoadPlan, ReadItem
from xckpt.core.plan.load import LoadPlanner
from xckpt.core.values import encode_value, value_kind
from xckpt.errors import PlanError, StorageError, UnsupportedLeafError
from xckpt.formats.source import TensorSource
from xckpt.mapping.names import keys_of
from xckpt.options import LoadOptions
from xckpt.storage.budget import Pool, ProgressCounter
from xckpt.storage.chunk import allocate
from xckpt.storage.foreign.concurrency import reading_threads

__all__ = ["SourceReader", "parts"]

PART_BYTES = 1 << 24
"""What one thread reads at a time, bytes, where the source can be cut so finely."""

Shape = tuple[int, ...]


@dataclass(slots=True)
class _Item:
    """A read item, and what has come of it."""

    item: ReadItem
    resolved: object
    host: NDArray[np.generic] | None
    """The destination's own memory; None if the host cannot reach it."""
    scratch: NDArray[np.generic] | None
    """Memory for all of the item, where `host` is None."""
    missing: int


class SourceReader:
    """Reads a load's items from a source of tensors.

    Args:
        open_source: opens it; called on every rank.
        name: how errors call it.
        options: threads, memory, progress.

    Example:
        >>> import xckpt
        >>> from xckpt.formats.source import XckptSource
        >>> _ = xckpt.save("memory://any-source", {"w": np.arange(3)})
        >>> reader = SourceReader(lambda: XckptSource("memory://any-source"))
        >>> state = {"w": np.zeros(3, int)}
        >>> _ = xckpt.load_state_dict(state, reader)
        >>> state["w"]
        array([0, 1, 2])
    """

    def __init__(
        self,
        open_source: Callable[[], TensorSource],
        name: str = "the source",
        *,
        options: LoadOptions | None = None,
    ) -> None:
        self.name = name
        self.options = options or LoadOptions()
        self._open = open_source
        self._source: TensorSource | None = None
        self._names: dict[str, str] = {}
        self._lock = threading.Lock()

    @property
    def source(self) -> TensorSource:
        """The open source."""
        if self._source is None:
            self._source = self._open()
        return self._source

    def read_metadata(self) -> bytes:
        """What the source is, so that every rank can tell whether it has the same."""
        return self.source.identity()

    def set_up_storage_reader(self, manifest: bytes, ranks: int) -> Metadata:
        """Compare this rank's source with the coordinator's, and describe it.

        Raises:
            StorageError: this rank sees another.
        """
        if self.source.identity() != manifest:
            raise StorageError(f"{self.name}: this rank sees other contents than the coordinator")
        told: Mapping[str, str] | None = getattr(self.source, "leaf_names", None)
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name in (*self.source.specs, *self.source.values):
            leaf = join_keys(keys_of(name)) if told is None else told[name]
            self._names[leaf] = name
            described[leaf] = self._described(name)
        containers: Mapping[str, str] = getattr(self.source, "containers", {})
        return Metadata(described, containers, user=dict(self.source.metadata) or None)

    def _described(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        spec = self.source.specs.get(name)
        if spec is None:
            kind = value_kind(self.source.values[name])
            if kind is None:
                raise UnsupportedLeafError(f"{name}: no value that can be loaded")
            return BytesStorageMetadata(kind)
        whole = Boxes.whole(spec.shape)
        chunk = np.array([self.source.chunks(name)], np.int64).reshape(1, len(spec.shape))
        grid = Grid(whole, chunk) if (chunk > 1).any() else None
        annotations: Mapping[str, str] = getattr(self.source, "annotations", {})
        return TensorStorageMetadata(
            TensorProperties(spec.dtype),
            spec.shape,
            whole,
            grid,
            annotation=annotations.get(name, ""),
        )

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are: each rank reads for itself."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Read this rank's items."""
        tensors: list[ReadItem] = []
        for item in plan.items:
            if item.type is LoadItemType.TENSOR:
                tensors.append(item)
                continue
            text = encode_value(self.source.values[self._names[item.storage_index.fqn]])
            planner.load_bytes(item, io.BytesIO(text.encode("utf-8", "surrogatepass")))
        sizes = [prod(item.lengths) * item_size(self._dtype(item)) for item in tensors]
        progress = ProgressCounter(sum(sizes), self.options.progress)
        threads = self.options.threads or reading_threads(getattr(self.source, "path", None))
        with Pool(threads=threads, budget=self.options.memory_bytes) as pool:
            for item, size in zip(tensors, sizes, strict=True):
                if not pool.failed:
                    self._submit(item, size, planner, pool, progress)

    def _submit(
        self,
        item: ReadItem,
        size: int,
        planner: LoadPlanner,
        pool: Pool,
        progress: ProgressCounter,
    ) -> None:
        """Have an item's parts read, within the budget."""
        work = self._resolve(item, planner, pool, size)
        name = self._names[item.storage_index.fqn]
        most = max(1, PART_BYTES // item_size(self._dtype(item)))
        cuts = list(parts(item.storage_offsets, item.lengths, self.source.chunks(name), most))
        bytes_each = item_size(self._dtype(item))

        def read(box: Box) -> None:
            self._read_part(work, name, box)
            progress.add(prod(box.sizes) * bytes_each)
            if self._landed(work, prod(box.sizes)):
                if work.scratch is not None:
                    planner.adapters.copy_into(work.resolved, work.scratch)
                    work.scratch = None
                    pool.release(size)
                planner.commit_tensor(work.item, work.resolved)

        for box in cuts:
            pool.submit(lambda box=box: read(box))

    def _dtype(self, item: ReadItem) -> str:
        return self.source.specs[self._names[item.storage_index.fqn]].dtype

    def _resolve(self, item: ReadItem, planner: LoadPlanner, pool: Pool, size: int) -> _Item:
        """An item's destination, with scratch memory of the budget where that is needed."""
        resolved = planner.resolve_tensor(item)
        host = planner.adapters.writable_numpy(resolved)
        if host is not None and host.shape != tuple(item.lengths):
            raise PlanError(
                f"{item.dest_index.fqn}: resolve_tensor must return {item.lengths} elements, got "
                f"an array of shape {host.shape}"
            )
        scratch = None
        if host is None:
            pool.reserve(size)
            scratch = allocate(item.lengths, numpy_dtype(self._dtype(item)), item.dest_index.fqn)
        return _Item(item, resolved, host, scratch, prod(item.lengths))

    def _read_part(self, work: _Item, name: str, box: Box) -> None:
        destination = work.scratch if work.host is None else work.host
        assert destination is not None
        starts = zip(box.offsets, work.item.storage_offsets, box.sizes, strict=True)
        region = tuple(slice(a - o, a - o + n) for a, o, n in starts)
        into = destination[region] if region else destination
        dtype = numpy_dtype(self._dtype(work.item))
        if into.dtype == dtype:
            self.source.read(name, box, into)
            return
        data = allocate(box.sizes, dtype, work.item.dest_index.fqn)
        self.source.read(name, box, data)
        np.copyto(into, data, casting="unsafe")

    def _landed(self, work: _Item, elements: int) -> bool:
        with self._lock:
            work.missing -= elements
            return work.missing == 0

    def close(self) -> None:
        """Close the source."""
        if self._source is not None:
            self._source.close()
            self._source = None


def parts(
    offsets: Sequence[int], sizes: Sequence[int], chunk: Sequence[int], most: int
) -> Iterator[Box]:
    """Cut a box along multiples of ``chunk`` into boxes of about ``most`` elements, rows whole.

    Example:
        >>> [box.offsets for box in parts((1, 0), (5, 8), (2, 8), 32)]
        [(1, 0), (4, 0)]
        >>> [box.sizes for box in parts((1, 0), (5, 8), (2, 8), 32)]
        [(3, 8), (2, 8)]
        >>> list(parts((), (), (), 1))
        [Box(offsets=(), sizes=())]
    """
    if prod(sizes) <= most or not sizes:
        yield Box(tuple(offsets), tuple(sizes))
        return
    d = next((d for d, size in enumerate(sizes) if size > _room(offsets[d], chunk[d])), None)
    if d is None:
        yield Box(tuple(offsets), tuple(sizes))
        return
    row = prod(sizes[d + 1 :]) * prod(sizes[:d])
    step = max(1, most // max(1, row * chunk[d])) * chunk[d]
    at, end = offsets[d], offsets[d] + sizes[d]
    while at < end:
        stop = min(end, (at // step + 1) * step)
        inner = (*sizes[:d], stop - at, *sizes[d + 1 :])
        yield from parts((*offsets[:d], at, *offsets[d + 1 :]), inner, chunk, most)
        at = stop


def _room(offset: int, chunk: int) -> int:
    """Elements from an offset to the next multiple of the chunk."""
    return chunk - offset % chunk
