"""Reading a checkpoint through TensorStore, every byte verified.

1. `read_metadata` fetches the manifest, on the coordinator, and checks it.
2. `prepare_local_plan` tells the coordinator which chunks this rank wants and on which host it is.
3. `prepare_global_plan` has chunks that several ranks of one host want read by one of them.
4. `read_data` fetches digests and reads the chunks (`xckpt.storage.chunks.read_chunks`).
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter, eq
from typing import Final

import msgspec
import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from xckpt.core.geometry.box import Box, Int64s
from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.manifest.codec import MAX_BYTES, parse, to_metadata
from xckpt.core.manifest.entries import BytesEntry, Entry, Manifest, TensorEntry, ValueEntry
from xckpt.core.manifest.memory import COPIES, check_memory
from xckpt.core.manifest.own_keys import MANIFEST
from xckpt.core.metadata import Metadata
from xckpt.core.plan.host_reads import Announcement, PackedReads, SharedReads, packed, share_reads
from xckpt.core.plan.items import LoadPlan, ReadItem
from xckpt.core.plan.load import LoadPlanner
from xckpt.core.plan.reads.items import ReadItems, needs_no_items
from xckpt.engine.ranks.rendezvous import host_identity
from xckpt.errors import ManifestError, NotACheckpointError, naming
from xckpt.options import LoadOptions, checked_options
from xckpt.storage.absent import what_file_is_there, what_is_there, what_keys_are_there
from xckpt.storage.array import digest_bytes
from xckpt.storage.chunks.chunk import ChunkSource, allocate
from xckpt.storage.chunks.file_checks import file_content, status_problem, stored_content
from xckpt.storage.chunks.read_chunks import read_box, read_items, requests_of
from xckpt.storage.chunks.requests import UNPACKED, ChunkRequests
from xckpt.storage.host.exchange import PATIENCE, Exchange
from xckpt.storage.host.far import FarRanks
from xckpt.storage.host.shared_blocks import NO_BLOCKS, PackBlocks, blocks_of
from xckpt.storage.location import Location, check_process, open_store, storage_errors


def read_manifest(location: Location, memory_bytes: int | None = None) -> bytes:
    """The bytes of the manifest at a location, which take no more than ``memory_bytes``.

    Raises:
        NotACheckpointError: no committed checkpoint is there.
        ManifestError: it is too long.
        StorageError: the storage refused, or this process was forked and could read no chunk.
    """
    check_process()
    folder = location.folder
    with storage_errors(location):
        if folder is not None and folder.is_file():
            raise NotACheckpointError(what_file_is_there(folder))
        if folder is not None:
            check = partial(_check_file, location, memory_bytes)
            stored = file_content(f"{location.path}/{MANIFEST}", MAX_BYTES, check)
        else:
            stored = stored_content(location, MANIFEST, MAX_BYTES)
    if stored is None:
        there = what_keys_are_there(location) if folder is None else what_is_there(folder)
        raise NotACheckpointError(f"{location} holds no committed checkpoint: {there}")
    if len(stored) > MAX_BYTES:
        raise ManifestError(f"{location}: the manifest is over {MAX_BYTES:,} bytes long")
    if memory_bytes is not None:
        _check_length(location, len(stored), memory_bytes)
    return stored


def _check_file(location: Location, memory_bytes: int | None, status: os.stat_result) -> None:
    """Refuse a manifest by the status of its file, before it is read."""
    if memory_bytes is not None and stat.S_ISREG(status.st_mode):
        _check_length(location, status.st_size, memory_bytes)
    problem = status_problem(status, MAX_BYTES)
    if problem:
        raise ManifestError(f"{location}: {MANIFEST} is {problem}")


def _check_length(location: Location, size: int, memory_bytes: int) -> None:
    """Refuse a manifest that cannot be taken apart in the memory; see `check_memory`."""
    check_memory(COPIES * size, f"{location}: the manifest of {size:,} bytes", memory_bytes)


class ZarrStorageReader:
    """Reads a checkpoint that is zarr v3, through TensorStore.

    Args:
        path: a local path, or a ``file://``, ``memory://``, ``s3://`` or ``gs://`` URL.
        options: threads, memory, progress.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://example-reader", {"w": np.arange(3.0)})
        >>> state = {"w": np.zeros(3)}
        >>> _ = xckpt.load_state_dict(state, ZarrStorageReader("memory://example-reader"))
        >>> state
        {'w': array([0., 1., 2.])}
    """

    source: ChunkSource
    """The chunks of the checkpoint, once `set_up_storage_reader` has opened it."""

    def __init__(self, path: str | os.PathLike[str], *, options: LoadOptions | None = None) -> None:
        self.options: LoadOptions = checked_options(options, LoadOptions, "ZarrStorageReader")
        self.location: Final = Location.parse(path, options)
        self.host_ranks = 1
        """Ranks of the load on a host, at most: they share its memory."""
        self.patience = PATIENCE
        """Seconds that a silent rank of this host is waited for."""
        self._may_share = False
        """Whether other ranks load too and reads are shared with those of this host."""
        self._exchange: Exchange | None = None
        self._bucket: ts.KvStore | None = None
        """Held from the first request on: a bucket opened anew is asked for its region anew."""
        self.entries: Mapping[str, Entry] = {}
        """Leaf name -> what the manifest says of it."""
        self._parsed: tuple[bytes, Manifest] | None = None
        """The digest of a manifest's bytes, and what they hold."""
        self._requested: tuple[ReadItems, ReadItems, ChunkRequests] | None = None
        """A plan's items, its tensor items, and the chunks that are needed."""
        self._values: list[ReadItem] = []
        """The plan's items that read values."""

    def read_metadata(self) -> bytes:
        """The manifest's bytes, checked.

        Raises:
            NotACheckpointError: no committed checkpoint is at the path.
            ManifestError: the manifest cannot be trusted.
        """
        self.location.access.start()
        if self.location.bucket:
            self._bucket = open_store(self.location)
        data = read_manifest(self.location, self.options.memory_bytes)
        self._parse(data)
        return data

    def _parse(self, data: bytes) -> Manifest:
        digest = digest_bytes(data)
        if self._parsed is None or self._parsed[0] != digest:
            with naming(self.location):
                self._parsed = digest, parse(data, digest_bytes, self.options.memory_bytes)
        return self._parsed[1]

    def set_up_storage_reader(self, manifest: bytes, ranks: int) -> Metadata:
        """Take the manifest that the coordinator read; ``ranks`` load together."""
        parsed = self._parse(manifest)
        self._requested = None
        root = self.location.within(parsed.root)
        memory = self.options.memory_bytes
        self.source = ChunkSource(self.location, root, parsed, memory, self.host_ranks)
        self.source.integrity.stored = len(manifest), digest_bytes(manifest)
        self._may_share = ranks > 1 and self.options.share_reads is not False
        self.entries = {leaf.name: leaf for leaf in parsed.leaves}
        return to_metadata(parsed, self.entries)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, with what this rank wants, if ranks of one host share their reads."""
        with self.source.integrity.noticing_replacement():
            wanted = self._shareable(plan) if self._may_share else None
        if wanted is None or not len(wanted):
            return plan
        # Without sockets each rank reads for itself.
        with contextlib.suppress(OSError):
            far = FarRanks(self.patience) if self._between_hosts() else None
            self._exchange = Exchange(self.patience, far)
            announcement = Announcement(
                self.options.host or host_identity(),
                self._exchange.address,
                packed(wanted),
                b"" if far is None else far.reach,
            )
            plan = replace(plan, storage_data=announcement)
        return plan

    def _shareable(self, plan: LoadPlan) -> Int64s:
        """The chunks and blocks of packs that this rank wants and may get from others."""
        requests = self._requests(plan)[1]
        chunks = requests.numbers[requests.places == UNPACKED]
        return np.concatenate([chunks, self._blocks(requests).numbers])

    def _blocks(self, requests: ChunkRequests) -> PackBlocks:
        """The blocks of packs that may be shared; local packs are in the memory of their host."""
        if self.location.bucket or self._between_hosts():
            return blocks_of(self.source, requests)
        return NO_BLOCKS

    def _between_hosts(self) -> bool:
        """Whether chunks that several hosts want are read by one of them."""
        if self.options.share_reads is not True:
            return self.options.share_reads == "job"
        if self.location.folder is None:
            return self.location.driver != "memory"
        from xckpt.storage.commit.file_system import is_local

        return not is_local(self.location.folder)

    @needs_no_items
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, with the chunks that one rank of a host reads for others."""
        announced = [
            None if plan.storage_data is None else msgspec.convert(plan.storage_data, Announcement)
            for plan in plans
        ]
        if not any(announced):
            return plans
        shares = share_reads(announced, _read_together(self.source))
        pairs = zip(plans, shares, strict=True)
        return [replace(plan, storage_data=share) for plan, share in pairs]

    def same_digests(self, one: str, other: str) -> bool:
        """Whether two tensors are cut alike, and the digests of their chunks are equal."""
        digests = self.source.integrity.digests
        ours, theirs = (self.source.arrays[name] for name in (one, other))
        grid = attrgetter("offset", "shape", "chunk")
        if [*map(grid, ours)] != [*map(grid, theirs)]:
            return False
        with self.source.integrity.noticing_replacement():
            digests.prepare([*ours, *theirs])
            return all(map(eq, *(chain(*map(digests.blocks, some)) for some in (ours, theirs))))

    def read_part(self, name: str, box: Box, into: NDArray[np.generic]) -> None:
        """Read a box of a tensor; see `xckpt.storage.chunks.read_chunks.read_box`."""
        read_box(self.source, self.source.arrays[name], box, into, threads=self.options.threads)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Read and verify this rank's items.

        Raises:
            CorruptCheckpointError: something is not what was saved.
            StorageError: the storage refused.
            CheckpointReplacedError: another save replaced the checkpoint meanwhile.
        """
        integrity = self.source.integrity
        with integrity.noticing_replacement():
            items, requests = self._requests(plan)
            long = self._load_short_values(planner)
            values = [_memory(self.entries[item.storage_index.fqn]) for item in long]
            if not requests:
                integrity.digests.check()
            integrity.prepare_ranges(*requests.ranges())
            share = SharedReads(0)
            if self._exchange is not None:
                share = msgspec.convert(plan.storage_data, PackedReads).reads()
            if not share.elsewhere:
                self._close_exchange()
            blocks = self._blocks(requests) if self._exchange is not None else NO_BLOCKS
            about = planner, self.options, share, self._exchange, values, blocks
            read_items(self.source, items, requests, *about)
        for item in long:
            planner.load_bytes(item, io.BytesIO(values.pop(0).tobytes()))

    def close(self) -> None:
        """Release what was opened for a load."""
        self._requested = None
        self._close_exchange()

    def _close_exchange(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def _requests(self, plan: LoadPlan) -> tuple[ReadItems, ChunkRequests]:
        """The tensors' read items and the chunks that these and the long values need."""
        items = ReadItems.of(plan.items)
        # The final plan of most planners reads what the local one did.
        if self._requested is None or self._requested[0] != items:
            self.source.integrity.digests.require()
            tensors, self._values = items.tensors(), list(items.values())
            names = (value.storage_index.fqn for value in self._values)
            long = (name for name in names if _is_long(self.entries[name]))
            self._requested = items, tensors, requests_of(self.source, tensors, long)
        return self._requested[1:]

    def _load_short_values(self, planner: LoadPlanner) -> list[ReadItem]:
        """Load the values that the manifest holds; returns the others, which are read."""
        long: list[ReadItem] = []
        for value in self._values:
            entry = self.entries[value.storage_index.fqn]
            if _is_long(entry):
                long.append(value)
                continue
            content = entry.value if isinstance(entry, ValueEntry) else ""
            planner.load_bytes(value, io.BytesIO(content.encode("utf-8", "surrogatepass")))
        return long

    def read_bytes(self, entry: BytesEntry) -> bytes:
        """The content of a long value, verified.

        Raises:
            CorruptCheckpointError: it is not what was saved.
            LeafTooLargeError: there is no memory for it.
        """
        data = _memory(entry)
        read_box(self.source, self.source.arrays[entry.name], Box.whole(data.shape), data)
        return data.tobytes()


def _read_together(source: ChunkSource) -> Callable[[Int64s], Int64s]:
    """Which chunks one request brings: several of a zarr shard, in a bucket."""
    # Imported here: a load by one process does without.
    from xckpt.core.geometry.shards.together import together
    from xckpt.storage.chunks.range_reads import RANGE_BYTES

    sharded: list[ZarrArray] = []
    for leaf in source.manifest.leaves if source.root.driver != "file" else ():
        if isinstance(leaf, TensorEntry):
            shard = leaf.shard if leaf.pieces is None else leaf.pieces.shard
            sharded += source.arrays[leaf.name] if shard is not None else ()
    return together(sharded, RANGE_BYTES)


def _is_long(entry: Entry) -> bool:
    """Whether the content of a value is stored beside the manifest."""
    return isinstance(entry, BytesEntry) and entry.size > 0


def _memory(entry: Entry) -> NDArray[np.generic]:
    """Memory for the content of a long value.

    Raises:
        LeafTooLargeError: there is none.
    """
    assert isinstance(entry, BytesEntry)
    return allocate((entry.size,), np.dtype(np.uint8), entry.name)
