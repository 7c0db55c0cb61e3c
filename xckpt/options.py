"""Options of a caller, checked when they are made, so that an error names the wrong option."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from typing import Final, Literal, TypeVar, cast

import numpy as np

from xckpt.core.geometry.grid import GridOptions
from xckpt.core.geometry.shards.hint import IN_BUCKETS, Readers, parts_of
from xckpt.core.geometry.shards.inner import LEAST_SHARD
from xckpt.core.names import check_dimension_names
from xckpt.core.text.arguments import check_function, named, shown_value, wrong_argument
from xckpt.core.text.shown import brief, documented
from xckpt.progress import Metrics, Progress

__all__ = ["LoadOptions", "SaveOptions"]

MEBIBYTE = 1 << 20


def processors() -> int:
    """Number of processors that this process may use."""
    # macOS cannot restrict a process to some of them.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_threads() -> int:
    """Threads that hash and wait for storage: twice the processors that this process may use."""
    return min(32, max(4, 2 * processors()))


MOST_CHUNK_BYTES = 1 << 29
"""A grid may exceed the target eightfold, and the format allows chunks of up to 4 GiB."""


def _check_number(options: object, name: str, least: int, most: int | None = None) -> None:
    """Refuse a value that is not an int in ``[least, most]``: a number of threads or of bytes."""
    value: object = getattr(options, name)
    if value is None and name in ("threads", "pack_bytes"):
        return
    if not isinstance(value, int) or isinstance(value, bool):
        bytes_ = "a number of bytes, an int, such as 8 << 20 for 8 MiB"
        unit = "a number of threads or None" if name == "threads" else bytes_
        raise wrong_argument(type(options).__name__, name, unit, value)
    if value < least or (most is not None and value > most):
        within = f"at least {least}" if most is None else f"in [{least:,}, {most:,}]"
        raise ValueError(f"{name} must be {within}, got {value:,}")


def check_flags(call: str, **flags: object) -> None:
    """Refuse arguments of a call that are neither True nor False: TypeError."""
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise wrong_argument(call, name, "True or False", value)


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """Options of saves and of loads: how long a storage is asked, and what is reported.

    If one about the storage is None, the variable of the environment counts, and without one the
    default given here. Local files are never asked twice.

    Example:
        >>> SaveOptions(retries=0, timeout=600).timeout
        600
    """

    retries: int | None = None
    """How often a bucket is asked again after a failure that may pass, at growing intervals of up
    to 2 s, each with a random part: ``XCKPT_RETRIES``, 16."""
    timeout: float | None = None
    """Seconds that a save, a load, an `open`, a slice or a `verify` may wait for the storage, from
    its beginning; then it fails. ``XCKPT_TIMEOUT``, no limit. Other ranks are waited for as long as
    their process group says."""
    request_timeout: float | None = None
    """Seconds without any answer of a bucket after which it counts as dead, and the call fails:
    ``XCKPT_REQUEST_TIMEOUT``, 60. A request that moves no byte for that long is made again; the
    value at a process's first use of a bucket counts for that."""
    concurrency: int | None = None
    """Requests that are under way at a time, of a bucket, or of the files that TensorStore reads
    and writes: ``XCKPT_CONCURRENCY``; 128 of a bucket, for files TensorStore's own choice."""
    progress: Callable[[Progress], None] | bool | None = None
    """Called with this rank's progress, from worker threads, one call at a time; True shows a
    bar on rank 0, or in a log a line every 10 seconds with the time left, for which rich must be
    installed (``pip install "xckpt[progress]"``)."""
    metrics: Callable[[Metrics], object] | None = None
    """Called once at the end of a save, load, conversion, `copy`, `diff`, `delete` or `gc`, on each
    rank, with what it took; also after a failure."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if isinstance(number := getattr(self, field.name), np.number):
                object.__setattr__(self, field.name, number.item())
        for name, kind in STORAGE.items():
            value: object = getattr(self, name)
            if value is not None:
                _check_limit(f"{type(self).__name__}({name}=)", name, kind, value)
        call, takes = type(self).__name__, "a function that is called with an xckpt."
        if self.metrics is not None:
            check_function(call, "metrics", f"{takes}Metrics", self.metrics)
        if self.progress is not None and not isinstance(self.progress, bool):
            check_function(call, "progress", f"True, or {takes}Progress", self.progress)
        elif self.progress and not find_spec("rich"):
            needs = 'progress=True needs rich: pip install "xckpt[progress]"'
            raise ImportError(needs, name="rich")


STORAGE: Final[Mapping[str, type[int] | type[float]]] = {
    "retries": int,
    "timeout": float,
    "request_timeout": float,
    "concurrency": int,
}
"""The options about the storage, and what they are."""


def _check_limit(where: str, name: str, kind: type[int] | type[float], value: object) -> None:
    if not isinstance(value, int if kind is int else (int, float)) or isinstance(value, bool):
        unit = "a whole number" if kind is int else "seconds"
        raise TypeError(f"{where} takes {unit} or None, not {shown_value(value)}")
    if value < 0 or (value == 0 and "retries" not in name.lower()) or value != value:
        least = "at least 0" if "retries" in name.lower() else "more than 0"
        raise ValueError(f"{name} must be {least}, got {value}")


def storage_option(options: CallOptions | None, name: str) -> float | None:
    """An option about the storage, as given or from the environment; None if neither has it.

    Raises:
        ValueError: the environment has no such number.

    Example:
        >>> storage_option(LoadOptions(retries=3), "retries")
        3
    """
    given: int | float | None = getattr(options, name, None)
    variable = f"XCKPT_{name.upper()}"
    text = os.environ.get(variable)
    if given is not None or not text:
        return given
    try:
        value = STORAGE[name](text)
    except ValueError:
        unit = "a whole number" if STORAGE[name] is int else "a number of seconds"
        raise ValueError(f"{variable} must be {unit}, got {text!r}") from None
    _check_limit(variable, variable, STORAGE[name], value)
    return value


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions(CallOptions):
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
    readers: Readers | None = None
    """Into how many parts those who load cut a tensor: each object then has up to 16 smaller
    chunks, of at least 64 KiB, cut along several dimensions, so that ranks that load columns of
    saved rows read little else. ``8``: any dimension into up to 8, which serves most; ``(1, 8)``:
    the second one into 8; or as a sharding cuts: ``NamedSharding(mesh, spec)`` of JAX, ``(mesh,
    placements)`` of torch, where a mesh may be its shape. 0 for loads that cut as the save did, and
    by default; but 8 in a bucket without ``shard_bytes``, ``crc32c`` or a large ``pack_bytes``."""
    pack_bytes: int | None = None
    """Tensors and shards of chunks up to this size, bytes, at most 512 MiB, are stored together,
    many in one object: quick where there are very many. Plain zarr does not list them. By default
    256 KiB where a checkpoint has more than 256 chunks up to that size, else nothing. 0 stores each
    as a zarr array. The coordinator's value counts for all ranks."""
    many_objects: bool = False
    """Write more than a million objects (files, or keys of a bucket), which is refused otherwise:
    nearly always ``chunk_bytes`` is too small. The coordinator's value counts for all ranks."""
    crc32c: bool = False
    """Also store a checksum in each chunk, for readers that ignore the manifest; this costs speed.
    The coordinator's value counts for all ranks."""
    threads: int | None = None
    """Threads that hash and write; 1 is the caller's own thread, None suits the storage."""
    memory_bytes: int = 256 * MEBIBYTE
    """Bytes in flight at a time on a host, packs and 1 KiB for each part of the plan included. Its
    ranks share it evenly; a single shard above a rank's share goes alone."""
    compare_replicas: bool | None = None
    """Refuse what differs between the ranks that hold it: by default values, plain tensors and
    shards of those on a part of the ranks, up to 1 MiB each, smallest first, 32 MiB in all; of
    others 1,024 elements. True compares all, shards too, in a pass over the state; False none."""
    verify_base: bool = False
    """Read each chunk of a save's ``base`` before it is shared; one that is damaged is written
    anew. The coordinator's value counts for all ranks."""
    dimension_names: Mapping[str, Sequence[str]] | None = None
    """Leaf name -> a name for each dimension, all different: what zarr and xarray call them. Others
    are called by their sizes. The coordinator's value counts for all ranks."""
    serialise: Callable[[object], bytes] | None = None
    """Turns a leaf of an unknown type into bytes; without it such a leaf is refused by name.
    `LoadOptions.deserialise` is its inverse."""

    __repr__ = brief

    def __post_init__(self) -> None:
        CallOptions.__post_init__(self)
        _check_number(self, "chunk_bytes", 1, MOST_CHUNK_BYTES)
        _check_number(self, "shard_bytes", 0, MOST_CHUNK_BYTES)
        if self.readers is not None:
            object.__setattr__(self, "readers", parts_of(self.readers))
        _check_number(self, "pack_bytes", 0, MOST_CHUNK_BYTES)
        _check_number(self, "threads", 1)
        _check_number(self, "memory_bytes", 1)
        flags = {"verify_base": self.verify_base, "many_objects": self.many_objects}
        check_flags("SaveOptions", crc32c=self.crc32c, **flags)
        if self.compare_replicas is not None:
            check_flags("SaveOptions", compare_replicas=self.compare_replicas)
        check_dimension_names(self.dimension_names)
        if self.serialise is not None:
            takes = "a function from a leaf to bytes"
            check_function("SaveOptions", "serialise", takes, self.serialise)

    def suited(self, *, to_bucket: bool) -> SaveOptions:
        """These options, with the ``readers`` that suit the storage where none are given."""
        # A base shares no zarr shards with checksums, and packs hold whole objects.
        other = self.shard_bytes or self.crc32c or (self.pack_bytes or 0) > LEAST_SHARD
        known = self.readers is not None or other or not to_bucket
        return self if known else replace(self, readers=IN_BUCKETS)

    @property
    def grid(self) -> GridOptions:
        """How large chunks and zarr shards are, and how readers cut."""
        readers = cast(int | tuple[int, ...] | None, self.readers)  # as it was checked
        return GridOptions(self.chunk_bytes, self.shard_bytes, readers=readers or 0)

    @property
    def layout(self) -> tuple[object, ...]:
        """Everything that decides which objects a save writes, and what their metadata say.

        Example:
            >>> SaveOptions(crc32c=True).layout == SaveOptions(threads=1).layout
            False
        """
        names = tuple(sorted((self.dimension_names or {}).items()))
        return self.grid, self.pack_bytes, self.crc32c, names


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions(CallOptions):
    """Options of a load.

    Example:
        >>> LoadOptions().memory_bytes == 256 << 20
        True
    """

    threads: int | None = None
    """Threads that read and verify; 1 is the caller's own thread, None suits the storage."""
    memory_bytes: int = 256 * MEBIBYTE
    """Bytes of scratch memory at a time on a host, whose ranks share it evenly; a chunk above a
    rank's share goes alone. A manifest whose objects take more is refused, and so are reads of so
    many chunks that the list of them does (1 KiB a chunk); each may always take 64 MiB."""
    share_reads: bool | Literal["host", "job"] = True
    """Ranks that want the same chunk read it once: ``"host"``, once on each host, and share it
    through memory; ``"job"``, once in the whole job, and send it to the other hosts as well. True
    is ``"job"`` for buckets and for file systems that several hosts mount, else ``"host"``."""
    host: str | None = None
    """The name of this rank's host, where it is not found: ranks of one name share memory."""
    deserialise: Callable[[bytes], object] | None = None
    """Makes an object of the bytes that a save's ``serialise`` gave; without it they stay bytes.
    A load by a planner of one's own does as that planner says."""

    def __post_init__(self) -> None:
        CallOptions.__post_init__(self)
        _check_number(self, "threads", 1)
        _check_number(self, "memory_bytes", 1)
        if not isinstance(self.share_reads, str):
            check_flags("LoadOptions", share_reads=self.share_reads)
        elif self.share_reads not in ("host", "job"):
            takes = f"True, False, 'host' or 'job', not {shown_value(self.share_reads)}"
            raise ValueError(f"LoadOptions(share_reads=) takes {takes}")
        if self.host is not None and not isinstance(self.host, str):
            raise wrong_argument("LoadOptions", "host", "a name or None", self.host)
        if self.host is not None and not self.host.strip():
            raise ValueError(f"LoadOptions(host=) takes a name or None, not {self.host!r}")
        if self.deserialise is not None:
            takes = "a function from bytes to a leaf"
            check_function("LoadOptions", "deserialise", takes, self.deserialise)


Options = TypeVar("Options", SaveOptions, LoadOptions)


@contextmanager
def with_progress(
    options: Options, call: str, rank: int, path: str | os.PathLike[str] = ""
) -> Iterator[Options]:
    """The options of a call, whose ``progress=True`` is a bar on rank 0 for as long as it lasts."""
    if options.progress is not True:
        yield options
    elif rank:
        yield replace(options, progress=None)
    else:
        from xckpt.progress_bar import ProgressBar

        with ProgressBar(call, path=path) as bar:
            yield replace(options, progress=bar)


def is_watched(options: SaveOptions | LoadOptions) -> bool:
    """Whether a call is timed: there is a metrics function, or the log level is INFO."""
    return options.metrics is not None or logging.getLogger("xckpt").isEnabledFor(logging.INFO)


def checked_options(
    options: object, kind: type[Options], call: str, argument: str = "options"
) -> Options:
    """The options of a call, or the defaults if it has none.

    Args:
        options: what the caller passed, as ``argument``.
        kind: `SaveOptions` or `LoadOptions`.
        call: what takes them, for the message.

    Raises:
        TypeError: they have another type.

    Example:
        >>> checked_options({"threads": 2}, LoadOptions, "load")
        Traceback (most recent call last):
        TypeError: load takes options=xckpt.LoadOptions(...), not a dict
    """
    if options is None:
        return kind()
    if not isinstance(options, kind):
        name = type(options).__name__
        name = name if isinstance(options, SaveOptions | LoadOptions) else named(name)
        raise TypeError(f"{call} takes {argument}=xckpt.{kind.__name__}(...), not {name}")
    return options
