"""A tensor in a checkpoint: its shape and chunks, and slices of it, read and verified.

1. An index becomes boxes to read and their places (`xckpt.core.geometry.selection`).
2. Each box is read through a window of chunks, in threads and within the budget of the options.
3. A pickled stored array names its checkpoint; the other process opens that again, once for all
   arrays, and refuses a different one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import numpy_dtype
from xckpt.core.geometry.box import Box, Shape
from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.geometry.selection import (
    AxisPicks,
    Key,
    PickedBox,
    axis_of,
    expand,
    mask_of,
    parts,
    points,
)
from xckpt.core.metadata import Sharding
from xckpt.core.text.printable import printable
from xckpt.core.text.shown import facts_html, readable_bytes
from xckpt.engine.limits import not_compiled
from xckpt.options import LoadOptions
from xckpt.storage.chunks.chunk import ChunkSource, allocate
from xckpt.storage.chunks.read_chunks import read_box
from xckpt.storage.contents.unopened import or_unopened
from xckpt.storage.read_checkpoint import ZarrStorageReader
from xckpt.storage.refusals import replaced


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StoredArray:
    """A tensor in a checkpoint. Indexing reads only the selected elements, verified, into a NumPy
    array.

    Indices are those of zarr-python: ints, slices, ``...``, a list or mask for one dimension;
    arrays for all dimensions pick single elements, as `vindex` does. An array may be of any
    framework; one without dimensions is an int. Slices may have negative steps. It can be pickled,
    for workers that reach the same storage; dask and torch take it as an array.

    Example:
        >>> import xckpt
        >>> _ = xckpt.save("memory://stored-array", {"w": np.arange(12).reshape(3, 4)})
        >>> stored = xckpt.open("memory://stored-array")["w"]
        >>> stored.shape, stored.dtype, stored[1:, ::2]
        ((3, 4), dtype('int64'), array([[ 4,  6],
               [ 8, 10]]))
        >>> stored[[2, 0], -1], stored[::-1, 0]
        (array([11,  3]), array([8, 4, 0]))
        >>> stored
        <StoredArray 'w': int64 (3, 4), 96 B in chunks of (3, 4)>
    """

    name: str
    """The leaf name."""
    shape: tuple[int, ...]
    """The global shape, elements."""
    dtype_name: str
    """The format's name of the element type, such as ``"bfloat16"``."""
    sharding: Sharding | None
    """The sharding that wrote it."""
    annotation: str
    _source: ChunkSource
    _options: LoadOptions

    @property
    def pieces(self) -> Sequence[ZarrArray]:
        """The zarr arrays that hold it; looked up on demand, since there may be many leaves."""
        return self._source.arrays.get(self.name, ())

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The NumPy dtype, or that of ml_dtypes for types that NumPy lacks."""
        return numpy_dtype(self.dtype_name)

    @property
    def label(self) -> str:
        """The leaf name for messages: without control characters."""
        return printable(self.name or "the root")

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.size * self.dtype.itemsize

    @property
    def chunks(self) -> tuple[int, ...] | None:
        """The chunk shape; None for a leaf in pieces, which each have their own."""
        return self.pieces[0].chunk if self.regular else None

    @property
    def regular(self) -> bool:
        """Whether one zarr array is all of the tensor."""
        return len(self.pieces) == 1 and self.pieces[0].piece_of is None

    @property
    def dimension_names(self) -> tuple[str, ...] | None:
        """The caller's name for each dimension, where `SaveOptions.dimension_names` gave them."""
        return self.pieces[0].dimension_names if self.pieces else None

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.label}: a tensor of no dimensions has no len()")
        return self.shape[0]

    def __iter__(self) -> Iterator[NDArray[np.generic]]:
        return map(self.__getitem__, range(len(self)))

    @not_compiled
    def __getitem__(self, index: Key | tuple[Key, ...]) -> NDArray[np.generic]:
        """The elements that an index picks, always as an array.

        One array of positions beside ints and slices picks along its own dimension, as in zarr;
        where a slice parts it from an int, NumPy would put that dimension first.

        Raises:
            IndexError: the index does not fit the shape.
            CorruptCheckpointError: a chunk is not what was saved.
            LeafTooLargeError: there is not enough memory for the elements.
            StorageError: another save has replaced the checkpoint meanwhile.
        """
        mask = mask_of(index, self.name)
        if mask is not None and mask.ndim > 1:
            return self.vindex[mask]
        keys = expand(index, self.shape, self.name)
        arrays = [key for key in keys if isinstance(key, np.ndarray)]
        if len(arrays) > 1 or any(array.ndim != 1 for array in arrays):
            if any(isinstance(key, slice) for key in keys):
                raise IndexError(
                    f"{self.label}: arrays for several dimensions beside slices can mean two"
                    " things: write stored.oindex[...] (every combination), or give an array for"
                    " every dimension (single elements)"
                )
            return self.vindex[index]
        return self.oindex[index]

    @property
    def oindex(self) -> Orthogonal:
        """Indexes each dimension on its own: every combination of what the keys pick."""
        return Orthogonal(self)

    @property
    def vindex(self) -> Points:
        """Picks single elements: an array of positions for each dimension, or a mask."""
        return Points(self)

    def read(self, box: Box, into: NDArray[np.generic]) -> None:
        """Read a box into memory, verified; in the calling thread, a few chunks at a time.

        Args:
            box: which elements, counted from the tensor's first.
            into: writable memory of the box's sizes and the tensor's dtype, of any strides.

        Raises:
            CorruptCheckpointError: a chunk is not what was saved.
            StorageError: the storage refused, or another save has replaced the checkpoint.
        """
        if box.elements:
            self._source.home.access.start()
            read_box(self._source, self.pieces, box, into)

    def part(self, box: Box) -> NDArray[np.generic]:
        """The elements of a box, read by several threads where it is large."""
        elements = allocate(box.sizes, self.dtype, self.name)
        self.fill(box, elements)
        return elements

    def fill(self, box: Box, into: NDArray[np.generic]) -> None:
        """`read` by as many threads as the options say, within their memory."""
        if box.elements:
            threads = 1 if into.nbytes < PARALLEL_BYTES else self._options.threads
            budget = self._options.memory_bytes
            self._source.home.access.start()
            read_box(self._source, self.pieces, box, into, threads=threads, budget=budget)

    def block(self) -> Shape:
        """The shape by which scattered elements are grouped into reads."""
        return self.pieces[0].chunk if self.pieces else tuple(max(1, n) for n in self.shape)

    @not_compiled
    def __array__(
        self, dtype: np.dtype[np.generic] | None = None, copy: bool | None = None
    ) -> NDArray[np.generic]:
        if copy is False:
            raise ValueError(f"{self.label}: a stored tensor becomes an array by a copy only")
        whole = self[...]
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def __reduce__(self) -> tuple[object, ...]:
        home, stored = str(self._source.home), self._source.integrity.stored
        about = self.name, self.shape, self.dtype_name, self.sharding, self.annotation
        return _reopened_array, (home, stored, replace(self._options, progress=None), about)

    def __dask_tokenize__(self) -> tuple[str, ...]:
        return str(self._source.home), self._source.integrity.stored[1].hex(), self.name

    def __repr__(self) -> str:
        chunks = f"in chunks of {self.chunks}" if self.regular else f"in {len(self.pieces)} pieces"
        what = f"{self.dtype_name} {self.shape}, {readable_bytes(self.nbytes)}"
        return f"<StoredArray {self.name!r}: {what} {chunks}>"

    def _repr_html_(self) -> str:
        return facts_html(
            self.name,
            [
                ("dtype", self.dtype_name),
                ("shape", self.shape),
                ("size", readable_bytes(self.nbytes)),
                ("chunks", self.chunks if self.regular else f"{len(self.pieces)} pieces"),
                ("dimensions", self.dimension_names),
                ("saved as", self.sharding),
                ("is a", self.annotation or None),
            ],
        )


PARALLEL_BYTES = 1 << 22
"""A smaller box is read by the calling thread alone."""
_About = tuple[str, Shape, str, Sharding | None, str]


@dataclass(frozen=True, slots=True)
class Orthogonal:
    """Indexes each dimension of a stored array on its own.

    Example:
        >>> import xckpt
        >>> _ = xckpt.save("memory://oindex", {"w": np.arange(12).reshape(3, 4)})
        >>> xckpt.open("memory://oindex")["w"].oindex[[0, 2], [1, 3]]
        array([[ 1,  3],
               [ 9, 11]])
    """

    stored: StoredArray

    @not_compiled
    def __getitem__(self, index: Key | tuple[Key, ...]) -> NDArray[np.generic]:
        """Every combination of what the keys pick; errors as of `StoredArray.__getitem__`."""
        stored = self.stored
        keys = expand(index, stored.shape, stored.name)
        sizes = zip(keys, stored.shape, stored.block(), strict=True)
        axes = [axis_of(key, size, chunk) for key, size, chunk in sizes]
        elements = allocate([axis.size for axis in axes], stored.dtype, stored.name)
        for part in parts(axes):
            self._put(part, elements)
        return _finished(axes, elements)

    def _put(self, part: PickedBox, elements: NDArray[np.generic]) -> None:
        if part.is_whole:
            self.stored.fill(part.box, elements)
            return
        found = self.stored.part(part.box)
        for d, take in enumerate(part.take):
            found = found[(*[slice(None)] * d, take)]
        places = [
            np.arange(found.shape[d]) if isinstance(place, slice) else place
            for d, place in enumerate(part.place)
        ]
        elements[np.ix_(*places)] = found


@dataclass(frozen=True, slots=True)
class Points:
    """Picks single elements of a stored array.

    Example:
        >>> import xckpt
        >>> _ = xckpt.save("memory://vindex", {"w": np.arange(12).reshape(3, 4)})
        >>> stored = xckpt.open("memory://vindex")["w"]
        >>> stored.vindex[[0, 2], [1, 3]], stored.vindex[np.eye(3, 4, dtype=bool)]
        (array([ 1, 11]), array([ 0,  5, 10]))
    """

    stored: StoredArray

    @not_compiled
    def __getitem__(self, index: Key | tuple[Key, ...]) -> NDArray[np.generic]:
        """The elements at positions that are broadcast; errors as of `StoredArray.__getitem__`."""
        stored = self.stored
        mask = mask_of(index, stored.name)
        if mask is not None and mask.ndim == stored.ndim:
            if mask.shape != stored.shape:
                raise IndexError(f"{stored.label}: a mask of shape {mask.shape} for {stored.shape}")
            index = tuple(np.nonzero(mask))
        keys = expand(index, stored.shape, stored.name)
        if any(isinstance(key, slice) for key in keys) or not keys:
            raise IndexError(f"{stored.label}: vindex needs an array or int for each dimension")
        try:
            positions = np.broadcast_arrays(*(np.asarray(key, np.intp) for key in keys))
        except ValueError as error:
            raise IndexError(f"{stored.label}: {error}") from error
        found = allocate([positions[0].size], stored.dtype, stored.name)
        for box, numbers, within in points([axis.ravel() for axis in positions], stored.block()):
            found[numbers] = stored.part(box)[within]
        return found.reshape(positions[0].shape)


def _finished(axes: Sequence[AxisPicks], elements: NDArray[np.generic]) -> NDArray[np.generic]:
    """The result in its final order; elements skipped by a step keep no memory."""
    final = tuple(axis.final for axis in axes)
    result = np.asarray(elements[final])
    has_steps = any(isinstance(each, slice) and each.step not in (None, 1, -1) for each in final)
    return result.copy() if has_steps else result


@functools.lru_cache(maxsize=8)
def _reopened(home: str, stored: tuple[int, bytes], options: LoadOptions) -> ChunkSource:
    """The chunks of a checkpoint in another process; ``stored`` tells its manifest.

    Raises:
        NotACheckpointError: this process finds no checkpoint there.
        CheckpointReplacedError: another checkpoint is there by now.
    """
    reader = ZarrStorageReader(home, options=options)
    reader.set_up_storage_reader(reader.read_metadata(), 1)
    if reader.source.integrity.stored != stored:
        raise replaced(home, "after a stored array of it was pickled")
    return reader.source


@or_unopened(StoredArray)
def _reopened_array(
    home: str, stored: tuple[int, bytes], options: LoadOptions, about: _About
) -> StoredArray:
    """A stored array that was pickled; its first use raises as `_reopened` does."""
    return StoredArray(*about, _reopened(home, stored, options), options)
