"""Where a checkpoint is: a local folder, ``memory://``, ``s3://`` or ``gs://``, and its store.

1. A `Location` is parsed from what the user typed. A checkpoint never names a location: everything
   is rebuilt from the path that the caller gave.
2. `open_store` opens it as a TensorStore key-value store whose keys are relative to it.
3. `storage_errors` turns what a store raises into a `StorageError` that says where. The system
   raises `OSError`; TensorStore raises `ValueError`, whose message begins with a status
   (``NOT_FOUND: ...``). It wraps the calls of a store and nothing else, so that what a planner or a
   callback raises reaches the caller as it is.
4. TensorStore's threads do not survive a fork, and it ends a forked process that uses it by an
   abort. `check_process` raises an error before.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

import tensorstore as ts

from xckpt.errors import StorageError, XckptError

_UNUSABLE = re.compile(r"[\\\x00\ud800-\udfff]")
"""TensorStore takes a backslash for a slash, and its specs carry UTF-8 only: Python has surrogates
for other bytes."""
_BUCKETS = {"s3": "s3", "gs": "gcs"}
S3_RETRIES = {"max_retries": 8, "initial_delay": "200ms", "max_delay": "4s"}
"""TensorStore's defaults (32 tries, up to 32 s apart) wait 15 minutes for a dead endpoint."""


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
    """Whether local files are written without forcing them to disk; the writer does that later."""
    unlocked: bool = False
    """Whether local files are written without locks, where a file system has none."""

    @classmethod
    def parse(cls, path: str | os.PathLike[str]) -> Location:
        """The location that a path or URL means.

        Raises:
            TypeError: neither a str nor a PathLike.
            StorageError: no path, a URL without a bucket, or of a scheme that is not supported.
        """
        text = os.fspath(path)
        if not isinstance(text, str):
            raise TypeError(f"a path must be a str or a PathLike of str, not {type(text).__name__}")
        if not text:
            raise StorageError("the path is empty; give . for the working folder")
        scheme, separator, rest = text.partition("://")
        if not separator or "/" in scheme:
            return cls._local(os.path.expanduser(text))
        first, _, below = rest.partition("/")
        if scheme == "file":
            if first not in ("", "localhost") or not below:
                raise StorageError(f"{text}: a file URL has three slashes: file:///data/ckpt")
            return cls._local(unquote(f"/{below}"))
        if scheme == "memory":
            return cls("memory", rest.strip("/"))
        if scheme in _BUCKETS:
            if not first:
                raise StorageError(f"{text}: no bucket is named; give {scheme}://bucket/path")
            return cls(_BUCKETS[scheme], below.strip("/"), first)
        raise StorageError(
            f"{text}: the scheme {scheme!r} is not supported; "
            f"give a local path, or file://, memory://, s3:// or gs://"
        )

    @classmethod
    def _local(cls, path: str) -> Location:
        if _UNUSABLE.search(path):
            raise StorageError(
                f"{path!r}: a path with a backslash, a NUL or bytes that are no UTF-8 "
                f"cannot be used"
            )
        return cls("file", os.path.abspath(path))

    @property
    def folder(self) -> Path | None:
        """The local folder, if it is one."""
        return Path(self.path) if self.driver == "file" else None

    def within(self, root: str) -> Location:
        """The folder ``root`` inside this one; itself for an empty root."""
        return replace(self, path="/".join(part for part in (self.path, root) if part))

    def child(self, key: str) -> str:
        """The place of a key, as people write it."""
        return f"{self}/{key}" if key else str(self)

    def store_spec(self) -> dict[str, object]:
        """TensorStore's spec of the key-value store at this folder."""
        path = f"{self.path}/" if self.path else ""
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
                # Otherwise AWS's library warns of each missing configuration file.
                spec["aws_credentials"] = {"type": "environment"}
            endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
            if endpoint:
                spec["endpoint"] = endpoint
            region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
            if region:
                spec["aws_region"] = region
        return spec

    def __str__(self) -> str:
        if self.driver == "file":
            return self.path
        scheme = next((s for s, driver in _BUCKETS.items() if driver == self.driver), self.driver)
        return f"{scheme}://{'/'.join(part for part in (self.bucket, self.path) if part)}"


def is_location(path: object) -> bool:
    """Whether it is a path or URL that xckpt can save to and load from."""
    try:
        Location.parse(path)  # pyright: ignore[reportArgumentType]  # it may be anything
    except (StorageError, TypeError):
        return False
    return True


def context(*, mapped: bool = False) -> ts.Context:
    """The process's TensorStore context; ``memory://`` lives as long as it does.

    Args:
        mapped: read local files through memory maps, which saves a copy. A committed checkpoint
            doesn't change; still, network file systems should be read without.

    Raises:
        StorageError: see `check_process`.
    """
    check_process()
    return _context(mapped)


@functools.cache
def _context(mapped: bool) -> ts.Context:
    if mapped:
        return ts.Context({"file_io_mode": {"mode": "memmap"}}, _context(False))
    return ts.Context({"s3_request_retries": S3_RETRIES, "gcs_request_retries": S3_RETRIES})


_forked = False
"""Whether this process was forked from one that had used TensorStore."""


def _note_fork() -> None:
    global _forked
    _forked = _context.cache_info().currsize > 0


if hasattr(os, "register_at_fork"):
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
            "(multiprocessing.get_context('spawn'), "
            "torch's DataLoader(..., multiprocessing_context='spawn')), or fork before the first "
            "save or load"
        )


def file_problem(location: Location, key: str, most: int) -> str:
    """Why a local file must not be read: it is no plain file, or longer than ``most`` bytes.

    TensorStore reads a file as a whole: a huge one would end the process, a pipe would hang it.
    Empty if nothing is wrong, if the file is missing, and for other stores.
    """
    if location.driver != "file":
        return ""
    try:
        status = os.stat(f"{location.path}/{key}")
    except OSError:
        return ""
    return status_problem(status, most)


def status_problem(status: os.stat_result, most: int) -> str:
    """Why a file of this status must not be read; as of `file_problem`."""
    if not stat.S_ISREG(status.st_mode):
        return "no plain file"
    if status.st_size > most:
        return f"{status.st_size:,} bytes long, where at most {most:,} are expected"
    return ""


def open_store(location: Location, *, mapped: bool = False) -> ts.KvStore:
    """The key-value store at a location.

    Raises:
        StorageError: the store cannot be opened.
    """
    with storage_errors(location):
        return ts.KvStore.open(location.store_spec(), context=context(mapped=mapped)).result()


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
    except (OSError, ValueError) as error:
        raise _storage_error(str(where), error) from error


def _storage_error(where: str, error: OSError | ValueError) -> StorageError:
    advice = _advice(str(error))
    if isinstance(error, OSError):
        named = "" if str(error.filename) in ("None", where) else f" ({error.filename})"
        return StorageError(f"{where}: {error.strerror or error}{named}{advice}")
    return StorageError(f"{where}: {error}{advice}")


def _advice(message: str) -> str:
    if "RESOURCE_EXHAUSTED" in message or "No space left" in message:
        return "; the disk is full: free space or save elsewhere"
    if "PERMISSION_DENIED" in message or "Permission denied" in message or "Read-only" in message:
        return "; check the permissions of this folder"
    return ""
