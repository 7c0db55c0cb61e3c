"""What a caller can tune: sizes, threads, memory, progress."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["LoadOptions", "Progress", "SaveOptions"]

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Progress:
    """How far this rank has come."""

    done: int
    """Bytes written or read and verified."""
    total: int
    """Bytes to write or read."""


def default_threads() -> int:
    """Threads that hash and wait for storage: twice the processors that this process may use.

    Example:
        >>> default_threads() >= 4
        True
    """
    return min(32, max(4, 2 * len(os.sched_getaffinity(0))))


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Options of a save.

    Example:
        >>> SaveOptions(chunk_bytes=1 << 20).shard_bytes
        0
    """

    chunk_bytes: int = 8 * MEBIBYTE
    """Target for a chunk, bytes: what a reader reads and verifies at once."""
    shard_bytes: int = 0
    """Target for a zarr shard (one object of several chunks), bytes; 0 for an object a chunk."""
    crc32c: bool = False
    """Also put a checksum into each chunk, for readers that know no manifest; costs speed."""
    threads: int | None = None
    """Threads that hash and write; None for `default_threads`."""
    memory_bytes: int = 256 * MEBIBYTE
    """Bytes in flight at a time; a single shard above it goes alone."""
    compare_replicas: bool = False
    """Refuse plain tensors and values that differ between the ranks that hold them."""
    serialise: Callable[[object], bytes] | None = None
    """Turns a leaf of an unknown type into bytes; by default such a leaf is refused by name."""
    progress: Callable[[Progress], None] | None = None
    """Called with this rank's progress, from worker threads, one call at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of a load.

    Example:
        >>> LoadOptions().memory_bytes == 256 << 20
        True
    """

    threads: int | None = None
    """Threads that read and verify; None for `default_threads`."""
    memory_bytes: int = 256 * MEBIBYTE
    """Bytes of scratch memory at a time; a single chunk above it goes alone."""
    memory_map: bool = True
    """Read local files through memory maps, which saves a copy; turn it off on network file
    systems."""
    share_reads: bool = True
    """Ranks of one host read each chunk once and share it through memory."""
    progress: Callable[[Progress], None] | None = None
    """Called with this rank's progress, from worker threads, one call at a time."""
