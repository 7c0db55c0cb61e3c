"""`exists`, `delete` and `copy`: checkpoints as wholes, in local folders and in buckets.

They are called on one rank, and no other takes part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from xckpt.api.save import Path, check_path, names_limits
from xckpt.engine.ranks.watch import watched_call
from xckpt.errors import NotACheckpointError
from xckpt.options import LoadOptions, check_flags, checked_options

if TYPE_CHECKING:
    from xckpt.storage.location import Location


@names_limits
def exists(path: Path) -> bool:
    """Whether a committed checkpoint is at a path, of any format that `load` takes.

    A checkpoint of xckpt is found by one small request; the others are recognised by the names and
    first bytes of files.

    Args:
        path: a path or URL as for `load`.

    Raises:
        StorageError: the storage gives no answer.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://example-exists", {"w": np.ones(3)})
        >>> xckpt.exists("memory://example-exists"), xckpt.exists("memory://nowhere")
        (True, False)
    """
    check_path(path, "exists(path)")
    from xckpt.storage.copy_checkpoint import has_checkpoint
    from xckpt.storage.location import Location

    location = Location.parse(path)
    location.access.start()
    return has_checkpoint(location) or _is_foreign(path, location)


@names_limits
def delete(path: Path, *, options: LoadOptions | None = None) -> None:
    """Delete a checkpoint: first its manifest, so that no half of it can be read, then the rest.

    Files in the folder that are not the checkpoint's stay there. A checkpoint of another format
    that `load` takes is deleted on a local file system: a safetensors or torch.save file, an index
    and the files that it names, the files of a DCP folder, or those of an Orbax item or step, but
    no other checkpoint that lies in it. Call it on one rank.

    Args:
        path: where it is, a path or URL as for `save`.
        options: progress, which counts files, metrics, and retries.

    Raises:
        NotACheckpointError: no committed checkpoint is at the path, or several.
        StorageError: the storage refused, or another format lies in a bucket; if the manifest is
            gone, a save to the path with ``overwrite=True`` clears what is left.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://example-delete", {"w": np.ones(3)})
        >>> xckpt.delete("memory://example-delete")
        >>> xckpt.exists("memory://example-delete")
        False
    """
    check_path(path, "delete(path)")
    from xckpt.storage.commit.remove import remove_checkpoint
    from xckpt.storage.location import Location

    options = checked_options(options, LoadOptions, "delete")
    location = Location.parse(path, options)
    with watched_call(options, "delete", path) as chosen:
        try:
            remove_checkpoint(location, chosen.progress)
        except NotACheckpointError:
            if not _is_foreign(path, location):
                raise
            from xckpt.formats.own_files import delete_files, own_files

            delete_files(own_files(path), chosen.progress)


@names_limits
def copy(
    source: Path, target: Path, *, overwrite: bool = False, options: LoadOptions | None = None
) -> None:
    """Copy a checkpoint; the copy is there as a whole or not at all. Call it on one rank.

    Within one local file system the files get a second name and no bytes are copied. Within one
    bucket, with ``xckpt[buckets]``, the bucket copies its objects and no bytes travel. Elsewhere
    objects pass through this process as they are, some at a time, in the memory of a load. Nothing
    is verified: what is damaged is copied, and is found when it is read. A checkpoint of another
    format that `load` takes is copied between local file systems.

    Args:
        source: where the checkpoint is, a path or URL as for `save`.
        target: where the copy goes.
        overwrite: replace a checkpoint there, as `save` does.
        options: memory, progress, metrics, retries.

    Raises:
        NotACheckpointError: no committed checkpoint is at ``source``.
        CheckpointExistsError: ``target`` is taken, and ``overwrite`` is False.
        ValueError: both are one place.
        CorruptCheckpointError: an object of the source is missing.
        MemoryLimitError: an object that passes through this process is longer than
            ``memory_bytes`` and than any chunk.
        StorageError: a storage refused, or another format lies in a bucket, or ``source`` was
            replaced while it was copied.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://example-copy", {"w": np.ones(3)}, overwrite=True)
        >>> xckpt.copy("memory://example-copy", "memory://example-copied")
        >>> xckpt.load("memory://example-copied")
        {'w': array([1., 1., 1.])}
    """
    check_path(source, "copy(source, target)")
    check_path(target, "copy(source, target)", "second")
    check_flags("copy", overwrite=overwrite)
    from xckpt.storage.copy_checkpoint import copy_checkpoint, has_checkpoint
    from xckpt.storage.location import Location

    options = checked_options(options, LoadOptions, "copy")
    origin = Location.parse(source, options)
    place = replace(Location.parse(target), access=origin.access)  # one time for both
    if origin == place:
        raise ValueError(f"source and target of a copy are one place: {origin}")
    origin.access.start()
    with watched_call(options, "copy", source) as chosen:
        if has_checkpoint(origin) or not _is_foreign(source, origin):
            copy_checkpoint(origin, place, chosen, overwrite=overwrite)
        else:
            _copy_foreign(source, target, chosen, overwrite=overwrite)


def _is_foreign(path: Path, location: Location) -> bool:
    """Whether another format is there; a bucket is asked within the time of the call."""
    from xckpt.formats.detect import is_known

    return is_known(location if location.bucket else path)


def _copy_foreign(source: Path, target: Path, options: LoadOptions, *, overwrite: bool) -> None:
    from xckpt.formats.own_files import copy_files, own_files
    from xckpt.storage.foreign.paths import local_path

    there = local_path(target)
    copy_files(own_files(source), there, overwrite=overwrite, progress=options.progress)
