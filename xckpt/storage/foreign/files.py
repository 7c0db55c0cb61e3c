"""Files of other libraries, open for reads by range: local files, and objects of a bucket.

1. `OpenFile` is a local file. Ranges are read straight into memory, two to four times as fast as
   through TensorStore. Nothing is mapped: a file that is truncated during a read is an error and
   does not end the process.
2. `StoredFile` is an object. Each range is a request, with several in flight. Each answer carries
   the object's generation, so that contents from before and after a replacement never mix.
3. TensorStore does not say how long an object is. If a format says where its file ends, that is
   checked by asking for the last byte and for the one after it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from xckpt.engine.ranks.alive import WORK
from xckpt.errors import RESTORE, CorruptCheckpointError, StorageError
from xckpt.storage.foreign.paths import FilePath, StoredPath
from xckpt.storage.location import Reading, answer_within, check_process, storage_errors

LONGEST_TRANSFER: Final = 1 << 26
"""Bytes of one call; larger calls are no quicker, and after each the other ranks can hear that this
one makes progress."""
REQUEST_BYTES: Final = 1 << 22
"""Longest range of one request."""
IN_FLIGHT: Final = 2
"""Requests that one call has in flight."""
LONGEST_FILE: Final = 1 << 62
"""`RangeFile.most_bytes` of an object, whose length the store does not say."""

Range = tuple[int, int]
"""[start, stop), bytes."""


class OpenFile:
    """A local file open for reading, or for writing in place; closed when it is deleted.

    Args:
        path: the file.
        write: whether it may be written.
    """

    free_bytes: int = 0
    """Largest gap between two ranges, bytes, that is read to save a request."""

    def __init__(self, path: Path | str, *, write: bool = False) -> None:
        self._path = path
        flags = os.O_RDWR if write else os.O_RDONLY
        # Opening a pipe would wait for its other end.
        self.descriptor: int = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)

    @property
    def path(self) -> Path:
        """The file, by its path."""
        return Path(self._path)

    @property
    def most_bytes(self) -> int:
        """How long it is."""
        return os.fstat(self.descriptor).st_size

    def size(self, stated: Callable[[], int]) -> int:
        """How long it is."""
        return self.most_bytes

    def state(self) -> bytes:
        """A value that changes with its contents, as a rule: size and time of change.

        It is equal in a copy that keeps the time; see `xckpt.storage.foreign.versions`.
        """
        return state_from(os.fstat(self.descriptor))

    def head(self, count: int) -> bytes:
        """Its first bytes; fewer if it has no more."""
        return self._read(0, count)

    def tail(self, count: int) -> bytes:
        """Its last bytes; fewer if it has no more."""
        return self._read(max(0, self.most_bytes - count), count)

    def whole(self, most: int) -> bytes | None:
        """All of it; None if it is longer than ``most`` bytes."""
        if self.most_bytes > most:
            return None
        data = self._read(0, self.most_bytes + 1)
        return None if len(data) > most else data

    def fetch(self, ranges: Sequence[Range]) -> list[bytes]:
        """The bytes of some ranges.

        Raises:
            CorruptCheckpointError: the file ends before that.
        """
        parts: list[bytes] = []
        for start, stop in ranges:
            parts.append(self._read(start, stop - start))
            WORK.get().moved = time.monotonic()
            if len(parts[-1]) != stop - start:
                raise _truncated(self._path, start, stop)
        return parts

    def _read(self, position: int, count: int) -> bytes:
        """The bytes from ``position`` on; fewer at the end. One call moves 2 GiB at most."""
        data = os.pread(self.descriptor, count, position)
        rest = count - len(data)
        while rest and (more := os.pread(self.descriptor, rest, position + len(data))):
            data += more
            rest -= len(more)
        return data

    def read_into(self, position: int, buffer: memoryview) -> None:
        """Fill a run of bytes from those at ``position``.

        Raises:
            CorruptCheckpointError: the file ends before.
        """
        done = 0
        while done < len(buffer):
            part = buffer[done : done + LONGEST_TRANSFER]
            count = os.preadv(self.descriptor, [part], position + done)
            if count == 0:
                raise _truncated(self._path, position, position + len(buffer))
            done += count
            WORK.get().moved = time.monotonic()

    def write_from(self, position: int, buffer: NDArray[np.uint8]) -> None:
        """Put a run of bytes at ``position``."""
        done = 0
        while done < len(buffer):
            part = buffer[done : done + LONGEST_TRANSFER].data
            done += os.pwrite(self.descriptor, part, position + done)
            WORK.get().moved = time.monotonic()

    def close(self) -> None:
        """Close the file, which nothing reads any more; a second call does nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        # An OSError in opening leaves no descriptor.
        if getattr(self, "descriptor", -1) >= 0:
            self.close()


class StoredFile:
    """An object of a bucket.

    Example:
        >>> from xckpt.storage.location import Location, open_store
        >>> from xckpt.storage.foreign.paths import find_path
        >>> _ = open_store(Location.parse("memory://one")).write("file", b"0123456789").result()
        >>> file = open_file(find_path("memory://one/file"))
        >>> file.fetch([(2, 4), (7, 10)]), file.tail(3), file.size(lambda: 10)
        ([b'23', b'789'], b'789', 10)
        >>> file.fetch([(8, 12)])
        Traceback (most recent call last):
        xckpt.errors.CorruptCheckpointError: memory://one/file is truncated: it ends within bytes \
[8, 12)
    """

    free_bytes: int = 1 << 22
    most_bytes: int = LONGEST_FILE

    def __init__(self, path: StoredPath) -> None:
        self.path = path
        self._store = path.keys.store
        self._seen: dict[str, bytes] = {}
        """Its generation, once an answer has come: `dict.setdefault` has one of several threads
        decide."""

    def size(self, stated: Callable[[], int]) -> int:
        """Its length, which must be what its contents say.

        Args:
            stated: says how long that is.

        Raises:
            CorruptCheckpointError: it does not end there, or is missing.
            StorageError: it cannot be read.
        """
        end = min(stated(), LONGEST_FILE)
        probes = [self._begin(slice(at, at + 1)) for at in (end - 1, end) if at >= 0]
        *last, after = [self._bytes(probe) for probe in probes]
        if after is not None or None in last:
            how = "goes on after" if after else "is truncated: it ends before"
            raise CorruptCheckpointError(
                f"{self.path} {how} byte {end:,}, where it ends by its contents"
            )
        return end

    def state(self) -> bytes:
        """Its generation."""
        found = self._seen.get("generation") or self.path.generation()
        return self._settled(found) if found else b""

    def _settled(self, generation: bytes) -> bytes:
        """The generation that came first, of this answer or of another."""
        return self._seen.setdefault("generation", generation)

    def head(self, count: int) -> bytes:
        """Its first bytes; fewer if it has no more."""
        return self._edge(slice(0, count))

    def tail(self, count: int) -> bytes:
        """Its last bytes; fewer if it has no more."""
        return self._edge(slice(-count, None))

    def whole(self, most: int) -> bytes | None:
        """All of it; None if it is longer than ``most`` bytes."""
        if self._bytes(self._begin(slice(most, most + 1))) is not None:
            return None
        return self._bytes(self._begin(None))

    def _edge(self, part: slice) -> bytes:
        """A range at one end, or the whole if that is shorter."""
        data = self._bytes(self._begin(part))
        if data is None:
            data = self._bytes(self._begin(None))
        return data or b""

    def fetch(self, ranges: Sequence[Range]) -> list[bytes]:
        """The bytes of some ranges, requested at once.

        Raises:
            CorruptCheckpointError: the object ends before that, or is missing.
            StorageError: it cannot be read, or was replaced meanwhile.
        """
        batch = ts.Batch()
        futures = [
            self._begin(slice(start, stop), batch) if stop > start else None
            for start, stop in ranges
        ]
        batch.submit()
        return [
            b"" if future is None else self._finish(future, *bounds)
            for future, bounds in zip(futures, ranges, strict=True)
        ]

    def read_into(self, position: int, buffer: memoryview) -> None:
        """Fill memory from the bytes at ``position``; errors as of `fetch`."""
        starts = range(0, len(buffer), REQUEST_BYTES)
        cuts = [(start, min(start + REQUEST_BYTES, len(buffer))) for start in starts]
        requests = ((a, b, self._begin(slice(position + a, position + b))) for a, b in cuts)
        in_flight = deque(islice(requests, IN_FLIGHT))
        while in_flight:
            start, stop, future = in_flight.popleft()
            buffer[start:stop] = self._finish(future, position + start, position + stop)
            in_flight.extend(islice(requests, 1))

    def close(self) -> None:
        """Nothing is held open."""

    def _begin(self, part: slice | None, batch: ts.Batch | None = None) -> Reading:
        """Request a range, or everything."""
        check_process()
        with storage_errors(self.path):
            return self._store.read(self.path.key, byte_range=part, batch=batch)

    def _finish(self, future: Reading, start: int, stop: int) -> bytes:
        data = self._bytes(future)
        if data is None:
            raise _truncated(self.path, start, stop)
        return data

    def _bytes(self, future: Reading) -> bytes | None:
        """The bytes of an answer, which must come from the same object as all others.

        Returns:
            None if the range reaches beyond the end of the object.

        Raises:
            CorruptCheckpointError: there is no object.
            StorageError: it cannot be read, or was replaced meanwhile.
        """
        with storage_errors(self.path):
            read = answer_within(future, self.path.keys.bucket)
        if read is None:
            return None
        if read.state != "value":
            raise CorruptCheckpointError(f"{self.path} is missing; {RESTORE}")
        if read.stamp.generation != self._settled(read.stamp.generation):
            raise StorageError(
                f"{self.path} was replaced while it was read; open it again to read what is "
                f"there now"
            )
        return read.value


def _truncated(path: FilePath | str, start: int, stop: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path} is truncated: it ends within bytes [{start:,}, {stop:,})"
    )


RangeFile: TypeAlias = OpenFile | StoredFile
"""A file that is read by range; thread-safe."""


def open_file(path: FilePath) -> RangeFile:
    """Open a file for reads by range.

    Raises:
        OSError: a local file cannot be opened.
    """
    if isinstance(path, StoredPath):
        return StoredFile(path)
    return OpenFile(path)


def read_up_to(path: FilePath, most: int) -> bytes | None:
    """A file's bytes; None if they are more than ``most``.

    Raises:
        StorageError: it is not a plain file, or cannot be read.
    """
    with storage_errors(path):
        if not path.is_file():
            raise StorageError(f"{path} is not a plain file")
        with closing(open_file(path)) as file:
            return file.whole(most)


def state_from(status: os.stat_result) -> bytes:
    """See `OpenFile.state`."""
    return f"{status.st_size} {status.st_mtime_ns}".encode()
