"""Files of `torch.save`, as tensors that map the file and as plain Python values.

An archive is a ZIP file that stores everything uncompressed: ``data.pkl``, a pickle in which each
tensor refers to a storage by number, and the bytes of storage n under ``data/n``.

1. `Archive.open` finds the entries of one archive, which may lie anywhere in a larger file.
2. `Archive.value` describes ``data.pkl`` (`xckpt.formats.torch_save.values`): nothing is unpickled,
   and no element is read. A tensor is a dtype, a shape, strides and a range of the file.

In a bucket each read is a request, so both ends of an archive are read at once: they hold the
directory, and in a small archive all but the elements.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from xckpt.core.manifest.memory import COPIES
from xckpt.errors import (
    RESTORE,
    CorruptCheckpointError,
    ManifestError,
    UnsupportedLeafError,
    naming,
)
from xckpt.formats.torch_save.values import Storage, read_value
from xckpt.storage.foreign.documents import Allowance
from xckpt.storage.foreign.files import RangeFile, open_file
from xckpt.storage.foreign.paths import FilePath
from xckpt.storage.location import storage_errors

ENTRY_TIMES: Final = 16
"""How many times the bytes of an archive's directory are taken to describe its entries."""

EDGE_BYTES: Final = 1 << 12
"""Bytes that are read ahead at each end of an archive in a bucket."""
TAIL_BYTES: Final = 1 << 16
"""Longest last record of a ZIP file, a comment included."""

_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
_END: Final = struct.Struct("<4s8xII2x")
_END64_LOCATOR: Final = struct.Struct("<4s4xQ4x")


@dataclass(frozen=True, slots=True)
class Where:
    """Where an entry is stored: ``length`` bytes from ``offset`` on, in a file of the folder."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Archive:
    """One archive, as `torch.save` writes it.

    Example:
        >>> from xckpt.formats.torch_save.write import write_saved
        >>> write_saved(Path("step.pt"), {"step": 7})
        >>> archive = Archive.open(Path(), Where("step.pt", 0, Path("step.pt").stat().st_size))
        >>> archive.value()
        {'step': 7}
    """

    path: FilePath
    pickled: bytes
    """The bytes of ``data.pkl``."""
    records: Mapping[str, tuple[int, int]]
    """Name within the archive -> where in the file the entry begins, and its length."""
    little_endian: bool

    @classmethod
    def open(cls, folder: FilePath, where: Where, memory: Allowance | None = None) -> Archive:
        """Find the entries of an archive.

        Args:
            folder: where the file is.
            where: the archive's range of it.
            memory: what the description of its entries may take, and ``data.pkl``.

        Raises:
            ManifestError: they take more.
            CorruptCheckpointError: the file is missing or too short, or holds no such archive.
            UnsupportedLeafError: it holds safetensors.
            StorageError: the file cannot be read.
        """
        memory = memory or Allowance()
        path = folder / where.file
        end = where.offset + where.length
        there = f"[{where.offset:,}, {end:,})"
        with storage_errors(path):
            if isinstance(path, Path) and not path.is_file():
                problem = "is not a plain file" if path.exists() else "is missing"
                raise CorruptCheckpointError(f"{path} {problem}")
            with closing(open_file(path)) as file:
                if end > file.most_bytes:
                    raise CorruptCheckpointError(
                        f"{path} is truncated: it has {file.most_bytes:,} bytes, but an entry lies "
                        f"at {there}; {RESTORE}"
                    )
                with naming(f"{path}: bytes {there}"), memory.passing() as needed:
                    view = _FileRange(file, where, needed)
                    records = _records(view, needed)
                    pickled, order = view.ranges(
                        [records["data.pkl"], records.get("byteorder", (0, 0))]
                    )
        absolute = {name: (where.offset + at, size) for name, (at, size) in records.items()}
        return cls(path, pickled, absolute, order in (b"", b"little"))

    def value(self, memory: Allowance | None = None) -> object:
        """What was saved: plain values, with a `MappedTensor` for each tensor.

        Args:
            memory: what the values may take; the caller counts those that stay.

        Raises:
            XckptError: see `read_value`.
        """
        with (memory or Allowance()).passing() as needed:
            return read_value(self.pickled, self._storage, needed)

    def _storage(self, key: str, dtype: str | None) -> Storage:
        record = self.records.get(f"data/{key}")
        if record is None:
            raise CorruptCheckpointError(f"{self.path}: the archive has no data/{key}; {RESTORE}")
        return Storage(dtype, self.path, *record, self.little_endian)


def value_in(content: bytes) -> object:
    """The value that `torch.save` has written to memory; no tensors.

    Raises:
        UnsupportedLeafError: there is a tensor in it, or a class that is not a plain container.
        CorruptCheckpointError: it is not an archive of `torch.save`.

    Example:
        >>> from xckpt.formats.torch_save.write import write_saved
        >>> write_saved(Path("step.pt"), {"step": 7})
        >>> value_in(Path("step.pt").read_bytes())
        {'step': 7}
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            [name] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            pickled = archive.read(name)
    except (zipfile.BadZipFile, ValueError) as error:
        raise CorruptCheckpointError(f"not an archive of torch.save: {error}") from error
    return read_value(pickled, _no_storage)


def _no_storage(key: str, dtype: str | None) -> Storage:
    raise UnsupportedLeafError("there is a tensor in it")


class _FileRange:
    """A range of a file, as `zipfile` reads a file; in a bucket both ends are read ahead."""

    def __init__(self, file: RangeFile, where: Where, memory: Allowance) -> None:
        self._file, self._start, self.length, self._at = file, where.offset, where.length, 0
        self._memory = memory
        self._edges: list[tuple[int, bytes]] = []
        if file.free_bytes:
            edge = min(EDGE_BYTES, self.length)
            starts = (0, self.length - edge)
            edges = self.ranges([(start, edge) for start in starts])
            self._edges = list(zip(starts, edges, strict=True))

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place, counted as `io.IOBase.seek` does."""
        self._at = max(0, (0, self._at, self.length)[whence] + offset)
        return self._at

    def tell(self) -> int:
        """The current place."""
        return self._at

    def read(self, size: int = -1) -> bytes:
        """The next bytes; all of them by default.

        Raises:
            ManifestError: they are a directory whose description takes too much memory.
        """
        left = max(0, self.length - self._at)
        size = left if size < 0 else min(size, left)
        self._memory.take(ENTRY_TIMES * size, f"a directory of {size:,} bytes")
        [data] = self.ranges([(self._at, size)])
        self._at += len(data)
        return data

    def ranges(self, wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes at some (start, length), as far as the range of the file reaches."""
        known: list[bytes | None] = []
        missing: list[tuple[int, int]] = []
        for start, length in wanted:
            low = min(max(start, 0), self.length)
            high = min(low + length, self.length)
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


def stated_length(file: RangeFile) -> int:
    """The length of a file that is one archive, by the record at its end.

    Raises:
        CorruptCheckpointError: there is no such file, or it does not end as an archive does.
        StorageError: it cannot be read.

    Example:
        >>> from xckpt.formats.torch_save.write import write_saved
        >>> path = Path("whole.pt")
        >>> write_saved(path, {"step": 7})
        >>> stated_length(open_file(path)) == path.stat().st_size
        True
    """
    tail = file.tail(TAIL_BYTES)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) < at + _END.size:
        raise CorruptCheckpointError(
            f"{file.path} does not end as an archive of torch.save does: it is truncated, or not "
            f"an archive"
        )
    _, size, offset = _END.unpack_from(tail, at)
    locator, record = at - _END64_LOCATOR.size, tail.rfind(b"PK\6\6", 0, at)
    if record >= 0 and tail[locator:at].startswith(b"PK\6\7"):
        return _END64_LOCATOR.unpack_from(tail, locator)[1] + len(tail) - record
    return offset + size + len(tail) - at


def _records(view: _FileRange, memory: Allowance) -> dict[str, tuple[int, int]]:
    """Name within the archive -> start and length of each entry."""
    try:
        entries = zipfile.ZipFile(view).infolist()  # type: ignore[arg-type]  # it has what zipfile calls
    except ManifestError:
        raise
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        if view.ranges([(8, 2)]) == [b'{"']:
            raise UnsupportedLeafError(
                "stored as safetensors, which torch's own reader does not read from here either; "
                "save it again with SerializationFormat.TORCH_SAVE"
            ) from error
        raise CorruptCheckpointError(f"not an archive of torch.save ({error})") from error
    root = next((e.filename[:-8] for e in entries if e.filename.endswith("data.pkl")), None)
    if root is None:
        raise CorruptCheckpointError("an archive without data.pkl")
    entries = [entry for entry in entries if entry.filename.startswith(root)]
    headers = view.ranges([(entry.header_offset, _LOCAL_HEADER.size) for entry in entries])
    records: dict[str, tuple[int, int]] = {}
    for entry, header in zip(entries, headers, strict=True):
        found = _range(header, entry, view.length)
        # Readers differ in which of two they take.
        if records.setdefault(entry.filename.removeprefix(root), found) != found:
            raise CorruptCheckpointError(f"an archive with two entries {entry.filename[:80]}")
    length = records["data.pkl"][1]
    memory.take(COPIES * length, f"a data.pkl of {length:,} bytes")
    return records


def _range(header: bytes, entry: zipfile.ZipInfo, length: int) -> tuple[int, int]:
    """Where an entry's bytes are in an archive of ``length`` bytes."""
    name = entry.filename[:80]
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        raise CorruptCheckpointError(f"an archive whose {name} is compressed")
    if len(header) != _LOCAL_HEADER.size or not header.startswith(b"PK\3\4"):
        raise CorruptCheckpointError(f"an archive whose {name} is damaged")
    _, name_length, extra_length = _LOCAL_HEADER.unpack(header)
    start = entry.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    if start + entry.file_size > length:
        raise CorruptCheckpointError(f"an archive whose {name} is cut off")
    return start, entry.file_size
