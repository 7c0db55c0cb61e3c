"""Another library's checkpoint as a whole: its files, and copying and deleting them.

1. `own_files` asks each format which files of a local path are the checkpoint's: the file itself,
   an index and the files that it names, ``.metadata`` and the files that it names, or what Orbax
   puts into a step (`xckpt.formats.orbax.files`). Every other file is the user's, and so is a
   checkpoint of another format that lies in an Orbax folder: it is neither copied nor deleted.
2. `copy_files` stages the copy as a sink stages an output, links what it can, and renames.
3. `delete_files` deletes the marker first: without it no reader takes the rest for a checkpoint.

On local file systems only: in a bucket the formats have no step that commits several objects at
once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from xckpt.errors import NotACheckpointError, StorageError
from xckpt.formats.dcp.keys import METADATA_FILE
from xckpt.formats.dcp.metadata import MAX_BYTES, parse
from xckpt.formats.detect import detect
from xckpt.formats.file_sets import Files, find_files
from xckpt.formats.orbax.files import files_below, orbax_files
from xckpt.formats.safetensors.source import SUFFIX
from xckpt.formats.sink import other_names
from xckpt.formats.torch_save.source import find_saved
from xckpt.storage.budget import ProgressCounter, Watcher
from xckpt.storage.chunks.file_checks import status_problem
from xckpt.storage.commit.folder import real_path, sync_folder
from xckpt.storage.commit.output import OutputPath
from xckpt.storage.copy_checkpoint import link_or_copy, not_copied
from xckpt.storage.foreign.documents import read_whole
from xckpt.storage.foreign.paths import find_path
from xckpt.storage.foreign.versions import state_of
from xckpt.storage.location import storage_errors


@dataclass(frozen=True, slots=True)
class OwnFiles:
    """The files of a checkpoint of another library.

    Example:
        >>> OwnFiles("torch", Path("w.pt"), (Path("w.pt"),)).single
        True
    """

    format: str
    place: Path
    """The file that it is, or the folder that it lies in."""
    files: tuple[Path, ...]
    """The file without which the others are not a checkpoint comes first."""

    @property
    def single(self) -> bool:
        """Whether it is one file and no folder."""
        return self.files == (self.place,)

    def foreign(self, path: Path) -> str:
        """Why what is at a path must not be replaced by a copy; empty if it may be."""
        try:
            there = own_files(path)
        except NotACheckpointError:
            return f"it is not a checkpoint of the format {self.format}"
        if there.format != self.format:
            return f"it is a checkpoint of the format {there.format}, not {self.format}"
        others = () if there.single else set(files_below(path)) - set(there.files)
        return other_names(each.name for each in others)


def own_files(path: str | os.PathLike[str]) -> OwnFiles:
    """The files of what lies at a path.

    Raises:
        NotACheckpointError: it is not a checkpoint of another library, or several.
        StorageError: it is not on a local file system.

    Example:
        >>> from safetensors.numpy import save_file
        >>> import numpy as np
        >>> save_file({"w": np.zeros(3)}, "owned.safetensors")
        >>> own_files("owned.safetensors").format
        'safetensors'
    """
    format = detect(path)
    if format not in _FILES:
        raise NotACheckpointError(
            f"{path} held no checkpoint when this call began, and one of xckpt has been committed "
            f"there since; nothing was touched: call again"
        )
    place = find_path(path)
    if not isinstance(place, Path):
        raise StorageError(
            f"{place} is a checkpoint of the format {format}, and these are copied and deleted on "
            f"local file systems only: use the bucket's own tools, or convert it"
        )
    with storage_errors(place):
        root, files = _FILES[format](place)
    return OwnFiles(format, root, files)


def copy_files(source: OwnFiles, target: Path, *, overwrite: bool, progress: Watcher) -> None:
    """Copy a checkpoint's files; the copy is there as a whole or not at all.

    Args:
        source: the files.
        target: where the copy goes.
        overwrite: whether the copy may replace another of its format.
        progress: called with the bytes of the files that are there.

    Raises:
        CheckpointExistsError: the target is taken.
        CorruptCheckpointError: a file is a pipe or a device.
        StorageError: the system refused, or a file was written meanwhile.

    Example:
        >>> from safetensors.numpy import save_file
        >>> import numpy as np
        >>> save_file({"w": np.zeros(3)}, "first.safetensors")
        >>> source = own_files("first.safetensors")
        >>> copy_files(source, Path("second.safetensors"), overwrite=False, progress=None)
        >>> Path("second.safetensors").read_bytes() == source.place.read_bytes()
        True
    """
    target = real_path(target)
    staged = OutputPath(target, source.foreign, overwrite, source.single).begin()
    try:
        with storage_errors(target):
            sizes = {file: _length(file) for file in source.files}
            states = [state_of(file) for file in sizes]
            counter = ProgressCounter(sum(sizes.values()), progress)
            for file, size in sizes.items():
                new = staged.folder / (
                    target.name if source.single else file.relative_to(source.place)
                )
                new.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(file, new)
                counter.add(size)
            if states != [state_of(file) for file in sizes]:
                raise StorageError(f"{source.place} was written while it was copied; copy it again")
        staged.publish()
    except BaseException:
        staged.abort()
        raise


def _length(file: Path) -> int:
    """The bytes of a plain file; a pipe or a device would never end."""
    status = file.stat()
    if problem := status_problem(status, status.st_size):
        raise not_copied(file, problem)
    return status.st_size


def delete_files(found: OwnFiles, progress: Watcher = None) -> None:
    """Delete a checkpoint's files, and the folders that are empty then.

    Args:
        found: the files.
        progress: called with the files that have gone.

    Raises:
        StorageError: the system refused.

    Example:
        >>> from safetensors.numpy import save_file
        >>> import numpy as np
        >>> save_file({"w": np.zeros(3)}, "gone.safetensors")
        >>> delete_files(own_files("gone.safetensors"))
        >>> Path("gone.safetensors").exists()
        False
    """
    with storage_errors(found.place):
        marker, *others = found.files
        counter = ProgressCounter(len(found.files), progress, "files")
        marker.unlink()
        sync_folder(marker.parent)
        counter.add(1)
        for file in others:
            file.unlink(missing_ok=True)
            counter.add(1)
        above = {folder for file in found.files for folder in file.parents}
        inner = {folder for folder in above if found.place in (folder, *folder.parents)}
        for folder in sorted(inner, reverse=True):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _of_file_set(files: Files, place: Path) -> tuple[Path, tuple[Path, ...]]:
    found = (*filter(None, [files.index_path]), *files.paths)
    paths = cast(tuple[Path, ...], found)  # A local path leads to local files.
    is_file = place.is_file() and files.index_path is None
    return place if is_file else paths[0].parent, paths


def _of_safetensors(place: Path) -> tuple[Path, tuple[Path, ...]]:
    return _of_file_set(find_files(place, SUFFIX), place)


def _of_torch(place: Path) -> tuple[Path, tuple[Path, ...]]:
    files = find_saved(place)
    for file in files.paths:
        if detect(str(file)) != "torch":
            raise NotACheckpointError(f"{file} is not a file of torch.save")
    return _of_file_set(files, place)


def _of_dcp(place: Path) -> tuple[Path, tuple[Path, ...]]:
    metadata = place / METADATA_FILE
    names = parse(read_whole(metadata, MAX_BYTES)).files
    return place, (metadata, *(place / name for name in names))


def _of_orbax(place: Path) -> tuple[Path, tuple[Path, ...]]:
    return place, orbax_files(place)


_FILES: Final[Mapping[str, Callable[[Path], tuple[Path, tuple[Path, ...]]]]] = {
    "safetensors": _of_safetensors,
    "torch": _of_torch,
    "dcp": _of_dcp,
    "orbax": _of_orbax,
}
"""Format -> from the caller's path to the checkpoint's place and its files."""
