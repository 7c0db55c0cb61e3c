"""An open checkpoint: look at it, slice it, verify it, without loading it.

`Checkpoint` is a mapping from leaf name to `StoredArray` or Python value. Slicing a stored array
reads and verifies the chunks that the slice touches, and no others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import EllipsisType

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import numpy_dtype
from xckpt.core.geometry.boxes import Boxes, intersect
from xckpt.core.geometry.grid import cells
from xckpt.core.manifest.codec import (
    BytesEntry,
    Manifest,
    TensorEntry,
    ValueEntry,
    ZarrArray,
    arrays,
)
from xckpt.core.metadata import Metadata, Sharding
from xckpt.core.tree import unflatten
from xckpt.core.values import Value, decode_content, decode_value
from xckpt.errors import XckptError
from xckpt.options import LoadOptions, Progress
from xckpt.storage.budget import Pool, ProgressCounter
from xckpt.storage.chunk import ChunkSource, allocate
from xckpt.storage.read_checkpoint import ZarrStorageReader

__all__ = ["Checkpoint", "StoredArray"]

Index = int | slice | EllipsisType


@dataclass(frozen=True, slots=True)
class StoredArray:
    """A tensor in a checkpoint. Slicing it with ints, slices and ``...`` reads just that.

    Example:
        >>> import xckpt
        >>> _ = xckpt.save("memory://stored-array", {"w": np.arange(12).reshape(3, 4)})
        >>> stored = xckpt.open("memory://stored-array")["w"]
        >>> stored.shape, stored.dtype, stored[1:, ::2]
        ((3, 4), 'int64', array([[ 4,  6],
               [ 8, 10]]))
    """

    name: str
    """The leaf name."""
    shape: tuple[int, ...]
    """The global shape, elements."""
    dtype: str
    """The format's name of the element type."""
    pieces: tuple[ZarrArray, ...]
    """The zarr arrays that hold it."""
    sharding: Sharding | None
    """The sharding that wrote it."""
    annotation: str
    _source: ChunkSource

    @property
    def chunks(self) -> tuple[int, ...] | None:
        """The chunk shape; None for a leaf in pieces, which each have their own."""
        return self.pieces[0].chunk if self.regular else None

    @property
    def regular(self) -> bool:
        """Whether one zarr array is all of the tensor."""
        return len(self.pieces) == 1 and self.pieces[0].piece_of is None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * numpy_dtype(self.dtype).itemsize

    def __getitem__(self, index: Index | tuple[Index, ...]) -> NDArray[np.generic]:
        """The elements of a slice, as NumPy would give them, always as an array.

        Raises:
            IndexError: the index does not fit the shape.
            CorruptCheckpointError: a chunk is not what was saved.
            LeafTooLargeError: there is no memory for so many elements.
            StorageError: another save has replaced the checkpoint meanwhile.
        """
        keys = _normalised(index, self.shape, self.name)
        low = tuple(key.start for key in keys)
        sizes = [max(0, key.stop - key.start) for key in keys]
        box = allocate(sizes, numpy_dtype(self.dtype), self.name)
        if box.size:
            with self._source.noticing_replacement():
                self._read(low, box)
        picked = index if isinstance(index, tuple) else (index,)
        picked = tuple(key for key in _expanded(picked, len(self.shape)))
        steps = tuple(
            0 if isinstance(key, int) else slice(None, None, key.step) if key.step else slice(None)
            for key in picked
        )
        return np.asarray(box[steps])

    def __array__(
        self, dtype: np.dtype[np.generic] | None = None, copy: bool | None = None
    ) -> NDArray[np.generic]:
        whole = self[...]
        return whole if dtype is None else whole.astype(dtype)

    def _read(self, low: tuple[int, ...], box: NDArray[np.generic]) -> None:
        wanted = Boxes.of([(low, box.shape)])
        stored = Boxes.of([(piece.offset, piece.shape) for piece in self.pieces])
        _, numbers, shared = intersect(wanted, stored)
        for number, part in zip(numbers.tolist(), shared, strict=True):
            piece = self.pieces[number]
            key = (piece.leaf, piece.number)
            self._source.prepare([key])
            start = [a - b for a, b in zip(part.offsets, piece.offset, strict=True)]
            stop = [a + n for a, n in zip(start, part.sizes, strict=True)]
            chunk_numbers, boxes = cells(start, stop, piece.shape, piece.chunk)
            for chunk_number, cell in zip(chunk_numbers.tolist(), boxes, strict=True):
                scratch = allocate(cell.sizes, box.dtype, self.name)
                self._source.read(key, chunk_number, (cell.offsets, cell.sizes), scratch)
                _copy_overlap(
                    scratch,
                    [a + b for a, b in zip(cell.offsets, piece.offset, strict=True)],
                    box,
                    low,
                )


def _copy_overlap(
    source: NDArray[np.generic],
    source_at: list[int],
    target: NDArray[np.generic],
    target_at: tuple[int, ...],
) -> None:
    """Copy what two boxes share, each given by its elements and its offset."""
    low = [max(a, b) for a, b in zip(source_at, target_at, strict=True)]
    ends = zip(source_at, source.shape, target_at, target.shape, strict=True)
    high = [min(a + n, b + m) for a, n, b, m in ends]
    into = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, target_at, strict=True))
    out = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, source_at, strict=True))
    if into:
        target[into] = source[out]
    else:
        target[...] = source


def _expanded(index: tuple[Index, ...], rank: int) -> list[int | slice]:
    """One int or slice for each dimension."""
    ellipses = [position for position, key in enumerate(index) if key is Ellipsis]
    if len(ellipses) > 1:
        raise IndexError("an index can have one ellipsis")
    at = ellipses[0] if ellipses else len(index)
    given = [key for key in index if not isinstance(key, EllipsisType)]
    if len(given) > rank:
        raise IndexError(f"too many indices: {len(given)} for {rank} dimensions")
    missing = [slice(None)] * (rank - len(given))
    full = [*given[:at], *missing, *given[at:]]
    for key in full:
        if isinstance(key, slice):
            if key.step is not None and key.step < 1:
                raise IndexError("slices with a negative step are not supported")
        elif not isinstance(key, int | np.integer):
            raise IndexError(f"index with ints, slices and ..., not {type(key).__name__}")
    return [key if isinstance(key, slice) else int(key) for key in full]


def _normalised(index: Index | tuple[Index, ...], shape: tuple[int, ...], name: str) -> list[slice]:
    """A slice with bounds for each dimension; an int is a slice of one."""
    bounds: list[slice] = []
    for d, key in enumerate(_expanded(index if isinstance(index, tuple) else (index,), len(shape))):
        size = shape[d]
        if isinstance(key, slice):
            start, stop, _ = key.indices(size)
            bounds.append(slice(start, max(start, stop)))
            continue
        if not -size <= key < size:
            raise IndexError(f"{name}: index {key} is outside dimension {d} with size {size}")
        position = key % size
        bounds.append(slice(position, position + 1))
    return bounds


class Checkpoint(Mapping[str, StoredArray | Value]):
    """A committed checkpoint, open for reading: leaf name -> stored array or Python value.

    Example:
        >>> import xckpt
        >>> _ = xckpt.save("memory://open", {"step": 7, "w": np.zeros(3)}, metadata={"run": "a"})
        >>> checkpoint = xckpt.open("memory://open")
        >>> list(checkpoint), checkpoint["step"], checkpoint.user_metadata
        (['step', 'w'], 7, {'run': 'a'})
        >>> checkpoint.verify()
        []
    """

    def __init__(self, path: str | os.PathLike[str], *, options: LoadOptions | None = None) -> None:
        reader = ZarrStorageReader(path, options=options)
        self.metadata: Metadata = reader.set_up_storage_reader(reader.read_metadata(), 1)
        """What the checkpoint says about its leaves."""
        assert reader.source is not None
        self.location = reader.location
        self.options = reader.options
        self._reader = reader
        self._source: ChunkSource = reader.source
        self._entries = {leaf.name: leaf for leaf in self.manifest.leaves}

    @property
    def manifest(self) -> Manifest:
        """The manifest as it is stored."""
        return self._source.manifest

    @property
    def chunk_source(self) -> ChunkSource:
        """Reads and verifies single chunks."""
        return self._source

    @property
    def user_metadata(self) -> object:
        """What the caller passed as ``metadata=`` when saving."""
        return self.manifest.user

    @cached_property
    def _arrays(self) -> dict[str, list[ZarrArray]]:
        found: dict[str, list[ZarrArray]] = {}
        for array in arrays(self.manifest):
            found.setdefault(array.leaf, []).append(array)
        return found

    @property
    def tree(self) -> object:
        """The saved containers, with a stored array or value for each leaf."""
        return unflatten(dict(self.items()), self.metadata.containers)

    def __getitem__(self, name: str) -> StoredArray | Value:
        entry = self._entries.get(name)
        if entry is None:
            raise KeyError(f"{name!r} is no leaf of {self.location}")
        if isinstance(entry, ValueEntry):
            return decode_value(entry.type, entry.value)
        if isinstance(entry, BytesEntry):
            return self._value_of(entry)
        return self._stored(entry)

    def _stored(self, entry: TensorEntry) -> StoredArray:
        pieces = tuple(self._arrays.get(entry.name, ()))
        return StoredArray(
            entry.name,
            entry.shape,
            entry.dtype,
            pieces,
            entry.sharding,
            entry.annotation,
            self._source,
        )

    def _value_of(self, entry: BytesEntry) -> Value:
        with self._source.noticing_replacement():
            content = self._reader.read_bytes(entry)
        return decode_content(entry.name, entry.type, content)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.location}: {len(self)} leaves>"

    def verify(self, progress: Callable[[Progress], None] | None = None) -> list[str]:
        """Read everything and compare it with what was saved.

        Returns:
            A line for each thing that is wrong; empty if the checkpoint is whole.
        """
        problems = self._source.altered_documents()
        digests = self._digest_file_problem()
        if digests:
            return [f"{digests}; without it no chunk can be verified", *problems]
        every = list(arrays(self.manifest))
        total = sum(prod(a.shape) * numpy_dtype(a.dtype).itemsize for a in every)
        counter = ProgressCounter(total, progress)
        found: list[str] = []
        with Pool(threads=self.options.threads, budget=self.options.memory_bytes) as pool:
            for array in every:
                self._verify_array(array, pool, counter, found)
        return problems + sorted(found)

    def _digest_file_problem(self) -> str:
        try:
            return self._source.digest_file_problem()
        except XckptError as error:
            return str(error)

    def _verify_array(
        self, array: ZarrArray, pool: Pool, counter: ProgressCounter, found: list[str]
    ) -> None:
        key = (array.leaf, array.number)
        if array.count == 0:
            return
        try:
            self._source.prepare([key], check_documents=False)
        except XckptError as error:
            found.append(str(error))
            return
        dtype = numpy_dtype(array.dtype)
        zeros = (0,) * len(array.shape)
        numbers, boxes = cells(zeros, array.shape, array.shape, array.chunk)
        for number, cell in zip(numbers.tolist(), boxes, strict=True):
            size = prod(cell.sizes) * dtype.itemsize
            pool.reserve(size)

            def check(
                number: int = number,
                cell: tuple[tuple[int, ...], tuple[int, ...]] = (cell.offsets, cell.sizes),
                size: int = size,
            ) -> None:
                try:
                    self._source.read(key, number, cell, allocate(cell[1], dtype, array.leaf))
                except XckptError as error:
                    found.append(str(error))
                finally:
                    pool.release(size)
                counter.add(size)

            pool.submit(check)
