"""The chunks of a checkpoint: each read on its own and verified against its digest.

1. What a local file holds as it is (`xckpt.storage.chunks.plain_files`) is read at once, into
   C-contiguous memory (`ChunkSource.fill`), or slab by slab (`ChunkSource.slabs`).
2. `ChunkSource.begin` starts the read of any other `Chunk`. A small chunk that is an object of its
   own is read as a value; any other through its array, which is opened once. `ChunkSource.finish`
   waits for it.
3. The digest is compared, which was taken at the destination: so it also catches a chunk that was
   swapped with another, or that an earlier save wrote.

`xckpt.storage.chunks.window` has many chunks in flight.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from xckpt.core.geometry.box import Box
from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.manifest.entries import Manifest
from xckpt.core.manifest.packs import PACKS
from xckpt.core.manifest.rules import count_chunks
from xckpt.core.manifest.stored_arrays import StoredArrays
from xckpt.core.problem import Problem
from xckpt.errors import RESTORE, CorruptCheckpointError, LeafTooLargeError, XckptError
from xckpt.storage.array import SMALL_BYTES, digest_array, open_array
from xckpt.storage.buckets.odd_answers import is_odd
from xckpt.storage.chunks.digests import Digests
from xckpt.storage.chunks.file_checks import file_problem, most_bytes
from xckpt.storage.chunks.plain_files import (
    PlainFile,
    are_plain,
    is_leading,
    is_plain,
    slab_elements,
    stored_bytes,
)
from xckpt.storage.chunks.requests import Chunk
from xckpt.storage.foreign.files import LONGEST_FILE
from xckpt.storage.integrity import Integrity
from xckpt.storage.location import (
    Location,
    Reading,
    answer,
    check_process,
    open_store,
    storage_errors,
)
from xckpt.storage.packs.places import places_of
from xckpt.storage.refusals import refusal

_DAMAGED = ("FAILED_PRECONDITION", "DATA_LOSS", "OUT_OF_RANGE", "Unexpected EOF")
"""TensorStore's messages about a chunk that does not fit its metadata; the last one, about a file
that is cut off while it is read."""


@dataclass(frozen=True, slots=True)
class PendingRead:
    """A read that was started and not yet verified."""

    chunk: Chunk
    into: NDArray[np.generic]
    wait: Callable[[], bytes]
    """Waits until the elements are in `into`; their digest. Raises what TensorStore does, with a
    status."""

    def give_up(self) -> None:
        """Wait until nothing writes into the memory any more."""
        with contextlib.suppress(Exception):
            self.wait()


@dataclass(slots=True)
class ChunkSource:
    """Chunks of a checkpoint's arrays, opened lazily and verified when read."""

    home: Location
    """The checkpoint's place, where its manifest is."""
    root: Location
    """The root group's place."""
    manifest: Manifest
    memory_bytes: int
    """Bytes that the chunks to be read may take in memory; see `ChunkRequests`."""
    host_ranks: int = 1
    """How many ranks share it."""
    integrity: Integrity = field(init=False)
    closed: bool = False
    """Whether the source is closed."""
    bytes_read: int = 0
    """Bytes of chunks read so far."""
    _chunks: ts.KvStore | None = None
    _arrays: StoredArrays | None = None
    _opened: dict[str, ts.TensorStore] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __repr__(self) -> str:
        return f"<ChunkSource {self.root}>"

    def __post_init__(self) -> None:
        digests = Digests(self.root, count_chunks(self.manifest), self.manifest.digests)
        places = places_of(self.root, self.manifest)
        self.integrity = Integrity(self.home, self.root, self.manifest, digests, places)

    @property
    def arrays(self) -> StoredArrays:
        """Leaf name -> its arrays; made when first asked for, which a listing never does."""
        if self._arrays is None:
            self._arrays = StoredArrays(self.manifest)
        return self._arrays

    def close(self) -> None:
        """Release everything that is open."""
        self.closed = True
        self._opened.clear()
        self._chunks = None

    def read(self, chunk: Chunk, into: NDArray[np.generic]) -> None:
        """Read a chunk into C-contiguous memory of its sizes and verify it.

        Raises:
            CorruptCheckpointError: the chunk is missing, truncated, or not what was saved.
        """
        if self.is_plain_file(chunk):
            self.fill(chunk, into)
        else:
            self.finish(self.begin(chunk, into))

    def begin(self, chunk: Chunk, into: NDArray[np.generic]) -> PendingRead:
        """Start a `read` of no plain file, whose memory must stay until `finish`.

        Raises:
            CorruptCheckpointError: what is there cannot be a chunk.
            StorageError: this process was forked from one that had used TensorStore.
            ValueError: the checkpoint was closed.
        """
        self.check_open()
        if chunk.array.place is not None:
            place = self.integrity.places.place(chunk.array, chunk.number)
            part = slice(place.offset, place.offset + chunk.nbytes)
            value = self.store.read(place.pack, byte_range=part)
            return PendingRead(chunk, into, partial(_take_value, value, into, self.root))
        self._check_file(chunk)
        if into.nbytes <= SMALL_BYTES and self._is_object(chunk):
            value = self.store.read(chunk.array.key(chunk.box.offsets))
            return PendingRead(chunk, into, partial(_take_value, value, into, self.root))
        memory = ts.array(into, copy=False, write=True)
        with storage_errors(self.root):
            write = memory.write(self._open(chunk.array)[chunk.box.slices()])
        return PendingRead(chunk, into, partial(_take_write, write, into, self.root))

    def finish(self, pending: PendingRead) -> None:
        """Wait for a read and verify it.

        Raises:
            CorruptCheckpointError: the chunk is missing, truncated, or not what was saved.
            StorageError: the storage gave no answer.
        """
        with self.file_errors(pending.chunk):
            digest = pending.wait()
        self.verify(pending.chunk, digest)

    def fill(self, chunk: Chunk, into: NDArray[np.generic]) -> None:
        """`read` a chunk for which `is_plain_file` is true."""
        self.check_open()
        with self.file_errors(chunk), contextlib.closing(_open_file(self, chunk)) as file:
            file.fill(into)
            digest = file.digest()
        self.verify(chunk, digest)

    def translated(self, chunk: Chunk, error: OSError | ValueError | RuntimeError) -> XckptError:
        """What a failure of TensorStore says about a chunk."""
        if isinstance(error, XckptError):
            return error
        if not is_odd(str(error)) and (reason := _damage(error)):
            return self.damage(chunk, reason)
        return refusal(self._place(chunk), error)

    def is_plain_file(self, chunk: Chunk) -> bool:
        """Whether a local file holds a chunk's elements as they are, one behind another."""
        if self.root.driver != "file":
            return False
        leading = is_leading(chunk.box.sizes, chunk.array.chunk)
        return chunk.array.place is not None or (leading and are_plain(self.manifest.codecs))

    def slabs(self, chunk: Chunk) -> Generator[tuple[Box, NDArray[np.generic]]]:
        """Read a chunk for which `is_plain_file` is true, some rows at a time.

        Yields:
            The box of each slab, counted from the chunk's first element, and its elements, which
            stay until the next slab. They are verified only after the last one.

        Raises:
            CorruptCheckpointError: the chunk is missing, truncated, or not what was saved.
            StorageError: it cannot be read.
        """
        sizes, dtype, leaf = chunk.box.sizes, chunk.dtype, chunk.array.leaf
        self.check_open()
        memory = allocate((slab_elements(sizes, dtype.itemsize),), dtype, leaf)
        with self.file_errors(chunk), contextlib.closing(_open_file(self, chunk)) as file:
            yield from file.slabs(sizes, memory)
            digest = file.digest()
        self.verify(chunk, digest)

    @contextlib.contextmanager
    def file_errors(self, chunk: Chunk) -> Iterator[None]:
        """Name the chunk in the error about a file that is damaged or cannot be read."""
        try:
            yield
        except CorruptCheckpointError as error:
            raise self.damage(chunk, str(error)) from error
        except (OSError, ValueError, RuntimeError) as error:
            raise self.translated(chunk, error) from error

    def verify(self, chunk: Chunk, digest: bytes) -> None:
        """Compare the digest of what was read with the one that was saved.

        Raises:
            CorruptCheckpointError: they differ.
        """
        if digest != self.integrity.digests.of(chunk.array, chunk.number):
            raise self.damage(chunk, "its digest differs from the one saved")
        self.count(chunk.nbytes)

    def count(self, nbytes: int) -> None:
        """Count bytes of chunks that were read and verified."""
        with self._lock:
            self.bytes_read += nbytes

    def damage(self, chunk: Chunk, reason: str) -> CorruptCheckpointError:
        """The error that says what is wrong with a chunk, and where it is."""
        text = f"{reason}; {RESTORE}"
        line = f"{self._place(chunk)}: {text}"
        box = chunk.box.shifted(chunk.array.offset)
        problem = Problem(chunk.array.leaf, box, kind="chunk", text=text, line=line)
        return CorruptCheckpointError(line, [problem])

    def check_open(self) -> None:
        """Raise an error if the checkpoint is closed, or this process is a fork."""
        check_process()
        if self.closed:
            raise ValueError(f"{self.home} is closed; open it again")

    def _check_file(self, chunk: Chunk) -> None:
        most = most_bytes(chunk.array, self.manifest.codecs)
        problem = file_problem(self.root, chunk.array.key(chunk.box.offsets), most)
        if problem:
            raise self.damage(chunk, f"the file is {problem}")

    def _is_object(self, chunk: Chunk) -> bool:
        """Whether a chunk's elements are all that its object holds."""
        array = chunk.array
        return is_plain(array, self.manifest.codecs) and chunk.box.sizes == array.chunk

    @property
    def store(self) -> ts.KvStore:
        """The objects of the checkpoint."""
        store = self._chunks  # another thread may close it
        if store is None:
            store = self._chunks = open_store(self.root)
        return store

    def _open(self, array: ZarrArray) -> ts.TensorStore:
        opened = self._opened.get(array.path)
        if opened is None:
            opened = open_array(self.store, array, self.manifest.codecs)
            self._opened[array.path] = opened
        return opened

    def _place(self, chunk: Chunk) -> str:
        array, box = chunk.array, chunk.box.shifted(chunk.array.offset)
        key = PACKS if array.place is not None else array.key(chunk.box.offsets)
        return f"{array.leaf or 'the root'}: {box} in {self.root.child(key)}"


def allocate(sizes: Sequence[int], dtype: np.dtype[np.generic], leaf: str) -> NDArray[np.generic]:
    """New memory for elements of a leaf.

    Raises:
        LeafTooLargeError: there is none.
    """
    try:
        return np.empty(sizes, dtype)
    except MemoryError as error:
        raise LeafTooLargeError(
            f"{leaf or 'the root'}: no memory for {tuple(sizes)} elements of {dtype} ({error})"
        ) from error


def open_range(root: Location, key: str, start: int, stop: int) -> PlainFile:
    """A local file of several chunks, open at byte ``start`` and at least ``stop`` long."""
    file = PlainFile(f"{root.path}/{key}", stop, LONGEST_FILE)
    file.go_to(start)
    return file


def _open_file(source: ChunkSource, chunk: Chunk) -> PlainFile:
    """The local file of a chunk, or of its pack or shard, open at the chunk."""
    if chunk.array.place is not None:
        pack, offset = source.integrity.places.place(chunk.array, chunk.number)
        return open_range(source.root, pack, offset, offset + chunk.nbytes)
    path = f"{source.root.path}/{chunk.array.key(chunk.box.offsets)}"
    if chunk.array.shard is None:
        return PlainFile(path, stored_bytes(chunk.array))
    from xckpt.storage.chunks.shards.files import open_in_shard

    return open_in_shard(path, chunk.array, chunk.box)


def _take_write(write: ts.WriteFutures, into: NDArray[np.generic], where: Location) -> bytes:
    """Wait until TensorStore has filled a chunk's memory; returns its digest."""
    answer(write, where)
    return digest_array(into)


def _take_value(value: Reading, into: NDArray[np.generic], where: Location) -> bytes:
    """Wait for an object's value and copy it into a chunk's memory, if the lengths agree."""
    read = answer(value, where)
    if read.state == "missing":
        raise ValueError("NOT_FOUND")
    if read.state != "value" or len(read.value) != into.nbytes:
        raise ValueError(f"OUT_OF_RANGE: {len(read.value):,} bytes instead of {into.nbytes:,}")
    into.reshape(-1).view(np.uint8)[:] = np.frombuffer(read.value, np.uint8)
    return digest_array(into)


def _damage(error: Exception) -> str:
    """What is wrong with a chunk that TensorStore refused; empty if it could not be read at all."""
    text = str(error)
    if "NOT_FOUND" in text:
        return "the chunk is missing"
    answered = "http_response_code" in text  # by a bucket, that refuses
    if not answered and any(status in text for status in _DAMAGED):
        return f"the chunk is truncated or damaged ({text[:200]})"
    return ""
