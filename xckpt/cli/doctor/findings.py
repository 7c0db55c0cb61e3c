"""Remarks of `xckpt doctor` on its findings, without I/O.

`Remark` is one line: what will fail, be slow or differ from other storages, why, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal

import msgspec

from xckpt.core.text.shown import readable_bytes
from xckpt.storage.abilities.bucket import BucketAbilities
from xckpt.storage.abilities.local import LocalAbilities

SLOW_SYNC: Final = 0.005
"""Seconds to force a small file to disk, above which many small leaves are slow."""
SLOW_TRIP: Final = 0.1
"""Seconds of a round trip to a bucket, above which small leaves should lie together."""
LITTLE_ROOM: Final = 1 << 30
FEW_FILES: Final = 100_000
FEW_OPEN: Final = 1024
"""Files that a process may have open, below which a save of many chunks may want more."""

PACK: Final = "store small leaves together with SaveOptions(pack_bytes=1 << 18)"


class Remark(msgspec.Struct, frozen=True):
    """A conclusion from a finding."""

    kind: Literal["fails", "slow", "note"]
    text: str


class Machine(msgspec.Struct, frozen=True):
    """What this process runs on."""

    system: str
    python: str
    processors: int
    memory_bytes: int | None
    open_files: int | None
    """Files that the process may have open at a time; None where there is no limit."""


class Diagnosis(msgspec.Struct, frozen=True):
    """All that `xckpt doctor` prints."""

    machine: Machine
    packages: Mapping[str, str | None]
    """Package -> its version; None where it is not installed."""
    variables: Mapping[str, str]
    """Variables of the environment that change what xckpt does; secrets are not among them."""
    path: str | None
    local: LocalAbilities | None
    bucket: BucketAbilities | None
    remarks: tuple[Remark, ...]


def of_machine(machine: Machine, packages: Mapping[str, str | None]) -> Iterator[Remark]:
    """What follows from what is installed.

    Example:
        >>> machine = Machine("Linux", "3.12.1", 1, None, 256)
        >>> [remark.kind for remark in of_machine(machine, {"torch": None, "jax": None})]
        ['note', 'slow', 'note']
    """
    if not packages.get("torch") and not packages.get("jax"):
        text = "neither torch nor jax is installed: only NumPy arrays can be saved and loaded"
        yield Remark("note", text)
    if machine.processors < 2:
        text = "one processor: digests are computed between writes, not while others run"
        yield Remark("slow", text)
    if machine.open_files is not None and machine.open_files < FEW_OPEN:
        text = f"a process may open {machine.open_files} files: raise the limit (ulimit -n 4096)"
        yield Remark("note", text)


def of_local(found: LocalAbilities) -> Iterator[Remark]:
    """What follows from what a file system can do.

    Example:
        >>> from xckpt.core.commit import FileSystem
        >>> able = FileSystem(locks=True, syncs_folders=True, tells_case=False, longest_name=255)
        >>> found = LocalAbilities("/data", able, True, True, True, True, 0.001, 1 << 40, None)
        >>> [remark.text for remark in of_local(found)]
        ['names that differ in case alone are one: such leaves are refused']
    """
    able = found.able
    if not able.locks:
        text = "there are no file locks: two concurrent saves to one path are not separated"
        yield Remark("note", f"{text}; save each to a new path")
    if not able.syncs_folders:
        text = "names in a folder are not forced to disk: after a power cut the newest may be gone"
        yield Remark("note", text)
    if not able.tells_case:
        yield Remark("note", "names that differ in case alone are one: such leaves are refused")
    if not found.exchanges_folders:
        text = "two folders cannot change places: an overwrite keeps its data in .generations"
        yield Remark("note", f"{text}, and plain zarr readers have to open that folder")
    if not found.links_files:
        text = "there are no hard links: copies and saves with a base write all bytes again"
        yield Remark("slow", text)
    if found.sync_seconds > SLOW_SYNC:
        each = f"forcing a file to disk takes {1e3 * found.sync_seconds:.0f} ms"
        batch = "; many small files of one save are synced in one call" * found.syncs_at_once
        yield Remark("slow", f"{each}{batch}: {PACK}")
    elif not found.is_local:
        text = f"a network file system: each file takes round trips; {PACK}"
        cut = "SaveOptions(readers=8) has loads that cut tensors otherwise read little in vain"
        yield Remark("slow", f"{text}; {cut}")
    if found.free_bytes < LITTLE_ROOM:
        yield Remark("note", f"{readable_bytes(found.free_bytes)} are free: a save may not fit")
    if found.free_files is not None and found.free_files < FEW_FILES:
        yield Remark("note", f"{found.free_files:,} files may still be made: {PACK}")


def of_bucket(found: BucketAbilities) -> Iterator[Remark]:
    """What follows from how quickly a bucket answers.

    Example:
        >>> [remark.kind for remark in of_bucket(BucketAbilities("s3://b", (), 0.2))]
        ['slow']
    """
    if found.round_trip_seconds > SLOW_TRIP:
        trip = f"a request takes {1e3 * found.round_trip_seconds:.0f} ms"
        yield Remark("slow", f"{trip}: run nearer to the bucket, or {PACK}")
