"""Copies of many arrays in one region of host memory, made by several threads.

`HostCopies.copy` takes parts of a state, of any strides, overlapping or the same, and copies each:

1. Parts that overlap belong to one stretch of memory. It is copied once, as bytes, so that views of
   one storage stay views of one copy; unless it has more bytes than its parts have elements (every
   tenth column, say): then each part is copied on its own.
2. One region has room for all. Each copy lies in it as its original lies in memory, relative to a
   cache line.
3. The threads copy slabs of a few megabytes. Copying releases the interpreter's lock, so the caller
   builds what it needs over the copies meanwhile.

New memory costs more than the copying (`xckpt.engine.fresh_memory`). `HostCopies.prepare` pays for
it ahead of time; a region that is kept pays once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from xckpt.core.leaf import Part, RemotePart
from xckpt.engine.fresh_memory import (
    CACHE_LINE,
    HUGE_PAGE,
    PAGE,
    Bytes,
    offer,
    populate,
    use_huge_pages,
)
from xckpt.engine.ranks.alive import AwaitedThread
from xckpt.options import processors

Array = NDArray[np.generic]
Result = TypeVar("Result")

SLAB = 4 * HUGE_PAGE
"""Bytes that a thread copies at a time."""
MOST_THREADS = 16
"""Beyond this, more threads do not make memory faster."""
ALONE_BYTES = 1 << 20
"""Up to this size, starting a thread costs more than it gains."""


@dataclass(frozen=True, slots=True)
class _Memory:
    """A stretch of this process's memory, for NumPy to look at."""

    low: int
    size: int

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {"version": 3, "shape": (self.size,), "typestr": "|u1", "data": (self.low, True)}


@dataclass(frozen=True, slots=True)
class _Block:
    """Bytes of the region for one stretch of memory, or for one part on its own."""

    offset: int
    """Where it begins in the region."""
    size: int
    source: _Memory | Part


class _Extent(NamedTuple):
    """Where a part lies in memory."""

    low: int
    high: int
    """Address after its last byte."""
    first: int
    """Address of its first element."""
    part: Array
    key: object


@dataclass(slots=True)
class _RegionPlan:
    """Which bytes of the region hold what; nothing is copied yet."""

    keys: list[object]
    """The parts' keys, in order."""
    size: int = 0
    blocks: list[_Block] = field(default_factory=list[_Block])
    places: dict[object, tuple[int, tuple[int, ...] | None]] = field(
        default_factory=dict[object, tuple[int, tuple[int, ...] | None]]
    )
    """Key of a part -> where its first element is in the region, and its strides; None: C order."""

    def add(self, source: _Memory | Part, size: int, skew: int = 0) -> int:
        """Take room that begins ``skew`` bytes into a cache line."""
        offset = -(-self.size // CACHE_LINE) * CACHE_LINE + skew
        self.blocks.append(_Block(offset, size, source))
        self.size = offset + size
        return offset


class HostCopies:
    """Copies of arrays, in memory that is new each time or kept from one time to the next.

    Args:
        allocate: gives at least as many bytes as asked for, at the beginning of a cache line.
        keep: have the next `copy` overwrite the memory of this one.

    Example:
        >>> from xckpt.engine.fresh_memory import fresh
        >>> base = np.arange(6)
        >>> whole, odd = HostCopies(fresh).copy([base, base[1::2]], lambda copies: copies)
        >>> base[:] = 0
        >>> whole[1] = 7
        >>> odd
        array([7, 3, 5])
    """

    def __init__(self, allocate: Callable[[int], Bytes], *, keep: bool = False) -> None:
        self._allocate = allocate
        self._keep = keep
        self._region: Bytes | None = None
        self._plan: _RegionPlan | None = None
        """The last plan: with 1 MiB a part, making one takes as long as a tenth of the copying."""
        self._touched = False
        """Whether the region has its pages."""
        self._huge = False
        """Whether they are huge pages, if the system has any."""

    def copy(self, parts: Sequence[Part], build: Callable[[list[Array]], Result]) -> Result:
        """Copy all parts.

        Args:
            parts: what to copy.
            build: is called with the copies, in the parts' order, while they are being filled; so
                it may refer to them, but not read them.

        Returns:
            What ``build`` returned; all is copied.
        """
        keyed = [(part, _key(part)) for part in parts]
        plan = self._plan_for(keyed)
        region = self._memory(plan.size)
        with ExitStack() as begun:  # after a failure, too: nothing may write kept memory after it
            for block in plan.blocks:
                if isinstance(block.source, RemotePart):
                    block.source.start(_in_order(region, block.offset, block.source))
                    begun.callback(block.source.wait)
            result = _run(
                list(_copies(plan, region, new=not self._touched)),
                lambda: build([_view(part, key, plan, region) for part, key in keyed]),
                threads=_threads_for(plan.size),
            )
            self._touched = True
        return result

    def prepare(self, parts: Sequence[Part]) -> None:
        """Have the kernel give pages to the memory that these parts will take."""
        region = self._memory(_plan_region([(part, _key(part)) for part in parts]).size)
        self._use_huge_pages(region)
        clear = [partial(region[a : a + SLAB : PAGE].fill, 0) for a in range(0, region.size, SLAB)]
        _run(clear, lambda: None, threads=_threads_for(region.size))
        self._touched = True

    def release(self) -> None:
        """Drop the memory; it lives on while copies in it do."""
        self._region = self._plan = None

    def offer(self) -> None:
        """Let the system take the pages of kept memory when it needs them; the copies are void.

        Pages that it has not taken serve the next `copy`.
        """
        if self._region is not None:
            self._use_huge_pages(self._region)
            offer(self._region)

    def _use_huge_pages(self, region: Bytes) -> None:
        if not self._huge:
            use_huge_pages(region)
            self._huge = True

    def _plan_for(self, keyed: Sequence[tuple[Part, object]]) -> _RegionPlan:
        """The last plan if these are the same parts."""
        keys = [key for _, key in keyed]
        if self._plan is not None and self._plan.keys == keys:
            return self._plan
        plan = _plan_region(keyed)
        # A block that refers to a part would keep it alive.
        lasting = all(isinstance(block.source, _Memory) for block in plan.blocks)
        self._plan = plan if self._keep and lasting else None
        return plan

    def _memory(self, size: int) -> Bytes:
        if not size:
            return np.empty(0, np.uint8)
        if not self._keep:
            self._touched = False
            return self._allocate(size)
        if self._region is None or not size <= self._region.size <= 2 * size:
            self._region = None  # Before the new one, so that there are never two.
            self._touched = self._huge = False
            self._region = self._allocate(size)
        return self._region


def _plan_region(keyed: Sequence[tuple[Part, object]]) -> _RegionPlan:
    """Room for every part, once."""
    plan = _RegionPlan([key for _, key in keyed])
    extents: list[_Extent] = []
    for key, part in {key: part for part, key in keyed if 0 not in part.shape}.items():
        if isinstance(part, RemotePart):
            size = part.dtype.itemsize * math.prod(part.shape)
            plan.places[key] = plan.add(part, size), None
        else:
            extents.append(_extent(part, key))
    extents.sort(key=lambda extent: (extent.low, extent.high))
    for stretch in _stretches(extents):
        low, high = stretch[0].low, max([extent.high for extent in stretch])
        if high - low <= sum([extent.part.nbytes for extent in stretch]):
            start = plan.add(_Memory(low, high - low), high - low, low % CACHE_LINE)
            for extent in stretch:
                plan.places[extent.key] = start + extent.first - low, extent.part.strides
        else:
            for extent in stretch:
                plan.places[extent.key] = plan.add(extent.part, extent.part.nbytes), None
    return plan


def _stretches(extents: Iterable[_Extent]) -> Iterator[list[_Extent]]:
    """Extents in ascending order, overlapping ones grouped."""
    together: list[_Extent] = []
    high = 0
    for extent in extents:
        if together and extent.low >= high:
            yield together
            together = []
        together.append(extent)
        high = max(high, extent.high)
    if together:
        yield together


def _extent(part: Array, key: object) -> _Extent:
    first = low = high = part.__array_interface__["data"][0]
    if part.flags.c_contiguous:
        return _Extent(low, low + part.nbytes, first, part, key)
    for size, stride in zip(part.shape, part.strides, strict=True):
        low += min(0, (size - 1) * stride)
        high += max(0, (size - 1) * stride)
    return _Extent(low, high + part.itemsize, first, part, key)


def _key(part: Part) -> object:
    """Equal for parts that are the same elements of the same memory."""
    if isinstance(part, RemotePart):
        return id(part)
    return part.__array_interface__["data"][0], part.shape, part.strides, part.dtype


def _view(part: Part, key: object, plan: _RegionPlan, region: Bytes) -> Array:
    """A part's copy, with the part's strides where its stretch is copied as bytes."""
    place = plan.places.get(key)
    if place is None:
        return np.empty(part.shape, part.dtype)
    return np.ndarray(part.shape, part.dtype, region, place[0], place[1])


def _in_order(region: Bytes, offset: int, part: Part) -> Array:
    """The part's copy in C order."""
    return np.ndarray(part.shape, part.dtype, region, offset)


def _copies(plan: _RegionPlan, region: Bytes, *, new: bool) -> Iterator[Callable[[], None]]:
    """The copying in slabs, the largest blocks first, so that all threads end together."""
    slab: list[tuple[Array, Array]] = []
    size = 0
    for block in sorted(plan.blocks, key=lambda block: block.size, reverse=True):
        if isinstance(block.source, RemotePart):
            continue
        if isinstance(block.source, np.ndarray):
            target = _in_order(region, block.offset, block.source)
            yield partial(_copy_all, [(target, block.source)], new)
            continue
        source = np.asarray(block.source)
        target = region[block.offset : block.offset + block.size]
        for start in range(0, block.size, SLAB):
            slab.append((target[start : start + SLAB], source[start : start + SLAB]))
            size += slab[-1][0].nbytes
            if size >= SLAB // 2:
                yield partial(_copy_all, slab, new)
                slab, size = [], 0
    if slab:
        yield partial(_copy_all, slab, new)


def _copy_all(pairs: Iterable[tuple[Array, Array]], new: bool) -> None:
    for target, source in pairs:
        if new:
            populate(target)
        np.copyto(target, source, casting="no")


def _threads_for(size: int) -> int:
    return min(MOST_THREADS, processors()) if size > ALONE_BYTES else 0


def _run(
    tasks: Sequence[Callable[[], None]], meanwhile: Callable[[], Result], *, threads: int
) -> Result:
    """Run tasks in threads and ``meanwhile`` in this one, or all here if 0; raise a failure."""
    if not threads:
        for task in tasks:
            task()
        return meanwhile()
    waiting, failures = iter(tasks), list[BaseException]()

    def work() -> None:
        try:
            for task in waiting:
                if not failures:
                    task()
        except BaseException as error:
            failures.append(error)

    def join() -> None:
        for thread in started:
            thread.join()

    # No executor: a handler of signals that saves could wait for ever (`xckpt.storage.budget`).
    started = [AwaitedThread(work, "xckpt-copy") for _ in range(threads)]
    try:
        for thread in started:
            thread.start()
        result = meanwhile()
        join()
    except BaseException as error:
        failures.append(error)  # an interrupt, too: no thread may write kept memory after it
        join()
        raise
    if not failures:
        return result
    raise failures[0]
