"""What stores raise, as errors of this library: the one translator.

The system raises `OSError`. TensorStore raises `ValueError`, whose message begins with a status
(``NOT_FOUND: ...``).

1. `storage_errors` makes both a `StorageError` that says where. It wraps the calls of a store and
   nothing else, so that what a planner or a callback raises reaches the caller as it is.
2. `foreign_errors` is for arrays that another library wrote: unless TensorStore says that it could
   not read them at all, they are damaged.
3. `naming` says where for errors of our own.
4. `chunk_damage` and `is_beyond_end` read the status of a single answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from xckpt.errors import CorruptCheckpointError, StorageError, XckptError

_UNREAD: Final = ("UNAVAILABLE", "ABORTED", "UNAUTHENTICATED", "DEADLINE_EXCEEDED", "CANCELLED")
"""Statuses that say nothing of what is stored."""
_DAMAGED: Final = ("FAILED_PRECONDITION", "DATA_LOSS", "OUT_OF_RANGE")
"""Statuses of a chunk that is there, but is not what its metadata says."""


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


@contextlib.contextmanager
def foreign_errors(where: object) -> Iterator[None]:
    """The same for reading an array of another library, which may be damaged.

    Example:
        >>> with foreign_errors("/data/model: w"):
        ...     raise ValueError("NOT_FOUND: there is no chunk 0.0")
        Traceback (most recent call last):
        xckpt.errors.CorruptCheckpointError: /data/model: w: NOT_FOUND: there is no chunk 0.0
    """
    with storage_errors(where):
        try:
            yield
        except XckptError:
            raise
        except ValueError as error:
            if str(error).startswith(_UNREAD):
                raise
            raise CorruptCheckpointError(f"{where}: {error}") from error


@contextlib.contextmanager
def naming(where: object) -> Iterator[None]:
    """Put the place before the message of an error of this library.

    Example:
        >>> from xckpt.errors import ManifestError
        >>> with naming("model.json"):
        ...     raise ManifestError("the index is damaged")
        Traceback (most recent call last):
        xckpt.errors.ManifestError: model.json: the index is damaged
    """
    try:
        yield
    except XckptError as error:
        raise type(error)(f"{where}: {error}", error.problems) from error


def chunk_damage(error: ValueError) -> str:
    """What is wrong with a chunk that TensorStore refused; empty if it could not be read at all."""
    text = str(error)
    if "NOT_FOUND" in text:
        return "the chunk is missing"
    if any(status in text for status in _DAMAGED):
        return f"the chunk is truncated or damaged ({text[:200]})"
    return ""


def is_beyond_end(error: ValueError) -> bool:
    """Whether TensorStore refused a range because it reaches beyond the end of an object."""
    return str(error).startswith("OUT_OF_RANGE")


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
