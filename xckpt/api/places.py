"""`exists`, `delete` and `copy`: checkpoints as wholes, in local folders and in buckets.

They are called on one rank, and no other takes part.
"""

from __future__ import annotations

from xckpt.api.save import Path, check_path


def exists(path: Path) -> bool:
    """Whether a committed checkpoint of xckpt is at a path; one small request.

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

    return has_checkpoint(Location.parse(path))


def delete(path: Path) -> None:
    """Delete a checkpoint: first its manifest, so that no half of it can be read, then the rest.

    Files in the folder that are not the checkpoint's stay there. Call it on one rank.

    Raises:
        NotACheckpointError: no committed checkpoint is at the path.
        StorageError: the storage refused; if the manifest is gone, a save to the path with
            ``overwrite=True`` clears what is left.

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

    remove_checkpoint(Location.parse(path))


def copy(source: Path, target: Path, *, overwrite: bool = False) -> None:
    """Copy a checkpoint; the copy is there as a whole or not at all. Call it on one rank.

    Within one local file system the files get a second name and no bytes are copied. Elsewhere
    objects are copied as they are, 16 at a time; their digests are checked when they are read.

    Args:
        source: where the checkpoint is, a path or URL as for `save`.
        target: where the copy shall be.
        overwrite: replace a checkpoint there, as `save` does.

    Raises:
        NotACheckpointError: no committed checkpoint is at ``source``.
        CheckpointExistsError: ``target`` is taken, and ``overwrite`` is False.
        ValueError: both are one place.
        CorruptCheckpointError: an object of the source is missing.
        StorageError: a storage refused, or ``source`` was replaced while it was copied.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://example-copy", {"w": np.ones(3)}, overwrite=True)
        >>> xckpt.copy("memory://example-copy", "memory://example-copied")
        >>> xckpt.load("memory://example-copied")
        {'w': array([1., 1., 1.])}
    """
    check_path(source, "copy(source, target)")
    check_path(target, "copy(source, target)")
    from xckpt.storage.copy_checkpoint import copy_checkpoint
    from xckpt.storage.location import Location

    places = Location.parse(source), Location.parse(target)
    if places[0] == places[1]:
        raise ValueError(f"source and target of a copy are one place: {places[0]}")
    copy_checkpoint(*places, overwrite=overwrite)
