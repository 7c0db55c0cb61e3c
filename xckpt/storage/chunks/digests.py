"""The digests of a checkpoint's chunks: a file with a row of 16 bytes for each chunk (`RowFile`).

The places of packed chunks are such a file too (`xckpt.storage.packs.places`). A manifest of a few
bytes can claim billions of chunks, so only the rows that are needed are in memory:

1. A file of up to `FEW_BYTES` is read and checked as a whole.
2. Of a longer one, `RowFile.prepare` asks for the rows of the arrays that are about to be read,
   neighbours in one request, if an array has no more than `BLOCK`. For a larger array, `RowFile.of`
   fetches blocks when their first chunk comes, and keeps the last ones.
3. Nothing waits for them before `RowFile.of`, so chunks are requested meanwhile.
4. `RowFile.problem` hashes the whole file, range by range.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.manifest.own_keys import DIGESTS
from xckpt.core.manifest.packs import runs
from xckpt.errors import RESTORE, CorruptCheckpointError
from xckpt.storage.array import DIGEST_BYTES, digest_bytes
from xckpt.storage.chunks.file_checks import file_problem, stored_content
from xckpt.storage.location import Location, Reading, answer_within, open_store, storage_errors

FEW_BYTES = 1 << 20
"""A digest file up to this size (bytes) is read and checked as a whole."""

BLOCK = 1 << 16
"""Digests that are fetched at a time if an array has more: 1 MiB."""

KEPT_BLOCKS = 16
"""Blocks that are kept in memory."""

RANGE_BYTES = 1 << 23
"""Bytes of one request, if more of the file is wanted."""

GAP_BYTES = 1 << 16
"""Gap that is read along rather than making two requests, bytes."""


@dataclass(slots=True)
class _Range:
    """A part of the file that was asked for."""

    start: int
    """The number of its first row."""
    stop: int
    """One past the number of its last."""
    asked: Reading
    _content: bytes | None = None

    def content(self, root: Location, key: str) -> bytes:
        """Its rows, waited for once; empty if the file is too short for it."""
        if self._content is None:
            self._content = _content(self.asked, root, key)
        return self._content


@dataclass(slots=True)
class _Ranges:
    """The parts of the file that were asked for, in its order."""

    starts: list[int] = field(default_factory=list[int])
    parts: list[_Range] = field(default_factory=list[_Range])

    def holding(self, first: int, count: int) -> _Range | None:
        """The part that has some rows."""
        at = bisect_right(self.starts, first) - 1
        return self.parts[at] if at >= 0 and first + count <= self.parts[at].stop else None

    def lacking(self, firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows no part has."""
        at = np.searchsorted(np.array([-1, *self.starts]), firsts, side="right") - 1
        return firsts + counts > np.array([-1, *(part.stop for part in self.parts)])[at]

    def add(self, part: _Range) -> None:
        """Add a part that ends with new arrays: it has any other array entirely or not at all."""
        low = bisect_left(self.starts, part.start)
        within = slice(low, bisect_left(self.starts, part.stop, low))
        self.starts[within], self.parts[within] = [part.start], [part]

    def rows(self, numbers: NDArray[np.int64], root: Location, key: str) -> _Rows:
        """See `RowFile.rows`."""
        rows, found = np.zeros((len(numbers), DIGEST_BYTES), np.uint8), np.zeros(len(numbers), bool)
        at = np.searchsorted(np.array(self.starts, np.int64), numbers, side="right") - 1
        for number in np.unique(at[at >= 0]).tolist():
            part, own = self.parts[number], np.flatnonzero(at == number)
            rows[own], found[own] = _taken(part.content(root, key), numbers[own] - part.start)
        return rows, found


_Rows: TypeAlias = tuple[NDArray[np.uint8], NDArray[np.bool_]]
"""Rows, (n, 16), and a mask of those that are there."""


@dataclass(slots=True)
class RowFile:
    """A file beside the manifest that has a row of 16 bytes for each chunk."""

    root: Location
    """The root group's place."""
    total: int
    """Number of rows."""
    expected: str
    """Digest of the whole file, hex."""
    key: str
    """The file's."""
    content: bytes = b""
    """The whole file, if it is short and was read."""
    _asked_whole: Reading | None = None
    """The whole file, if it was requested."""
    _ranges: _Ranges = field(default_factory=_Ranges)
    _last: OrderedDict[int, bytes] = field(default_factory=OrderedDict[int, bytes])
    """The blocks that were used last, of arrays without a requested range."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def before(self) -> int:
        """Bytes before the first row."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.before + self.total * DIGEST_BYTES

    @property
    def few(self) -> bool:
        """Whether the file is read as a whole, or its content is known."""
        return bool(self.content) or self.nbytes <= FEW_BYTES

    def first(self, array: ZarrArray) -> int:
        """The number of an array's first row."""
        return array.first

    def require(self) -> None:
        """Refuse a manifest with many more chunks than rows, before the chunks are enumerated.

        Raises:
            CorruptCheckpointError: the file is missing or too short.
        """
        if not self.few:
            self._answered(self._ask(self.total - 1, 1), 1, f"{self.total:,} chunks")

    def prepare(self, wanted: Iterable[ZarrArray]) -> None:
        """Ask for the rows of arrays, once.

        Raises:
            CorruptCheckpointError: a local file was altered.
        """
        pairs = [(self.first(array), array.count) for array in wanted]
        self.prepare_ranges(*np.array(pairs, np.int64).reshape(-1, 2).T)

    def prepare_ranges(self, firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Ask for the rows of arrays, by their first rows and counts; see `prepare`.

        Raises:
            CorruptCheckpointError: a local file was altered.
        """
        if not self.few:
            some = (counts > 0) & (counts <= BLOCK)
            self._ask_ranges(firsts[some], counts[some])
        elif self.content or not len(firsts):
            return
        elif self.root.driver == "file":
            self.check()
        elif self._asked_whole is None:
            self._asked_whole = open_store(self.root).read(self.key)

    def _ask_ranges(self, firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        gap, most = GAP_BYTES // DIGEST_BYTES, RANGE_BYTES // DIGEST_BYTES
        with self._lock:
            new = self._ranges.lacking(firsts, counts)
            for each in runs(firsts[new], counts[new], gap=gap, most=most):
                asked = self._ask(each.start, each.stop - each.start)
                self._ranges.add(_Range(each.start, each.stop, asked))

    def of(self, array: ZarrArray, number: int) -> bytes:
        """The row of chunk ``number`` of a prepared array.

        Raises:
            CorruptCheckpointError: the file was altered, or is too short.
        """
        found = self._kept(self.first(array) + number, 1)
        if found is not None:
            return found
        start = number % BLOCK * DIGEST_BYTES
        return self._block(array, number // BLOCK)[start : start + DIGEST_BYTES]

    def blocks(self, array: ZarrArray) -> Iterator[bytes]:
        """All rows of a prepared array's chunks, `BLOCK` at a time.

        Raises:
            CorruptCheckpointError: the file is too short.
        """
        for number in range(-(-array.count // BLOCK)):
            yield self._block(array, number)

    def _block(self, array: ZarrArray, number: int) -> bytes:
        first = self.first(array) + number * BLOCK
        count = min(BLOCK, array.count - number * BLOCK)
        found = self._kept(first, count)
        if found is not None:
            return found
        with self._lock:
            if first not in self._last:
                self._last[first] = self._answered(self._ask(first, count), count, array.leaf)
                if len(self._last) > KEPT_BLOCKS:
                    self._last.popitem(last=False)
            self._last.move_to_end(first)
            return self._last[first]

    def _kept(self, first: int, count: int) -> bytes | None:
        """Some rows, if they were requested and the file has all of them."""
        if self.few:
            start = self.before + first * DIGEST_BYTES
            return (self.content or self.whole())[start : start + count * DIGEST_BYTES]
        with self._lock:
            part = self._ranges.holding(first, count)
            if part is None:
                return None
            content = part.content(self.root, self.key)
        low = (first - part.start) * DIGEST_BYTES
        found = content[low : low + count * DIGEST_BYTES]
        return found if len(found) == count * DIGEST_BYTES else None

    def rows(self, numbers: NDArray[np.int64]) -> _Rows:
        """Many rows at once, by their numbers, (n,); `of` gives those that are not found."""
        if self.few:
            return _taken((self.content or self.whole())[self.before :], numbers)
        with self._lock:
            return self._ranges.rows(numbers, self.root, self.key)

    def whole(self) -> bytes:
        """The content of a file that is read as a whole.

        Raises:
            CorruptCheckpointError: it was altered.
        """
        with self._lock:  # one of several threads reads it
            if not self.content:
                self.check()
        return self.content

    def _ask(self, first: int, count: int) -> Reading:
        """Begin to read ``count`` rows of the file.

        Raises:
            CorruptCheckpointError: a local file is none that can be read, or too long.
        """
        problem = file_problem(self.root, self.key, self.nbytes)
        if problem:
            raise CorruptCheckpointError(f"{self.root}: {self.key} is {problem}; {RESTORE}")
        low = self.before + first * DIGEST_BYTES
        where = slice(low, low + count * DIGEST_BYTES)
        return open_store(self.root).read(self.key, byte_range=where)

    def _answered(self, asked: Reading, count: int, what: str) -> bytes:
        """The content of a range of the file, which must have ``count`` rows."""
        digests = _content(asked, self.root, self.key)
        if len(digests) != count * DIGEST_BYTES:
            raise CorruptCheckpointError(
                f"{self.root}: {self.key} is missing or too short for {what}; {RESTORE}"
            )
        return digests

    def check(self) -> None:
        """Refuse a manifest beside the file of another checkpoint; a long file is not read.

        Raises:
            CorruptCheckpointError: the file is not the manifest's.
        """
        if self.few:
            problem = self.problem()
            if problem:
                raise CorruptCheckpointError(f"{self.root}: {problem}; {RESTORE}")

    def problem(self) -> str:
        """What is wrong with the file as a whole; empty if nothing.

        Raises:
            StorageError: it cannot be read.
        """
        if file_problem(self.root, self.key, self.nbytes):
            return f"{self.key}: altered"
        if not self.few:
            return _long_problem(self)
        asked, self._asked_whole = self._asked_whole, None
        with storage_errors(self.root.child(self.key)):
            content = stored_content(self.root, self.key, self.nbytes, asked)
        if content is None:
            return f"{self.key}: missing"
        if len(content) != self.nbytes or digest_bytes(content).hex() != self.expected:
            return f"{self.key}: altered"
        self.content = content
        return ""


@dataclass(slots=True)
class Digests(RowFile):
    """The digests of one checkpoint's chunks."""

    key: str = DIGESTS
    """The file's."""


def _taken(content: bytes, numbers: NDArray[np.int64]) -> _Rows:
    """The rows of these numbers, counted from the first in ``content``."""
    count = len(content) // DIGEST_BYTES
    there = numbers < count
    rows = np.zeros((len(numbers), DIGEST_BYTES), np.uint8)
    stored = np.frombuffer(content, np.uint8, count * DIGEST_BYTES).reshape(-1, DIGEST_BYTES)
    rows[there] = stored[numbers[there]]
    return rows, there


def _content(asked: Reading, root: Location, key: str) -> bytes:
    """A range of a file; empty if the file is too short for it."""
    with storage_errors(root.child(key)):
        read = answer_within(asked, root)
        return b"" if read is None else read.value


def _long_problem(rows: RowFile) -> str:
    """What is wrong with a file that is too long to keep."""
    hashed, key, size = xxhash.xxh3_128(), rows.key, rows.nbytes
    store = open_store(rows.root)
    for start in range(0, size, RANGE_BYTES):
        stop = min(start + RANGE_BYTES, size)
        with storage_errors(rows.root.child(key)):
            asked = store.read(key, byte_range=slice(start, stop))
            content = answer_within(asked, rows.root)
        if content is not None and content.state != "value":
            return f"{key}: missing"
        if content is None or len(content.value) != stop - start:
            return f"{key}: altered"
        hashed.update(content.value)
    return "" if hashed.hexdigest() == rows.expected else f"{key}: altered"
