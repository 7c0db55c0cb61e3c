"""What a caller can tune: sizes, threads, memory, progress."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["LoadOptions", "Progress", "SaveOptions"]

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Progress:
    """How many bytes this rank has written or read so far."""

    done: int
    """Bytes written or read and verified."""
    total: int
    """Bytes to write or read."""


def processors() -> int:
    """Number of processors that this process may use."""
    # macOS and Windows cannot restrict a process to some of them.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_threads() -> int:
    """Threads that hash and wait for storage: twice the processors that this process may use.

    Example:
        >>> default_threads() >= 4
        True
    """
    return min(32, max(4, 2 * processors()))


MOST_CHUNK_BYTES = 1 << 29
"""A grid may exceed the target eightfold, and the format allows chunks of up to 4 GiB."""


def _check(name: str, value: int | None, least: int, most: int | None = None) -> None:
    if value is not None and (value < least or (most is not None and value > most)):
        within = f"at least {least}" if most is None else f"in [{least:,}, {most:,}]"
        raise ValueError(f"{name} must be {within}, got {value:,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Options of a save.

    Example:
        >>> SaveOptions(chunk_bytes=1 << 20).shard_bytes
        0
    """

    chunk_bytes: int = 8 * MEBIBYTE
    """Target for a chunk, bytes, at most 512 MiB: what a reader reads and verifies at once."""
    shard_bytes: int = 0
    """Target for a zarr shard (one object of several chunks), bytes, at most 512 MiB; 0 for an
    object a chunk."""
    crc32c: bool = False
    """Also store a checksum in each chunk, for readers that ignore the manifest; this costs speed.
    The coordinator's value counts for all ranks."""
    threads: int | None = None
    """Threads that hash and write; 1 is the caller's own thread, None suits the machine."""
    memory_bytes: int = 256 * MEBIBYTE
    """Bytes in flight at a time; a single shard above this limit goes alone."""
    compare_replicas: bool = False
    """Refuse plain tensors and values that differ between the ranks that hold them."""
    dimension_names: Mapping[str, Sequence[str]] | None = None
    """Leaf name -> a name for each dimension, all different: what zarr and xarray call them. Others
    are called by their sizes. The coordinator's value counts for all ranks."""
    serialise: Callable[[object], bytes] | None = None
    """Turns a leaf of an unknown type into bytes; without it such a leaf is refused by name."""
    progress: Callable[[Progress], None] | None = None
    """Called with this rank's progress, from worker threads, one call at a time."""

    def __post_init__(self) -> None:
        _check("chunk_bytes", self.chunk_bytes, 1, MOST_CHUNK_BYTES)
        _check("shard_bytes", self.shard_bytes, 0, MOST_CHUNK_BYTES)
        _check("threads", self.threads, 1)
        _check("memory_bytes", self.memory_bytes, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of a load.

    Example:
        >>> LoadOptions().memory_bytes == 256 << 20
        True
    """

    threads: int | None = None
    """Threads that read and verify; 1 is the caller's own thread, None suits the machine."""
    memory_bytes: int = 256 * MEBIBYTE
    """Bytes of scratch memory at a time; a single chunk above this limit goes alone."""
    memory_map: bool = True
    """Read local files through memory maps, which saves a copy; turn it off on network file
    systems."""
    share_reads: bool = True
    """Ranks of one host read each chunk once and share it through memory."""
    progress: Callable[[Progress], None] | None = None
    """Called with this rank's progress, from worker threads, one call at a time."""

    def __post_init__(self) -> None:
        _check("threads", self.threads, 1)
        _check("memory_bytes", self.memory_bytes, 1)
