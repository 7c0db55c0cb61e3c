"""A range of a file as a file, and how long the archive in a file says that it is.

In a bucket each read is a request, so both ends of a range are asked for at once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import closing
from io import RawIOBase
from typing import Final

from xckpt.errors import CorruptCheckpointError
from xckpt.storage.foreign.files import RangeFile, open_file
from xckpt.storage.foreign.paths import FilePath

MAX_PICKLE_BYTES: Final = 1 << 28
"""Longest ``data.pkl`` that is read."""

EDGE_BYTES: Final = 1 << 12
"""What is read ahead at each end of an archive in a bucket."""
TAIL_BYTES: Final = 1 << 16
"""How far the last record of a ZIP file reaches at most, a comment included."""

_END: Final = struct.Struct("<4s8xII2x")
_END64_LOCATOR: Final = struct.Struct("<4s4xQ4x")


class FileRange(RawIOBase):
    """A range of a file, as a file."""

    def __init__(self, file: RangeFile, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0
        self._edges: list[tuple[int, bytes]] = []
        if file.free_bytes:
            edge = min(EDGE_BYTES, length)
            last = length - edge
            head, tail = self.ranges([(0, edge), (last, edge)])
            self._edges = [(0, head), (last, tail)]

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place, counted as `io.IOBase.seek` does."""
        base = (0, self._at, self._length)[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        """The current place."""
        return self._at

    def read(self, size: int = -1) -> bytes:
        """The next bytes; all of them by default."""
        left = max(0, self._length - self._at)
        size = left if size < 0 else min(size, left)
        if size > MAX_PICKLE_BYTES:
            raise ValueError(f"a directory or pickle of {size:,} bytes")
        data = self.range(self._at, size)
        self._at += len(data)
        return data

    def range(self, start: int, length: int) -> bytes:
        """The bytes there."""
        return self.ranges([(start, length)])[0]

    def ranges(self, wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes at some (start, length), as far as the range of the file reaches."""
        known: list[bytes | None] = []
        missing: list[tuple[int, int]] = []
        for start, length in wanted:
            low = min(max(start, 0), self._length)
            high = min(low + length, self._length)
            known.append(self._near(low, high))
            if known[-1] is None:
                missing.append((self._start + low, self._start + high))
        read = iter(self._file.fetch(missing))
        return [next(read) if data is None else data for data in known]

    def _near(self, low: int, high: int) -> bytes | None:
        """A range that was read ahead."""
        for start, data in self._edges:
            if start <= low and high <= start + len(data):
                return data[low - start : high - start]
        return None


def stated_length(path: FilePath, most: int = TAIL_BYTES) -> int:
    """How long the end of an archive says that it is.

    Args:
        path: a file that is one archive.
        most: how many of the last bytes to look at.

    Raises:
        CorruptCheckpointError: there is no such file, or it does not end as an archive does.
        StorageError: it cannot be read.
    """
    with closing(open_file(path)) as file:
        tail = file.tail(most)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) < at + _END.size:
        raise CorruptCheckpointError(
            f"{path} does not end as an archive of torch.save does: it is truncated, or no archive"
        )
    _, size, offset = _END.unpack_from(tail, at)
    locator, record = at - _END64_LOCATOR.size, tail.rfind(b"PK\6\6", 0, at)
    if record >= 0 and tail[locator:at].startswith(b"PK\6\7"):
        return _END64_LOCATOR.unpack_from(tail, locator)[1] + len(tail) - record
    return offset + size + len(tail) - at
