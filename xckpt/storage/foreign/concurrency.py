"""Reads of many items from another library's files.

1. In a bucket, threads wait for answers most of the time: there are more of them.
2. What is wrong with one item does not hide what is wrong with the next: `map_named` gathers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from xckpt.errors import (
    CorruptCheckpointError,
    ManifestError,
    UnsafePickleError,
    UnsupportedLeafError,
    XckptError,
)
from xckpt.storage.foreign.paths import FilePath, StoredPath

BUCKET_THREADS: Final = 16
"""Threads that read from a bucket: each holds some MiB of answers."""

FAULTS: Final = (UnsafePickleError, ManifestError, CorruptCheckpointError, UnsupportedLeafError)
"""What can be wrong with an item, the worst first."""

T = TypeVar("T")
R = TypeVar("R")


def reading_threads(path: object) -> int | None:
    """How many threads should read from a path; None for the default, where it is local."""
    return BUCKET_THREADS if isinstance(path, StoredPath) else None


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

    def tried(item: T) -> R | XckptError:
        try:
            return function(item)
        except FAULTS as error:
            return error

    named = list(items)
    threads = reading_threads(path)
    if threads is None or len(named) < 2:
        results = [tried(item) for _, item in named]
    else:
        with ThreadPoolExecutor(threads) as executor:
            results = list(executor.map(tried, [item for _, item in named]))
    for kind in FAULTS:
        problems = [
            f"{name}: {line}"
            for (name, _), error in zip(named, results, strict=True)
            if isinstance(error, kind)
            for line in error.problems or (str(error),)
        ]
        if problems:
            raise kind.listing(f"{path}: {len(problems)} entries cannot be read", problems)
    return [result for result in results if not isinstance(result, XckptError)]
