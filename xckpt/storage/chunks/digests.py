"""The digests of a checkpoint's chunks; only the parts of their file that are needed are in memory.

A file of places (`xckpt.storage.packs.places`) is read in the same way.

A manifest of a few bytes can claim billions of chunks, each with a digest.

1. A file of up to `FEW_BYTES` is read and checked as a whole.
2. Of a longer one, `Digests.prepare` asks for the digests of the arrays that are about to be read,
   neighbours in one request, if an array has no more than `BLOCK`. For a larger array, `Digests.of`
   fetches blocks when their first chunk comes, and keeps the last ones.
3. Nothing waits for them before `Digests.of`, so chunks are requested meanwhile.
4. `Digests.problem` hashes the whole file, range by range.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

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

    stop: int
    """One past the number of its last digest."""
    asked: Reading
    content: bytes | None = None
    """None until it is waited for; empty if the file is too short for it."""


@dataclass(slots=True)
class Digests:
    """The digests of one checkpoint."""

    root: Location
    """The root group's place."""
    total: int
    """Number of chunks in the whole checkpoint."""
    expected: str
    """Digest of the whole file, hex."""
    key: str = DIGESTS
    """The file's."""
    _whole: bytes = b""
    _asked_whole: Reading | None = None
    """The whole file, if it was requested."""
    _starts: list[int] = field(default_factory=list[int])
    """The numbers of the first digests of the ranges that were asked for, in order."""
    _ranges: list[_Range] = field(default_factory=list[_Range])
    _last: OrderedDict[int, bytes] = field(default_factory=OrderedDict[int, bytes])
    """The blocks that were used last, of arrays without a requested range."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def before(self) -> int:
        """Bytes before the first digest."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.before + self.total * DIGEST_BYTES

    @property
    def few(self) -> bool:
        """Whether the file is read as a whole, or its content is known."""
        return bool(self._whole) or self.nbytes <= FEW_BYTES

    def first(self, array: ZarrArray) -> int:
        """The number of an array's first digest."""
        return array.first

    def require(self) -> None:
        """Refuse a manifest with many more chunks than digests, before the chunks are enumerated.

        Raises:
            CorruptCheckpointError: the digest file is missing or too short.
        """
        if not self.few:
            self._answered(self._ask(self.total - 1, 1), 1, f"{self.total:,} chunks")

    def prepare(self, wanted: Iterable[ZarrArray]) -> None:
        """Ask for the digests of arrays, once.

        Raises:
            CorruptCheckpointError: a local file was altered.
        """
        pairs = [(self.first(array), array.count) for array in wanted]
        self.prepare_ranges(*np.array(pairs, np.int64).reshape(-1, 2).T)

    def prepare_ranges(self, firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Ask for the digests of arrays, by their first digests and counts; see `prepare`.

        Raises:
            CorruptCheckpointError: a local file was altered.
        """
        if not self.few:
            some = (counts > 0) & (counts <= BLOCK)
            _ask_ranges(self, firsts[some], counts[some])
        elif self._whole or not len(firsts):
            return
        elif self.root.driver == "file":
            self.check()
        elif self._asked_whole is None:
            self._asked_whole = open_store(self.root).read(self.key)

    def _range(self, first: int, count: int) -> int | None:
        """Which of the ranges has some digests."""
        at = bisect_right(self._starts, first) - 1
        return at if at >= 0 and first + count <= self._ranges[at].stop else None

    def of(self, array: ZarrArray, number: int) -> bytes:
        """The digest of chunk ``number`` of a prepared array.

        Raises:
            CorruptCheckpointError: the digest file was altered, or is too short.
        """
        found = self._kept(self.first(array) + number, 1)
        if found is not None:
            return found
        start = number % BLOCK * DIGEST_BYTES
        return self._block(array, number // BLOCK)[start : start + DIGEST_BYTES]

    def blocks(self, array: ZarrArray) -> Iterator[bytes]:
        """All digests of a prepared array's chunks, `BLOCK` at a time.

        Raises:
            CorruptCheckpointError: the digest file is too short.
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
        """Some digests, if they were requested and the file has them. The file may be too short
        only for other digests of the request.
        """
        if self.few:
            start = self.before + first * DIGEST_BYTES
            return (self._whole or self.whole())[start : start + count * DIGEST_BYTES]
        with self._lock:
            at = self._range(first, count)
            if at is None:
                return None
            start, part = self._starts[at], self._ranges[at]
            content = self._content(part)
        low = (first - start) * DIGEST_BYTES
        found = content[low : low + count * DIGEST_BYTES]
        return found if len(found) == count * DIGEST_BYTES else None

    def _content(self, part: _Range) -> bytes:
        """The content of a requested range; the lock is held."""
        if part.content is None:
            part.content = _content(part.asked, self.root, self.key)
        return part.content

    def whole(self) -> bytes:
        """The content of a file that is read as a whole.

        Raises:
            CorruptCheckpointError: it was altered.
        """
        with self._lock:  # one of several threads reads it
            if not self._whole:
                self.check()
        return self._whole

    def _ask(self, first: int, count: int) -> Reading:
        """Begin to read ``count`` digests of the file.

        Raises:
            CorruptCheckpointError: a local file is none that can be read, or too long.
        """
        problem = file_problem(self.root, self.key, self.nbytes)
        if problem:
            raise CorruptCheckpointError(f"{self.root}: {self.key} is {problem}")
        low = self.before + first * DIGEST_BYTES
        where = slice(low, low + count * DIGEST_BYTES)
        return open_store(self.root).read(self.key, byte_range=where)

    def _answered(self, asked: Reading, count: int, what: str) -> bytes:
        """The content of a range of the digest file, which must have ``count`` digests."""
        digests = _content(asked, self.root, self.key)
        if len(digests) != count * DIGEST_BYTES:
            raise CorruptCheckpointError(
                f"{self.root}: {self.key} is missing or too short for {what}"
            )
        return digests

    def check(self) -> None:
        """Refuse a manifest beside the digest file of another checkpoint; a long file is not read.

        Raises:
            CorruptCheckpointError: the digest file is not the manifest's.
        """
        if self.few:
            problem = self.problem()
            if problem:
                raise CorruptCheckpointError(f"{self.root}: {problem}; {RESTORE}")

    def problem(self) -> str:
        """What is wrong with the digest file as a whole; empty if nothing.

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
        self._whole = content
        return ""


def _ask_ranges(digests: Digests, firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
    """Begin to read the digests of arrays."""
    gap, most = GAP_BYTES // DIGEST_BYTES, RANGE_BYTES // DIGEST_BYTES
    with digests._lock:
        starts, ranges = digests._starts, digests._ranges
        at = np.searchsorted(np.array([-1, *starts]), firsts, side="right") - 1
        new = firsts + counts > np.array([-1, *(each.stop for each in ranges)])[at]
        for each in runs(firsts[new], counts[new], gap=gap, most=most):
            asked = digests._ask(each.start, each.stop - each.start)
            # Such a range ends with new arrays: it holds any other array entirely or not at all.
            low, high = bisect_left(starts, each.start), each.stop
            within = slice(low, bisect_left(starts, high, low))
            starts[within], ranges[within] = [each.start], [_Range(high, asked)]


def many(
    digests: Digests, numbers: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Many digests at once, (n, 16), and a mask of those found; `Digests.of` gives the others.

    Args:
        digests: of arrays that are prepared.
        numbers: of digests in the file, (n,).
    """
    rows = np.zeros((len(numbers), DIGEST_BYTES), np.uint8)
    if digests.few:
        content = digests._whole[digests.before :]
        return _take(rows, content, numbers), numbers < len(content) // DIGEST_BYTES
    found = np.zeros(len(numbers), bool)
    with digests._lock:
        starts = np.array(digests._starts, np.int64)
        at = np.searchsorted(starts, numbers, side="right") - 1
        for number in np.unique(at[at >= 0]).tolist():
            content = digests._content(digests._ranges[number])
            own = np.flatnonzero(at == number)
            within = numbers[own] - starts[number]
            rows[own] = _take(rows[own], content, within)
            found[own] = within < len(content) // DIGEST_BYTES
    return rows, found


def _take(rows: NDArray[np.uint8], content: bytes, numbers: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The rows, filled with the digests that a part of the file has."""
    count = len(content) // DIGEST_BYTES
    stored = np.frombuffer(content, np.uint8, count * DIGEST_BYTES).reshape(-1, DIGEST_BYTES)
    there = numbers < count
    rows[there] = stored[numbers[there]]
    return rows


def _content(asked: Reading, root: Location, key: str) -> bytes:
    """A range of a file; empty if the file is too short for it."""
    with storage_errors(root.child(key)):
        read = answer_within(asked, root)
        return b"" if read is None else read.value


def _long_problem(digests: Digests) -> str:
    """What is wrong with a file that is too long to keep."""
    hashed, key, size = xxhash.xxh3_128(), digests.key, digests.nbytes
    store = open_store(digests.root)
    for start in range(0, size, RANGE_BYTES):
        stop = min(start + RANGE_BYTES, size)
        with storage_errors(digests.root.child(key)):
            asked = store.read(key, byte_range=slice(start, stop))
            content = answer_within(asked, digests.root)
        if content is not None and content.state != "value":
            return f"{key}: missing"
        if content is None or len(content.value) != stop - start:
            return f"{key}: altered"
        hashed.update(content.value)
    return "" if hashed.hexdigest() == digests.expected else f"{key}: altered"
