"""Carrying out one rank's reads: every chunk once, straight to where it is wanted if possible.

1. `requests_of` splits all read items into chunks: which parts of which chunks go where. Long
   values come after the tensors, as destinations of their own.
2. A `Destination` asks the planner where an item goes when its first chunk comes, and commits the
   item when its last part has landed.
3. `read_items` reads all chunks through one `ChunkWindow`. With an `Exchange`, chunks that other
   ranks want too are read into shared memory by one rank and delivered by each.
4. `read_boxes` reads parts of tensors for slices and for other formats.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import dtype_name
from xckpt.core.geometry.box import Box, Boxes
from xckpt.core.geometry.box_lookup import intersect
from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.plan.host_reads import SharedReads
from xckpt.core.plan.items import ReadItem
from xckpt.core.plan.load import LoadPlanner
from xckpt.core.plan.reads.items import ReadItems
from xckpt.core.plan.wanted import Countdown
from xckpt.core.text.arguments import named
from xckpt.errors import PlanError
from xckpt.options import LoadOptions
from xckpt.storage.array import SMALL_BYTES
from xckpt.storage.budget import ProgressCounter
from xckpt.storage.chunks.chunk import ChunkSource, allocate
from xckpt.storage.chunks.requests import UNPACKED, ChunkRequest, ChunkRequests
from xckpt.storage.chunks.window import ChunkWindow
from xckpt.storage.host.exchange import Exchange
from xckpt.storage.host.shared_blocks import NO_BLOCKS, PackBlocks, SharedBlocks
from xckpt.storage.host.shared_chunks import SharedChunks
from xckpt.storage.integrity import DOCUMENTS_IN_FLIGHT, RequestedDocument

IN_FLIGHT = 4
"""Chunks that `read_box` has in flight."""


def requests_of(source: ChunkSource, items: ReadItems, values: Iterable[str] = ()) -> ChunkRequests:
    """The chunks that items read; destination ``n`` is that of item ``n``.

    Args:
        source: the checkpoint's chunks.
        items: read tensors.
        values: the names of long values, whose destinations come next.
    """
    stored = source.arrays
    requests = ChunkRequests(source.memory_bytes, source.host_ranks, stored)
    is_one = (stored.nbytes > 0).tolist()
    rows = zip(items.names, items.rows, strict=True)
    whole = iter(stored.numbers_of([name for name, row in rows if not isinstance(row, ReadItem)]))
    for row in items.rows:
        if isinstance(row, ReadItem):
            array = source.arrays[row.storage_index.fqn][row.storage_index.index or 0]
            requests.add(array, Box(row.storage_offsets, row.lengths))
        elif is_one[leaf := next(whole)]:
            requests.add_whole(leaf)
        else:
            (array,) = stored.at(leaf)
            requests.add(array, Box.whole(array.shape))
    for name in values:
        (array,) = source.arrays[name]
        requests.add(array, Box.whole(array.shape))
    return requests


class Destination:
    """Where an item's elements go; calls from several threads are fine.

    Args:
        planner: resolves the item's destination, and is called when all has landed.
        item: the read item.
        dtype: the element type of what is read.
        missing: how much has not come yet, in the unit that `landed` counts.
    """

    def __init__(
        self, planner: LoadPlanner, item: ReadItem, dtype: np.dtype[np.generic], missing: int
    ) -> None:
        self.item = item
        self.is_scratch: bool = False
        """Whether the memory is copied to its final place; known once it is resolved."""
        self._planner = planner
        self._dtype = dtype
        self._missing = Countdown(missing)
        self._resolved: object = None
        """What the planner has returned."""
        self._memory: NDArray[np.generic] | None = None
        self._lock = threading.Lock()

    def memory(self) -> NDArray[np.generic]:
        """The destination as host memory, resolved once.

        Raises:
            PlanError: the planner gave something of other sizes.
            LeafTooLargeError: there is no memory.
        """
        with self._lock:
            if self._memory is None:
                self._memory = self._resolve()
            return self._memory

    def _resolve(self) -> NDArray[np.generic]:
        item, adapters = self.item, self._planner.adapters
        self._resolved = self._planner.resolve_tensor(item)
        memory, got = adapters.writable_numpy(self._resolved), ""
        self.is_scratch = memory is None
        if memory is None:
            kind = type(self._resolved).__name__
            got = "" if adapters.is_leaf(self._resolved) else named(kind)
            memory = allocate(item.lengths, self._dtype, item.dest_index.fqn)
        usual = memory.dtype == self._dtype
        if memory.shape != tuple(item.lengths) or not (usual or dtype_name(memory.dtype)):
            got = f"{memory.dtype} of shape {memory.shape}"
        got = got or ("" if memory.flags.writeable else "memory that cannot be written")
        if got:
            what = f"resolve_tensor must return {item.lengths} elements, got {got}"
            raise PlanError(f"{item.dest_index.fqn}: {what}")
        return memory

    def landed(self, count: int = 1) -> bool:
        """Count what has come; the last of it commits the item and returns True."""
        if self._missing.land(count):
            return False
        memory, resolved = self._memory, self._resolved
        assert memory is not None
        if self.is_scratch:
            self._planner.adapters.copy_into(resolved, memory)
        self._planner.commit_tensor(self.item, resolved)
        self._memory = self._resolved = None
        return True


class _Destinations:
    """The destinations of a load's items, each made when its first chunk comes.

    None is made for all of a leaf, if the planner leaves it to the leaf's target. The memory of
    long values is given.
    """

    def __init__(
        self,
        planner: LoadPlanner,
        items: ReadItems,
        requests: ChunkRequests,
        values: Sequence[NDArray[np.generic]],
    ) -> None:
        self._planner = planner
        self._items = items
        self._requests = requests
        self._tensors, self._values = len(items), values
        self._missing: list[int] = requests.parts.tolist()
        """How many chunks of each have not landed yet."""
        self._made: dict[int, Destination] = {}
        self._lock = threading.Lock()

    def memory(self, number: int) -> NDArray[np.generic]:
        """The memory of a destination; see `Destination.memory`."""
        if number >= self._tensors:
            return self._values[number - self._tensors]
        made = self._made.get(number)
        if made is None:
            memory = self._of_target(number)
            if memory is not None:
                return memory
            with self._lock:
                made = self._made.get(number)
                if made is None:
                    about = self._items[number], self._requests.dtype(number), self._missing[number]
                    made = self._made[number] = Destination(self._planner, *about)
        return made.memory()

    def _of_target(self, number: int) -> NDArray[np.generic] | None:
        """The memory of a leaf that is read as a whole; None if the planner must be asked."""
        sizes = self._items.rows[number]
        target = self._planner.whole_target(self._items.names[number])
        if target is None or not isinstance(sizes, tuple):
            return None
        try:
            memory = self._planner.adapters.writable_numpy(target.buffer(0))
        except MemoryError:  # the planner names the leaf
            return None
        return memory if memory is not None and memory.shape == sizes else None

    def landed(self, number: int) -> None:
        """Count one more chunk of a destination."""
        if number >= self._tensors:
            return
        made = self._made.get(number)
        if made is not None:
            if made.landed():
                del self._made[number]
            return
        with self._lock:
            self._missing[number] -= 1
            is_last = not self._missing[number]
        if is_last:
            target = self._planner.whole_target(self._items.names[number])
            assert target is not None
            target.commit(0)


def read_items(
    source: ChunkSource,
    items: ReadItems,
    requests: ChunkRequests,
    planner: LoadPlanner,
    options: LoadOptions,
    share: SharedReads,
    exchange: Exchange | None,
    values: Sequence[NDArray[np.generic]] = (),
    blocks: PackBlocks = NO_BLOCKS,
) -> None:
    """Read the chunks of items; those that other ranks publish come through the exchange.

    ``values`` are the memory of the long values among the requests; ``blocks`` those of the packs
    that this rank would share.

    After a failure nothing more is written, so that the targets can be loaded from elsewhere.

    Raises:
        CorruptCheckpointError: a chunk or zarr.json is not what was saved.
        StorageError: the storage refused, or another rank of this host was lost.
    """
    destinations = _Destinations(planner, items, requests, values)
    total = int(requests.nbytes.sum())
    elsewhere = share.elsewhere.union(requests.numbers[blocks.rows_of(share.elsewhere)].tolist())
    # Chunks that are handed over take the same number of bytes again, in shared memory.
    hands_over = exchange is not None and bool(share.own or share.receives)
    budget = max(1, requests.budget // (1 + hands_over))
    with ChunkWindow(
        source,
        destinations.memory,
        destinations.landed,
        threads=options.threads,
        budget=budget,
        progress=ProgressCounter(total, options.progress),
    ) as window:
        if exchange is not None:
            shared = SharedBlocks(window, requests, blocks, exchange, share)
            SharedChunks(source, requests, window, exchange, share, shared).start(budget)
        read_requests(window, requests, elsewhere)
    if exchange is not None:
        exchange.finish()
        window.casts.check()  # of what other ranks have brought since


def read_requests(
    window: ChunkWindow, requests: ChunkRequests, elsewhere: Collection[int] = ()
) -> None:
    """Read chunks, large ones first, and compare the zarr.json of their arrays meanwhile.

    Args:
        window: reads them.
        requests: what is wanted.
        elsewhere: numbers of chunks that are not read here.
    """
    pool, integrity = window.pool, window.source.integrity
    here = ~np.isin(requests.numbers, np.array([*elsewhere], np.int64))
    packed, small = requests.places != UNPACKED, requests.nbytes <= SMALL_BYTES
    large = deque(np.flatnonzero(here & ~packed & ~small).tolist())
    together: list[ChunkRequest] = []
    while large and pool.has_room(int(requests.held[large[0]])) and not pool.failed:
        request = requests.at(large.popleft())
        together += [] if window.submit_alone(request) else [request]
    # Now that large chunks keep the storage busy.
    wanted, documents = requests.unpacked, list[RequestedDocument]()
    if window.source.root.driver == "file" and not pool.single:
        pool.submit(partial(integrity.check_documents, wanted))
        wanted = iter(())
    else:
        documents = integrity.request_documents(islice(wanted, DOCUMENTS_IN_FLIGHT))
    rows = (*np.flatnonzero(here & ~packed & small).tolist(), *large)
    window.submit_all(chain(together, map(requests.at, rows)))
    if (here & packed).any():
        from xckpt.storage.packs.read_packs import read_rows

        read_rows(window, requests, np.flatnonzero(here & packed))
    window.finish_queue()
    integrity.check(documents)
    integrity.check_documents(wanted)


def read_box(
    source: ChunkSource,
    arrays: Sequence[ZarrArray],
    box: Box,
    into: NDArray[np.generic],
    *,
    threads: int | None = 1,
    budget: int = 0,
) -> None:
    """Read a box of a tensor, verified.

    Args:
        source: the checkpoint's chunks.
        arrays: the zarr arrays that hold the tensor.
        box: which elements, counted from the tensor's first.
        into: writable memory of the box's sizes and the tensor's dtype, of any strides.
        threads: that read; 1 is the caller's own, None suits the machine.
        budget: bytes of scratch memory; by default those of a few chunks.

    Raises:
        CorruptCheckpointError: a chunk or zarr.json is not what was saved.
        StorageError: the storage refused, or the checkpoint was replaced meanwhile.
    """
    read_boxes(source, [(arrays, box, into)], threads=threads, budget=budget)


def read_boxes(
    source: ChunkSource,
    wanted: Iterable[tuple[Sequence[ZarrArray], Box, NDArray[np.generic]]],
    *,
    threads: int | None = 1,
    budget: int = 0,
) -> None:
    """Read boxes of several tensors, each chunk once; see `read_box`.

    Args:
        source: the checkpoint's chunks.
        wanted: of each box the arrays that hold its tensor, where it is, and its memory.
        threads: see `read_box`.
        budget: see `read_box`.
    """
    requests = ChunkRequests(source.memory_bytes)
    views: list[NDArray[np.generic]] = []
    for arrays, box, into in wanted:
        stored = Boxes.of([(array.offset, array.shape) for array in arrays], rank=len(box.sizes))
        _, numbers, shared = intersect(Boxes.of([(box.offsets, box.sizes)]), stored)
        for number, part in zip(numbers.tolist(), shared, strict=True):
            requests.add(arrays[number], part.relative_to(arrays[number].offset))
            views.append(into[(*part.slices(box.offsets), ...)])
    budget = min(budget, requests.budget) or IN_FLIGHT * int(requests.held.max(initial=0))
    with (
        source.integrity.noticing_replacement(),
        ChunkWindow(source, views.__getitem__, threads=threads, budget=budget) as window,
    ):
        source.integrity.prepare_ranges(*requests.ranges())
        read_requests(window, requests)
