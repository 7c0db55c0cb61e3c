"""Where a conversion reads from: the protocol of a source, and the source over a checkpoint.

`XckptSource` reads a box of a tensor chunk by chunk: a chunk that is a contiguous part of the
memory given is read straight into it, any other into scratch memory, and each is verified.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Protocol, cast, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import numpy_dtype
from xckpt.core.geometry.box import Box
from xckpt.core.geometry.boxes import Boxes, intersect
from xckpt.core.geometry.grid import cells
from xckpt.core.geometry.transpose import copy_bits
from xckpt.core.manifest.entries import BytesEntry
from xckpt.core.metadata import JSONValue, Sharding, TensorStorageMetadata
from xckpt.formats.opaque import Opaque
from xckpt.mapping.names import by_mapping_name
from xckpt.mapping.spec import TensorSpec
from xckpt.options import LoadOptions
from xckpt.storage.checkpoint import Checkpoint, StoredArray
from xckpt.storage.chunk import ChunkSource, PendingRead, allocate
from xckpt.storage.integrity import digest_bytes
from xckpt.storage.streaming import ChunkStream

__all__ = ["USER", "TensorSource", "XckptSource", "metadata_texts"]

IN_FLIGHT = 4
"""Chunks that one call of `XckptSource.read` has in flight."""

USER = "xckpt.user"
"""The key of `TensorSource.metadata` that holds a checkpoint's user metadata as JSON."""


@runtime_checkable
class TensorSource(Protocol):
    """Named tensors that can be read by the box, wherever they are stored.

    Names are mapping names (`xckpt.mapping.names`).
    """

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Name -> shape and dtype of every tensor."""
        ...

    @property
    def values(self) -> Mapping[str, object]:
        """Name -> every leaf that is a Python value."""
        ...

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the file says about itself, as text."""
        ...

    def chunks(self, name: str) -> tuple[int, ...]:
        """Elements of each dimension that are cheap to read together.

        Boxes that begin and end at multiples of these read no element in vain. The tensor's own
        shape where only the whole can be read; 1 in each dimension where any part is as good.
        """
        ...

    def read(self, name: str, box: Box, into: NDArray[np.generic]) -> None:
        """Read a box of a tensor; called from several threads.

        Args:
            name: which tensor.
            box: which elements.
            into: writable memory of the box's sizes and the tensor's dtype, of any strides.

        Raises:
            CorruptCheckpointError: what is stored is not what was saved; names leaf and range.
            StorageError: the storage refused.
        """
        ...

    def identity(self) -> bytes:
        """A digest of what the source is: another where its contents may be others."""
        ...

    def close(self) -> None:
        """Let go of files and memory."""
        ...


def metadata_texts(user: JSONValue) -> dict[str, str]:
    """User metadata as texts by name; as one text of JSON where they are anything else.

    Example:
        >>> metadata_texts({"by": "me"}), metadata_texts([1]), metadata_texts(None)
        ({'by': 'me'}, {'xckpt.user': '[1]'}, {})
    """
    if user is None:
        return {}
    if isinstance(user, dict) and all(isinstance(value, str) for value in user.values()):
        return cast(dict[str, str], user)
    return {USER: msgspec.json.encode(user).decode()}


@dataclass(frozen=True, slots=True)
class _Read:
    """A chunk that is being read."""

    pending: PendingRead | ChunkStream
    target: NDArray[np.generic] | None
    """Where the part that is wanted goes; None if it was read there."""
    part: tuple[slice, ...]

    def give_up(self) -> None:
        """Leave the rest: TensorStore must not write on into memory that somebody else may get."""
        if isinstance(self.pending, ChunkStream):
            self.pending.close()
        else:
            self.pending.future.exception()


class XckptSource:
    """The tensors of a checkpoint of ours; a `TensorSource`.

    Args:
        path: where the checkpoint is; see `xckpt.save`.
        options: memory maps and threads.
        opaque: give objects that were serialised as `Opaque` ones; by default they are bytes.

    Raises:
        NotACheckpointError: no committed checkpoint is there.
        MappingError: two leaves have one mapping name.

    Example:
        >>> import xckpt
        >>> _ = xckpt.save("memory://a-source", {"w": np.arange(6.0).reshape(2, 3), "step": 7})
        >>> source = XckptSource("memory://a-source")
        >>> source.specs, source.values
        ({'w': TensorSpec(shape=(2, 3), dtype='float64')}, {'step': 7})
        >>> row = np.empty((1, 3))
        >>> source.read("w", Box((1, 0), (1, 3)), row)
        >>> row
        array([[3., 4., 5.]])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        options: LoadOptions | None = None,
        opaque: bool = False,
    ) -> None:
        self.checkpoint = Checkpoint(path, options=options)
        """The open checkpoint."""
        self._opaque = {
            entry.name
            for entry in self.checkpoint.manifest.leaves
            if opaque and isinstance(entry, BytesEntry) and entry.type == "opaque"
        }
        self.leaf_names = by_mapping_name(self.checkpoint)
        """Mapping name -> leaf name."""
        self._chunks: ChunkSource = self.checkpoint.chunk_source
        self._tensors = {
            name: cast(StoredArray, self.checkpoint[leaf])
            for name, leaf in self.leaf_names.items()
            if isinstance(self._described(leaf), TensorStorageMetadata)
        }

        self._specs = {
            name: TensorSpec(tuple(stored.shape), stored.dtype)
            for name, stored in self._tensors.items()
        }

    def _described(self, leaf: str) -> object:
        return self.checkpoint.metadata.state_dict_metadata[leaf]

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Name -> shape and dtype of every tensor."""
        return self._specs

    @property
    def values(self) -> Mapping[str, object]:
        """Name -> every leaf that is a Python value."""
        return self._values

    @cached_property
    def _values(self) -> Mapping[str, object]:
        return {
            name: self._value(leaf)
            for name, leaf in self.leaf_names.items()
            if name not in self._tensors
        }

    def _value(self, leaf: str) -> object:
        if leaf not in self._opaque:
            return self.checkpoint[leaf]
        return Opaque(lambda: cast(bytes, self.checkpoint[leaf]))

    @property
    def containers(self) -> Mapping[str, str]:
        """Name of each container of the saved tree that is no plain dict -> its kind."""
        return self.checkpoint.metadata.containers

    @cached_property
    def shardings(self) -> Mapping[str, Sharding]:
        """Name -> the sharding that wrote a tensor."""
        return {name: stored.sharding for name, stored in self._tensors.items() if stored.sharding}

    @cached_property
    def annotations(self) -> Mapping[str, str]:
        """Name -> what a tensor is beyond an array, such as ``"prng_key:threefry2x32"``."""
        return {
            name: stored.annotation for name, stored in self._tensors.items() if stored.annotation
        }

    @property
    def metadata(self) -> Mapping[str, str]:
        """The user's metadata: as they are if they are texts by name, else as JSON."""
        return metadata_texts(self.checkpoint.user_metadata)

    @property
    def bytes_read(self) -> int:
        """Bytes of chunks read so far."""
        return self._chunks.bytes_read

    def chunks(self, name: str) -> tuple[int, ...]:
        """The chunk shape; of a leaf in pieces that of its first."""
        stored = self._tensors[name]
        if not stored.pieces:
            return tuple(max(1, size) for size in stored.shape)
        return stored.pieces[0].chunk

    def read(self, name: str, box: Box, into: NDArray[np.generic]) -> None:
        """Read a box of a tensor, verified; see `TensorSource.read`."""
        if prod(box.sizes) == 0:
            return
        with self._chunks.noticing_replacement():
            self._read(self._tensors[name], box, into)

    def _read(self, stored: StoredArray, box: Box, into: NDArray[np.generic]) -> None:
        pieces = Boxes.of([(piece.offset, piece.shape) for piece in stored.pieces])
        _, numbers, shared = intersect(Boxes.of([(box.offsets, box.sizes)]), pieces)
        begun: deque[_Read] = deque()
        try:
            for number, part in zip(numbers.tolist(), shared, strict=True):
                piece = stored.pieces[number]
                key = (piece.leaf, piece.number)
                self._chunks.prepare([key])
                low = _minus(part.offsets, piece.offset)
                high = tuple(a + n for a, n in zip(low, part.sizes, strict=True))
                for at, cell in zip(*cells(low, high, piece.shape, piece.chunk), strict=True):
                    if len(begun) == IN_FLIGHT:
                        self._finish(begun.popleft())
                    begun.append(
                        self._begin(key, int(at), cell, into, _minus(box.offsets, piece.offset))
                    )
            while begun:
                self._finish(begun.popleft())
        finally:
            for read in begun:
                read.give_up()

    def _begin(
        self,
        key: tuple[str, int],
        number: int,
        cell: Box,
        into: NDArray[np.generic],
        origin: tuple[int, ...],
    ) -> _Read:
        """Start reading a chunk of an array into memory whose first element is at ``origin``."""
        low = tuple(max(a, o) for a, o in zip(cell.offsets, origin, strict=True))
        ends = zip(cell.offsets, cell.sizes, origin, into.shape, strict=True)
        high = tuple(min(a + n, o + m) for a, n, o, m in ends)
        where = (slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))
        target = into[(*where, ...)]  # with the ellipsis a view even where there are no dimensions
        whole = target.shape == cell.sizes
        direct = whole and target.flags.c_contiguous and target.flags.aligned
        place = (cell.offsets, cell.sizes)
        bounds = zip(low, high, cell.offsets, strict=True)
        part = tuple(slice(a - c, b - c) for a, b, c in bounds)
        file = "" if direct else self._chunks.plain_file(key, place)
        if file:
            return _Read(ChunkStream(self._chunks, key, number, place, file), target, part)
        dtype = numpy_dtype(self._chunks.array(key).dtype)
        memory = target if direct else allocate(cell.sizes, dtype, key[0])
        pending = self._chunks.begin(key, number, place, memory)
        return _Read(pending, None if direct else target, part)

    def _finish(self, read: _Read) -> None:
        if isinstance(read.pending, ChunkStream):
            assert read.target is not None
            with contextlib.closing(read.pending):
                for where, slab in read.pending.slabs():
                    _take(read.target, read.part, where, slab)
            return
        self._chunks.finish(read.pending)
        if read.target is not None:
            copy_bits(read.target, read.pending.into[(*read.part, ...)])

    def identity(self) -> bytes:
        """The digest of the manifest, which has the digest of all digests in it."""
        return digest_bytes(msgspec.json.encode(self.checkpoint.manifest))

    def close(self) -> None:
        """Nothing is held open beyond this object's life."""


def _take(
    target: NDArray[np.generic],
    part: tuple[slice, ...],
    where: tuple[slice, ...],
    slab: NDArray[np.generic],
) -> None:
    """Copy what a slab has of a part of its chunk to where the part goes."""
    axis = len(where) - 1
    low = max(part[axis].start, where[axis].start)
    high = min(part[axis].stop, where[axis].stop)
    if low < high:
        inside, rest = (slice(None),) * axis, part[axis + 1 :]
        into = slice(low - part[axis].start, high - part[axis].start)
        out = slice(low - where[axis].start, high - where[axis].start)
        copy_bits(target[(*inside, into)], slab[(*inside, out, *rest)])


def _minus(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))
