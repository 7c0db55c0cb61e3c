"""Paths of other libraries' files: `pathlib.Path` for local ones, and `StoredPath` for a bucket.

1. `find_path` takes what the user typed. A local path or ``file://`` URL becomes a `Path`, any
   other URL a `StoredPath`; `FilePath` is either.
2. Object stores have no folders: a `StoredPath` is a folder if keys lie below it. A listing
   returns every key below, so it is requested once, shared by all paths derived from one
   `find_path`, and answers for the files below too. A single file is looked up without a listing.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TypeAlias, TypeVar, cast

import tensorstore as ts

from xckpt.core.names import is_utf8
from xckpt.errors import NotACheckpointError, StorageError
from xckpt.storage.buckets.listing import listed
from xckpt.storage.location import Location, answer, open_store, storage_errors


class _Keys:
    """What is known about a bucket's keys; nothing is requested twice."""

    def __init__(self, bucket: Location) -> None:
        self.bucket = bucket
        self.store = open_store(bucket)
        self._below: dict[str, list[str]] = {}
        self._generations: dict[str, bytes] = {}

    def below(self, path: StoredPath) -> list[str]:
        """The keys below a folder, in order."""
        start = f"{path.key}/" if path.key else ""
        keys = self._listing_of(start)
        if keys is None:
            between = ts.KvStore.KeyRange(start.encode(), _after(start).encode() if start else b"")
            with storage_errors(path):
                found = listed(self.store, self.bucket, between)
            keys = self._below[start] = sorted(key.decode("utf-8", "replace") for key in found)
        first = bisect.bisect_left(keys, start)
        return keys[first : bisect.bisect_left(keys, _after(start), first)]

    def _listing_of(self, key: str) -> list[str] | None:
        """The keys of a listing that would have this one; None if nothing was listed there."""
        below = list(self._below.items())
        return next((keys for start, keys in below if key.startswith(start)), None)

    def generation(self, path: StoredPath) -> bytes:
        """The generation of an object, which changes with each write; empty without an object."""
        known = self._generations.get(path.key)
        if known is not None:
            return known
        keys = self._listing_of(path.key)
        if not path.key or (keys is not None and not _holds(keys, path.key)):
            return b""
        generation = self._generations[path.key] = self.generation_now(path)
        return generation

    def generation_now(self, path: StoredPath) -> bytes:
        """The same, asked anew."""
        with storage_errors(path):
            # An empty range requests no content.
            read = answer(self.store.read(path.key, byte_range=slice(0, 0)), self.bucket)
        return read.stamp.generation if read.state == "value" else b""

    def __contains__(self, path: StoredPath) -> bool:
        keys = self._listing_of(path.key)
        return bool(self.generation(path)) if keys is None else _holds(keys, path.key)


def _holds(keys: list[str], key: str) -> bool:
    """Whether a key is among sorted ones."""
    at = bisect.bisect_left(keys, key)
    return keys[at : at + 1] == [key]


def _after(start: str) -> str:
    """The first key beyond those that begin with ``start``, which ends in a slash."""
    return f"{start[:-1]}0" if start else "\U0010ffff"


@dataclass(frozen=True)
class StoredPath:
    """A file or folder of ``memory://``, ``s3://`` or ``gs://``.

    Example:
        >>> open_store(Location.parse("memory://files")).write("a/b.txt", b"hello").result()
        KvStore.TimestampedStorageGeneration(...)
        >>> folder = find_path("memory://files")
        >>> folder.is_dir(), folder.is_file(), [str(each) for each in folder.iterdir()]
        (True, False, ['memory://files/a'])
        >>> (folder / "a" / "b.txt").is_file()
        True
    """

    bucket: Location
    """All of the store."""
    key: str
    """Where in it, without a slash at the end."""
    keys: _Keys = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """The last part; empty for all of the store."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> StoredPath:
        """The folder that it is in."""
        return replace(self, key=self.key.rpartition("/")[0])

    def __truediv__(self, name: str, /) -> StoredPath:
        below = PurePosixPath(name).as_posix()
        return replace(self, key=f"{self.key}/{below}" if self.key else below)

    def __str__(self) -> str:
        return str(replace(self.bucket, path=self.key))

    def exists(self) -> bool:
        """Whether there is an object, or one below."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        """Whether there is an object of this key."""
        return self in self.keys

    def is_dir(self) -> bool:
        """Whether there are keys below."""
        return bool(self.keys.below(self))

    def iterdir(self) -> Iterator[StoredPath]:
        """What is in the folder, each once, by name."""
        start = len(self.key) + 1 if self.key else 0
        names = {key[start:].partition("/")[0] for key in self.keys.below(self)}
        return (self / name for name in sorted(names) if name)

    def generation(self) -> bytes:
        """The generation of the object, which changes with each write; empty without an object.

        Raises:
            StorageError: the storage refused.
        """
        return self.keys.generation(self)


FilePath: TypeAlias = Path | StoredPath
"""A path on any storage."""
AnyPath = TypeVar("AnyPath", bound=FilePath)
"""The same, for functions that lead from one to others of its kind."""


def find_path(path: str | os.PathLike[str]) -> FilePath:
    """The path that a path or URL means; no request is made.

    Raises:
        TypeError: neither a str nor a PathLike.
        StorageError: no path, or a URL that is not supported.

    Example:
        >>> find_path("file:///data/model"), str(find_path("gs://bucket/model").parent)
        (PosixPath('/data/model'), 'gs://bucket')
    """
    location = Location.parse(path)
    if location.folder is not None:
        return location.folder
    bucket = replace(location, path="")
    return StoredPath(bucket, location.path, _Keys(bucket))


def location_of(path: FilePath) -> Location:
    """The location of a path; one in a bucket shares the time of what it was derived from."""
    if isinstance(path, StoredPath):
        return replace(path.bucket, path=path.key)
    return Location.parse(path)


def is_location(path: object) -> bool:
    """Whether it is a path or URL that xckpt can save to and load from."""
    try:
        Location.parse(path)  # pyright: ignore[reportArgumentType]  # it may be anything
    except (StorageError, TypeError):
        return False
    return True


def existing_path(path: str | os.PathLike[str]) -> FilePath:
    """The path of something that is there, on any storage.

    Raises:
        StorageError: it is not a path, a URL that is not supported, or the storage refused.
        NotACheckpointError: nothing is there.
    """
    place = find_path(path)
    with storage_errors(place):
        if not place.exists():
            raise NotACheckpointError(f"{place}: nothing is there; check the path")
    return place


def local_path(path: str | os.PathLike[str]) -> Path:
    """The local path that a path or ``file://`` URL means.

    Raises:
        StorageError: it is a URL of another scheme.
    """
    folder = Location.parse(path).folder
    if folder is None:
        raise StorageError(
            f"{path}: other libraries' checkpoints are written on local file systems only; write "
            f"it there and copy it"
        )
    return folder


def file_name_problem(name: object) -> str:
    """Why a name in a file does not name a file beside or below it; empty if it does.

    Example:
        >>> file_name_problem("model-00001-of-00002.safetensors")
        ''
        >>> file_name_problem("../../etc/passwd")
        'leads out of the folder'
    """
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name or not is_utf8(name):
        return "is not a name of a file"
    path = PurePosixPath(name)
    return "leads out of the folder" if path.is_absolute() or ".." in path.parts else ""


def entries_in(folder: AnyPath, *suffixes: str) -> list[AnyPath]:
    """The entries of a folder, sorted by name; none if it is not a folder.

    Args:
        folder: where.
        suffixes: only names that end with one of these.
    """
    if not folder.is_dir():
        return []
    inside = cast(Iterator[AnyPath], folder.iterdir())  # of its own kind
    entries = [each for each in inside if each.name.endswith(suffixes or ("",))]
    return sorted(entries, key=lambda each: each.name)
