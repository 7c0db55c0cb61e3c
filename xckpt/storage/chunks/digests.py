"""The digests of a checkpoint's chunks, as much of their file in memory as is needed.

The file of places (`xckpt.storage.packs.places`) is read in the same way.

A manifest of a few bytes can claim billions of chunks, each with a digest.

1. A file of up to `FEW_BYTES` is read and checked as a whole.
2. Of a longer one, `Digests.prepare` asks for the digests of the arrays that are about to be read,
   what lies together in one request, where an array has no more than `BLOCK`; of a larger array,
   `Digests.of` fetches blocks when their first chunk comes, and keeps the last ones.
3. Nothing waits for them before `Digests.of`, so that chunks are on their way meanwhile.
4. `Digests.problem` hashes the whole file, range by range.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import tensorstore as ts
import xxhash

from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.manifest.own_keys import DIGESTS
from xckpt.core.manifest.packs import runs
from xckpt.errors import CorruptCheckpointError
from xckpt.storage.array import DIGEST_BYTES, digest_bytes
from xckpt.storage.chunks.file_checks import file_problem
from xckpt.storage.location import Location, answer, open_store, storage_errors

FEW_BYTES = 1 << 20
"""A digest file up to this size (bytes) is read and checked as a whole."""

BLOCK = 1 << 16
"""Digests that are fetched at a time, of an array that has more: 1 MiB."""

KEPT_BLOCKS = 16
"""How many of these are in memory."""

RANGE_BYTES = 1 << 23
"""What is asked for at a time, of a file of which more is wanted."""

GAP_BYTES = 1 << 16
"""What is read in vain rather than asked for in two requests."""

_Block = tuple[str, int]
"""The path of an array, and the number of a block of it."""


_Read: TypeAlias = "ts.Future[ts.KvStore.ReadResult]"


@dataclass(frozen=True, slots=True)
class _Range:
    """A part of the file that was asked for."""

    start: int
    content: _Read


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
    _asked_whole: _Read | None = None
    """The whole file, where it is on its way."""
    _asked: dict[str, _Range] = field(default_factory=dict[str, _Range])
    """By the path of an array, where its digests come from."""
    _blocks: dict[_Block, bytes] = field(default_factory=dict[_Block, bytes])
    """Those that stay: of arrays that have one block."""
    _last: OrderedDict[_Block, bytes] = field(default_factory=OrderedDict[_Block, bytes])
    """The blocks of larger arrays that were used last."""
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
        """Whether the file is read as a whole."""
        return self.nbytes <= FEW_BYTES

    def first(self, array: ZarrArray) -> int:
        """The number of an array's first digest."""
        return array.first

    def require(self) -> None:
        """Refuse a manifest that has many more chunks than digests, before they are enumerated.

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
        new = {a.path: a for a in wanted if (a.path, 0) not in self._blocks and a.count <= BLOCK}
        if not self.few:
            self._ask_ranges([a for path, a in new.items() if a.count and path not in self._asked])
        elif new and not self._whole and self.root.driver == "file":
            self.check()
        elif new and not self._whole and self._asked_whole is None:
            self._asked_whole = open_store(self.root).read(self.key)

    def _ask_ranges(self, wanted: Sequence[ZarrArray]) -> None:
        """Begin to read the digests of arrays."""
        ranges = [self._range(array) for array in wanted]
        lows, lengths = [r.start for r in ranges], [r.stop - r.start for r in ranges]
        store = open_store(self.root) if wanted else None
        for each in runs(lows, lengths, gap=GAP_BYTES, most=RANGE_BYTES):
            assert store is not None
            part = store.read(self.key, byte_range=slice(each.start, each.stop))
            for number in each.members:
                self._asked[wanted[number].path] = _Range(each.start, part)

    def of(self, array: ZarrArray, number: int) -> bytes:
        """The digest of chunk ``number`` of a prepared array.

        Raises:
            CorruptCheckpointError: the digest file was altered, or is too short.
        """
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
        found = self._blocks.get((array.path, number))
        if found is not None:
            return found
        key = array.path, number
        with self._lock:
            if self.few or array.count <= BLOCK:
                if key not in self._blocks:
                    self._blocks[key] = self._all_of(array)
                return self._blocks[key]
            if key not in self._last:
                first = self.first(array) + number * BLOCK
                count = min(BLOCK, array.count - number * BLOCK)
                self._last[key] = self._answered(self._ask(first, count), count, array.leaf)
                if len(self._last) > KEPT_BLOCKS:
                    self._last.popitem(last=False)
            self._last.move_to_end(key)
            return self._last[key]

    def _all_of(self, array: ZarrArray) -> bytes:
        """The digests of an array that has one block, from what was asked for."""
        where, asked = self._range(array), self._asked.pop(array.path, None)
        if self.few:
            return self.whole()[where]
        if asked is not None:
            with contextlib.suppress(ValueError):
                content = answer(asked.content, self.root).value
                found = content[where.start - asked.start : where.stop - asked.start]
                if len(found) == array.count * DIGEST_BYTES:
                    return found
        # The file may be too short for other arrays of the request alone.
        return self._answered(self._ask(self.first(array), array.count), array.count, array.leaf)

    def whole(self) -> bytes:
        """The content of a file that is read as a whole.

        Raises:
            CorruptCheckpointError: it was altered.
        """
        if not self._whole:
            self.check()
        return self._whole

    def _range(self, array: ZarrArray) -> slice:
        """Where an array's digests are in the file."""
        low = self.before + self.first(array) * DIGEST_BYTES
        return slice(low, low + array.count * DIGEST_BYTES)

    def _ask(self, first: int, count: int) -> _Read:
        """Begin to read ``count`` digests of the file."""
        low = self.before + first * DIGEST_BYTES
        where = slice(low, low + count * DIGEST_BYTES)
        return open_store(self.root).read(self.key, byte_range=where)

    def _answered(self, asked: _Read, count: int, what: str) -> bytes:
        """A range of the digest file, which must have ``count`` digests in it."""
        with storage_errors(self.root.child(self.key)):
            try:
                digests = answer(asked, self.root).value
            except ValueError as error:
                if not str(error).startswith("OUT_OF_RANGE"):
                    raise
                digests = b""
        if len(digests) != count * DIGEST_BYTES:
            raise CorruptCheckpointError(
                f"{self.root}: {self.key} is missing or too short for {what}"
            )
        return digests

    def check(self) -> None:
        """Refuse a manifest that lies among files of another checkpoint; a long file is not read.

        Raises:
            CorruptCheckpointError: the digest file is not the manifest's.
        """
        if self.few:
            problem = self.problem()
            if problem:
                raise CorruptCheckpointError(f"{self.root}: {problem}")

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
            content = answer(asked or open_store(self.root).read(self.key), self.root)
        if content.state != "value":
            return f"{self.key}: missing"
        whole = len(content.value) == self.nbytes
        if not whole or digest_bytes(content.value).hex() != self.expected:
            return f"{self.key}: altered"
        self._whole = content.value
        return ""


def _long_problem(digests: Digests) -> str:
    """What is wrong with a file that is not kept."""
    hashed, key, size = xxhash.xxh3_128(), digests.key, digests.nbytes
    store = open_store(digests.root)
    for start in range(0, size, RANGE_BYTES):
        stop = min(start + RANGE_BYTES, size)
        with storage_errors(digests.root.child(key)):
            try:
                content = answer(store.read(key, byte_range=slice(start, stop)), digests.root)
            except ValueError as error:
                if not str(error).startswith("OUT_OF_RANGE"):
                    raise
                return f"{key}: altered"
        if content.state != "value":
            return f"{key}: missing"
        if len(content.value) != stop - start:
            return f"{key}: altered"
        hashed.update(content.value)
    return "" if hashed.hexdigest() == digests.expected else f"{key}: altered"
