"""What `torch.save` wrote, as arrays that map the file and as plain Python values.

An archive is a ZIP file that stores everything uncompressed: ``data.pkl``, a pickle in which each
tensor refers to a storage by number, and the bytes of storage n under ``data/n``.

1. `Archive.open` finds the entries of one archive, which may lie anywhere in a larger file.
2. ``data.pkl`` is described, not unpickled (`xckpt.formats.torch_save.values`).
3. A tensor becomes a `MappedTensor`: dtype, shape, strides and a range of the file. `array` maps
   it; nothing is read until it is looked at.

In a bucket each read is a request, so both ends of an archive are asked for at once: the directory
lies there, and of small archives all but the elements.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import DTYPES, item_size, numpy_dtype
from xckpt.errors import CorruptCheckpointError, UnsupportedLeafError
from xckpt.formats.torch_save.file_range import MAX_PICKLE_BYTES, FileRange
from xckpt.formats.torch_save.symbols import Symbol
from xckpt.formats.torch_save.values import View, describe
from xckpt.storage.foreign.files import open_file
from xckpt.storage.foreign.paths import FilePath
from xckpt.storage.location import storage_errors

_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")


@dataclass(frozen=True, slots=True)
class Where:
    """Where an entry is stored: ``length`` bytes from ``offset`` on, in a file of the folder."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor in a file: where its elements are."""

    path: FilePath
    dtype: str
    """The format's name of the element type."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Elements between neighbours, per dimension."""
    position: int
    """Byte of the file at which its first element is."""
    extent: int
    """Bytes from there to the end of its last element."""
    conjugated: bool = False
    negated: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * item_size(self.dtype)

    def array(self) -> NDArray[np.generic]:
        """The elements: a read-only view of the mapped file; or a copy, of a file in a bucket, and
        of what torch has only noted down as conjugated or negated.
        """
        dtype = numpy_dtype(self.dtype)
        if not prod(self.shape):
            return np.empty(self.shape, dtype)
        strides = tuple(step * dtype.itemsize for step in self.strides)
        array: NDArray[np.generic] = np.ndarray(self.shape, dtype, self._bytes(), 0, strides)
        if self.conjugated:
            array = np.conj(array)
        return np.negative(array) if self.negated else array  # type: ignore[return-value]

    def _bytes(self) -> NDArray[np.uint8]:
        if isinstance(self.path, Path):
            return np.memmap(self.path, np.uint8, "r", self.position, (self.extent,))
        memory = np.empty(self.extent, np.uint8)
        open_file(self.path).read_into(self.position, memory)
        return memory


class Archive:
    """One archive, as `torch.save` writes it."""

    def __init__(
        self, path: FilePath, pickled: bytes, records: Mapping[str, tuple[int, int]], little: bool
    ) -> None:
        self._path = path
        self.pickled = pickled
        """The bytes of ``data.pkl``."""
        self._records = records
        self._little = little

    @classmethod
    def open(cls, folder: FilePath, where: Where) -> Archive:
        """Find the entries of an archive.

        Raises:
            CorruptCheckpointError: the file is missing or too short, or holds no such archive.
            UnsupportedLeafError: it holds safetensors.
            StorageError: the file cannot be read.
        """
        path = folder / where.file
        problem = _file_problem(path, where) if isinstance(path, Path) else ""
        if problem:
            raise CorruptCheckpointError(f"{path} {problem}")
        with storage_errors(path), closing(open_file(path)) as file:
            view = FileRange(file, where.offset, where.length)
            records = _records(view, path, where)
            pickled = view.range(*records["data.pkl"])
            order = view.range(*records.get("byteorder", (0, 0))) or b"little"
        absolute = {name: (where.offset + at, size) for name, (at, size) in records.items()}
        return cls(path, pickled, absolute, order == b"little")

    def value(self) -> object:
        """What was saved: plain values, with a `MappedTensor` for each tensor.

        Raises:
            UnsafePickleError: it holds an instance of a class, or a function.
            CorruptCheckpointError: a tensor lies outside the archive.
            ManifestError: the pickle is damaged.
            UnsupportedLeafError: what it holds is no plain value.
        """
        return _Values(self).convert(describe(self.pickled))

    def tensor(self, view: View) -> MappedTensor:
        """The tensor that a pickle describes.

        Raises:
            CorruptCheckpointError: it lies outside its storage, or that outside the archive.
            UnsupportedLeafError: it has more elements than its storage, or is big-endian.
        """
        name = f"data/{view.storage.key}"
        record = self._records.get(name)
        if record is None:
            raise CorruptCheckpointError(f"{self._path}: the archive has no {name}")
        if not self._little and item_size(view.dtype) > 1:
            raise UnsupportedLeafError("written on a machine with big-endian numbers")
        item = item_size(view.dtype)
        start, length = record
        steps = zip(view.shape, view.strides, strict=True)
        last = sum((size - 1) * step for size, step in steps) if prod(view.shape) else -1
        if (view.offset + last + 1) * item > length:
            raise CorruptCheckpointError(
                f"{self._path}: a tensor of shape {view.shape} and strides {view.strides} reaches "
                f"beyond the {length:,} bytes of its storage"
            )
        if prod(view.shape) * item > length:
            raise UnsupportedLeafError(
                f"a tensor of shape {view.shape} expanded from {length:,} bytes"
            )
        return MappedTensor(
            self._path,
            view.dtype,
            view.shape,
            view.strides,
            start + view.offset * item,
            (last + 1) * item,
            view.conjugated,
            view.negated,
        )


def _file_problem(path: Path, where: Where) -> str:
    try:
        if not path.is_file():
            return "is no plain file" if path.exists() else "is missing"
        size = path.stat().st_size
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if where.offset + where.length > size:
        return (
            f"is truncated: it has {size:,} bytes, but an entry lies at "
            f"[{where.offset:,}, {where.offset + where.length:,})"
        )
    return ""


def _corrupt(path: FilePath, where: Where, what: str) -> CorruptCheckpointError:
    there = f"[{where.offset:,}, {where.offset + where.length:,})"
    return CorruptCheckpointError(f"{path}: at bytes {there} is {what}")


def _records(view: FileRange, path: FilePath, where: Where) -> dict[str, tuple[int, int]]:
    """Name within the archive -> start and length of each entry."""
    try:
        entries = zipfile.ZipFile(view).infolist()  # type: ignore[arg-type]
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        if view.range(8, 2) == b'{"':
            raise UnsupportedLeafError(
                f"{path}: stored as safetensors, which torch's own reader does not read from here "
                f"either; save it again with SerializationFormat.TORCH_SAVE"
            ) from error
        raise _corrupt(path, where, f"no archive of torch.save ({error})") from error
    root = next((e.filename[:-8] for e in entries if e.filename.endswith("data.pkl")), None)
    if root is None:
        raise _corrupt(path, where, "an archive without data.pkl")
    headers = view.ranges([(entry.header_offset, _LOCAL_HEADER.size) for entry in entries])
    records = {
        entry.filename.removeprefix(root): _range(header, entry, path, where)
        for entry, header in zip(entries, headers, strict=True)
    }
    length = records["data.pkl"][1]
    if length > MAX_PICKLE_BYTES:
        raise _corrupt(path, where, f"an archive with {length:,} bytes of data.pkl")
    return records


def _range(header: bytes, entry: zipfile.ZipInfo, path: FilePath, where: Where) -> tuple[int, int]:
    """Where an entry's bytes are in the archive."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        raise _corrupt(path, where, f"an archive whose {entry.filename[:80]} is compressed")
    if len(header) != _LOCAL_HEADER.size or not header.startswith(b"PK\3\4"):
        raise _corrupt(path, where, f"an archive whose {entry.filename[:80]} is damaged")
    _, name, extra = _LOCAL_HEADER.unpack(header)
    start = entry.header_offset + _LOCAL_HEADER.size + name + extra
    if start + entry.file_size > where.length:
        raise _corrupt(path, where, f"an archive whose {entry.filename[:80]} is cut off")
    return start, entry.file_size


MOST_PARTS: Final = 1_000_000
"""Most parts of a value: a pickle of some bytes can refer to one list a million times."""
DEEPEST: Final = 64
"""Most containers around a value."""


class _Values:
    """Turns what a pickle describes into plain values."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._left = MOST_PARTS

    def convert(self, value: object, depth: int = 0) -> object:
        self._left -= 1
        if depth > DEEPEST or self._left < 0:
            raise UnsupportedLeafError(
                f"more than {DEEPEST} containers deep" if depth > DEEPEST else "too many parts"
            )
        if isinstance(value, View):
            if value.dtype not in DTYPES:
                raise UnsupportedLeafError(f"a tensor of dtype {value.dtype}")
            return self._archive.tensor(value)
        if isinstance(value, dict):
            return {key: self.convert(part, depth + 1) for key, part in value.items()}
        if isinstance(value, list):
            return [self.convert(part, depth + 1) for part in value]
        if isinstance(value, tuple):
            return tuple(self.convert(part, depth + 1) for part in value)
        if isinstance(value, str | bool | int | float | complex | bytes | None):
            return value
        kind = value.name if isinstance(value, Symbol) else type(value).__name__.strip("_").lower()
        raise UnsupportedLeafError(f"a {kind} is no plain value")
