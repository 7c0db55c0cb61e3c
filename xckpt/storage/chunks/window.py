"""Many chunks in flight: the one loop over chunks, for loads, slices, verification, conversions.

1. `xckpt.storage.chunks.requests` says which chunks are wanted, and where their parts go.
2. `ChunkWindow.submit` begins a chunk as soon as the pool's budget has room for it: into its
   destination's own memory if it fills a contiguous part of it (`direct_view`), else into scratch
   memory.
3. The oldest chunk is finished when the budget is full, or by the pool's threads where there are
   processors for them: wait, verify, copy the parts to their destinations.
4. A local file that holds elements as they are (`ChunkSource.is_plain_file`) is read by a thread
   from beginning to end, without scratch memory: slab by slab where it cannot be direct.
5. After a failure nothing more is written: leaving the ``with`` block ends what is in flight.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Box
from xckpt.core.geometry.transpose import copy_bits
from xckpt.core.targets.casting import CastingCopies
from xckpt.errors import XckptError
from xckpt.storage.array import SMALL_BYTES
from xckpt.storage.budget import Pool, ProgressCounter
from xckpt.storage.chunks.chunk import ChunkSource, PendingRead, allocate
from xckpt.storage.chunks.plain_files import are_plain
from xckpt.storage.chunks.requests import ChunkRequest
from xckpt.storage.commit.file_system import suited_threads

TOGETHER = 32
"""Small files that a thread reads in a row: handing one over takes as long as reading it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    """A chunk that is being read."""

    request: ChunkRequest
    read: PendingRead
    direct: bool
    """Whether it is read straight into its destination."""


class ChunkWindow:
    """Chunks in flight. Leaving the ``with`` block ends all reads and raises the first failure.

    Args:
        source: the chunks; their arrays' digests are fetched already (`Digests.prepare`).
        memory: the memory of the destination with a number; called from several threads.
        landed: called when one more part of a destination is there and verified.
        threads: how many finish chunks; None chooses.
        budget: bytes of chunks in flight; a larger chunk goes alone.
        progress: counts the bytes of each chunk that has landed.
        on_error: takes the error of a chunk; by default the first one ends all.
    """

    def __init__(
        self,
        source: ChunkSource,
        memory: Callable[[int], NDArray[np.generic]],
        landed: Callable[[int], object] = lambda number: None,
        *,
        threads: int | None,
        budget: int,
        progress: ProgressCounter | None = None,
        on_error: Callable[[XckptError], None] | None = None,
    ) -> None:
        self.pool: Pool = Pool(threads=threads or suited_threads(source.root.folder), budget=budget)
        self.source = source
        self._memory = memory
        self._landed = landed
        self._progress = progress
        self._on_error = on_error
        self.casts: CastingCopies = CastingCopies()  # checked at the end, or by a later deliverer
        self.queue: deque[Callable[[], object]] = deque()
        """What the caller's thread will do: finish the reads that it has begun."""
        self._unsent: list[ChunkRequest] = []
        """Files that a thread reads together with the next ones."""
        self._in_flight: set[_Begun] = set()

    def submit_all(self, requests: Iterable[ChunkRequest]) -> None:
        """Begin chunks; neighbours in a pack or a shard are read together."""
        together = [request for request in requests if not self.submit_alone(request)]
        if together:
            from xckpt.storage.chunks.range_reads import read_together

            read_together(self, together)

    def submit_alone(self, request: ChunkRequest) -> bool:
        """Begin a chunk, unless it lies in a pack or a shard with others."""
        array = request.chunk.array
        if array.shard is not None and are_plain(self.source.manifest.codecs):
            return False
        if array.place is None and not self.pool.failed:
            self.submit(request)
        return array.place is None

    def fill(self, destination: int, content: memoryview, dtype: np.dtype[np.generic]) -> bool:
        """Deliver verified bytes to a destination that wants no others; False if they are cast."""
        into = self._memory(destination)
        if into.dtype != dtype:
            return False
        into[...] = np.ndarray(into.shape, dtype, content)
        self._landed(destination)
        if self._progress is not None:
            self._progress.add(len(content))
        return True

    def prepare(self, requests: Iterable[ChunkRequest]) -> None:
        """Have the caller's thread make the memory: the heap of another returns its pages."""
        for request in requests:
            for part in request.parts:
                self._memory(part.destination)

    def submit(self, request: ChunkRequest) -> None:
        """Begin a chunk as soon as the budget has room for it."""
        small = request.nbytes <= SMALL_BYTES
        if self.source.is_plain_file(request.chunk):
            self._unsent.append(request)
            if not small or len(self._unsent) >= TOGETHER:
                self._send()
            return
        self.reserve(request.held)
        try:
            begun = self._begin(request)
        except XckptError as error:
            self.pool.release(request.held)
            self.refuse(error)
            return
        if small or self.pool.alone:
            self.queue.append(partial(self._finish, begun))
        else:
            self.pool.submit(partial(self._finish, begun))

    def reserve(self, size: int) -> None:
        """Take bytes of the budget; first finish what waits for the caller's own thread."""
        while self.queue and not self.pool.has_room(size):
            self.queue.popleft()()
        self.pool.reserve(size)

    def _send(self) -> None:
        """Have a thread read the files that wait for one."""
        requests, self._unsent = self._unsent, []
        if requests:
            size = sum(request.held for request in requests)
            self.reserve(size)
            self.prepare(requests)
            self.pool.run(partial(self._read_files, requests), size)

    def _read_files(self, requests: Iterable[ChunkRequest]) -> None:
        for request in requests:
            if not self.pool.failed:
                self._read_file(request)

    def _read_file(self, request: ChunkRequest) -> None:
        """Read a chunk from its file, verify it, and bring its parts to their destinations."""
        try:
            into = self.direct_view(request)
            if into is not None:
                self.source.fill(request.chunk, into)
            else:
                with contextlib.closing(self.source.slabs(request.chunk)) as slabs:
                    for at, slab in slabs:
                        self.deliver(request, slab, at)
            self.landed(request)
        except XckptError as error:
            self.refuse(error)

    def finish_queue(self) -> None:
        """Finish the reads of the caller's thread, and send the rest to threads."""
        self._send()
        while self.queue and not self.pool.failed:
            self.queue.popleft()()

    def __enter__(self) -> ChunkWindow:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                with self.pool:
                    self.finish_queue()
                self.casts.check()
            else:
                self.pool.__exit__(kind, error, trace)
        finally:
            for begun in tuple(self._in_flight):  # a thread may have just begun another
                begun.read.give_up()

    def deliver(
        self, request: ChunkRequest, data: NDArray[np.generic], at: Box | None = None
    ) -> None:
        """Copy the parts of a chunk to their destinations.

        ``data`` are its elements, or those of the box ``at``, which counts from the chunk's first.
        """
        whole = Box.whole(request.chunk.box.sizes)
        for part in request.parts:
            if part.box is None and at is None:
                into = self._memory(part.destination)[(*part.region, ...)]
                _copy(self.casts, request, into, data, whole)
                continue
            wanted, given = part.box or whole, at or whole
            shared = wanted.meets(given)
            if shared is not None:
                target = self._memory(part.destination)[(*part.region, ...)]
                source = data[(*shared.slices(given.offsets), ...)]
                into = target[(*shared.slices(wanted.offsets), ...)]
                _copy(self.casts, request, into, source, shared)

    def landed(self, request: ChunkRequest) -> None:
        """Every part of a chunk has been delivered and verified."""
        for part in request.parts:
            self._landed(part.destination)
        if self._progress is not None:
            self._progress.add(request.nbytes)

    def _begin(self, request: ChunkRequest) -> _Begun:
        chunk, view = request.chunk, self.direct_view(request)
        made = allocate(chunk.box.sizes, chunk.dtype, chunk.array.leaf) if view is None else view
        begun = _Begun(request, self.source.begin(chunk, made), view is not None)
        self._in_flight.add(begun)
        return begun

    def direct_view(self, request: ChunkRequest) -> NDArray[np.generic] | None:
        """The destination's own memory, if the chunk can be read straight into it."""
        if len(request.parts) != 1 or request.parts[0].box is not None:
            return None
        (part,) = request.parts
        memory = self._memory(part.destination)
        view = memory[(*part.region, ...)] if part.region else memory
        suits = view.flags.c_contiguous and view.flags.aligned and view.flags.writeable
        return view if suits and view.dtype == request.chunk.dtype else None

    def _finish(self, begun: _Begun) -> None:
        """Wait for a chunk, verify it, and bring its parts to their destinations."""
        request, read = begun.request, begun.read
        try:
            self.source.finish(read)
            self._in_flight.remove(begun)  # but not after an interrupt: it still goes on
            if not begun.direct:
                self.deliver(request, read.into)
            self.landed(request)
        except XckptError as error:
            self._in_flight.discard(begun)
            self.refuse(error)
        finally:
            self.pool.release(request.held)

    def refuse(self, error: XckptError) -> None:
        """Raise the error of a chunk, unless they are collected."""
        if self._on_error is None:
            raise error
        self._on_error(error)


def _copy(
    casts: CastingCopies,
    request: ChunkRequest,
    into: NDArray[np.generic],
    source: NDArray[np.generic],
    shared: Box,
) -> None:
    """Copy elements of a chunk, those of the box ``shared`` in it, to where they go."""
    if into.dtype != source.dtype:
        chunk = request.chunk
        moved = shared.shifted(chunk.box.offsets).shifted(chunk.array.offset)
        casts.copy(chunk.array.leaf, into, source, moved.offsets)
    elif source.nbytes > SMALL_BYTES:
        copy_bits(into, source)
    else:
        np.copyto(into, source)
