"""Thread counts for latency-bound reads: in a bucket, threads wait for answers most of the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from xckpt.storage.foreign.paths import FilePath, StoredPath

BUCKET_THREADS: Final = 16
"""Threads that read from a bucket: each holds some MiB of answers."""

T = TypeVar("T")
R = TypeVar("R")


def reading_threads(path: object) -> int | None:
    """How many threads should read from a path; None for the default, where it is local."""
    return BUCKET_THREADS if isinstance(path, StoredPath) else None


def map_concurrently(path: FilePath, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Apply a function to each item, concurrently where ``path`` is in a bucket."""
    threads = reading_threads(path)
    if threads is None or len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads) as executor:
        return list(executor.map(function, items))
