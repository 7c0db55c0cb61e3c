"""New host memory, and the pages for it.

The kernel provides a page when it is first touched, and clears it first. That costs several times
as much as the copy into it; only memory that has its pages already (`HostCopies.prepare`) avoids
it. Three fixed rules keep it low:

1. Memory that is touched for the first time gets pages of the system's own choice. A huge page
   costs less than the 512 small ones in its place on some machines, and four times as much in a
   virtual machine that returns free memory to its host.
2. A thread has the pages of a slab populated in one call just before it copies to them, so that the
   cleared pages are in its processor's cache (`populate`).
3. Memory that is kept gets huge pages once, away from the caller's wait (`use_huge_pages`). In them
   memory that was offered to the system (`offer`) is written again at the speed of a copy.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

CACHE_LINE = 64
PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20
POPULATE_WRITE = 23
"""What Linux calls MADV_POPULATE_WRITE since 5.14; Python has no name for it."""
COLLAPSE = 25
"""What Linux calls MADV_COLLAPSE since 6.1."""
SMALLEST = 64 << 10
"""Bytes below which a call to the kernel costs more than it saves."""


def fresh(size: int) -> Bytes:
    """A region of new memory that begins at a cache line; a large one, at a huge page.

    It goes back to the system with the last reference to it.

    Raises:
        MemoryError: there is none.

    Example:
        >>> fresh(3 << 20).shape
        (3145728,)
    """
    if size < HUGE_PAGE or not hasattr(mmap, "MAP_ANONYMOUS"):
        padded = np.empty(size + CACHE_LINE, np.uint8)
        return padded[-padded.ctypes.data % CACHE_LINE :][:size]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    # Whole huge pages, and one more so that the region can begin with one.
    try:
        pages = mmap.mmap(-1, (-(-size // HUGE_PAGE) + 1) * HUGE_PAGE, flags=flags)
    except OSError as error:
        raise MemoryError(f"no memory for {size:,} bytes: {error.strerror}") from error
    region = np.frombuffer(pages, np.uint8)
    return region[-region.ctypes.data % HUGE_PAGE :][:size]


def populate(target: NDArray[np.generic]) -> None:
    """Have the kernel provide the pages of a C-contiguous part of `fresh` memory; contents stay."""
    if sys.platform == "linux" and target.nbytes >= SMALLEST and _is_mapped(target):
        _advise(target, PAGE, POPULATE_WRITE)


def use_huge_pages(region: Bytes) -> None:
    """Put huge pages in the place of small ones, now and later; contents stay."""
    if hasattr(mmap, "MADV_HUGEPAGE") and _is_mapped(region):
        _advise(region, HUGE_PAGE, mmap.MADV_HUGEPAGE)
        _advise(region, HUGE_PAGE, COLLAPSE)


def offer(region: Bytes) -> None:
    """Let the system take a region's pages when it needs them: what they hold is void."""
    if hasattr(mmap, "MADV_FREE") and _is_mapped(region):
        _advise(region, PAGE, mmap.MADV_FREE)


def _is_mapped(memory: object) -> bool:
    """Whether this is in a large region of `fresh`."""
    if isinstance(memory, np.ndarray):
        return _is_mapped(memory.base)
    if isinstance(memory, memoryview):
        return _is_mapped(memory.obj)
    return isinstance(memory, mmap.mmap)


def _advise(target: NDArray[np.generic], unit: int, advice: int) -> None:
    """Give advice on the pages of that size that hold a part of the target.

    A kernel that does not know the advice refuses it, and the copying goes on without.
    """
    low = target.__array_interface__["data"][0]
    start, end = low // unit * unit, -(-(low + target.nbytes) // unit) * unit
    _madvise()(start, end - start, advice)


@cache
def _madvise() -> Callable[[int, int, int], int]:
    # `mmap.madvise` holds the interpreter's lock meanwhile.
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
