"""How many threads look at files: in a bucket they wait for answers rather than work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from xckpt.storage.foreign.paths import FilePath, StoredPath

__all__ = ["soon", "waiting_threads"]

WAITING_THREADS: Final = 16
"""Threads that read from a bucket: each holds some MiB of answers."""

T = TypeVar("T")
R = TypeVar("R")


def waiting_threads(path: object) -> int | None:
    """How many threads read what is there; None for the usual, which do not wait for a bucket."""
    return WAITING_THREADS if isinstance(path, StoredPath) else None


def soon(path: FilePath, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """A function of each item; all at once where ``path`` is in a bucket, which answers slowly."""
    threads = waiting_threads(path)
    if threads is None or len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads) as executor:
        return list(executor.map(function, items))
