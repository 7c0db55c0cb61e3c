"""Reads of many items from another library's files.

1. In a bucket, threads wait for answers most of the time: there are more of them.
2. `machine_memory` bounds what must be in memory at once.
3. A fault of one item does not hide that of the next: `map_named` gathers them.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from xckpt.errors import (
    CorruptCheckpointError,
    ManifestError,
    UnsafePickleError,
    UnsupportedLeafError,
    XckptError,
)
from xckpt.storage.budget import in_threads
from xckpt.storage.foreign.paths import FilePath, StoredPath

BUCKET_THREADS: Final = 16
"""Threads that read from a bucket: each holds some MiB of answers."""

FAULTS: Final = (UnsafePickleError, ManifestError, CorruptCheckpointError, UnsupportedLeafError)
"""The errors that an item may have, the worst first."""


class _Fault(NamedTuple):
    """An error without its traceback, which would hold all that was read, in a cycle with it."""

    kind: type[XckptError]
    problems: tuple[str, ...]


T = TypeVar("T")
R = TypeVar("R")


def reading_threads(path: object) -> int | None:
    """How many threads should read from a path; None for the default, where it is local."""
    return BUCKET_THREADS if isinstance(path, StoredPath) else None


def machine_memory() -> int:
    """Bytes of memory that this process can have at most, as far as the system tells.

    Example:
        >>> machine_memory() > 1 << 27
        True
    """
    limits = [1 << 62]
    if "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space)
    with contextlib.suppress(OSError, ValueError):  # a container's limit, if it has one
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits)


def map_named(
    path: FilePath, function: Callable[[T], R], items: Iterable[tuple[str, T]]
) -> list[R]:
    """Apply a function to each item, concurrently where ``path`` is in a bucket.

    Args:
        path: where the items are.
        function: reads one.
        items: each with its name for errors.

    Raises:
        XckptError: items have one of `FAULTS`; all of the worst kind are listed.

    Example:
        >>> from pathlib import Path
        >>> map_named(Path("folder"), len, [("x", "1"), ("y", "12")])
        [1, 2]
    """

    def tried(item: T) -> R | _Fault:
        try:
            return function(item)
        except FAULTS as error:
            return _Fault(type(error), error.problems or (str(error),))

    named = list(items)
    threads = reading_threads(path)
    if threads is None or len(named) < 2:
        results = [tried(item) for _, item in named]
    else:
        results = in_threads(tried, [item for _, item in named], threads)
    for kind in FAULTS:
        problems = [
            f"{name}: {line}"
            for (name, _), fault in zip(named, results, strict=True)
            if isinstance(fault, _Fault) and issubclass(fault.kind, kind)
            for line in fault.problems
        ]
        if problems:
            raise kind.listing(f"{path} cannot be read", problems)
    return [result for result in results if not isinstance(result, _Fault)]
