"""`open`: a checkpoint to look at, without loading it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xckpt.api.save import Path, check_path
from xckpt.errors import NotACheckpointError
from xckpt.options import LoadOptions, checked_options

if TYPE_CHECKING:
    from xckpt.storage.checkpoint import Checkpoint


def open(path: Path, *, options: LoadOptions | None = None) -> Checkpoint:
    """Open a checkpoint to look at it or to read parts of it; see `Checkpoint`.

    Every format that `load` reads can be opened; `Checkpoint.format` says which one it is.

    Raises:
        NotACheckpointError: no committed checkpoint is at the path.
        ManifestError: the manifest cannot be trusted.
        TypeError: ``options`` are not `LoadOptions`.
    """
    check_path(path, "open(path)")
    options = checked_options(options, LoadOptions, "open")
    from xckpt.storage.checkpoint import Checkpoint

    try:
        return Checkpoint(path, options=options)
    except NotACheckpointError:
        from xckpt.formats.opened import open_foreign

        foreign = open_foreign(path, options=options)
        if foreign is None:
            raise
        return foreign
