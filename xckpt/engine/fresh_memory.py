"""New anonymous memory, and the pages for it at the best price that the machine has.

The kernel gives a page when it is first touched, and clears it before. That costs more than a copy,
and how much depends on the machine and on the size of the pages: where all memory is at hand, a
huge page is cheaper than the 512 small ones in its place. In a virtual machine that returns free
memory to its host, whole huge pages are what has been returned, and what must be fetched one by
one; small pages come from between what is in use, and cost a third.

`FirstTouch` finds out while it copies, stretch by stretch:

1. It tells the kernel how large the pages of the stretch shall be, and asks for all of them in one
   call; page by page, on demand, takes longer.
2. It copies at once, while the cleared pages are in the processor's cache.
3. The first stretches try both sizes. From then on each takes the size that has cost less so far.

Small pages cost more later: memory that was offered to the system (MADV_FREE) and is written to
again takes 1.6 times as long. `join_pages` puts huge ones in their place, which costs as much as to
have touched those first; a save does so once, at its end, while training goes on.

What this can reach depends on what the host has taken back. On a virtual machine with two
processors, copies of 1 GiB into new pages took, beside a copy between warm memory: in small pages
2.1 to 4.2 times as long; in huge ones 1.7 to 3.3 times where as much had been freed just before,
and 7 to 9 times three seconds later; by writing to a memory file, whose pages are not cleared, 2.9
to 3.6 times; by ``torch.clone`` 3.2 to 4.6 times. Whole first saves took as long as ``torch.clone``
of the state, 1.2 times. Only memory that is there before the save is faster: `prepare`.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from functools import cache
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CACHE_LINE",
    "HUGE_PAGE",
    "PAGE",
    "FirstTouch",
    "ask_huge_pages",
    "fresh",
    "join_pages",
    "offer",
]

Bytes = NDArray[np.uint8]

CACHE_LINE = 64
PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20
POPULATE_WRITE = 23
"""What Linux calls MADV_POPULATE_WRITE since 5.14; Python has no name for it."""
COLLAPSE = 25
"""What Linux calls MADV_COLLAPSE since 6.1."""
TRIAL = 8 << 20
"""Bytes that are written to pages of either size before they are compared."""
SMALLEST = 64 << 10
"""For less than so many bytes the kernel is not asked ahead."""


def fresh(size: int) -> Bytes:
    """A region of new memory, at the beginning of a cache line; a large one, of a huge page.

    It goes back to the system when nobody refers to it any more.

    Example:
        >>> fresh(3 << 20).shape
        (3145728,)
    """
    if size < HUGE_PAGE or not hasattr(mmap, "MAP_ANONYMOUS"):
        padded = np.empty(size + CACHE_LINE, np.uint8)
        return padded[-padded.ctypes.data % CACHE_LINE :][:size]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    # Whole huge pages, and one more so that the region can begin with one.
    pages = mmap.mmap(-1, (-(-size // HUGE_PAGE) + 1) * HUGE_PAGE, flags=flags)
    region = np.frombuffer(pages, np.uint8)
    return region[-region.ctypes.data % HUGE_PAGE :][:size]


def ask_huge_pages(region: Bytes) -> None:
    """Have what is yet to be touched of a region come in huge pages."""
    if _has_page_sizes(region):
        _advise(region, HUGE_PAGE, mmap.MADV_HUGEPAGE)


def join_pages(region: Bytes) -> None:
    """Put huge pages in the place of small ones; what they hold stays."""
    if _has_page_sizes(region):
        _advise(region, HUGE_PAGE, mmap.MADV_HUGEPAGE)
        _advise(region, HUGE_PAGE, COLLAPSE)


def offer(region: Bytes) -> None:
    """Let the system take a region's pages when it needs them: what they hold is void."""
    if _is_mapped(region) and hasattr(mmap, "MADV_FREE"):
        _advise(region, PAGE, mmap.MADV_FREE)


def _has_page_sizes(region: Bytes) -> bool:
    """Whether advice on the size of this region's pages makes sense."""
    return hasattr(mmap, "MADV_HUGEPAGE") and _is_mapped(region)


def _is_mapped(region: Bytes) -> bool:
    """Whether this is a large region of `fresh`."""
    base: object = region
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return isinstance(base, mmap.mmap)


class FirstTouch:
    """Writing to memory that has no pages yet; for several threads at a time.

    Args:
        region: what `fresh` gave. Other memory is taken as it is.
        clock: seconds.

    Example:
        >>> region = fresh(3 << 20)
        >>> FirstTouch(region).fill(region, lambda: region.fill(7))
        >>> int(region.min())
        7
    """

    def __init__(self, region: Bytes, clock: Callable[[], float] = perf_counter) -> None:
        self._advisable = _has_page_sizes(region)
        self._clock = clock
        self._lock = threading.Lock()
        self._sizes = {True: 0, False: 0}
        """Bytes written to huge pages and to small ones."""
        self._seconds = {True: 0.0, False: 0.0}

    def fill(self, target: NDArray[np.generic], write: Callable[[], object]) -> None:
        """Have ``write`` touch every page of a C-contiguous part of the region."""
        if not self._advisable or target.nbytes < SMALLEST:
            write()
            return
        huge = self.prefers_huge_pages()
        start = self._clock()
        _advise(target, HUGE_PAGE, mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        _advise(target, PAGE, POPULATE_WRITE)
        write()
        seconds = self._clock() - start
        with self._lock:
            self._sizes[huge] += target.nbytes
            self._seconds[huge] += seconds

    def prefers_huge_pages(self) -> bool:
        """Whether the next stretch goes into huge pages."""
        with self._lock:
            if min(self._sizes.values()) < TRIAL:
                return self._sizes[True] <= self._sizes[False]
            return self._seconds[True] * self._sizes[False] <= (
                self._seconds[False] * self._sizes[True]
            )


def _advise(target: NDArray[np.generic], unit: int, advice: int) -> None:
    """Give advice on the pages of that size that hold a part of the target.

    A kernel that does not know the advice refuses it, and the copying that follows does without.
    """
    low = target.__array_interface__["data"][0]
    start, end = low // unit * unit, -(-(low + target.nbytes) // unit) * unit
    _madvise()(start, end - start, advice)


@cache
def _madvise() -> Callable[[int, int, int], int]:
    # `mmap.madvise` has the other threads wait for the interpreter's lock.
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
