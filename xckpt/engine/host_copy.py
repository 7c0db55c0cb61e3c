"""Copying many arrays into one region of host memory, at the speed of the memory.

`HostCopies.copy` takes parts of a state, of any strides, overlapping or the same, and makes a copy
of each:

1. Parts that overlap belong to one stretch of memory. It is copied once, as bytes, so that views of
   one storage stay views of one copy; unless it has more bytes than its parts have elements (every
   tenth column, say): then each part is copied on its own.
2. One region has room for all. Each copy lies in it as its original lies in memory, relative to a
   cache line.
3. Several threads copy pieces of a few megabytes that end where huge pages end, so that no two
   threads wait for the same page. Copying leaves the interpreter's lock alone, so meanwhile the
   first thread builds what it likes over the copies, and then copies too.
4. Where the region is kept and the same parts come again, steps 1 and 2 are not repeated.

What is copied to new memory for the first time waits for the kernel to clear each page, which takes
longer than the copying (`xckpt.engine.fresh_memory`). `HostCopies.prepare` pays for that ahead of
time.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from xckpt.core.leaf import Part, RemotePart
from xckpt.engine.fresh_memory import (
    CACHE_LINE,
    HUGE_PAGE,
    PAGE,
    FirstTouch,
    ask_huge_pages,
    join_pages,
    offer,
)

__all__ = ["HostCopies"]

Bytes = NDArray[np.uint8]
Arrays = list[NDArray[np.generic]]
Result = TypeVar("Result")

STEP = 4 * HUGE_PAGE
"""Bytes that a thread copies at a time."""
LONG_STEPS = 4
LONG = 8
"""The first few steps are this many times as long: they last while the first thread builds, since
whoever ends a step needs the interpreter's lock to begin another."""
FIRST_STEP = 2 * HUGE_PAGE
"""Bytes that a thread copies at a time to new memory: what its processor's caches can hold."""
MOST_THREADS = 16
"""Beyond this, more threads do not make memory faster."""
ALONE_BYTES = 1 << 20
"""Up to so many bytes, starting a thread costs more than it gains."""


@dataclass(frozen=True, slots=True)
class _Memory:
    """A stretch of this process's memory, for NumPy to look at."""

    low: int
    size: int

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {"version": 3, "shape": (self.size,), "typestr": "|u1", "data": (self.low, True)}


@dataclass(slots=True)
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
    part: NDArray[np.generic]
    key: object


@dataclass(slots=True)
class _Layout:
    """Which bytes of the region hold what; nothing is copied yet."""

    keys: list[object] = field(default_factory=list)
    """The parts that it is for."""
    size: int = 0
    blocks: list[_Block] = field(default_factory=list)
    places: dict[object, tuple[int, tuple[int, ...] | None]] = field(default_factory=dict)
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
        self._layout: _Layout | None = None
        self._touched = False
        """Whether the region has its pages."""
        self._joined = False
        """Whether they are huge ones, as far as there are any."""
        self._tasks: list[Callable[[], None]] | None = None
        """What copies by this layout into this region once it has its pages."""

    def copy(self, parts: Sequence[Part], build: Callable[[Arrays], Result]) -> Result:
        """Copy all parts.

        Args:
            parts: what to copy.
            build: is called with the copies, in the parts' order, while they are being filled; so
                it may refer to them, but not look inside.

        Returns:
            What ``build`` returned; all is copied.
        """
        layout = self._lay_out(parts)
        region = self._memory(layout.size)
        remote = [
            (block.source, _array(region, block.offset, block.source))
            for block in layout.blocks
            if isinstance(block.source, RemotePart)
        ]
        for source, target in remote:
            source.start(target)
        built: list[Result] = []

        def meanwhile() -> None:
            keys = zip(parts, layout.keys, strict=True)
            built.append(build([_view(part, layout.places.get(key), region) for part, key in keys]))

        _run(self._copying(layout, region), layout.size, meanwhile)
        self._touched = True
        for source, _ in remote:
            source.wait()
        return built[0]

    def prepare(self, parts: Sequence[Part]) -> None:
        """Have the kernel give pages to the memory that these parts will take."""
        layout = self._lay_out(parts)
        region = self._memory(layout.size)
        ask_huge_pages(region)

        def clear(piece: Bytes) -> Callable[[], None]:
            def work() -> None:
                piece[::PAGE] = 0

            return work

        _run(
            [clear(region[a:b]) for a, b in _pieces(region, 0, region.size, repeat(STEP))],
            region.size,
        )
        self._touched = True
        self._copying(layout, region)

    def release(self) -> None:
        """Let go of the memory; whoever has copies keeps them."""
        self._region = self._layout = self._tasks = None

    def offer(self) -> None:
        """Let the system take the pages of kept memory when it needs them: copies are void.

        What it has not taken by the next `copy` is as good as it was.
        """
        if self._region is None:
            return
        if not self._joined:
            join_pages(self._region)
            self._joined = True
        offer(self._region)

    def _lay_out(self, parts: Sequence[Part]) -> _Layout:
        keys = [_key(part) for part in parts]
        if self._layout is not None and self._layout.keys == keys:
            return self._layout
        layout, self._tasks = _layout(parts, keys), None
        # What refers to a part would keep it alive.
        lasting = all(isinstance(block.source, _Memory) for block in layout.blocks)
        self._layout = layout if self._keep and lasting else None
        return layout

    def _copying(self, layout: _Layout, region: Bytes) -> list[Callable[[], None]]:
        """The work of a copy; kept once it need not care for pages."""
        if not self._touched:
            return list(_tasks(layout, region, FirstTouch(region)))
        tasks = self._tasks or list(_tasks(layout, region))
        self._tasks = tasks if layout is self._layout else None
        return tasks

    def _memory(self, size: int) -> Bytes:
        if not size:
            return np.empty(0, np.uint8)
        if not self._keep:
            self._touched = False
            return self._allocate(size)
        if self._region is None or not size <= self._region.size <= 2 * size:
            self._region = self._tasks = None  # Before the new one, so that there are never two.
            self._touched = self._joined = False
            self._region = self._allocate(size)
        return self._region


def _layout(parts: Sequence[Part], keys: list[object]) -> _Layout:
    """Room for every part, once."""
    layout = _Layout(keys)
    extents: list[_Extent] = []
    seen: set[object] = set()
    for part, key in zip(parts, keys, strict=True):
        if key in seen or 0 in part.shape:
            continue
        seen.add(key)
        if isinstance(part, RemotePart):
            size = part.dtype.itemsize * math.prod(part.shape)
            layout.places[key] = layout.add(part, size), None
        else:
            extents.append(_extent(part, key))
    extents.sort(key=lambda extent: (extent.low, extent.high))
    for stretch in _stretches(extents):
        low, high = stretch[0].low, max(extent.high for extent in stretch)
        if high - low <= sum(extent.part.nbytes for extent in stretch):
            start = layout.add(_Memory(low, high - low), high - low, low % CACHE_LINE)
            for each in stretch:
                layout.places[each.key] = start + each.first - low, each.part.strides
        else:
            for each in stretch:
                layout.places[each.key] = layout.add(each.part, each.part.nbytes), None
    return layout


def _stretches(extents: Iterable[_Extent]) -> Iterator[list[_Extent]]:
    """Extents in ascending order, those together that overlap."""
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


def _extent(part: NDArray[np.generic], key: object) -> _Extent:
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


def _view(
    part: Part, place: tuple[int, tuple[int, ...] | None] | None, region: Bytes
) -> NDArray[np.generic]:
    if place is None:
        return np.empty(part.shape, part.dtype)
    return np.ndarray(part.shape, part.dtype, region, place[0], place[1])


def _array(region: Bytes, offset: int, part: Part) -> NDArray[np.generic]:
    """The part's copy in C order."""
    return np.ndarray(part.shape, part.dtype, region, offset)


def _tasks(
    layout: _Layout, region: Bytes, touch: FirstTouch | None = None
) -> Iterator[Callable[[], None]]:
    """The copying in pieces, the largest first, so that all threads end together."""
    small: list[tuple[NDArray[np.generic], NDArray[np.generic]]] = []
    waiting = 0
    long = chain(repeat(STEP * LONG, LONG_STEPS), repeat(STEP))
    steps, most = (long, STEP) if touch is None else (repeat(FIRST_STEP), FIRST_STEP)
    for block in sorted(layout.blocks, key=lambda block: block.size, reverse=True):
        if isinstance(block.source, RemotePart):
            continue
        if isinstance(block.source, np.ndarray):
            yield _copying([(_array(region, block.offset, block.source), block.source)], touch)
            continue
        source = np.asarray(block.source)
        for a, b in _pieces(region, block.offset, block.offset + block.size, steps):
            small.append((region[a:b], source[a - block.offset : b - block.offset]))
            waiting += b - a
            if waiting >= most // 2:
                yield _copying(small, touch)
                small, waiting = [], 0
    if small:
        yield _copying(small, touch)


def _copying(
    pairs: list[tuple[NDArray[np.generic], NDArray[np.generic]]], touch: FirstTouch | None
) -> Callable[[], None]:
    def copy() -> None:
        for target, source in pairs:
            write = partial(np.copyto, target, source, casting="no")
            if touch is None:
                write()
            else:
                touch.fill(target, write)

    return copy


def _pieces(region: Bytes, low: int, high: int, steps: Iterator[int]) -> Iterator[tuple[int, int]]:
    """``[low, high)`` of a region in steps that end at huge pages of its addresses."""
    skew = region.__array_interface__["data"][0] % HUGE_PAGE
    while low < high:
        end = (low + skew + next(steps)) // HUGE_PAGE * HUGE_PAGE - skew
        yield low, min(high, end)
        low = end


def _run(
    tasks: Sequence[Callable[[], None]],
    size: int,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Carry the tasks out, in several threads if that pays; this one joins after ``meanwhile``.

    Raises:
        BaseException: the first failure.
    """
    failures: list[BaseException] = []
    left = iter(tasks)
    lock = threading.Lock()

    def work() -> None:
        try:
            while not failures:
                with lock:
                    task = next(left, None)
                if task is None:
                    return
                task()
        except BaseException as error:
            failures.append(error)

    count = min(MOST_THREADS, _processors(), len(tasks)) if size > ALONE_BYTES else 0
    threads = [threading.Thread(target=work, name="xckpt-copy") for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        meanwhile()
        work()
    finally:
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


def _processors() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
