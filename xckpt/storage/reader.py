"""Reading a checkpoint through TensorStore, every byte verified.

`read_metadata` fetches the manifest; nothing else in a checkpoint is believed. `read_data`:

1. Compare the zarr.json of every array that is read with what the manifest implies, and fetch the
   digests of its chunks.
2. Split all read items into chunks; a chunk that several items want is read once.
3. In a thread, for each chunk: a chunk that fills a contiguous part of one destination is read
   straight into it and its digest taken there; any other is read into scratch memory, verified, and
   copied to where its elements are wanted.
4. Commit an item when its last chunk is in place.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from xckpt.core import leaves as frameworks
from xckpt.core.boxes import interval
from xckpt.core.dtypes import dtype_name, numpy_dtype
from xckpt.core.grid import cells
from xckpt.core.load_planner import LoadPlanner
from xckpt.core.manifest import (
    MAX_BYTES,
    BytesEntry,
    Manifest,
    ValueEntry,
    ZarrArray,
    arrays,
    parse,
    to_metadata,
)
from xckpt.core.metadata import Metadata
from xckpt.core.plan import LoadItemType, LoadPlan, ReadItem
from xckpt.core.zarr_json import documents
from xckpt.errors import CorruptCheckpointError, ManifestError, NotACheckpointError, XckptError
from xckpt.options import LoadOptions
from xckpt.storage.arrays import open_array
from xckpt.storage.commit import DIGESTS, MANIFEST, storage_errors
from xckpt.storage.digests import DIGEST_BYTES, digest_array, digest_bytes
from xckpt.storage.location import Location, open_store
from xckpt.storage.pool import Pool, ProgressCounter

__all__ = ["ChunkSource", "ZarrStorageReader", "read_manifest"]

Shape = tuple[int, ...]
ArrayKey = tuple[str, int]


def read_manifest(location: Location) -> bytes:
    """The bytes of the manifest at a location.

    Raises:
        NotACheckpointError: no committed checkpoint is there.
        ManifestError: it is absurdly long.
        StorageError: the storage refused.
    """
    with storage_errors(str(location)):
        folder = location.folder
        if folder is not None and folder.is_file():
            raise NotACheckpointError(f"{location} is a file, not a checkpoint folder")
        store = open_store(location)
        head = store.read(MANIFEST, byte_range=slice(0, None)).result()
    if head.state != "value":
        raise NotACheckpointError(
            f"{location} holds no committed checkpoint: there is no {MANIFEST} in it; "
            f"check the path, or whether the save finished"
        )
    if len(head.value) > MAX_BYTES:
        raise ManifestError(f"{location}: the manifest is over {MAX_BYTES:,} bytes long")
    return head.value


@dataclass(slots=True)
class ChunkSource:
    """Chunks of a checkpoint's arrays, opened lazily and verified when read."""

    root: Location
    manifest: Manifest
    mapped: bool
    bytes_read: int = 0
    """Bytes of chunks read so far."""
    _arrays: dict[ArrayKey, ZarrArray] = field(default_factory=dict)
    _opened: dict[ArrayKey, ts.TensorStore] = field(default_factory=dict)
    _digests: dict[ArrayKey, bytes] = field(default_factory=dict)
    _documents: dict[str, bytes] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._arrays = {(array.leaf, array.number): array for array in arrays(self.manifest)}
        self._documents = dict(documents(self.manifest))

    @property
    def total_digests(self) -> int:
        """Number of chunks in the whole checkpoint."""
        return sum(array.count for array in self._arrays.values())

    def array(self, key: ArrayKey) -> ZarrArray:
        """The array ``(leaf name, number)``."""
        return self._arrays[key]

    def prepare(self, keys: Iterable[ArrayKey], *, check_documents: bool = True) -> None:
        """Open arrays: check their zarr.json against the manifest and fetch their digests.

        Raises:
            CorruptCheckpointError: some zarr.json or the digest file was altered; all are listed.
        """
        new = [key for key in dict.fromkeys(keys) if key not in self._opened]
        if not new:
            return
        store = open_store(self.root, mapped=False)
        chosen = [self._arrays[key] for key in new]
        names = [f"{array.path}/zarr.json" for array in chosen] if check_documents else []
        problems = _altered(store, names, self._documents)
        if problems:
            raise CorruptCheckpointError.listing(f"{self.root}: altered zarr metadata", problems)
        self._fetch_digests(store, chosen)
        for key, array in zip(new, chosen, strict=True):
            self._opened[key] = open_array(
                self.root, array, self.manifest.codecs, mapped=self.mapped
            )

    def _fetch_digests(self, store: ts.KvStore, chosen: Sequence[ZarrArray]) -> None:
        futures = []
        for array in chosen:
            start = array.first * DIGEST_BYTES
            stop = start + array.count * DIGEST_BYTES
            where = slice(start, stop)
            futures.append(store.read(DIGESTS, byte_range=where) if stop > start else None)
        for array, future in zip(chosen, futures, strict=True):
            try:
                found = future.result().value if future else b""
            except ValueError as error:
                raise CorruptCheckpointError(
                    f"{self.root}: {DIGESTS} is too short for {array.leaf}; it was truncated"
                ) from error
            if len(found) != array.count * DIGEST_BYTES:
                raise CorruptCheckpointError(
                    f"{self.root}: {DIGESTS} is missing or too short for {array.leaf}"
                )
            self._digests[array.leaf, array.number] = found

    def altered_documents(self) -> list[str]:
        """A line for each zarr.json of the checkpoint that is not what the manifest implies."""
        return _altered(open_store(self.root), list(self._documents), self._documents)

    def digest_file_problem(self) -> str:
        """What is wrong with the digest file as a whole; empty if nothing."""
        found = open_store(self.root).read(DIGESTS).result()
        if found.state != "value":
            return f"{DIGESTS}: missing"
        if digest_bytes(found.value).hex() != self.manifest.digests:
            return f"{DIGESTS}: altered"
        return ""

    def read(
        self, key: ArrayKey, number: int, cell: tuple[Shape, Shape], into: NDArray[np.generic]
    ) -> None:
        """Read chunk ``number``, whose box is ``cell``, into C-contiguous memory and verify it.

        Raises:
            CorruptCheckpointError: the chunk is missing, truncated, or not what was saved.
        """
        array = self._arrays[key]
        offsets, sizes = cell
        region = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        try:
            destination = ts.array(into, copy=False, write=True)
            destination.write(self._opened[key][region]).result()
        except ValueError as error:
            raise self._chunk_error(array, cell, _reason(error)) from error
        expected = self._digests[key][number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        if digest_array(into) != expected:
            raise self._chunk_error(array, cell, "its digest differs from the one saved")
        with self._lock:
            self.bytes_read += into.nbytes

    def _chunk_error(
        self, array: ZarrArray, cell: tuple[Shape, Shape], reason: str
    ) -> CorruptCheckpointError:
        offsets = [a + b for a, b in zip(cell[0], array.offset, strict=True)]
        return CorruptCheckpointError(
            f"{array.leaf or 'the root'}: {interval(offsets, cell[1])} in "
            f"{self.root.child(array.path)}: {reason}; restore it from a copy of the checkpoint"
        )


def _reason(error: ValueError) -> str:
    text = str(error)
    if "NOT_FOUND" in text:
        return "the chunk is missing"
    if "FAILED_PRECONDITION" in text or "DATA_LOSS" in text or "OUT_OF_RANGE" in text:
        return f"the chunk is truncated or damaged ({text[:200]})"
    return text[:400]


def _altered(store: ts.KvStore, keys: Sequence[str], expected: Mapping[str, bytes]) -> list[str]:
    """A line for each document that is not, byte for byte, what is expected."""
    futures = [store.read(key) for key in keys]
    problems: list[str] = []
    for key, future in zip(keys, futures, strict=True):
        found = future.result()
        if found.state != "value":
            problems.append(f"{key}: missing")
        elif found.value != expected[key]:
            problems.append(f"{key}: edited; it is not the one that was saved")
    return problems


@dataclass(frozen=True, slots=True)
class _Wish:
    """A part of a chunk that an item wants."""

    item: int
    source: tuple[slice, ...]
    """In the chunk."""
    destination: tuple[slice, ...]
    """In the item's destination."""
    whole: bool
    """Whether that is all of the chunk."""


@dataclass(slots=True)
class _Destination:
    """Where an item's elements go, resolved when its first chunk comes."""

    item: ReadItem
    missing: int
    resolved: object = None
    host: NDArray[np.generic] | None = None


class ZarrStorageReader:
    """Reads a checkpoint that is zarr v3, through TensorStore.

    Args:
        path: a local path, or a ``file://``, ``memory://``, ``s3://`` or ``gs://`` URL.
        options: threads, memory, progress.
    """

    def __init__(self, path: str | os.PathLike[str], *, options: LoadOptions | None = None) -> None:
        self.location = Location.parse(path)
        self.options = options or LoadOptions()
        self.source: ChunkSource | None = None

    def read_metadata(self) -> bytes:
        """The manifest's bytes, checked.

        Raises:
            NotACheckpointError: no committed checkpoint is at the path.
            ManifestError: the manifest cannot be trusted.
        """
        data = read_manifest(self.location)
        self._parse(data)
        return data

    def _parse(self, data: bytes) -> Manifest:
        try:
            return parse(data, digest_bytes)
        except ManifestError as error:
            raise type(error)(f"{self.location}: {error}", error.problems) from error

    def set_up_storage_reader(self, manifest: bytes, is_coordinator: bool) -> Metadata:
        """Take the manifest that the coordinator read."""
        parsed = self._parse(manifest)
        root = self.location.within(parsed.root)
        mapped = self.options.memory_map and self.location.driver == "file"
        self.source = ChunkSource(root, parsed, mapped)
        return to_metadata(parsed)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Read and verify this rank's items.

        Raises:
            CorruptCheckpointError: something is not what was saved.
            StorageError: the storage refused.
        """
        assert self.source is not None
        with storage_errors(str(self.location)):
            self._read_values(plan, planner)
            tensors = [item for item in plan.items if item.type is LoadItemType.TENSOR]
            keys = [(item.storage_index.fqn, item.storage_index.index or 0) for item in tensors]
            self.source.prepare(keys)
            _ReadTask(self.source, planner, self.options, tensors, keys).run()

    def _read_values(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        assert self.source is not None
        entries = {leaf.name: leaf for leaf in self.source.manifest.leaves}
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                entry = entries[item.storage_index.fqn]
                if isinstance(entry, ValueEntry):
                    content = entry.value.encode("utf-8", "surrogatepass")
                else:
                    assert isinstance(entry, BytesEntry)
                    content = self.read_bytes(entry)
                planner.load_bytes(item, io.BytesIO(content))

    def read_bytes(self, entry: BytesEntry) -> bytes:
        """The content of a long value, verified."""
        assert self.source is not None
        key = (entry.name, 0)
        self.source.prepare([key])
        data = np.empty(entry.size, np.uint8)
        numbers, boxes = cells((0,), (entry.size,), (entry.size,), (entry.chunk,))
        for number, cell in zip(numbers.tolist(), boxes, strict=True):
            part = data[cell.offsets[0] : cell.offsets[0] + cell.sizes[0]]
            self.source.read(key, number, (cell.offsets, cell.sizes), part)
        return data.tobytes()


class _ReadTask:
    """The reading of one rank's tensor items."""

    def __init__(
        self,
        source: ChunkSource,
        planner: LoadPlanner,
        options: LoadOptions,
        items: Sequence[ReadItem],
        keys: Sequence[ArrayKey],
    ) -> None:
        self.source = source
        self.planner = planner
        self.options = options
        self.destinations = [_Destination(item, prod(item.lengths)) for item in items]
        self.lock = threading.Lock()
        self.chunks: dict[tuple[ArrayKey, int], tuple[tuple[Shape, Shape], list[_Wish]]] = {}
        for number, (item, key) in enumerate(zip(items, keys, strict=True)):
            self._wish(number, item, key)
        sizes = (
            prod(cell[1]) * self._item_bytes(key) for (key, _), (cell, _) in self.chunks.items()
        )
        self.progress = ProgressCounter(sum(sizes), options.progress)

    def _item_bytes(self, key: ArrayKey) -> int:
        return numpy_dtype(self.source.array(key).dtype).itemsize

    def _wish(self, number: int, item: ReadItem, key: ArrayKey) -> None:
        """Note which parts of which chunks an item wants."""
        array = self.source.array(key)
        low = item.storage_offsets
        high = tuple(a + n for a, n in zip(low, item.lengths, strict=True))
        chunk_numbers, boxes = cells(low, high, array.shape, array.chunk)
        for chunk_number, cell in zip(chunk_numbers.tolist(), boxes, strict=True):
            ends = [o + n for o, n in zip(cell.offsets, cell.sizes, strict=True)]
            start = [max(a, o) for a, o in zip(low, cell.offsets, strict=True)]
            stop = [min(b, e) for b, e in zip(high, ends, strict=True)]
            wish = _Wish(
                number,
                tuple(
                    slice(a - o, b - o) for a, b, o in zip(start, stop, cell.offsets, strict=True)
                ),
                tuple(slice(a - o, b - o) for a, b, o in zip(start, stop, low, strict=True)),
                all(b - a == n for a, b, n in zip(start, stop, cell.sizes, strict=True)),
            )
            entry = self.chunks.setdefault((key, chunk_number), ((cell.offsets, cell.sizes), []))
            entry[1].append(wish)

    def run(self) -> None:
        """Read every chunk once, in threads."""
        with Pool(threads=self.options.threads, budget=self.options.memory_bytes) as pool:
            for (key, number), (cell, wishes) in self.chunks.items():
                if pool.failed:
                    break
                size = prod(cell[1]) * self._item_bytes(key)
                pool.reserve(size)

                def read(
                    key: ArrayKey = key,
                    number: int = number,
                    cell: tuple[Shape, Shape] = cell,
                    wishes: list[_Wish] = wishes,
                    size: int = size,
                ) -> None:
                    try:
                        self._read_chunk(key, number, cell, wishes)
                    finally:
                        pool.release(size)
                    self.progress.add(size)

                pool.submit(read)

    def _read_chunk(
        self, key: ArrayKey, number: int, cell: tuple[Shape, Shape], wishes: Sequence[_Wish]
    ) -> None:
        dtype = numpy_dtype(self.source.array(key).dtype)
        direct = self._direct(wishes, dtype)
        if direct is not None:
            self.source.read(key, number, cell, direct)
        else:
            scratch = np.empty(cell[1], dtype)
            self.source.read(key, number, cell, scratch)
            for wish in wishes:
                part = (
                    self._host(wish.item)[wish.destination]
                    if wish.destination
                    else self._host(wish.item)
                )
                np.copyto(part, scratch[wish.source], casting="unsafe")
        for wish in wishes:
            self._landed(wish.item, prod(s.stop - s.start for s in wish.destination))

    def _direct(
        self, wishes: Sequence[_Wish], dtype: np.dtype[np.generic]
    ) -> NDArray[np.generic] | None:
        """The destination itself, if one chunk can be read straight into it."""
        if len(wishes) != 1 or not wishes[0].whole:
            return None
        host = self._host(wishes[0].item)
        part = host[wishes[0].destination] if wishes[0].destination else host
        aligned = part.flags.c_contiguous and part.flags.aligned and part.flags.writeable
        return part if aligned and part.dtype == dtype else None

    def _host(self, number: int) -> NDArray[np.generic]:
        """An item's destination as host memory, resolved once."""
        destination = self.destinations[number]
        with self.lock:
            if destination.host is None:
                item = destination.item
                destination.resolved = self.planner.resolve_tensor(item)
                host = frameworks.to_writable_numpy(destination.resolved)
                if host is None:
                    stored = self.source.array(
                        (item.storage_index.fqn, item.storage_index.index or 0)
                    )
                    host = np.empty(item.lengths, numpy_dtype(stored.dtype))
                if host.shape != tuple(item.lengths) or dtype_name(host.dtype) is None:
                    raise XckptError(
                        f"{item.dest_index.fqn}: resolve_tensor must return {item.lengths} "
                        f"elements, got {host.dtype} of shape {host.shape}"
                    )
                destination.host = host
            return destination.host

    def _landed(self, number: int, elements: int) -> None:
        """Count what has arrived; commit the item with its last element."""
        destination = self.destinations[number]
        with self.lock:
            destination.missing -= elements
            done = destination.missing == 0
        if done:
            host, resolved = destination.host, destination.resolved
            assert host is not None
            if frameworks.to_writable_numpy(resolved) is None:
                frameworks.copy_into(resolved, host)
            self.planner.commit_tensor(destination.item, resolved)
            destination.host = destination.resolved = None
