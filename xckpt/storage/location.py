"""Where a checkpoint is: a local folder, ``memory://``, ``s3://`` or ``gs://``, and its store.

1. A `Location` is parsed from what the user typed. A checkpoint never names a location: everything
   is rebuilt from the path that the caller gave.
2. `open_store` opens it as a TensorStore key-value store whose keys are relative to it.
3. `storage_errors` turns what a store raises into a `StorageError` that says where and what to do
   (`xckpt.storage.refusals`). It wraps the calls of a store and nothing else, so that errors of a
   planner or a callback reach the caller unchanged.
4. TensorStore aborts a forked process that uses it; `check_process` raises an error first.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import sys
import threading
import time
from asyncio import CancelledError
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol, TypeAlias, TypeVar
from urllib.parse import unquote

import tensorstore as ts

from xckpt.core.storage import absolute, url_parts
from xckpt.engine.limits import FOR_THREADS, check_address_space
from xckpt.engine.ranks.alive import WORK
from xckpt.errors import PathError, StorageError, XckptError
from xckpt.options import CallOptions
from xckpt.storage.buckets.odd_answers import check_read, is_odd
from xckpt.storage.budget import REQUEST_SECONDS, Access
from xckpt.storage.refusals import refusal

_UNUSABLE = re.compile(r"[\\\x00\ud800-\udfff]")
"""TensorStore takes a backslash for a slash; its specs are UTF-8, which has no surrogates."""
_LONE = re.compile(r"[\ud800-\udfff]")
_BUCKETS = {"s3": "s3", "gs": "gcs"}
DELAYS: Final = {"initial_delay": "200ms", "max_delay": "2s"}
"""Delays between two tries. TensorStore's defaults wait 15 minutes for a dead endpoint."""
REQUESTS: Final = 128
"""Concurrent requests in a bucket; TensorStore's own 32 take 2.5 times as long at 30 ms each."""
_STARTING = threading.RLock()  # else two first contexts would have a ``memory://`` each
_STALL: Final = "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS"
"""Seconds without a byte after which curl gives up a request; read once in a process."""


@dataclass(frozen=True, slots=True)
class Location:
    """A folder of some store.

    Example:
        >>> Location.parse("s3://bucket/run/7").child("xckpt.json")
        's3://bucket/run/7/xckpt.json'
        >>> Location.parse("/data/ckpt").folder
        PosixPath('/data/ckpt')
    """

    driver: str
    """TensorStore's driver: ``file``, ``memory``, ``s3`` or ``gcs``."""
    path: str
    """The folder within the store, without a slash at the end; absolute for files."""
    bucket: str = ""
    unsynced: bool = False
    """Whether local files are written without forcing them to disk; the writer syncs them later."""
    unlocked: bool = False
    """Whether local files are written without locks, because the file system has none."""
    access: Access = field(default_factory=Access, compare=False, repr=False)
    """How long the storage is asked; shared by all locations derived from this one."""

    @classmethod
    def parse(cls, path: str | os.PathLike[str], options: CallOptions | None = None) -> Location:
        """The location that a path or URL means.

        Args:
            path: what the user typed, or a location, which is returned as it is.
            options: how often and how long it is asked.

        Raises:
            TypeError: neither a str nor a PathLike.
            StorageError: it is relative to a working folder that was deleted.
            PathError: no path, a URL without a bucket, or of a scheme that is not supported.
            ValueError: a variable of the environment holds no number.
        """
        if isinstance(path, Location):
            return path
        return replace(cls._parsed(path), access=Access.of(options))

    @classmethod
    def _parsed(cls, path: str | os.PathLike[str]) -> Location:
        text = os.fspath(path) if isinstance(path, os.PathLike) else path
        if not isinstance(text, str):
            raise TypeError(f"a path must be a str or a PathLike of str, not {type(text).__name__}")
        if not text:
            raise PathError("the path is empty; give . for the working folder")
        parts = url_parts(text)
        if parts is None:
            return cls._local(text)
        if _LONE.search(text):
            raise PathError(f"{text!r}: a URL with bytes that are not UTF-8 cannot be used")
        scheme, rest = parts
        first, _, below = rest.partition("/")
        if scheme == "file":
            if first not in ("", "localhost") or not below:
                raise PathError(f"{text}: a file URL has three slashes: file:///data/ckpt")
            return cls._local(unquote(f"/{below}"))
        if scheme == "memory":
            return cls("memory", rest.strip("/"))
        if scheme in _BUCKETS:
            if not first:
                raise PathError(f"{text}: no bucket is named; give {scheme}://bucket/path")
            return cls(_BUCKETS[scheme], below.strip("/"), first)
        raise PathError(
            f"{text}: the scheme {scheme!r} is not supported; download it and give a local path, "
            f"or give file://, memory://, s3:// or gs://"
        )

    @classmethod
    def _local(cls, path: str) -> Location:
        encoding = sys.getfilesystemencoding()
        if encoding != "utf-8" and not _is_utf8(path):
            raise PathError(
                f"{path!r}: this process names files in {encoding}, and TensorStore in UTF-8: "
                f"run it with PYTHONUTF8=1, or in a locale of UTF-8"
            )
        if _UNUSABLE.search(path):
            raise PathError(
                f"{path!r}: a path with a backslash, a NUL or bytes that are not UTF-8 "
                f"cannot be used"
            )
        return cls("file", absolute(path))

    @property
    def folder(self) -> Path | None:
        """The local folder, if it is one."""
        return Path(self.path) if self.driver == "file" else None

    def within(self, root: str) -> Location:
        """The folder ``root`` inside this one; itself for an empty root."""
        return replace(self, path="/".join(part for part in (self.path, root) if part))

    def anew(self) -> Location:
        """The same place for another call: how long it may take has nothing to do with the last."""
        return replace(self, access=replace(self.access, until=math.inf, end=math.inf))

    def is_in_bucket_of(self, other: Location) -> bool:
        """Whether both are in one bucket, which can copy from one to the other."""
        return bool(self.bucket) and (self.driver, self.bucket) == (other.driver, other.bucket)

    def make_folder(self) -> None:
        """Make the folder, if it is a local one; a StorageError if the system refuses."""
        if self.folder is not None:
            with storage_errors(self):
                self.folder.mkdir(parents=True, exist_ok=True)

    def child(self, key: str) -> str:
        """The place of a key, as text."""
        return f"{self}/{key}" if key else str(self)

    def store_spec(self) -> dict[str, object]:
        """TensorStore's spec of the key-value store at this folder."""
        path = self.path if self.path in ("", "/") else f"{self.path}/"
        spec: dict[str, object] = {"driver": self.driver, "path": path}
        if self.unsynced:
            spec["file_io_sync"] = False
        if self.unlocked:
            spec["file_io_locking"] = {"mode": "none"}
        if self.bucket:
            spec["bucket"] = self.bucket
        if self.driver == "s3":
            spec["use_conditional_write"] = True
            if "AWS_ACCESS_KEY_ID" in os.environ:
                spec["aws_credentials"] = {"type": "environment"}  # else AWS warns of missing files
            endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
            if endpoint:
                spec["endpoint"] = endpoint
            if region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
                spec["aws_region"] = region
        return spec

    def __fspath__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        if self.driver == "file":
            return self.path
        scheme = next((s for s, driver in _BUCKETS.items() if driver == self.driver), self.driver)
        return f"{scheme}://{'/'.join(part for part in (self.bucket, self.path) if part)}"


def _is_utf8(path: str) -> bool:
    """Whether Python and TensorStore encode a path to the same bytes."""
    with contextlib.suppress(UnicodeEncodeError):
        return os.fsencode(path) == path.encode()
    return False


def context(access: Access | None = None) -> ts.Context:
    """A TensorStore context; ``memory://`` lives as long as the process.

    Args:
        access: how often and how many at a time a storage is asked.

    Raises:
        StorageError: see `check_process`.
    """
    check_process()
    access = access or Access()
    if access.request_timeout != REQUEST_SECONDS:
        os.environ.setdefault(_STALL, str(math.ceil(access.request_timeout)))
    with _STARTING:
        return _context(access.retries, access.concurrency)


@functools.cache
def _context(retries: int, concurrency: int) -> ts.Context:
    spec: dict[str, object] = {}
    for store in ("s3", "gcs"):
        spec[f"{store}_request_retries"] = {"max_retries": retries, **DELAYS}
        # By default all contexts share one queue, which the requests of an abandoned call fill.
        spec[f"{store}_request_concurrency"] = {"limit": concurrency or REQUESTS}
    if concurrency:
        spec["file_io_concurrency"] = {"limit": concurrency}
    return ts.Context(spec, _base())


def forget_contexts() -> None:
    """Keep later calls from waiting behind requests of abandoned calls."""
    _context.cache_clear()


@functools.cache
def _base() -> ts.Context:
    """The context that all others extend; TensorStore starts with the first."""
    check_address_space(FOR_THREADS, "the threads that read and write need")
    return ts.Context()


_forked = False  # whether this process was forked from one that had used TensorStore


def _note_fork() -> None:
    global _forked, _STARTING
    _forked = _base.cache_info().currsize > 0 or not _STARTING.acquire(blocking=False)
    _STARTING = threading.RLock()  # a thread that is not here may have had the other


os.register_at_fork(after_in_child=_note_fork)


def check_process() -> None:
    """Refuse to use TensorStore where that would abort the process.

    Raises:
        StorageError: the process was forked from one that had used TensorStore.
    """
    if _forked:
        raise StorageError(
            "this process was forked from one that had saved or loaded with xckpt, and the threads "
            "that read and write are not in it: start it with the method 'spawn' or 'forkserver' "
            "(multiprocessing.get_context('spawn'), torch's DataLoader(..., "
            "multiprocessing_context='spawn')), or fork before the first save or load"
        )


def open_store(location: Location) -> ts.KvStore:
    """The key-value store at a location.

    Raises:
        StorageError: the store cannot be opened.
    """
    with storage_errors(location):
        return ts.KvStore.open(location.store_spec(), context=context(location.access)).result()


Reading: TypeAlias = "ts.Future[ts.KvStore.ReadResult]"
"""A key that is being read."""
Writing: TypeAlias = "ts.Future[ts.KvStore.TimestampedStorageGeneration]"
"""A key that is being written or deleted."""
Answered = TypeVar("Answered", covariant=True)


class Answer(Protocol[Answered]):
    """The future answer of a storage; TensorStore's future has these methods."""

    def result(self, timeout: float | None = None) -> Answered:
        """Wait for it."""
        ...

    def cancel(self) -> bool:
        """Give it up."""
        ...


def answer(asked: Answer[Answered], where: Location) -> Answered:
    """Wait for a storage's answer, as long as the caller allows.

    Raises:
        StorageError: it gave no answer in time.
        OSError | ValueError | RuntimeError: it refused; see `storage_errors`.
    """
    access = where.access
    over = time.monotonic() + (left := access.left)
    seconds = min(left, access.request_timeout / 2) if where.bucket else left
    try:
        said = asked.result(None if seconds == math.inf else seconds)
    except TimeoutError:
        from xckpt.storage.silence import wait_on  # rarely needed

        said = wait_on(asked, where, over)
    except CancelledError:
        raise StorageError(f"{where}: given up, because another request had no answer") from None
    access.heard = WORK.get().moved = time.monotonic()
    if where.bucket:
        check_read(said, where)
    return said


def answer_within(asked: Reading, where: Location) -> ts.KvStore.ReadResult | None:
    """The `answer` to the request for a range of a key; None if that reaches beyond its end."""
    try:
        return answer(asked, where)
    except ValueError as error:
        if not str(error).startswith("OUT_OF_RANGE") or is_odd(str(error)):
            raise
        return None


@contextlib.contextmanager
def storage_errors(where: object) -> Iterator[None]:
    """Turn what TensorStore and the system raise into a `StorageError` that says where.

    Example:
        >>> with storage_errors("/data/model"):
        ...     raise OSError(28, "No space left on device")
        Traceback (most recent call last):
        xckpt.errors.StorageError: /data/model: No space left on device; the disk is full: free \
space or save elsewhere
    """
    try:
        yield
    except XckptError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise refusal(str(where), error) from error
