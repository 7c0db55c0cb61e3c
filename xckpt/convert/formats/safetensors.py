"""safetensors files as a source: one file, or several with ``model.safetensors.index.json``.

1. `find_files` says which files a path means: itself; those that its index names; the one
   ``.safetensors`` file of a folder; or a whole numbered series, ``NAME-00001-of-00003``.
2. Each file's header is read and checked (`safetensors_header`), then held against the index. All
   faults of all files are one error, before a byte of any tensor is read.
3. A box is read with as few calls as its rows allow (`file_ranges`); nothing is mapped.

The format has no checksums: what is verified is that headers and files fit each other.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xckpt.convert.formats.file_ranges import FileTensor, OpenFile, row_major
from xckpt.convert.formats.paths import (
    existing_path,
    file_problem,
    naming,
    read_text,
    system_errors,
)
from xckpt.convert.formats.safetensors_header import Header, Place, header_length, parse_header
from xckpt.convert.names import mapping_name
from xckpt.convert.tensors import TensorSpec
from xckpt.core.dtypes import numpy_dtype
from xckpt.core.metadata import ChunkStorageMetadata
from xckpt.core.values import decode_value
from xckpt.errors import (
    CorruptCheckpointError,
    ManifestError,
    NotACheckpointError,
    StorageError,
    UnsupportedLeafError,
    XckptError,
)

__all__ = ["INDEX", "SUFFIX", "VALUES", "SafetensorsSource", "find_files"]

SUFFIX: Final = ".safetensors"
INDEX: Final = ".safetensors.index.json"
VALUES: Final = "xckpt.values"
"""The text of ``__metadata__`` that holds Python values: JSON, mapping name -> [type, text]."""

MAX_INDEX_BYTES: Final = 1 << 28
_SERIES: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a checkpoint."""

    paths: tuple[Path, ...]
    index: Mapping[str, Path] | None = None
    """Name of a tensor -> the file that an index says it is in; None where there is no index."""
    index_path: Path | None = None


def find_files(path: Path) -> Files:
    """The safetensors files that a path means: a file, an index, or a folder of either.

    Raises:
        NotACheckpointError: there are none, or several that do not belong together.
        ManifestError: the index is damaged, or names files that are missing or outside its folder.
    """
    if path.is_file():
        return _indexed(path) if path.name.endswith(INDEX) else Files((path,))
    indexes = sorted(path.glob(f"*{INDEX}"))
    files = sorted(path.glob(f"*{SUFFIX}"))
    if len(indexes) == 1:
        return _indexed(indexes[0])
    if len(indexes) > 1 or not files:
        found = ", ".join(each.name for each in indexes[:5]) or "none"
        raise NotACheckpointError(
            f"{path}: one index or some {SUFFIX} files are needed; indexes found: {found}"
        )
    if len(files) > 1:
        _check_series(path, files)
    return Files(tuple(files))


def _check_series(folder: Path, files: list[Path]) -> None:
    """Refuse files that are not all of one numbered series."""
    found = [_SERIES.fullmatch(file.name) for file in files]
    series = {(match[1], match[3]) for match in found if match}
    if len(series) != 1 or None in found:
        named = ", ".join(file.name for file in files[:5])
        raise NotACheckpointError(
            f"{folder} holds {len(files)} {SUFFIX} files and no index that says which belong "
            f"together ({named}{', ...' if len(files) > 5 else ''}); give the path of one"
        )
    [(stem, count)] = series
    there = {int(match[2]) for match in found if match}
    missing = sorted(set(range(1, int(count) + 1)) - there)
    if missing:
        named = ", ".join(f"{stem}-{n:05d}-of-{count}{SUFFIX}" for n in missing[:5])
        raise CorruptCheckpointError(f"{folder}: of {int(count)} files are missing: {named}")


def _indexed(path: Path) -> Files:
    with naming(path):
        try:
            index = json.loads(read_text(path, MAX_INDEX_BYTES))
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"the index is damaged: {str(error)[:200]}") from error
        names = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(names, dict) or not names:
            raise ManifestError("the index has no weight_map of names to files")
        problems = sorted(
            {
                f"{name}: its file {str(file)[:100]!r} {problem}"
                for name, file in names.items()
                if (problem := file_problem(file))
            }
        )
        if problems:
            raise ManifestError.listing("the index names what is no file of its folder", problems)
        files = sorted(set(names.values()))
        _check_presence(path.parent, files, names)
        paths = {file: path.parent / file for file in files}
        return Files(tuple(paths.values()), {n: paths[f] for n, f in names.items()}, path)


def _check_presence(folder: Path, files: list[str], names: Mapping[str, str]) -> None:
    """Refuse an index whose files are missing, or that leaves out files of the same series."""
    first: dict[str, str] = {}
    for name, file in names.items():
        first.setdefault(file, name)
    problems = [
        f"{first[file]}: its file {file} is missing"
        for file in files
        if not (folder / file).is_file()
    ]
    series = {(match[1], match[3]) for file in files if (match := _SERIES.fullmatch(file))}
    problems += [
        f"{each.name} belongs to the series, but the index does not name it"
        for each in sorted(folder.glob(f"*{SUFFIX}"))
        if (match := _SERIES.fullmatch(each.name))
        and (match[1], match[3]) in series
        and each.name not in files
    ]
    if problems:
        raise CorruptCheckpointError.listing("files and index do not fit each other", problems)


class SafetensorsSource:
    """A checkpoint in safetensors files, as a source of tensors.

    A tensor's name is one key; see `xckpt.convert.formats.names`.

    Args:
        path: a file, a folder, or an index.

    Raises:
        NotACheckpointError: nothing is there, or it is not told which files belong together.
        ManifestError: a header or the index is damaged, or they contradict each other.
        CorruptCheckpointError: files are missing.
        UnsupportedLeafError: tensors of a dtype that the format lacks.
        StorageError: a file cannot be read.

    Example:
        >>> from safetensors.numpy import save_file
        >>> save_file({"a.b": np.arange(6, dtype=np.int32).reshape(2, 3)}, "small.safetensors")
        >>> source = SafetensorsSource("small.safetensors")
        >>> source.specs
        {'a.b': TensorSpec(shape=(2, 3), dtype='int32')}
        >>> into = np.zeros((2, 1), np.int32)
        >>> source.read("a.b", ChunkStorageMetadata((0, 1), (2, 1)), into)
        >>> into.tolist()
        [[1], [4]]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = existing_path(path)
        files = find_files(self.path)
        self._files: dict[Path, OpenFile] = {}
        headers = self._headers(files)
        owners = _owners(files, headers)
        self._places = {
            mapping_name([name]): (self._files[file], headers[file].places[name])
            for name, file in owners.items()
        }
        self.metadata: Mapping[str, str] = _metadata(headers)
        """The texts that the files carry."""
        self.values: Mapping[str, object] = _values(self.path, self.metadata)
        """Python values that xckpt has put there, by mapping name."""
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec(place.shape, place.dtype) for name, (_, place) in self._places.items()
        }
        """Mapping name -> what the tensor is."""

    def _headers(self, files: Files) -> dict[Path, Header]:
        headers: dict[Path, Header] = {}
        faults: dict[type[XckptError], list[str]] = {}
        self._state = hashlib.sha256()
        for file in files.paths:
            try:
                headers[file] = self._header(file)
            except (ManifestError, UnsupportedLeafError) as error:
                told = error.problems or (str(error),)
                faults.setdefault(type(error), []).extend(f"{file.name}: {line}" for line in told)
        for kind, problems in faults.items():
            raise kind.listing(f"{self.path} cannot be read", problems)
        return headers

    def _header(self, path: Path) -> Header:
        with system_errors(path):
            if not path.is_file():
                raise StorageError(f"{path} is no plain file")
            file = self._files[path] = OpenFile(path)
            found = os.fstat(file.descriptor)
            length = header_length(os.pread(file.descriptor, 8, 0), found.st_size)
            memory = np.empty(length, np.uint8)
            file.read_into(8, memory)
            text = memory.tobytes()
        told = f"{path.name} {found.st_size} {found.st_mtime_ns} ".encode()
        self._state.update(told + hashlib.sha256(text).digest())
        return parse_header(text, found.st_size)

    def chunks(self, name: str) -> tuple[int, ...]:
        """1 in each dimension: any part can be read as it is."""
        return (1,) * len(self.specs[name].shape)

    def read(self, name: str, box: ChunkStorageMetadata, into: NDArray[np.generic]) -> None:
        """Fill ``into``, of the box's sizes, with the elements of a box; thread-safe.

        Raises:
            CorruptCheckpointError: the file is shorter than it was.
            StorageError: it cannot be read.
        """
        file, place = self._places[name]
        with system_errors(f"{file.path}: {name}"):
            _tensor(file, place).read(box.offsets, into)

    def identity(self) -> bytes:
        """A digest of the files' headers, sizes and times of change."""
        return self._state.digest()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


def _tensor(file: OpenFile, place: Place) -> FileTensor:
    dtype = numpy_dtype(place.dtype)
    return FileTensor(file, place.start, dtype, place.shape, row_major(place.shape))


def _owners(files: Files, headers: Mapping[Path, Header]) -> dict[str, Path]:
    """Name of each tensor -> the file that holds it.

    Raises:
        ManifestError: the index names tensors that its files lack, or files share a name and
            nothing says whose counts; all are listed.
    """
    index = files.index or {}
    owners = dict(index)
    problems = [
        f"{name}: the index says that it is in {file.name}, which does not hold it"
        for name, file in index.items()
        if name not in headers[file].places
    ]
    for file, header in headers.items():
        for name in header.places:
            other = owners.setdefault(name, file)
            if other != file and name not in index:
                problems.append(f"{name}: in {other.name} and in {file.name}")
    if problems:
        where = files.index_path or files.paths[0].parent
        raise ManifestError.listing(f"{where}: the files do not make up one checkpoint", problems)
    return owners


def _metadata(headers: Mapping[Path, Header]) -> dict[str, str]:
    merged: dict[str, str] = {}
    for header in headers.values():
        for key, text in header.metadata.items():
            merged.setdefault(key, text)
    return merged


def _values(path: Path, metadata: Mapping[str, str]) -> dict[str, object]:
    text = metadata.get(VALUES)
    if text is None:
        return {}
    with naming(f"{path}: the values under {VALUES}"):
        try:
            decoded = json.loads(text)
            return {name: decode_value(kind, value) for name, (kind, value) in decoded.items()}
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, ManifestError):
                raise
            raise ManifestError("damaged") from error
