"""Checkpoints of one file, or of several that an index or their numbers hold together.

An index, ``NAME.SUFFIX.index.json``, maps each tensor's name to its file: Hugging Face's way, for
safetensors and for torch's files alike. Without one, a folder's only file counts, or a whole series
``NAME-00001-of-00003``. What is missing, left out or contradictory is an error.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from xckpt.core.text.printable import in_few
from xckpt.errors import (
    RESTORE,
    CorruptCheckpointError,
    ManifestError,
    NotACheckpointError,
    StorageError,
    naming,
)
from xckpt.storage.foreign.documents import Allowance, read_json
from xckpt.storage.foreign.paths import FilePath, entries_in, file_name_problem
from xckpt.storage.location import storage_errors

INDEX: Final = ".index.json"
NAME_BYTES: Final = 160
"""Bytes of memory of a name in an index, beside its letters."""
_SERIES: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})")


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a checkpoint."""

    paths: tuple[FilePath, ...]
    index: Mapping[str, FilePath] | None = None
    """Name of a tensor -> the file that an index says it is in; None where there is no index."""
    index_path: FilePath | None = None


def find_files(path: FilePath, suffix: str, memory: Allowance | None = None) -> Files:
    """The files that a path means: a file, an index, or a folder of either.

    Args:
        path: what the user gave.
        suffix: how they end.
        memory: what the index may take; it counts what stays.

    Raises:
        NotACheckpointError: there are none, or several that do not belong together.
        ManifestError: the index is damaged, or names files that are missing or outside its folder.

    Example:
        >>> from pathlib import Path
        >>> Path("series").mkdir()
        >>> for number in (1, 2):
        ...     Path("series", f"model-0000{number}-of-00002.bin").touch()
        >>> [file.name for file in find_files(Path("series"), ".bin").paths]
        ['model-00001-of-00002.bin', 'model-00002-of-00002.bin']
    """
    memory = memory or Allowance()
    if path.is_file():
        is_index = path.name.endswith(suffix + INDEX)
        return _indexed(path, suffix, memory) if is_index else Files((path,))
    indexes = entries_in(path, f"{suffix}{INDEX}")
    files = entries_in(path, suffix)
    if len(indexes) == 1:
        [index] = indexes
        found, whole = _indexed(index, suffix, memory), index.name.removesuffix(INDEX)
        if whole in {file.name for file in files} - {file.name for file in found.paths}:
            raise NotACheckpointError(
                f"{path} holds {whole} and {index.name}, which does not name it; readers differ in "
                "which they take: give the path of one"
            )
        return found
    if len(indexes) > 1 or not files:
        names = in_few([each.name for each in indexes]) or "none"
        raise NotACheckpointError(
            f"{path}: one index or some {suffix} files are needed; indexes found: {names}"
        )
    if len(files) > 1:
        _check_series(path, files, suffix)
    return Files(tuple(files))


def _check_series(folder: FilePath, files: list[FilePath], suffix: str) -> None:
    """Refuse files that are not all of one numbered series."""
    numbered = [_numbered(file.name, suffix) for file in files]
    series = {(match[1], match[3]) for match in numbered if match}
    if len(series) != 1 or None in numbered:
        raise NotACheckpointError(
            f"{folder} holds {len(files)} {suffix} files and no index that says which belong "
            f"together ({in_few([file.name for file in files])}); give the path of one"
        )
    [(stem, count)] = series
    present = {int(match[2]) for match in numbered if match}
    missing = sorted(set(range(1, int(count) + 1)) - present)
    if missing:
        names = [f"{stem}-{n:05d}-of-{count}{suffix}" for n in missing]
        raise CorruptCheckpointError(
            f"{folder}: files of {int(count)} are missing: {in_few(names)}; {RESTORE}"
        )


def _indexed(path: FilePath, suffix: str, memory: Allowance) -> Files:
    with naming(path):
        with memory.passing() as needed:
            text = read_json(path, needed)
            try:
                index = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ManifestError(f"the index is damaged: {str(error)[:200]}") from error
        names = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(names, dict) or not names:
            raise ManifestError("the index has no weight_map of names to files")
        problems = sorted(
            {
                f"{name}: its file {str(file)[:100]!r} {problem}"
                for name, file in names.items()
                if (problem := file_name_problem(file))
            }
        )
        if problems:
            raise ManifestError.listing(
                "the index names what is not a file of its folder", problems
            )
        memory.take(sum(map(len, names)) + len(names) * NAME_BYTES, "what the index names")
        files = sorted(set(names.values()))
        _check_presence(path.parent, files, names, suffix)
        paths = {file: path.parent / file for file in files}
        return Files(tuple(paths.values()), {n: paths[f] for n, f in names.items()}, path)


def _check_presence(
    folder: FilePath, files: list[str], names: Mapping[str, str], suffix: str
) -> None:
    """Refuse an index whose files are missing, or that leaves out files of the same series."""
    first = {file: name for name, file in reversed(list(names.items()))}
    problems = [
        f"{first[file]}: its file {file[:100]} is missing"
        for file in files
        if not _is_file(folder / file)
    ]
    series = {(match[1], match[3]) for file in files if (match := _numbered(file, suffix))}
    problems += [
        f"{each.name} belongs to the series, but the index does not name it"
        for each in entries_in(folder, suffix)
        if (match := _numbered(each.name, suffix))
        and (match[1], match[3]) in series
        and each.name not in files
    ]
    if problems:
        raise CorruptCheckpointError.listing("files and index do not fit each other", problems)


def _is_file(path: FilePath) -> bool:
    """Whether it is a file; a name that is longer than the file system takes is none."""
    try:
        with storage_errors(path.parent):
            return path.is_file()
    except StorageError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno == errno.ENAMETOOLONG:
            return False
        raise


def _numbered(name: str, suffix: str) -> re.Match[str] | None:
    """A file's place in a series: stem, number, count."""
    return _SERIES.fullmatch(name.removesuffix(suffix)) if name.endswith(suffix) else None


def owners_of(files: Files, contents: Mapping[FilePath, Collection[str]]) -> dict[str, FilePath]:
    """Name of each tensor -> the file that holds it.

    Raises:
        ManifestError: the index names tensors that its files lack, or files share a name and
            nothing says whose counts; all are listed.

    Example:
        >>> from pathlib import Path
        >>> first, second = Path("first.bin"), Path("second.bin")
        >>> owners = owners_of(Files((first, second)), {first: ["w"], second: ["b"]})
        >>> {name: file.name for name, file in owners.items()}
        {'w': 'first.bin', 'b': 'second.bin'}
    """
    index = files.index or {}
    owners = dict(index)
    problems = [
        f"{name}: the index says that it is in {file.name}, which does not hold it"
        for name, file in index.items()
        if name not in contents[file]
    ]
    for file, names in contents.items():
        for name in names:
            other = owners.setdefault(name, file)
            if other != file and name not in index:
                problems.append(f"{name}: in {other.name} and in {file.name}")
    if problems:
        where = files.index_path or files.paths[0].parent
        raise ManifestError.listing(f"{where}: the files do not make up one checkpoint", problems)
    return owners
