"""`open`: a checkpoint to look at, without loading it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xckpt.api.save import Path, check_path, names_limits
from xckpt.errors import NotACheckpointError
from xckpt.options import LoadOptions, checked_options

if TYPE_CHECKING:
    from xckpt.storage.checkpoint import Checkpoint


@names_limits
def open(path: Path, *, options: LoadOptions | None = None) -> Checkpoint:
    """Open a checkpoint to look at it or to read parts of it; see `Checkpoint`.

    Every format that `load` reads can be opened; `Checkpoint.format` says which one it is.

    Args:
        path: where it is; see `load`.
        options: threads, memory, progress.

    Returns:
        A mapping from leaf names to stored arrays, which read slices, and to Python values. No
        elements are read yet.

    Raises:
        NotACheckpointError: no committed checkpoint is at the path.
        ManifestError: the manifest cannot be trusted.
        TypeError: ``options`` are not `LoadOptions`.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://example-open", {"w": np.arange(6).reshape(3, 2), "step": 3})
        >>> checkpoint = xckpt.open("memory://example-open")
        >>> checkpoint["step"], checkpoint.array("w")[1:, 0]
        (3, array([2, 4]))
    """
    check_path(path, "open(path)")
    options = checked_options(options, LoadOptions, "open")
    from xckpt.storage.checkpoint import Checkpoint
    from xckpt.storage.location import Location

    place = Location.parse(path, options)
    there = place if place.bucket else path  # a bucket is asked within one time
    try:
        return Checkpoint(there, options=options)
    except NotACheckpointError:
        from xckpt.formats.opened import open_foreign

        foreign = open_foreign(there, options=options)
        if foreign is None:
            raise
        return foreign
